"""Area forward_backward, where it goes wrong: what a call that fails leaves, and what is shown."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from forge.api import TextTrainBatch
from forge_conformance.checks.calling import attempt, calls
from forge_conformance.checks.comparing import (
    expect_same_effect,
    expect_still_stochastic,
    stacked,
)
from forge_conformance.checks.registry import check
from forge_conformance.effects import effects
from forge_conformance.finding import broken, expect, expect_same
from forge_conformance.lab import Lab
from forge_conformance.scenarios import failures
from forge_conformance.scenarios.batches import batches, make_batch
from forge_conformance.scenarios.losses import Loss, mean_nll, times
from forge_conformance.subject import CallFailed, Subject


@check("forward_backward.failure_atomic", share=0.5, first=batches(), second=batches())
def a_failed_call_changes_nothing(lab: Lab, first: TextTrainBatch, second: TextTrainBatch) -> None:
    """What has already happened when a call fails: the count raised, gradients zeroed, the mode
    switched, part of the batch accumulated? Is the loss function's exception replaced or lost?"""
    bad = failures.bad_batches(lab.domain)["an input id equal to vocab_size"]
    failing: dict[str, tuple[TextTrainBatch, Loss | None]] = {
        "an input id outside the vocabulary": (bad, None),
        "a loss_fn that raises": (second, failures.raising_loss),
        "a loss_fn that returns a vector": (second, failures.vector_loss),
    }
    trainer = lab.trainer
    for what, (batch, loss_fn) in failing.items():
        logits = trainer.forward(first.input_ids)
        trainer.forward_backward(first)
        before = trainer.get_status()
        error = attempt(trainer, batch, loss_fn)
        if error is None:
            broken(expected=f"an error for {what}", seen="a result")
        if loss_fn is failures.raising_loss:
            expect(
                failures.names_the_cause(error),
                expected="the loss function's own DeliberateError, as such, as cause, or named",
                seen=f"{type(error).__name__}: {error}",
            )
        after = trainer.get_status()
        expect(
            after == before,
            expected=f"the status {tuple(before)} as before {what}",
            seen=f"{tuple(after)}",
        )
        expect_same(
            trainer.forward(first.input_ids), logits, f"logits after {what}", lab.unmoved_allowed
        )
        trainer.clear_gradients()
        _expect_failure_without_trace(lab, what, first, second, batch, loss_fn)


@check("forward_backward.failure_in_backward", batch=batches())
def sound_again_after_a_broken_backward(lab: Lab, batch: TextTrainBatch) -> None:
    """Is the call counted before backward has ended? What of a half-done backward does
    `clear_gradients` leave: gradients of some parameters, buckets, hooks, streams?"""
    trainer = lab.trainer
    for loss_fn in _breaking_losses(lab):
        logits = trainer.forward(batch.input_ids)
        before = trainer.get_status()
        if attempt(trainer, batch, loss_fn) is None:
            broken(expected="an error when backward raises", seen="a result")
        after = trainer.get_status()
        expect(after == before, expected=f"status {tuple(before)}", seen=f"{tuple(after)}")
        what = "logits after a call that failed in backward are those before"
        expect_same(trainer.forward(batch.input_ids), logits, what, lab.unmoved_allowed)
        trainer.clear_gradients()
        if lab.stochastic:
            continue
        # In this order: what a failure changes for good must not change the reference too.
        clean, recovered = effects(
            lab, calls(batch), calls(batch, None, batch, loss_fn=None, failing_first=loss_fn)
        )
        expect_same_effect(
            lab,
            recovered,
            clean,
            "after a failed backward and clear_gradients a call accumulates what it always does",
            exact=True,
        )


@check("forward_backward.failure_keeps_gradients", batch=batches())
def a_broken_backward_keeps_earlier_gradients(lab: Lab, batch: TextTrainBatch) -> None:
    """A backward that fails half-way has added to some gradients: compute into fresh ones and add
    them at the end, or restore the old ones."""
    other = make_batch(lab.domain, lab.domain.usual_shape, seed=3)
    for loss_fn in _breaking_losses(lab):

        def fails_later(subject: Subject, loss_fn: Loss = loss_fn) -> None:
            subject.forward_backward(batch)
            attempt(subject, other, loss_fn)

        with_failure, without = effects(lab, fails_later, calls(batch))
        expect_same_effect(
            lab,
            with_failure,
            without,
            "gradients accumulated before a call that failed in backward are still there",
            exact=True,
        )


@check("forward_backward.nonfinite_visible")
def a_nonfinite_loss_is_shown(lab: Lab) -> None:
    """Is NaN replaced (`nan_to_num`, a running mean, the last good value) before it is returned?"""
    batch = make_batch(lab.domain, lab.domain.usual_shape, mask="all")
    for bad in (math.nan, math.inf):
        weights = torch.ones_like(batch.target_ids, dtype=torch.float32)
        weights[-1, -1] = bad
        attempts: dict[str, tuple[TextTrainBatch, Loss | None]] = {
            f"a custom loss of {bad}": (batch, times(bad, mean_nll)),
            f"a kept target of weight {bad}": (replace(batch, target_weights=weights), None),
        }
        for what, (given, loss_fn) in attempts.items():
            subject = lab.fresh()
            try:
                subject.forward_backward(batch)
                loss = subject.forward_backward(given, loss_fn).loss
            except CallFailed:
                continue
            expect(
                not math.isfinite(loss),
                expected=f"a loss that isn't finite, or an error, for {what}",
                seen=f"loss {loss}",
            )


# Parts


def _breaking_losses(lab: Lab) -> list[Loss]:
    if lab.graph is None or not lab.graph.readable:
        return [failures.breaking_backward]
    return [failures.breaking_backward, failures.breaking_backward_late()]


def _expect_failure_without_trace(
    lab: Lab,
    what: str,
    first: TextTrainBatch,
    second: TextTrainBatch,
    batch: TextTrainBatch,
    loss_fn: Loss | None,
) -> None:
    def with_failure(subject: Subject) -> None:
        subject.forward_backward(first)
        attempt(subject, batch, loss_fn)
        if not lab.stochastic:
            subject.forward_backward(second)

    following = (first,) if lab.stochastic else (first, second)
    seen, reference = effects(lab, with_failure, calls(*following))
    expect_same_effect(
        lab, seen, reference, f"accumulated gradients, as if {what} had never been sent", exact=True
    )
    if lab.stochastic:
        expect_still_stochastic(lab, what, lambda subject: attempt(subject, batch, loss_fn))
        return

    def training(subject: Subject, fail: bool) -> Tensor:
        shown: list[Tensor | float] = []
        for _ in range(2):
            if fail:
                attempt(subject, batch, loss_fn)
            shown.append(subject.forward_backward(second).loss)
            shown += subject.optim_step()[:2]
        return stacked(*shown, subject.forward(first.input_ids))

    failing, clean = lab.pair_results(
        lambda subject: training(subject, True), lambda subject: training(subject, False)
    )
    what = f"losses, steps, rates and logits of a training, as if {what} had never been sent"
    expect_same(failing, clean, what, lab.run_allowed)
