"""The reference trainers on a CUDA device, judged as they are on the CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from forge_conformance.checks import CHECKS
from forge_conformance.engine import PROFILES, judge
from forge_conformance.lab import Lab
from forge_conformance.outcome import Verdict
from forge_conformance.report.text import failure_line
from forge_conformance.target import Target
from reference_impls.hf import HFTrainer
from reference_impls.plain import PlainTrainer
from tests.faults.declared import declared

on_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def plain(dtype: torch.dtype) -> Target:
    return declared(partial(PlainTrainer, device="cuda", compute_dtype=dtype))


TARGETS = {
    "plain": lambda: plain(torch.float32),
    "plain in bfloat16": lambda: plain(torch.bfloat16),
    "hf": lambda: Target(partial(HFTrainer, device="cuda")),
}
CLAUSES = [
    clause_id
    for clause_id in CHECKS
    if clause_id.startswith(("numerics.", "optim_step.", "clear_gradients."))
] + ["forward_backward.custom_loss", "forward_backward.accumulates", "checkpoint.round_trip"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_cuda) for name in TARGETS])
def test_a_reference_trainer_keeps_the_contract_on_cuda(name: str) -> None:
    lab = Lab(TARGETS[name](), timeout=60)
    try:
        outcomes = [judge(CHECKS[each], lab, PROFILES["default"], seed=0) for each in CLAUSES]
        assert lab.device == "cuda"
    finally:
        lab.close()
    failed = {
        outcome.clause_id: failure_line(outcome)
        for outcome in outcomes
        if outcome.verdict not in (Verdict.HELD, Verdict.NOT_CHECKED)
    }
    assert not failed
    assert any(each.reduced_precision for each in outcomes), "no flag of CUDA's was noted"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here_is_none_of_the_kits() -> None:
    lab = Lab(Target(TellsCuda), timeout=20)
    try:
        assert lab.device == "cpu"
    finally:
        lab.close()


class TellsCuda(PlainTrainer):
    """As a client of a trainer on another machine does."""

    async def get_config(self):
        config = await super().get_config()
        config.parallelism.device = "cuda"
        return config
