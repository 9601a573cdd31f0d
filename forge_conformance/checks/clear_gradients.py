"""Area clear_gradients: what was accumulated is gone, and nothing else."""

from __future__ import annotations

import math
from contextlib import suppress

from hypothesis import strategies as st
from torch import Tensor

from forge.api import TextTrainBatch
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
from forge_conformance.subject import CallFailed, Program, Subject


@check(
    "clear_gradients.discards",
    dropped=batches(),
    kept=batches(),
    clears=lambda _: st.integers(1, 2),
)
def what_was_accumulated_has_no_effect(
    lab: Lab, dropped: TextTrainBatch, kept: TextTrainBatch, clears: int
) -> None:
    """Is every place cleared that gradients accumulate in: `.grad` of all parameters, frozen ones
    too, buffers of a wrapper, running sums of losses and token counts, the count?"""

    def clear(subject: Subject) -> None:
        for _ in range(clears):
            subject.clear_gradients()
        count = subject.get_status().accumulated_microbatches
        expect(count == 0, expected="count 0 after clear_gradients", seen=f"{count}")

    def after_dropping(batch: TextTrainBatch) -> Program[None]:
        def program(subject: Subject) -> None:
            subject.forward_backward(batch)
            subject.forward_backward(batch)
            with suppress(CallFailed):  # a trainer may refuse a loss of NaN
                subject.forward_backward(batch, times(math.nan, mean_nll))
            clear(subject)
            subject.forward_backward(kept)

        return program

    def at_once(subject: Subject) -> None:
        subject.forward_backward(kept)

    reference = after_dropping(_negated(lab, dropped)) if lab.stochastic else at_once
    seen, expected = effects(lab, after_dropping(dropped), reference)
    what = "after clear_gradients, a call accumulates what it would have without any before"
    expect_same_effect(lab, seen, expected, what, exact=True)


@check("clear_gradients.only_gradients", first=batches(), second=batches())
def nothing_else_is_touched(lab: Lab, first: TextTrainBatch, second: TextTrainBatch) -> None:
    """Does clearing rebuild the optimizer, zero its state, step the schedule, count a step?"""

    def training(subject: Subject, clear: bool) -> Tensor:
        shown: list[Tensor | float] = []
        for batch in (first, second, first):
            if clear:
                logits = subject.forward(batch.input_ids)
                subject.clear_gradients()
                what = "logits after clear_gradients are those before"
                expect_same(subject.forward(batch.input_ids), logits, what, lab.unmoved_allowed)
                if not lab.stochastic:
                    subject.forward_backward(second)
                subject.clear_gradients()
            shown.append(subject.forward_backward(batch).loss)
            shown += subject.optim_step()[:2]
        return stacked(*shown, subject.forward(first.input_ids))

    with_clears, without = lab.pair_results(
        lambda subject: training(subject, True), lambda subject: training(subject, False)
    )
    what = "losses, steps, rates and logits of a training with cleared calls are those without"
    expect_same(with_clears, without, what, lab.run_allowed)


_FAILURES = (
    "bad input",
    "loss raises",
    "out of memory",
    "out of memory in backward",
    "backward raises late",
)


@check("clear_gradients.recovers", share=0.5, batch=batches())
def a_failed_call_can_be_cleared_away(lab: Lab, batch: TextTrainBatch) -> None:
    """What does a failed `forward_backward` (memory that ran out, say) leave that
    `clear_gradients` doesn't reset: a mode, a context that was entered, hooks, a flag, a smaller
    batch size for good, gradients of some parameters?"""
    for failure in _FAILURES:
        _expect_recovery(lab, batch, failure)


def _expect_recovery(lab: Lab, batch: TextTrainBatch, failure: str) -> None:
    def fail_and_clear(subject: Subject) -> None:
        given, loss_fn = _failing(lab, batch, failure)
        _expect_failure(subject, given, loss_fn)
        subject.clear_gradients()

    def training(subject: Subject, fail: bool) -> Tensor:
        shown: list[Tensor | float] = []
        for _ in range(2):
            if fail:
                fail_and_clear(subject)
            shown.append(subject.forward_backward(batch).loss)
            shown += subject.optim_step()[:2]
        return stacked(*shown, subject.forward(batch.input_ids))

    if lab.stochastic:
        _expect_weights_stay(lab, batch, fail_and_clear)
        expect_still_stochastic(lab, f"{failure}, then cleared", fail_and_clear)
        return
    with_failures, without = lab.pair_results(
        lambda subject: training(subject, True), lambda subject: training(subject, False)
    )
    what = f"a training with failed calls ({failure}) that were cleared is the one without"
    expect_same(with_failures, without, what, lab.run_allowed)


def _expect_weights_stay(lab: Lab, batch: TextTrainBatch, fail: Program[None]) -> None:
    logits = lab.trainer.forward(batch.input_ids)
    fail(lab.trainer)
    what = "logits after a failed call that was cleared are those before"
    expect_same(lab.trainer.forward(batch.input_ids), logits, what, lab.unmoved_allowed)


def _negated(lab: Lab, batch: TextTrainBatch) -> TextTrainBatch:
    """Another batch of the same shape and mask, so that dropout draws as much."""
    return TextTrainBatch(
        input_ids=lab.domain.vocab_size - 1 - batch.input_ids,
        target_ids=lab.domain.vocab_size - 1 - batch.target_ids,
        target_mask=batch.target_mask,
        target_weights=batch.target_weights,
    )


def _failing(lab: Lab, batch: TextTrainBatch, failure: str) -> tuple[TextTrainBatch, Loss | None]:
    match failure:
        case "bad input":
            return failures.bad_batches(lab.domain)["an input id equal to vocab_size"], None
        case "loss raises":
            return batch, failures.raising_loss
        case "out of memory":
            return _larger(lab, batch), failures.out_of_memory
        case "out of memory in backward":
            return _larger(lab, batch), failures.out_of_memory_in_backward
        case "backward raises late" if lab.graph is not None and lab.graph.readable:
            return batch, failures.breaking_backward_late()
        case _:
            return batch, failures.breaking_backward


def _larger(lab: Lab, batch: TextTrainBatch) -> TextTrainBatch:
    """One of twice as many rows, as what runs out of memory tends to be."""
    rows, seq = batch.input_ids.shape
    return make_batch(lab.domain, (2 * rows, seq)) if lab.domain.takes((2 * rows, seq)) else batch


def _expect_failure(subject: Subject, batch: TextTrainBatch, loss_fn: Loss | None) -> None:
    try:
        subject.forward_backward(batch, loss_fn)
    except CallFailed:
        return
    broken(expected="an error from a call that must fail", seen="a result")
