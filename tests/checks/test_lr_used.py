"""Whether the rate that is reported is the one used: seen, declared, or not to be told."""

from __future__ import annotations

import torch

from forge_conformance.checks import CHECKS
from forge_conformance.engine import PROFILES, judge
from forge_conformance.lab import Lab
from forge_conformance.outcome import Outcome, Verdict
from forge_conformance.target import Target
from reference_impls.plain import PlainTrainer


def outcome(target: Target) -> Outcome:
    lab = Lab(target, timeout=20)
    try:
        return judge(CHECKS["optim_step.lr_used"], lab, PROFILES["quick"], seed=0)
    finally:
        lab.close()


class StepsByHand(PlainTrainer):
    """Has no optimizer of torch, whose rate could be seen."""

    def _apply_update(self, learning_rate: float) -> None:
        with torch.no_grad():
            for p in self._trainable().values():
                if p.grad is not None:
                    p.sub_(learning_rate * p.grad)


def test_the_rate_of_an_optimizer_of_torch_is_seen():
    assert outcome(Target(PlainTrainer)).verdict is Verdict.HELD


def test_a_rate_that_is_neither_seen_nor_declared_is_not_checked():
    seen = outcome(Target(StepsByHand))
    assert seen.verdict is Verdict.NOT_CHECKED
    assert "declare Target.learning_rate" in seen.reason


def test_a_declared_rate_is_judged_without_being_seen():
    schedule = StepsByHand().schedule  # of the first update at 1
    target = Target(StepsByHand, learning_rate=lambda update: schedule(update + 1))
    assert outcome(target).verdict is Verdict.HELD
