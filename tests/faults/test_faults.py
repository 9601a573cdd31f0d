"""Every faulty trainer is caught by its clause, and no unusual one is failed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forge_conformance.checks import CHECKS
from forge_conformance.contract import Level, clause
from forge_conformance.engine import PROFILES, Profile, judge
from forge_conformance.lab import Lab
from forge_conformance.outcome import Outcome, Verdict
from forge_conformance.target import Target, resolve
from tests.faults import FAULTS, HONEST, honest_checkpoints
from tests.faults.corpus import Fault, Specimen
from tests.faults.declared import base

IN_ONE_PROCESS = [fault for fault in FAULTS if not fault.clause_id.startswith("distributed.")]
FEWEST_HELD = 50
AS_BY_DEFAULT = replace(PROFILES["default"], shrinks=10)
"""As many inputs as by default; a failing one need not be made small here."""

FEW = replace(PROFILES["quick"], examples=2)
"""For all clauses on many trainers; hunting false alarms by many seeds takes hours."""

ABOUT_FILES = {
    f"checkpoint.{name}"
    for name in ("crash_safe", "damaged", "foreign", "keeps_named", "latest", "overwrite")
}
"""What trainers that write their files as `PlainTrainer` does need not be judged by again."""

WHERE_NAMES_MEET = ("checkpoint.resumes", "checkpoint.save_pure", "checkpoint.latest")
"""Clauses that save so often that a trainer which refuses or prunes checkpoints comes to do so."""


def outcomes(
    target: Target,
    *clause_ids: str,
    against: Target | None = None,
    profile: Profile = PROFILES["quick"],
) -> list[Outcome]:
    """How a trainer comes out by these clauses, judged one after the other as in a run."""
    lab = Lab(target, timeout=20, against=against)
    try:
        return [judge(CHECKS[each], lab, profile, seed=0) for each in clause_ids]
    finally:
        lab.close()


@pytest.mark.parametrize(
    "fault", IN_ONE_PROCESS, ids=lambda fault: f"{fault.clause_id}-{fault.name}"
)
def test_a_fault_is_caught_by_its_clause(fault: Fault) -> None:
    (outcome,) = outcomes(fault.target, fault.clause_id, profile=AS_BY_DEFAULT, against=base())
    assert outcome.verdict is Verdict.BROKE, outcome.reason
    assert outcome.finding is not None
    assert outcome.finding.expected
    assert outcome.finding.seen


@pytest.mark.parametrize(
    "clause_id", [each for each in CHECKS if clause(each).area != "distributed"]
)
def test_a_clause_holds_for_the_trainer_that_the_faulty_ones_are_made_from(clause_id: str) -> None:
    target = resolve(f"{base.__module__}:{base.__name__}")
    (outcome,) = outcomes(target, clause_id, against=base())
    assert outcome.verdict is Verdict.HELD, outcome.finding or outcome.reason


@pytest.mark.parametrize("specimen", HONEST, ids=lambda specimen: specimen.name)
def test_an_unusual_trainer_is_not_failed(specimen: Specimen) -> None:
    writes_its_own = specimen.factory.__module__ == honest_checkpoints.__name__
    clause_ids = CHECKS if writes_its_own else CHECKS.keys() - ABOUT_FILES
    seen = outcomes(specimen.target, *sorted(clause_ids, key=[*CHECKS].index), profile=FEW)
    if writes_its_own:
        seen += outcomes(specimen.target, *WHERE_NAMES_MEET, profile=AS_BY_DEFAULT)
    failed = {
        outcome.clause_id: outcome.finding or outcome.reason
        for outcome in seen
        if outcome.verdict not in (Verdict.HELD, Verdict.NOT_CHECKED)
        and not (
            outcome.verdict is Verdict.BROKE and clause(outcome.clause_id).level is Level.SHOULD
        )
    }
    assert not failed
    held = [outcome.clause_id for outcome in seen if outcome.verdict is Verdict.HELD]
    assert len(held) >= FEWEST_HELD


def test_every_clause_has_a_faulty_trainer() -> None:
    missing = CHECKS.keys() - {fault.clause_id for fault in FAULTS}
    assert not missing, f"no faulty trainer shows that these checks work: {sorted(missing)}"
