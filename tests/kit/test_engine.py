"""Judging one clause: what becomes of a check that returns, breaks, gives up, or fails itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from forge_conformance.checks.registry import Check
from forge_conformance.contract import Need
from forge_conformance.engine import PROFILES, Profile, judge
from forge_conformance.finding import NotChecked, Undecided, expect, expect_same
from forge_conformance.lab import Lab
from forge_conformance.outcome import Outcome, Verdict
from forge_conformance.target import Target
from reference_impls.plain import PlainTrainer

QUICK = PROFILES["quick"]


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab(Target(factory=PlainTrainer), timeout=20)
    yield lab
    lab.close()


def judged(
    lab: Lab, check: Callable[..., None], profile: Profile = QUICK, seed: int = 0, **varying: Any
) -> Outcome:
    strategies = {name: (lambda _, s=strategy: s) for name, strategy in varying.items()}
    return judge(Check("forward.causal", check, strategies), lab, profile, seed)


def test_a_check_that_returns_holds(lab: Lab) -> None:
    outcome = judged(lab, lambda lab: lab.trainer.get_status())
    assert outcome.verdict is Verdict.HELD
    assert (outcome.examples, outcome.calls) == (1, 2)


def test_a_break_shows_the_smallest_input(lab: Lab) -> None:
    def small_numbers_only(lab: Lab, number: int) -> None:
        """Look at large numbers."""
        expect(number < 17, expected="a small number", seen=str(number))

    outcome = judged(lab, small_numbers_only, PROFILES["default"], number=st.integers(0, 1000))
    assert outcome.verdict is Verdict.BROKE
    assert outcome.finding is not None
    assert outcome.finding.example == ["number = 17"]
    assert outcome.finding.seen == "17"
    assert outcome.finding.where_to_look == "Look at large numbers."


def test_shrinking_is_bounded_by_number(lab: Lab) -> None:
    tried = []

    def fails(lab: Lab, number: int) -> None:
        tried.append(number)
        expect(number < 17, expected="", seen="")

    judged(lab, fails, Profile(examples=50, shrinks=5), number=st.integers(0, 10**9))
    failures = [number for number in tried if number >= 17]
    assert len(tried) - tried.index(failures[0]) <= 1 + 5


def test_a_break_that_comes_once_is_still_a_break(lab: Lab) -> None:
    runs = []

    def fails_once(lab: Lab, number: int) -> None:
        runs.append(number)
        expect(len(runs) != 2, expected="the same", seen="another")

    outcome = judged(lab, fails_once, number=st.integers(0, 1000))
    assert outcome.verdict is Verdict.BROKE


@pytest.mark.parametrize(
    ("beyond", "where", "verdict"),
    [
        (5, "on the trainer that others trained", Verdict.HELD),
        (5, "everywhere", Verdict.BROKE),
        (1000, "on the trainer that others trained", Verdict.BROKE),
    ],
)
def test_what_is_barely_beyond_the_tolerance_is_judged_again_on_new_trainers(
    lab: Lab, beyond: float, where: str, verdict: Verdict
) -> None:
    trained = lab.trainer
    exact = torch.ones(8)

    def looks(lab: Lab) -> None:
        off = where == "everywhere" or lab.trainer is trained
        error = beyond * lab.logits_allowed.error if off else 0.0
        expect_same(exact + error, exact, "ones", lab.logits_allowed)

    assert judged(lab, looks).verdict is verdict


def test_what_was_undecided_throughout_is_not_checked(lab: Lab) -> None:
    def gives_up(lab: Lab, number: int) -> None:
        raise Undecided("the learning rate is 0")

    outcome = judged(lab, gives_up, number=st.integers(0, 1000))
    assert outcome.verdict is Verdict.NOT_CHECKED
    assert "the learning rate is 0" in outcome.reason


def test_equal_results_that_are_not_finite_decide_nothing(lab: Lab) -> None:
    diverged = torch.tensor([math.nan])
    outcome = judged(lab, lambda lab: expect_same(diverged, diverged.clone(), "equal runs"))
    assert outcome.verdict is Verdict.NOT_CHECKED
    assert "aren't finite" in outcome.reason


def test_what_is_not_checked_says_what_unlocks_it(lab: Lab) -> None:
    def needs_more(lab: Lab) -> None:
        raise NotChecked("the optimizer isn't declared", Need.DECLARED_OPTIMIZER)

    outcome = judged(lab, needs_more)
    assert outcome.verdict is Verdict.NOT_CHECKED
    assert "Target.optimizer" in outcome.reason


def test_an_error_of_the_check_itself_is_no_finding(lab: Lab) -> None:
    def breaks(lab: Lab) -> None:
        raise KeyError("a mistake of ours")

    outcome = judged(lab, breaks)
    assert outcome.verdict is Verdict.KIT_ERROR
    assert "a mistake of ours" in outcome.reason


def test_an_error_in_the_trainers_own_objects_is_a_finding() -> None:
    class Evil:
        @property
        def model_config(self) -> None:
            raise OSError("not now")

    class ReturnsEvil(PlainTrainer):
        async def get_config(self) -> Evil:  # type: ignore[override]
            return Evil()

    lab = Lab(Target(factory=ReturnsEvil), timeout=20)
    outcome = judged(lab, lambda lab: lab.domain)
    lab.close()
    assert outcome.verdict is Verdict.BROKE
    assert outcome.finding is not None
    assert "OSError" in outcome.finding.seen


def test_what_the_trainer_raises_is_a_finding_with_its_traceback() -> None:
    class Broken(PlainTrainer):
        async def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            raise RuntimeError("no logits today")

    lab = Lab(Target(factory=Broken), timeout=20)
    outcome = judged(lab, lambda lab: lab.trainer.forward(torch.tensor([[1, 2]])))
    lab.close()
    assert outcome.verdict is Verdict.BROKE
    assert outcome.finding is not None
    assert "no logits today" in outcome.finding.seen
    assert "test_engine.py" in outcome.finding.trainer_traceback


def test_inputs_come_again_with_the_seed_and_differ_with_another(lab: Lab) -> None:
    def drawn(seed: int) -> list[int]:
        numbers: list[int] = []
        judged(lab, lambda lab, number: numbers.append(number), seed=seed, number=st.integers())
        return numbers

    assert drawn(1) == drawn(1) != drawn(2)


def test_the_users_random_streams_are_given_back(lab: Lab) -> None:
    before = torch.get_rng_state()
    judged(lab, lambda lab: torch.manual_seed(5))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_outcome_survives_the_way_between_processes(lab: Lab) -> None:
    def broke(lab: Lab) -> None:
        expect(False, expected="this", seen="that")

    outcome = judged(lab, broke)
    assert Outcome.from_dict(outcome.to_dict()) == outcome
