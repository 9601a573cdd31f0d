"""How small an error `numerics.gradient` finds in each precision, and that it is quiet without one.

Run with `-s` to see the table. Two comparisons share the work: with autograd's own gradient on the
trainer's graph, and, where that can't be had or is wrong itself, with finite differences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from forge_conformance import Target
from forge_conformance.checks import CHECKS
from forge_conformance.engine import PROFILES, judge
from forge_conformance.lab import Lab
from forge_conformance.outcome import Outcome, Verdict
from reference_impls.llama import Llama
from reference_impls.targets import named_parameters
from tests.faults.honest import Recomputes
from tests.faults.numerics import ChangesGradients

DEFAULT = replace(PROFILES["default"], shrinks=0)
SEEDS = (0, 1)
LAYER = "model.layers.1.mlp.up_proj.weight"
HONEST_RUNS = 200
TRAINERS = 4
"""That share the honest runs of a precision."""

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@dataclass(frozen=True)
class Floor:
    """Sizes relative to the gradient: always found, and never found."""

    found: float
    lost: float


@dataclass(frozen=True)
class Row:
    """A trainer's precision, the comparison that can see into it, and what that finds."""

    precision: str
    comparison: str
    scale: Floor
    stale: Floor

    def __str__(self) -> str:
        return f"{self.precision}, {self.comparison}"


TABLE = [
    Row("float32", "autograd", scale=Floor(1e-6, 1e-8), stale=Floor(1e-6, 1e-9)),
    Row("bfloat16 products", "autograd", scale=Floor(1e-6, 1e-8), stale=Floor(1e-6, 1e-9)),
    Row("bfloat16 weights", "autograd", scale=Floor(0.01, 0.003), stale=Floor(0.003, 0.0003)),
    Row("float32", "differences", scale=Floor(0.003, 0.0003), stale=Floor(0.003, 0.0003)),
    Row("bfloat16 products", "differences", scale=Floor(0.3, 0.03), stale=Floor(0.3, 0.03)),
    Row("bfloat16 weights", "differences", scale=Floor(0.3, 0.03), stale=Floor(0.3, 0.03)),
]


class Plants(ChangesGradients):
    """A trainer of some precision, whose graph may be in pieces, with an error of some size."""

    def __init__(self, row: Row, scale: float = 0.0, stale: float = 0.0, seed: int = 0) -> None:
        self.row, self.scale, self.stale = row, scale, stale
        self.before: dict[str, Tensor] = {}
        reduced = row.precision == "bfloat16 products"
        super().__init__(seed=seed, compute_dtype=torch.bfloat16 if reduced else torch.float32)

    def _make_model(self) -> Llama:
        # Autograd can't differentiate a reentrant checkpoint apart from the trainer's backward.
        pieces = self.row.comparison == "differences"
        model = (
            Recomputes(self.model_config, use_reentrant=True) if pieces else super()._make_model()
        )
        return model.bfloat16() if self.row.precision == "bfloat16 weights" else model

    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        before = self.before.get(name, torch.zeros_like(gradient))
        self.before[name] = gradient.clone()
        factor = 1 + self.scale if name == LAYER else 1.0
        return factor * gradient + self.stale * before


def outcome(target: Target, seed: int, examples: int = DEFAULT.examples) -> Outcome:
    lab = Lab(target, timeout=20)
    try:
        profile = replace(DEFAULT, examples=examples)
        return judge(CHECKS["numerics.gradient"], lab, profile, seed)
    finally:
        lab.close()


def is_found(
    row: Row, error: str, size: float, seed: int, examples: int = DEFAULT.examples
) -> bool:
    target = Target(lambda: Plants(row, **{error: size}), parameters=named_parameters)
    verdict = outcome(target, seed, examples).verdict
    assert verdict in (Verdict.HELD, Verdict.BROKE)
    return verdict is Verdict.BROKE


@pytest.mark.parametrize("error", ["scale", "stale"])
@pytest.mark.parametrize("row", TABLE, ids=str)
def test_an_error_is_found_down_to_the_floor(row: Row, error: str) -> None:
    floor: Floor = getattr(row, error)
    print(f"\n{row!s:40} {error}: found from {floor.found:g} on, lost at {floor.lost:g}")
    assert all(is_found(row, error, floor.found, seed) for seed in SEEDS)
    more = is_found(row, error, floor.lost, seed=0, examples=1)
    assert not more, "finds more than the table says: correct it"


@pytest.mark.parametrize("comparison", ["autograd", "differences"])
def test_in_float32_one_percent_is_above_the_floor(comparison: str) -> None:
    (row,) = [r for r in TABLE if (r.precision, r.comparison) == ("float32", comparison)]
    assert max(row.scale.found, row.stale.found) <= 0.01


BOTH_COMPARED = [row for row in TABLE if row.comparison == "autograd"]
"""What autograd agrees with is then compared with finite differences too."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(TRAINERS))
@pytest.mark.parametrize("row", BOTH_COMPARED, ids=lambda row: row.precision)
def test_no_honest_run_is_failed(row: Row, seed: int) -> None:
    runs = HONEST_RUNS // TRAINERS
    target = Target(lambda: Plants(row, seed=seed), parameters=named_parameters)
    found = outcome(target, seed, round(runs / CHECKS["numerics.gradient"].share))
    assert found.verdict is Verdict.HELD, found.finding or found.reason
    assert found.examples == runs
