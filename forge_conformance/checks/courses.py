"""The course of a training: what each of several updates shows, and comparing two courses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forge_conformance.finding import expect, expect_near, expect_same
from forge_conformance.lab import Lab
from forge_conformance.oracle.tolerance import Allowed, value_error
from forge_conformance.scenarios.batches import make_batch, make_ids
from forge_conformance.subject import Subject


@dataclass(frozen=True)
class Moment:
    """What one update shows: the last loss before it, what it returned, the logits after it."""

    loss: float
    step: int
    rate: float
    logits: Tensor


Course = list[Moment]


def course(lab: Lab, subject: Subject, updates: int, seed: int = 0) -> Course:
    """Several updates by the default loss, of one and two microbatches in turn, all different.

    The global random streams are set anew before each, for trainers that draw from these; a
    trainer's own stream goes on where it is.
    """
    moments = []
    for number in range(updates):
        lab.reseed(seed + number)
        if number % 2:
            subject.forward_backward(make_batch(lab.domain, lab.domain.usual_shape, seed - 1))
        batch = make_batch(lab.domain, lab.domain.usual_shape, seed + number)
        loss = subject.forward_backward(batch).loss
        update = subject.optim_step()
        moments.append(
            Moment(loss, update.step, update.learning_rate, subject.forward(batch.input_ids))
        )
    return moments


def expect_same_course(
    lab: Lab,
    seen: Course,
    reference: Course,
    what: str,
    allowed_after: Callable[[int], Allowed | None] | None = None,
) -> None:
    """Break the clause at the first update in which two courses differ.

    Args:
        what: Names both, as in "a fresh trainer after load goes on as the one that saved".
        allowed_after: How far apart losses and logits may be after so many updates, relatively;
            by default as far as those of two runs of one program.
    """
    for number, (now, then) in enumerate(zip(seen, reference, strict=True), start=1):
        allowed = lab.rerun_allowed if allowed_after is None else allowed_after(number)
        place = f"{what}: in update {number} after it"
        expect(
            now.step == then.step,
            expected=f"{place} step {then.step}",
            seen=f"step {now.step}",
        )
        rate_allowed = value_error(then.rate, then.rate, torch.float32)
        expect_near(now.rate, then.rate, f"{place} the learning rate", rate_allowed)
        expect_near(now.loss, then.loss, f"{place} the loss", _of_a_loss(allowed, then.loss))
        expect_same(now.logits, then.logits, f"{place} the logits", allowed)


def _of_a_loss(allowed: Allowed | None, loss: float) -> Allowed:
    if allowed is None:
        return Allowed(0.0, "bitwise")
    return Allowed(allowed.error * abs(loss), allowed.why)


def probe_logits(lab: Lab, subject: Subject) -> Tensor:
    """Logits by which two states of the weights are told apart: of sequences as long as may be."""
    rows, seq = lab.domain.usual_shape
    longest = min(lab.domain.longest_seq or seq, lab.domain.short_enough)
    shape = (rows, longest) if lab.domain.takes((rows, longest)) else (rows, seq)
    return subject.forward(make_ids(lab.domain, shape))
