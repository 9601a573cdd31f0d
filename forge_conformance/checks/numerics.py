"""Area numerics: the gradient, the step and the run are right, not only plausible."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from forge.api import TextTrainBatch
from forge_conformance.access import parameters_of
from forge_conformance.checks.comparing import (
    OwnGradients,
    expect_own_gradients,
    expect_same_effect,
    own_gradients,
    stacked,
    without_loss_scale,
)
from forge_conformance.checks.derivatives import (
    Look,
    Meter,
    expect_right_along,
    expect_unmoved_where_zero,
)
from forge_conformance.checks.registry import check
from forge_conformance.checks.replays import expect_declared_updates
from forge_conformance.contract import Need
from forge_conformance.effects import effects
from forge_conformance.finding import (
    NotChecked,
    Undecided,
    expect,
    expect_near,
    expect_same,
    identical,
)
from forge_conformance.lab import Lab
from forge_conformance.observe.exact import in_float64
from forge_conformance.observe.exported import scaled_copy
from forge_conformance.observe.parameters import (
    LARGEST,
    Parameters,
    Tensors,
    local_part,
    part_of,
)
from forge_conformance.observe.witness import Witness
from forge_conformance.oracle.losses import loss_value
from forge_conformance.oracle.optimizers import total_norm
from forge_conformance.oracle.tolerance import (
    Allowed,
    apart,
    derivative_error,
    gradient_along_error,
    logits_error,
    training_error,
    value_error,
)
from forge_conformance.scenarios.batches import batches, kept_mask, make_batch, make_ids
from forge_conformance.scenarios.losses import (
    Loss,
    every_logit,
    mean_nll,
    summed_nll,
    times,
)
from forge_conformance.subject import CallFailed, Subject, TrainerFault

_LOSSES = {"mean_nll": mean_nll, "every_logit": every_logit}

_MOST_TENSORS = 24
"""Parameters that one example looks at, of larger models a random choice."""
_MOST_WITH_THE_DEFAULT_LOSS = 4


@check(
    "numerics.gradient",
    batch=batches(min_batch=2, min_seq=4, masks=("all", "ragged")),
    loss=lambda _: st.sampled_from(sorted(_LOSSES)),
    seed=lambda _: st.integers(0, 2**16),
    share=0.25,
)
def the_gradient_is_the_derivative_of_the_loss(
    lab: Lab, batch: TextTrainBatch, loss: str, seed: int
) -> None:
    """Compare with `torch.autograd` layer by layer: a detached or frozen layer, a custom backward,
    gradients scaled or reduced after backward, what is left of an earlier gradient, a sum that is
    kept in low precision."""
    trainer = lab.trainer
    parameters = parameters_of(lab, trainer)
    if lab.graph is not None and lab.graph.whole and not lab.sees_all_parameters:
        missing = len(lab.graph.leaves) - len(parameters.tensors)
        lab.advise(
            f"{missing} of {len(lab.graph.leaves)} tensors that the loss depends on get no "
            "gradient: freeze them, or declare Target.parameters to have them judged"
        )
    looked_at = _some_of(parameters.tensors, seed)
    hold = _way_to_hold_dropout(lab, trainer, parameters, looked_at, batch)
    meter = _loss_meter(lab, trainer, batch, _LOSSES[loss], hold)
    gradients = _gradient_with_a_past(lab, trainer, parameters, batch, _LOSSES[loss], hold)
    blur = lab.arithmetic.unit * total_norm(gradients)
    looks = [
        Look(name, weight, gradients.get(name), meter, blur) for name, weight in looked_at.items()
    ]
    first = {look.name: look.derivative(seed) for look in looks}
    decided = [found for found in first.values() if found is not None]
    if not decided:
        raise Undecided("the loss doesn't move along any parameter")
    if all(found.measured == 0 for found in decided):
        raise NotChecked("moving the parameters found doesn't move the loss", Need.IN_PROCESS)
    wide = meter.arithmetic != lab.arithmetic
    allowed = (gradient_along_error if wide else derivative_error)(lab.arithmetic)
    for look in looks:
        found = first[look.name]
        if found is not None and look.suspicious(found, allowed):
            expect_right_along(look, seed, allowed)
        expect_unmoved_where_zero(look, seed)
    for look in _looks_at_the_reported_loss(lab, trainer, batch, parameters, looked_at, hold):
        found = look.derivative(seed)
        allowed = derivative_error(lab.arithmetic)
        if found is not None and look.suspicious(found, allowed):
            expect_right_along(look, seed, allowed)


@check("numerics.microbatches", batch=batches(min_batch=3, masks=("ragged", "all")))
def rows_apart_are_as_rows_together(lab: Lab, batch: TextTrainBatch) -> None:
    """With a summed loss nothing may depend on how rows are grouped. Is anything divided by the
    rows, the tokens or the number of calls, in the gradient or in the update?"""
    if lab.stochastic:
        raise NotChecked("dropout draws otherwise for other shapes")
    seq = batch.input_ids.shape[1]
    sizes = [size for size in (1, 2, 3) if lab.domain.takes((size, seq))]
    parts = _split(batch, sizes[0] if sizes else 0)
    if len(parts) < 2:
        raise Undecided("the batch can't be split into shapes that the trainer takes")

    def apart(subject: Subject) -> None:
        for part in parts:
            subject.forward_backward(part, summed_nll)

    split, whole = effects(lab, apart, lambda subject: subject.forward_backward(batch, summed_nll))
    what = "the gradient of a summed loss from single rows is that from the rows together"
    expect_same_effect(lab, split, whole, what)


@check(
    "numerics.train_step",
    program=lambda domain: st.lists(
        st.lists(batches()(domain), min_size=1, max_size=4), min_size=4, max_size=6
    ),
    factor=lambda _: st.sampled_from([None, 1e-3]),
)
def training_follows_a_float64_run(
    lab: Lab, program: list[list[TextTrainBatch]], factor: float | None
) -> None:
    """The trainer's own loss, microbatches, clipping (which a small loss keeps from binding),
    optimizer and schedule together, over several updates: where do the weights drift?"""
    declared = lab.target.learning_rate
    expect_declared_updates(
        lab,
        program,
        loss=None if factor is None else times(factor, mean_nll),
        rate_of=lambda update, reported: reported if declared is None else declared(update),
    )


@check(
    "numerics.deterministic", seeds=lambda _: st.lists(st.integers(0, 99), min_size=2, max_size=5)
)
def equal_trainers_stay_bitwise_equal(lab: Lab, seeds: list[int]) -> None:
    """What differs between two trainers of the factory: unseeded weights or dropout, kernels that
    add in another order (atomics, autotuning), hash order, time?"""
    if not lab.target.deterministic:
        raise NotChecked("determinism isn't declared", Need.DECLARED_DETERMINISTIC)

    def training(subject: Subject) -> Tensor:
        lab.reseed()
        shown: list[Tensor | float] = []
        for seed in seeds:
            batch = make_batch(lab.domain, lab.domain.usual_shape, seed)
            shown.append(subject.forward_backward(batch).loss)
            shown += subject.optim_step()[:2]
        return stacked(*shown, subject.forward(batch.input_ids))

    first, second = training(lab.fresh()), training(lab.fresh())
    what = "losses, steps, rates and logits of one trainer are those of another of the factory"
    expect_same(second, first, what)


@check("numerics.parity", alone=True)
def another_trainer_computes_the_same(lab: Lab) -> None:
    """The first divergence tells where to look: logits before any update, the model itself or how
    weights are exported; the loss, its normaliser; the losses after updates, the optimizer, its
    groups, clipping, schedule, or what is left of a gradient."""
    mine, theirs = lab.fresh(), lab.other()
    dtypes = (lab.dtype, lab.dtype_of(lab.other(), lab.against or lab.target))
    dtype = max(dtypes, key=lambda each: torch.finfo(each).eps)
    arithmetic = replace(lab.arithmetic, dtype=dtype)
    _share_weights(lab, mine, theirs)
    batch_of = functools.partial(
        make_batch, lab.domain, lab.domain.usual_shape, weights="fractional"
    )
    for seed in range(3):
        ids = batch_of(seed).input_ids
        what = f"the logits of {_against(lab)} with the same weights (batch {seed})"
        expect_same(mine.forward(ids), theirs.forward(ids), what, logits_error(arithmetic))
    if lab.stochastic:
        raise NotChecked("dropout: losses of the two differ by its random streams")
    for update in range(_UPDATES_IN_PARITY):
        batch = batch_of(update)
        own, other = (subject.forward_backward(batch).loss for subject in (mine, theirs))
        allowed = training_error(arithmetic, update)
        unit = torch.finfo(dtype).eps * max(abs(other), 1e-30)
        expect(
            abs(own - other) <= allowed.error * abs(other),
            expected=f"the loss of {_against(lab)} after {update} updates: {other:.9g}",
            seen=f"{own:.9g}, {abs(own - other) / unit:.3g} units in the last place from it",
            apart=f"relative {abs(own - other) / abs(other):.3g}; allowed {allowed.error:.2g} "
            f"({allowed.why})",
        )
        own_rate, other_rate = (each.optim_step().learning_rate for each in (mine, theirs))
        expect_near(
            own_rate,
            other_rate,
            f"the learning rate of update {update} in {_against(lab)}",
            value_error(other_rate, other_rate, torch.float32),
        )


# Parts


_UPDATES_IN_PARITY = 6


def _against(lab: Lab) -> str:
    return lab.against.name if lab.against is not None else "the second trainer"


def _share_weights(lab: Lab, mine: Subject, theirs: Subject) -> None:
    """Load what the first trainer exports into both, scaled where errors would hide in it."""
    saved = mine.save(path=str(lab.new_folder()), weights_only=True)
    for factor in (1.0, 3.0, 9.0, 27.0):
        given = saved if factor == 1 else scaled_copy(saved, lab.new_folder(), factor)
        for subject, name in ((mine, lab.target.name), (theirs, _against(lab))):
            try:
                subject.load(given)
            except CallFailed as refusal:
                change = "" if factor == 1 else f", made {factor:g} times as large to show errors"
                raise NotChecked(
                    f"{name} can't load the exported weights{change}: {refusal.error}"
                ) from None
        if _use_of_context(lab, mine) > _LEAST_USE_OF_CONTEXT:
            return
    raise NotChecked("however large the weights are made, logits hardly depend on earlier tokens")


_LEAST_USE_OF_CONTEXT = 0.02
"""Below this, wrong attention changes the logits too little to be told from rounding."""


def _use_of_context(lab: Lab, subject: Subject) -> float:
    """How much the last position's logits change with the tokens before it, relative."""
    first, second = (make_ids(lab.domain, lab.domain.usual_shape, seed) for seed in (1, 2))
    second[:, -1] = first[:, -1]
    return apart(subject.forward(first)[:, -1], subject.forward(second)[:, -1])


def _loss_meter(
    lab: Lab, subject: Subject, batch: TextTrainBatch, loss: Loss, hold: Callable[[], None]
) -> Meter:
    """How to read the loss at the weights as they are, with dropout held still."""

    def logits() -> Tensor:
        return subject.forward(batch.input_ids)

    def wide_logits() -> Tensor:
        return in_float64(logits)

    if not lab.stochastic:
        narrow = lab.arithmetic.unit > torch.finfo(torch.float32).eps
        wide = narrow and _is_wide(wide_logits, logits(), lab.logits_allowed)
        read = wide_logits if wide else logits
        return Meter(
            lambda: loss_value(loss, read(), batch).exact,
            replace(lab.arithmetic, dtype=torch.float64) if wide else lab.arithmetic,
        )

    def held() -> Tensor:
        return _dropped_logits(subject, batch, hold)

    return Meter(lambda: loss_value(loss, held(), batch).exact, lab.arithmetic)


def _looks_at_the_reported_loss(
    lab: Lab,
    subject: Subject,
    batch: TextTrainBatch,
    parameters: Parameters,
    looked_at: Tensors,
    hold: Callable[[], None],
) -> list[Look]:
    """A few parameters beside the gradient of the default loss, which only the trainer computes."""

    def read() -> float:
        hold()
        loss = subject.forward_backward(batch).loss
        subject.clear_gradients()
        return loss

    hold()
    subject.forward_backward(batch)
    gradients = without_loss_scale(lab, subject, parameters.gradients(), {})
    subject.clear_gradients()
    blur = lab.arithmetic.unit * total_norm(gradients)
    meter = Meter(read, lab.arithmetic)
    return [
        Look(
            f"{name} with the default loss",
            weight,
            gradients[name].double() if name in gradients else None,
            meter,
            blur,
        )
        for name, weight in list(looked_at.items())[:_MOST_WITH_THE_DEFAULT_LOSS]
    ]


def _way_to_hold_dropout(
    lab: Lab,
    subject: Subject,
    parameters: Parameters,
    looked_at: Tensors,
    batch: TextTrainBatch,
) -> Callable[[], None]:
    """What makes the next call draw the dropout that it drew after this the last time: setting the
    global random streams, or loading a checkpoint, which brings the trainer's own stream back.

    Raises:
        NotChecked: Neither does.
    """

    def reseed() -> None:
        lab.reseed(_STREAM)

    if not lab.stochastic or _holds(subject, batch, reseed):
        return reseed
    size = sum(tensor.numel() for tensor in parameters.tensors.values())
    if size <= _LARGEST_TO_LOAD:
        with suppress(TrainerFault):  # other clauses judge how it saves and loads
            saved = subject.save(path=str(lab.new_folder()))

            def load() -> None:
                moved = {name: weight.clone() for name, weight in looked_at.items()}
                subject.load(saved)
                for name, weight in looked_at.items():
                    weight.copy_(moved[name])

            if _holds(subject, batch, load):
                return load
    raise NotChecked("dropout draws from a random stream of its own, which can't be held still")


def _holds(subject: Subject, batch: TextTrainBatch, hold: Callable[[], None]) -> bool:
    return identical(_dropped_logits(subject, batch, hold), _dropped_logits(subject, batch, hold))


def _dropped_logits(subject: Subject, batch: TextTrainBatch, hold: Callable[[], None]) -> Tensor:
    witness = Witness(mean_nll)
    hold()
    subject.forward_backward(batch, witness)
    subject.clear_gradients()
    if witness.logits is None:
        raise NotChecked("dropout can't be held still in another process")
    return witness.logits


def _is_wide(compute: Callable[[], Tensor], narrow: Tensor, allowed: Allowed) -> bool:
    """Whether logits come out in float64, and else as the trainer's own."""
    try:
        wide = compute()
    except CallFailed:  # an operation has no kernel for float64
        return False
    rounded = wide.float().double()
    return not identical(rounded, wide.double()) and apart(wide, narrow) <= allowed.error


_STREAM = 7
_LARGEST_TO_LOAD = 2**22
"""Numbers that are loaded for every look at the loss."""


def _gradient_with_a_past(
    lab: Lab,
    subject: Subject,
    parameters: Parameters,
    batch: TextTrainBatch,
    loss: Loss,
    hold: Callable[[], None],
) -> Tensors:
    """The gradient of one call, after another one that was cleared; its loss scale taken out.

    It is compared with autograd's own, which finds what finite differences are too coarse for.
    """
    own: list[OwnGradients | None] = []

    def differentiated(outputs: dict[str, Any], given: TextTrainBatch) -> Tensor:
        value = loss(outputs, given)
        own.append(own_gradients(value, parameters))
        return value

    other = make_batch(lab.domain, lab.domain.usual_shape, seed=11)
    subject.forward_backward(other, loss)
    subject.clear_gradients()
    hold()
    subject.forward_backward(batch, differentiated)
    gradients = parameters.gradients()
    subject.clear_gradients()
    reference = own[-1] if own else None
    expect_own_gradients(lab, subject, gradients, reference)
    gradients = without_loss_scale(lab, subject, gradients, reference.first if reference else {})
    return {name: gradient.double() for name, gradient in gradients.items()}


def _some_of(tensors: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """What is read of some parameters, as views that change them."""
    local = {name: local_part(tensor) for name, tensor in tensors.items()}
    names = sorted(
        name
        for name, tensor in local.items()
        if tensor.is_contiguous() or tensor.numel() <= LARGEST
    )
    random.Random(seed).shuffle(names)
    return {name: part_of(local[name].detach()) for name in names[:_MOST_TENSORS]}


def _split(batch: TextTrainBatch, rows: int) -> list[TextTrainBatch]:
    """Parts of so many rows; those that keep nothing are left out, as their loss is 0."""
    if not rows or len(batch.input_ids) % rows:
        return []

    def some(tensor: Tensor | None, first: int) -> Tensor | None:
        return None if tensor is None else tensor[first : first + rows]

    parts = [
        TextTrainBatch(
            input_ids=batch.input_ids[first : first + rows],
            target_ids=batch.target_ids[first : first + rows],
            target_mask=some(batch.target_mask, first),
            target_weights=some(batch.target_weights, first),
        )
        for first in range(0, len(batch.input_ids), rows)
    ]
    return [part for part in parts if kept_mask(part).any()]
