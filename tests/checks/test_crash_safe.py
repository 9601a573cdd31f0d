"""Checkpoints are loaded from where `save` says that they are, whatever it was asked for."""

from __future__ import annotations

import pytest

from forge_conformance.checks import CHECKS
from forge_conformance.engine import PROFILES, judge
from forge_conformance.lab import Lab
from forge_conformance.outcome import Verdict
from forge_conformance.target import resolve
from reference_impls.plain import PlainTrainer


class AddsASuffix(PlainTrainer):
    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        return await super().save(name and f"{name}.ckpt", path, weights_only)


@pytest.mark.parametrize(
    ("clause_id", "verdict"),
    [("checkpoint.location", Verdict.BROKE), ("checkpoint.crash_safe", Verdict.HELD)],
)
def test_a_suffix_breaks_the_clause_of_locations_only(clause_id: str, verdict: Verdict) -> None:
    lab = Lab(resolve(f"{__name__}:{AddsASuffix.__name__}"), timeout=20)
    try:
        outcome = judge(CHECKS[clause_id], lab, PROFILES["quick"], seed=0)
    finally:
        lab.close()
    assert outcome.verdict is verdict, outcome.finding or outcome.reason
