"""Area optim_step: one update from what was accumulated, counted, reported, and cleared."""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from hypothesis import strategies as st
from torch import Tensor

from forge.api import TextTrainBatch
from forge_conformance.access import loss_scale_of, parameters_of
from forge_conformance.checks.comparing import expect_same_effect, stacked
from forge_conformance.checks.registry import check
from forge_conformance.checks.replays import expect_declared_updates
from forge_conformance.contract import Need
from forge_conformance.effects import effects
from forge_conformance.finding import (
    NotChecked,
    Undecided,
    broken,
    expect,
    expect_near,
    expect_same,
    identical,
)
from forge_conformance.lab import Lab
from forge_conformance.observe.parameters import Tensors
from forge_conformance.observe.rates import rates_used
from forge_conformance.oracle.optimizers import total_norm
from forge_conformance.oracle.tolerance import (
    Allowed,
    value_error,
)
from forge_conformance.scenarios.batches import batches, make_batch
from forge_conformance.scenarios.losses import mean_nll, times
from forge_conformance.subject import CallFailed, Program, Subject


@check("optim_step.step_and_count", batch=batches(), microbatches=lambda _: st.integers(1, 4))
def the_result_tells_step_and_count(lab: Lab, batch: TextTrainBatch, microbatches: int) -> None:
    """Is the result made before the counters move, or the count reset before it is read?"""
    trainer = lab.trainer
    before = trainer.get_status()
    for _ in range(microbatches):
        trainer.forward_backward(batch)
    update = trainer.optim_step()
    after = trainer.get_status()
    expect(
        update.step == after.step == before.step + 1,
        expected=f"step {before.step + 1} from optim_step and from get_status after it",
        seen=f"{update.step} and {after.step}",
    )
    expect(
        update.accumulated_microbatches == microbatches,
        expected=f"accumulated_microbatches = {microbatches}",
        seen=f"{update.accumulated_microbatches}",
    )


@check("optim_step.clears", first=batches(), second=batches())
def no_gradient_is_left(lab: Lab, first: TextTrainBatch, second: TextTrainBatch) -> None:
    """Are all gradients zeroed after the update: those of every parameter group, and of separate
    accumulators beside `.grad`?"""
    if lab.sees_gradients:
        trainer = lab.trainer
        parameters = parameters_of(lab, trainer)
        trainer.forward_backward(first)
        trainer.optim_step()
        left = total_norm(parameters.gradients())
        expect(left == 0, expected="no gradient after optim_step", seen=f"one of norm {left:.4g}")

    def training(subject: Subject, clear: bool) -> Tensor:
        shown: list[Tensor | float] = []
        for batch in (first, second, first):
            shown.append(subject.forward_backward(batch).loss)
            shown += subject.optim_step()[:2]
            if clear:
                subject.clear_gradients()
        return stacked(*shown, subject.forward(first.input_ids))

    with_clears, without = lab.pair_results(
        lambda subject: training(subject, True), lambda subject: training(subject, False)
    )
    what = "a training with clear_gradients after each optim_step is the one without"
    expect_same(with_clears, without, what, lab.run_allowed)


@check("optim_step.lr_used")
def the_reported_rate_is_the_one_used(lab: Lab) -> None:
    """Is the rate read after the scheduler has moved on? It must be that of the update just made,
    and the one that the optimizer really used."""
    subject = lab.fresh()
    batch = make_batch(lab.domain, lab.domain.usual_shape)
    reported: list[float] = []
    used: list[set[float]] = []
    for update in range(_SEVERAL_DOZEN):
        before = subject.forward(batch.input_ids)
        subject.forward_backward(batch)
        with rates_used() as seen:
            rate = subject.optim_step().learning_rate
        reported.append(rate)
        used.append(seen)
        expect(
            math.isfinite(rate) and rate >= 0,
            expected="a finite learning rate ≥ 0",
            seen=f"{rate} at update {update}",
        )
        if rate == 0:
            what = f"logits after update {update}, whose rate is reported as 0, are those before"
            expect_same(subject.forward(batch.input_ids), before, what, lab.unmoved_allowed)
        elif lab.target.learning_rate is not None:
            declared = lab.target.learning_rate(update)
            what = f"the rate of update {update} as declared"
            expect_near(rate, declared, what, value_error(declared, declared, torch.float32))
    _expect_rates_of_the_same_updates(reported, used)
    moves_by_it = "sgd" in lab.target.variants and lab.sees_gradients
    if moves_by_it:
        _expect_rate_of_plain_sgd(lab, batch)
    if not (moves_by_it or any(used) or lab.target.learning_rate is not None):
        raise NotChecked("no torch optimizer steps in this process", Need.DECLARED_SCHEDULE)


@check("optim_step.schedule", pattern=lambda _: st.lists(st.integers(1, 3), min_size=4, max_size=8))
def the_schedule_counts_updates(lab: Lab, pattern: list[int]) -> None:
    """Is the scheduler stepped for each microbatch, twice an update (by the optimizer and by the
    trainer), or by the number of ranks?"""
    batch = make_batch(lab.domain, lab.domain.usual_shape)

    def rates(microbatches: list[int]) -> list[float]:
        subject = lab.fresh()
        found = []
        for count in microbatches:
            for _ in range(count):
                subject.forward_backward(batch)
            found.append(subject.optim_step().learning_rate)
        return found

    one_each, by_pattern = rates([1] * len(pattern)), rates(pattern)
    declared = lab.target.learning_rate
    for update, (reference, rate) in enumerate(zip(one_each, by_pattern, strict=True)):
        allowed = value_error(reference, reference, torch.float32)
        what = f"the rate of update {update}, whatever the number of microbatches,"
        expect_near(rate, reference, what, allowed)
        if declared is not None:
            expect_near(rate, declared(update), f"the declared rate of update {update}", allowed)


@check("optim_step.updates_all", batch=batches(masks=("all", "none")))
def every_parameter_moves(lab: Lab, batch: TextTrainBatch) -> None:
    """Is every trainable parameter in the optimizer, in a group with a learning rate?"""
    trainer = lab.trainer
    parameters = parameters_of(lab, trainer)
    before = parameters.weights()
    trainer.forward_backward(batch)
    gradients = parameters.gradients()
    rate = trainer.optim_step().learning_rate
    after = parameters.weights()
    if rate == 0:
        raise Undecided("the learning rate is 0")
    if all(identical(after[name], before[name]) for name in before):
        _expect_parameters_are_current(lab, trainer, before)
    total = total_norm(gradients)
    for name, gradient in gradients.items():
        if not identical(after[name], before[name]) or not gradient.any():
            continue
        weight = before[name]
        smallest_step = torch.finfo(weight.dtype).eps * weight.abs().max().item()
        if rate * gradient.abs().max().item() > smallest_step and weight.dtype in _FULL:
            share = total_norm({name: gradient}) / total
            broken(
                expected=f"{name} {list(weight.shape)} to change with learning rate {rate:.4g}",
                seen=f"no change, though it has {share:.2g} of the gradient's norm",
            )
        lab.advise(f"an update was too small to move {name} in {weight.dtype}")


@check(
    "optim_step.update_rule",
    first=batches(),
    second=batches(),
    factor=lambda _: st.sampled_from([1.0, 1000.0, 0.001]),
    rounds=lambda _: st.sampled_from([1, 4]),
)
def weights_move_as_the_declared_optimizer_moves_them(
    lab: Lab, first: TextTrainBatch, second: TextTrainBatch, factor: float, rounds: int
) -> None:
    """Compare the update with the declared optimizer, fed with the same gradients: its
    hyper-parameters and their groups (weight decay on which parameters?), bias correction, the
    clipping before it, anything done to the gradients between backward and step."""
    updates = [[first], [second, first, second], [second]] * rounds
    expect_declared_updates(lab, updates, times(factor, mean_nll))


@check(
    "optim_step.clip_once",
    microbatches=lambda domain: st.lists(batches()(domain), min_size=2, max_size=4),
)
def clipping_sees_the_whole_gradient(lab: Lab, microbatches: list[TextTrainBatch]) -> None:
    """Is `clip_grad_norm_` called in `forward_backward` instead of once before the update?"""
    clip_norm = lab.target.clip_norm
    if clip_norm is None:
        raise NotChecked("whether and how it clips isn't declared", Need.DECLARED_CLIPPING)
    if not lab.sees_gradients:
        raise NotChecked("accumulated gradients can't be seen", Need.IN_PROCESS)

    def accumulate(factor: float) -> Program[None]:
        def program(subject: Subject) -> None:
            for batch in microbatches:
                subject.forward_backward(batch, times(factor, mean_nll))

        return program

    # Powers of two: the one loss is far below the clipping, the other as far above it.
    small, large = effects(lab, accumulate(2.0**-10), accumulate(_BINDING))
    threshold = clip_norm if math.isfinite(clip_norm) else 1.0
    if total_norm(large.tensors) <= threshold * loss_scale_of(lab, lab.trainer):
        raise Undecided("the gradient is too small for clipping to bind")
    what = "gradients that accumulate from a large loss aren't clipped before optim_step"
    expect_same_effect(lab, large, small.times(_BINDING * 2.0**10), what)
    if lab.target.optimizer is not None and lab.sees_all_parameters:
        expect_declared_updates(lab, [microbatches], times(_BINDING, mean_nll))


_BINDING = 2.0**10
"""A factor on the loss with which clipping binds, where there is any."""


@check("optim_step.empty", batch=batches())
def an_update_of_nothing_does_nothing(lab: Lab, batch: TextTrainBatch) -> None:
    """Does `optim_step` check that something was accumulated? Momentum and weight decay move
    weights without a gradient; step and schedule must stay too. Better: raise."""

    def training(subject: Subject, with_empty: bool) -> Tensor:
        shown: list[Tensor | float] = []
        for _ in range(2):
            if with_empty:
                _step_on_nothing(lab, subject)
            subject.forward_backward(batch)
            shown += subject.optim_step()[:2]
            if with_empty:
                _step_on_nothing(lab, subject)
                subject.forward_backward(batch)
                subject.clear_gradients()
                _step_on_nothing(lab, subject)
        return stacked(*shown, subject.forward(batch.input_ids))

    _step_on_nothing(lab, lab.trainer)
    if lab.stochastic:
        return
    with_empty, without = lab.pair_results(
        lambda subject: training(subject, True), lambda subject: training(subject, False)
    )
    what = "steps, rates and logits of a training with empty updates in between are those without"
    expect_same(with_empty, without, what, lab.run_allowed)


@check("optim_step.nonfinite")
def nonfinite_gradients_are_not_applied(lab: Lab) -> None:
    """Check the gradient norm before the update (a clip factor of NaN multiplies every gradient),
    and clear gradients, and the count with them, when the update is skipped."""
    batch = make_batch(lab.domain, lab.domain.usual_shape, mask="all")
    rates = _rates_of_fresh_trainer(lab, batch, updates=4)
    subject = lab.fresh()
    subject.forward_backward(batch)
    subject.optim_step()
    before, logits = subject.get_status(), subject.forward(batch.input_ids)
    try:
        subject.forward_backward(batch, times(math.nan, mean_nll))
    except CallFailed:
        raise Undecided("a loss of NaN is refused before it has a gradient") from None
    with suppress(CallFailed):  # raising is one of the two ways to do it right
        subject.optim_step()
    after = subject.get_status()
    what = "logits after an update with a gradient of NaN are those before"
    expect_same(subject.forward(batch.input_ids), logits, what, lab.unmoved_allowed)
    subject.forward_backward(batch)
    following = subject.optim_step()
    logits_after = subject.forward(batch.input_ids)
    expect(
        bool(logits_after.isfinite().all()),
        expected="finite logits after the next update: the gradient of NaN is gone",
        seen="logits that aren't finite",
    )
    expect(
        following.learning_rate == 0 or not identical(logits_after, logits),
        expected="the next update to move the weights: the optimizer's state took in no NaN",
        seen=f"no change with learning rate {following.learning_rate:.4g}",
    )
    expect(
        following.accumulated_microbatches == 1,
        expected="1 microbatch in the next update",
        seen=f"{following.accumulated_microbatches}",
    )
    made = 1 + after.step - before.step
    expect_near(
        following.learning_rate,
        rates[made],
        f"the next rate, with the step counter at {after.step} after {before.step},",
        value_error(rates[made], rates[made], torch.float32),
    )


# Parts


_SEVERAL_DOZEN = 48
"""Updates of a new trainer that take a short schedule to its end."""

_FULL = (torch.float32, torch.float64)


def _step_on_nothing(lab: Lab, subject: Subject) -> None:
    status = subject.get_status()
    ids = make_batch(lab.domain, lab.domain.usual_shape).input_ids
    logits = subject.forward(ids)
    try:
        subject.optim_step()
    except CallFailed:
        pass  # as it should
    else:
        lab.advise("raise when nothing was accumulated: an update of nothing is a caller's mistake")
    after = subject.get_status()
    expect(
        after == status,
        expected=f"status {tuple(status)} after optim_step with nothing accumulated",
        seen=f"{tuple(after)}",
    )
    what = "logits after optim_step with nothing accumulated are those before"
    expect_same(subject.forward(ids), logits, what, lab.unmoved_allowed)


def _rates_of_fresh_trainer(lab: Lab, batch: TextTrainBatch, updates: int) -> list[float]:
    subject = lab.fresh()
    rates = []
    for _ in range(updates):
        subject.forward_backward(batch)
        rates.append(subject.optim_step().learning_rate)
    return rates


def _expect_parameters_are_current(lab: Lab, trainer: Subject, before: Tensors) -> None:
    """Nothing moved: is it that nothing was updated, or that the update made new parameters?"""
    now = parameters_of(lab, trainer).weights()
    if any(not identical(now[name], before[name]) for name in before if name in now):
        raise NotChecked("each update makes new parameter tensors", Need.IN_PROCESS)


def _expect_rates_of_the_same_updates(reported: list[float], used: list[set[float]]) -> None:
    """Break the clause where what is reported of updates are rates that others were made with.

    Any other number may be right: of an optimizer that adapts its rate, the group's is a part.
    """

    def near(rate: float, rates: set[float]) -> bool:
        return any(
            abs(rate - each) <= value_error(each, each, torch.float32).error for each in rates
        )

    differing = [n for n, rate in enumerate(reported) if used[n] and not near(rate, used[n])]
    of_others = [n for n in differing if near(reported[n], set().union(*used))]
    # The next update's rate isn't known at the last one, nor the one before at the first.
    if not of_others or len(of_others) < len(differing) - 1:
        return
    update = of_others[0]
    other = next(n for n, rates in enumerate(used) if near(reported[update], rates))
    broken(
        expected=f"the rate that the optimizer made update {update} with: "
        + " or ".join(f"{rate:.6g}" for rate in sorted(used[update])),
        seen=f"{reported[update]:.6g}, the rate of update {other}",
    )


def _expect_rate_of_plain_sgd(lab: Lab, batch: TextTrainBatch) -> None:
    """In the variant with plain SGD the weights move by the reported rate times the gradient."""
    subject = lab.variant("sgd")
    parameters = parameters_of(lab, subject)
    for _ in range(3):
        before = parameters.weights()
        subject.forward_backward(batch)
        gradients = parameters.gradients()
        rate = subject.optim_step().learning_rate
        after = parameters.weights()
        scale = loss_scale_of(lab, subject)
        moved = math.fsum(
            float((before[n] - after[n]).double().mul(g).sum()) for n, g in gradients.items()
        )
        square = total_norm(gradients) ** 2 / scale
        if not square:
            raise Undecided("the variant with plain SGD has no gradient")
        expect_near(
            rate,
            moved / square,
            "the rate that the weights of the variant with plain SGD moved by",
            Allowed(1e-3 * abs(rate), "a thousandth: weights round the step"),
        )
