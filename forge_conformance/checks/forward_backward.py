"""Area forward_backward: the loss of this batch, its gradient added, and nothing else changed."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from forge.api import TextTrainBatch
from forge_conformance.access import parameters_of
from forge_conformance.checks.calling import calls
from forge_conformance.checks.comparing import (
    added,
    expect_own_gradients,
    expect_same_effect,
    expect_same_tensors,
    losses_of,
    own_gradients,
)
from forge_conformance.checks.default_loss import (
    expect_all_counted_without_mask,
    expect_finite_without_weight,
    expect_kept_targets_counted,
    expect_masked_targets_ignored,
    expect_none_means_ones,
    expect_weights_are_factors,
)
from forge_conformance.checks.registry import check
from forge_conformance.contract import Need
from forge_conformance.effects import effects
from forge_conformance.finding import (
    NotChecked,
    Undecided,
    expect,
    expect_near,
    expect_same,
)
from forge_conformance.lab import Lab
from forge_conformance.observe.witness import Witness
from forge_conformance.oracle.losses import loss_value
from forge_conformance.oracle.tolerance import value_error
from forge_conformance.scenarios.batches import batches, make_batch
from forge_conformance.scenarios.losses import (
    Loss,
    every_logit,
    mean_nll,
    summed_nll,
    times,
)
from forge_conformance.subject import CallFailed, Program, Subject

_LOSSES = {"mean_nll": mean_nll, "summed_nll": summed_nll, "every_logit": every_logit}


def _custom_losses(_domain: object) -> st.SearchStrategy[str]:
    return st.sampled_from(sorted(_LOSSES))


def _places(_domain: object) -> st.SearchStrategy[int]:
    return st.integers(0, 2**10)


# What the loss is


@check("forward_backward.loss_value", batch=batches(), loss=_custom_losses)
def the_loss_is_this_batchs(lab: Lab, batch: TextTrainBatch, loss: str) -> None:
    """Is the loss scaled, averaged again, rounded, or smoothed over calls before it is returned?
    Is it the custom loss's value, of this batch, with the weights as they are?"""
    trainer = lab.trainer
    witness = Witness(_LOSSES[loss])
    trainer.forward(batch.input_ids)
    trainer.forward_backward(batch)
    trainer.optim_step()
    logits = trainer.forward(batch.input_ids)
    reported = trainer.forward_backward(batch, witness).loss
    trainer.clear_gradients()
    if witness.logits is not None:
        exact, plain = loss_value(_LOSSES[loss], witness.logits, batch)
        precise = torch.promote_types(witness.logits.dtype, torch.float32)
        expect_near(
            reported,
            exact,
            f"the value of the custom loss {loss} on the logits that it was given",
            value_error(exact, plain, precise, scale=1.0),
        )
    if not lab.stochastic:
        if witness.logits is not None:
            what = "the logits given to the custom loss are those of forward"
            expect_same(witness.logits, logits, what, lab.logits_allowed)
        else:
            exact, plain = loss_value(_LOSSES[loss], logits, batch)
            allowed = value_error(exact, plain, lab.dtype, scale=1.0)
            expect_near(reported, exact, f"the custom loss {loss} of forward's logits", allowed)
    _expect_loss_of_this_call(lab, batch)


@check("forward_backward.custom_loss", batch=batches(), loss=_custom_losses)
def the_custom_loss_is_differentiated(lab: Lab, batch: TextTrainBatch, loss: str) -> None:
    """What is handed to `loss_fn`, and what is done to its value before backward: a division by a
    number of microbatches or ranks, a detached or recomputed loss, the default loss instead?"""
    trainer = lab.trainer
    parameters = parameters_of(lab, trainer) if lab.sees_gradients else None
    seen: dict[str, Any] = {}

    def differentiate(outputs: dict[str, Any], given: TextTrainBatch) -> Tensor:
        logits = outputs["logits"]
        seen.update(shape=list(logits.shape), graph=logits.requires_grad, batch=given)
        value = _LOSSES[loss](outputs, given)
        if parameters is not None and logits.requires_grad:
            seen["gradients"] = own_gradients(value, parameters)
        return value

    trainer.forward_backward(batch, differentiate)
    accumulated = parameters.gradients() if parameters is not None else {}
    trainer.clear_gradients()
    if not seen:
        raise Undecided("the loss runs in another process, where it can't be watched")
    wanted = [*batch.input_ids.shape, lab.domain.vocab_size]
    expect(
        seen["shape"] == wanted and seen["graph"],
        expected=f'outputs["logits"] of shape {wanted} with an autograd graph',
        seen=f"shape {seen['shape']}, requires_grad={seen['graph']}",
    )
    _expect_same_batch(seen["batch"], batch)
    expect_own_gradients(lab, trainer, accumulated, seen.get("gradients"))


@check("forward_backward.custom_loss_once", batch=batches(), loss=_custom_losses)
def the_next_call_uses_the_default(lab: Lab, batch: TextTrainBatch, loss: str) -> None:
    """Is `loss_fn` stored on the trainer and found there by the next call without one?"""

    def then_default(*loss_fn: Loss) -> Program[float]:
        def program(subject: Subject) -> float:
            subject.forward_backward(batch, *loss_fn)
            subject.clear_gradients()
            return subject.forward_backward(batch).loss

        return program

    what = "what a call without loss_fn accumulates after one with it is as after any other"
    after_custom, after_default = effects(lab, then_default(_LOSSES[loss]), then_default())
    expect_same_effect(lab, after_custom, after_default, what, exact=True)
    with suppress(NotChecked):  # only twins have never seen a custom loss, and there may be none
        if lab.repeats:
            seen, first = lab.twin_results(then_default(_LOSSES[loss]), then_default())
            what = "the loss of a call without loss_fn after one with it, as after any other,"
            expect_near(seen, first, what, value_error(first, first, lab.dtype))


@check(
    "forward_backward.default_loss",
    batch=batches(min_seq=2, masks=("ragged",), weights=("ones", "fractional")),
    place=_places,
)
def masks_and_weights_mean_what_they_say(lab: Lab, batch: TextTrainBatch, place: int) -> None:
    """How does the default loss use `target_mask` and `target_weights`? Look for a shift of the
    targets or the mask by one, a mask taken from the ids (padding, end of sequence), weights cast
    to integers, a product where positions ought to be left out, a mean over all positions."""
    logits = lab.trainer.forward(batch.input_ids)
    expect_masked_targets_ignored(lab, batch, place)
    expect_kept_targets_counted(lab, batch, logits, place)
    expect_all_counted_without_mask(lab, place)
    expect_none_means_ones(lab, batch)
    expect_finite_without_weight(lab, batch)
    expect_weights_are_factors(lab, batch, logits, place)


@check("forward_backward.declared_loss", batch=batches())
def the_default_loss_is_the_declared_one(lab: Lab, batch: TextTrainBatch) -> None:
    """Compare the trainer's loss with the declared one: normaliser (kept tokens, sum of weights,
    batch), shift, label smoothing, auxiliary terms that are on although they should be off."""
    declared = lab.target.default_loss
    if declared is None:
        raise NotChecked("the default loss isn't declared", Need.DECLARED_DEFAULT_LOSS)
    uneven = make_batch(lab.domain, lab.domain.usual_shape, weights="fractional")
    for given in (batch, uneven):
        _expect_value(lab, declared, given)
    with suppress(CallFailed):  # weights may be negative, as advantages are, or be refused
        _expect_value(lab, declared, _with_negative_weights(uneven))
    # Only gradients can show the next, and the declared loss needn't travel to another process.
    with suppress(NotChecked, CallFailed):
        by_default, as_given = effects(
            lab,
            lambda subject: subject.forward_backward(uneven),
            lambda subject: subject.forward_backward(uneven, declared),
        )
        what = "the gradient without loss_fn is that of the declared default loss as loss_fn"
        expect_same_effect(lab, by_default, as_given, what)


def _expect_value(lab: Lab, declared: Loss, batch: TextTrainBatch) -> None:
    reported, logits = _loss_and_logits(lab, batch)
    exact, plain = loss_value(declared, logits, batch)
    expect_near(
        reported,
        exact,
        "the declared default loss of the same logits in float64",
        value_error(exact, plain, lab.dtype, scale=1.0),
    )


def _with_negative_weights(batch: TextTrainBatch) -> TextTrainBatch:
    assert batch.target_weights is not None
    weights = batch.target_weights.clone()
    weights[:, ::3] /= -math.pi  # multiples of ¼ don't add up to 0 then, which a mean divides by
    return replace(batch, target_weights=weights)


# What it does to the trainer


@check("forward_backward.weights_fixed", batch=batches())
def only_gradients_change(lab: Lab, batch: TextTrainBatch) -> None:
    """Does `forward_backward` update anything: an optimizer hooked into backward, weight decay, a
    running statistic that `forward` reads?"""
    trainer = lab.trainer
    parameters = parameters_of(lab, trainer) if lab.sees_gradients else None
    trainer.forward_backward(batch)
    trainer.optim_step()
    weights = parameters.weights() if parameters else {}
    logits = trainer.forward(batch.input_ids)
    for loss_fn in (None, summed_nll) * 3:
        trainer.forward_backward(batch, loss_fn)
    what = "weights after forward_backward are those before"
    if parameters:
        expect_same_tensors(parameters.weights(), weights, what, None)
    expect_same(trainer.forward(batch.input_ids), logits, what, lab.unmoved_allowed)


@check(
    "forward_backward.accumulates",
    first=batches(),
    second=batches(),
    loss=lambda _: st.sampled_from(["default", *sorted(_LOSSES)]),
)
def gradients_add_up(lab: Lab, first: TextTrainBatch, second: TextTrainBatch, loss: str) -> None:
    """Is anything done to gradients that are already there: zeroed, averaged, clipped, divided by
    the number of calls, kept for the last microbatch only?"""
    loss_fn = _LOSSES.get(loss)
    both, one, other, both_reversed = effects(
        lab,
        calls(first, second, loss_fn=loss_fn),
        calls(first, loss_fn=loss_fn),
        calls(first, None, second, loss_fn=loss_fn),
        calls(second, first, loss_fn=loss_fn),
    )
    if not lab.stochastic:
        what = "what two calls accumulate doesn't depend on their order"
        expect_same_effect(lab, both_reversed, both, what, exact=True)
        _expect_updates_see_the_sum(lab, first)
    if both.from_gradients:
        expect_same_effect(
            lab, both, added(one, other), "the gradient of two calls is the sum of theirs"
        )


@check(
    "forward_backward.linear_in_loss",
    batch=batches(),
    loss=_custom_losses,
    factor=lambda _: st.sampled_from([2.0, 0.5, -1.0, 0.125]),  # exact in every precision
)
def gradients_scale_with_the_loss(
    lab: Lab, batch: TextTrainBatch, loss: str, factor: float
) -> None:
    """Is each call's gradient clipped or normalised? Is the loss scaled by something that depends
    on its size?"""
    base = _LOSSES[loss]
    factors = (factor, 64.0)
    halved = times(0.5, base)
    once, halves, *scaled = effects(
        lab,
        calls(batch, loss_fn=base),
        calls(batch, batch, loss_fn=halved),
        *(calls(batch, loss_fn=times(each, base)) for each in factors),
    )
    if not lab.stochastic:
        what = "two calls with half the loss accumulate what one does"
        expect_same_effect(lab, halves, once, what, exact=True, halved=True)
    if once.from_gradients:
        for each, effect in zip(factors, scaled, strict=True):
            what = f"{each} times the loss has {each} times the gradient"
            expect_same_effect(lab, effect, once.times(each), what)


@check("forward_backward.batch_untouched", batch=batches())
def batches_stay_as_they_were(lab: Lab, batch: TextTrainBatch) -> None:
    """Does anything write into the batch: `masked_fill_` on the targets, a mask applied in place,
    a field replaced?"""
    trainer = lab.trainer
    full = make_batch(lab.domain, lab.domain.usual_shape, weights="fractional")
    rows = batch.input_ids[:1].expand(batch.input_ids.shape)
    aliased = replace(full, target_ids=full.input_ids)
    repeated = TextTrainBatch(input_ids=rows, target_ids=rows)
    for given in (batch, aliased, repeated):
        before = {name: _copied(getattr(given, name)) for name in _FIELDS}
        objects = {name: getattr(given, name) for name in _FIELDS}
        for loss_fn in (None, mean_nll):
            trainer.forward_backward(given, loss_fn)
        for name in _FIELDS:
            expect(
                getattr(given, name) is objects[name],
                expected=f"batch.{name} to stay the object that it was",
                seen="another object",
            )
            reference = before[name]
            if reference is not None:
                expect_same(objects[name], reference, f"batch.{name} after the call is as before")


@check("forward_backward.learns")
def the_default_loss_falls(lab: Lab) -> None:
    """Does an update move the weights against the gradient, with a learning rate that does
    something? Is every layer reached?"""
    subject = lab.fresh()
    batch = make_batch(lab.domain, lab.domain.usual_shape, mask="all")
    losses = []
    for _ in range(36):
        losses.append(subject.forward_backward(batch).loss)
        subject.optim_step()
    start, end = losses[0], sum(losses[-3:]) / 3
    expect(
        end < start,
        expected="a lower default loss after 36 updates on one batch",
        seen=f"{start:.5g} at first, {end:.5g} at last",
    )


# Parts


_FIELDS = ("input_ids", "target_ids", "target_mask", "target_weights")


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _expect_same_batch(given: Any, batch: TextTrainBatch) -> None:
    for name in _FIELDS:
        sent, received = getattr(batch, name), getattr(given, name, None)
        same = (received is None) == (sent is None)
        if same and sent is not None:
            same = isinstance(received, Tensor) and torch.equal(received.cpu(), sent)
        expect(
            same,
            expected=f"loss_fn to be given the batch's own {name}",
            seen=f"{received!r:.200} instead of {sent!r:.200}",
        )


def _loss_and_logits(lab: Lab, batch: TextTrainBatch) -> tuple[float, Tensor]:
    """The default loss of a batch, and the logits that it was computed from."""
    if not lab.stochastic:
        logits = lab.trainer.forward(batch.input_ids)
        return lab.trainer.forward_backward(batch).loss, logits
    witness = Witness(mean_nll)
    _, reported = lab.twin_results(
        lambda subject: subject.forward_backward(batch, witness).loss,
        lambda subject: subject.forward_backward(batch).loss,
    )
    if witness.logits is None:
        raise NotChecked("dropout can't be watched where the loss runs in another process")
    return reported, witness.logits


def _expect_loss_of_this_call(lab: Lab, batch: TextTrainBatch) -> None:
    """The default loss depends neither on other batches before nor on what is accumulated."""
    other = make_batch(lab.domain, lab.domain.usual_shape, seed=5)
    first, _, again = losses_of(lab, batch, other, batch)
    allowed = value_error(first, first, lab.dtype)
    expect_near(again, first, "the default loss of the same batch after another one", allowed)
    if lab.stochastic:
        return
    trainer = lab.trainer
    for accumulated in (0, 2, 4):
        loss = trainer.forward_backward(batch).loss
        what = f"the default loss of the same batch with {accumulated} microbatches accumulated"
        expect_near(loss, first, what, allowed)
        trainer.forward_backward(other)


def _expect_updates_see_the_sum(lab: Lab, batch: TextTrainBatch) -> None:
    """Updates from one call, and from several that each have a part of its loss.

    The numbers of calls vary from update to update, so that an optimizer which ignores a constant
    factor sees one change.
    """

    def training(subject: Subject, calls: tuple[int, ...]) -> Tensor:
        for count in calls:
            for part in _halving_parts(count):
                subject.forward_backward(batch, times(part, mean_nll))
            subject.optim_step()
        return subject.forward(batch.input_ids)

    in_parts, whole = lab.pair_results(
        lambda subject: training(subject, (2, 1, 8, 1)),
        lambda subject: training(subject, (1, 1, 1, 1)),
    )
    what = "logits after updates from calls with a part of the loss each are those from one call"
    expect_same(in_parts, whole, what, lab.run_allowed)


def _halving_parts(count: int) -> list[float]:
    """So many powers of two that every sum from the first on is one, and the last is 1: exact."""
    return [0.5 ** (count - 1)] * (count > 1) + [0.5**i for i in range(count - 1, 0, -1)] or [1.0]
