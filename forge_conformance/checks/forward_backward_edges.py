"""Area forward_backward: batches at the edge of what a trainer takes, and beyond it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from forge.api import TextTrainBatch
from forge_conformance.checks.calling import attempt, calls
from forge_conformance.checks.comparing import expect_same_effect, losses_of
from forge_conformance.checks.registry import check
from forge_conformance.effects import effects
from forge_conformance.finding import broken, expect, expect_near
from forge_conformance.lab import Lab
from forge_conformance.oracle.tolerance import value_error
from forge_conformance.scenarios import failures
from forge_conformance.scenarios.batches import batches, make_batch
from forge_conformance.scenarios.losses import mean_nll
from forge_conformance.subject import CallFailed, Subject


@check("forward_backward.all_masked", batch=batches(masks=("all",)))
def nothing_kept_means_nothing_done(lab: Lab, batch: TextTrainBatch) -> None:
    """Is the loss divided by the number of kept targets without a guard for 0? Does an auxiliary
    term remain? Is a call without kept targets counted into a mean over microbatches?"""
    trainer = lab.trainer
    empty = replace(batch, target_mask=torch.zeros_like(batch.target_ids))
    before = trainer.get_status()
    try:
        loss = trainer.forward_backward(empty).loss
    except CallFailed:
        expect(
            trainer.get_status() == before,
            expected=f"the status {tuple(before)} after a refused batch",
            seen=f"{tuple(trainer.get_status())}",
        )
    else:
        expect(math.isfinite(loss), expected="a finite loss or an error", seen=f"loss {loss}")
    trainer.clear_gradients()
    useful = make_batch(lab.domain, lab.domain.usual_shape)

    def useful_then_empty(subject: Subject) -> None:
        subject.forward_backward(useful)
        attempt(subject, empty)

    with_empty, without, alone = effects(
        lab, useful_then_empty, calls(useful), lambda subject: attempt(subject, empty)
    )
    expect_same_effect(
        lab, with_empty, without, "a batch that keeps nothing adds nothing", exact=True
    )
    if alone.from_gradients:
        expect(alone.empty, expected="zero gradient", seen="a gradient that isn't zero")


@check("forward_backward.edge_shapes")
def edge_shapes_are_taken(lab: Lab) -> None:
    """Which shape or mask dtype takes another path: a squeeze that drops a batch of 1, a shift
    that leaves nothing of one position, `~mask` on integers, an off-by-one at `max_seq_len`?"""
    trainer = lab.trainer
    for shape in lab.domain.edge_shapes:
        batch = make_batch(lab.domain, shape, mask="ragged", weights="fractional")
        losses = {}
        for dtype in (torch.float32, torch.bool, torch.int64):
            mask = batch.target_mask.to(dtype) if batch.target_mask is not None else None
            trainer.clear_gradients()
            lab.reseed()
            losses[dtype] = trainer.forward_backward(replace(batch, target_mask=mask)).loss
            expect(
                math.isfinite(losses[dtype]),
                expected=f"a finite loss for shape {list(shape)}, mask of {dtype}",
                seen=f"{losses[dtype]}",
            )
            trainer.forward_backward(replace(batch, target_mask=mask), mean_nll)
        for dtype, loss in losses.items():
            if lab.stochastic:
                break
            reference = losses[torch.float32]
            expect_near(
                loss,
                reference,
                f"the loss for shape {list(shape)} with a mask of {dtype} as with one of float32",
                value_error(reference, reference, lab.dtype),
            )


@check("forward_backward.bad_input")
def bad_batches_are_refused(lab: Lab) -> None:
    """Validate a batch before anything else: ids against the vocabulary, kept targets too (-100
    is the usual ignore index), dtypes, rank, equal shapes, emptiness, length. Clamping, wrapping,
    broadcasting and cutting all train on something that the caller didn't send."""
    trainer = lab.trainer
    for what, batch in failures.bad_batches(lab.domain).items():
        try:
            loss = trainer.forward_backward(batch).loss
        except CallFailed as refusal:
            text = str(refusal.error).strip()
            expect(
                bool(text),
                expected=f"an error that says what is wrong with {what}",
                seen=f"{type(refusal.error).__name__} without a message",
            )
        else:
            broken(expected=f"a batch with {what} to be refused", seen=f"the loss {loss}")
    _expect_masked_junk_harmless(lab)
    _expect_long_sequences_whole(lab)


# Parts


def _expect_masked_junk_harmless(lab: Lab) -> None:
    batch = make_batch(lab.domain, lab.domain.usual_shape, mask="all")
    mask = torch.ones_like(batch.target_ids)
    mask[-1, -1] = 0
    clean = replace(batch, target_mask=mask)
    for junk in (-100, lab.domain.vocab_size + 7):
        ids = batch.target_ids.clone()
        ids[-1, -1] = junk
        given = replace(clean, target_ids=ids)
        if attempt(lab.trainer, given) is not None:
            continue
        loss, with_junk = losses_of(lab, clean, given)
        what = f"the loss with {junk} at a masked target, as it is accepted,"
        expect_near(with_junk, loss, what, value_error(loss, loss, lab.dtype))


def _expect_long_sequences_whole(lab: Lab) -> None:
    longest = lab.domain.max_seq_len
    if longest is None or longest != lab.domain.longest_seq or lab.domain.declared_shapes:
        return
    batch = make_batch(lab.domain, (1, longest + 3), mask="none")
    if attempt(lab.trainer, batch) is not None:
        return
    for end, position in (("first", 0), ("last", -1)):
        mask = torch.zeros_like(batch.target_ids)
        mask[0, position] = 1
        only = replace(batch, target_mask=mask)
        other = replace(only, target_ids=(batch.target_ids + 1) % lab.domain.vocab_size)
        loss, with_other = losses_of(lab, only, other)
        expect(
            loss != with_other,
            expected=f"{longest + 3} positions, over max_seq_len, refused or computed in full",
            seen=f"a loss that doesn't depend on the {end} target: the sequence is cut",
        )
