"""Updates of a new trainer beside the declared optimizer's, fed with the same gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forge.api import TextTrainBatch
from forge_conformance.access import loss_scale_of, parameters_of
from forge_conformance.contract import Need
from forge_conformance.finding import NotChecked, expect
from forge_conformance.lab import Lab
from forge_conformance.observe.parameters import Tensors
from forge_conformance.oracle.optimizers import Replay, total_norm
from forge_conformance.oracle.tolerance import FACTOR, ULPS
from forge_conformance.scenarios.losses import Loss, mean_nll, times

Updates = Sequence[Sequence[TextTrainBatch]]
"""The microbatches of each update."""


def expect_declared_updates(
    lab: Lab,
    updates: Updates,
    loss: Loss | None,
    rate_of: Callable[[int, float], float] = lambda _update, reported: reported,
) -> None:
    """Break the clause unless a new trainer's weights follow the declared optimizer's in float64.

    The replay runs freely: only gradients and rates are taken from the trainer, never weights. It
    takes five copies of the parameters in float64 and five in their own dtype; of a large model
    it follows some parameters only (`Parameters.some`), clipped by the norm of all.

    Where clipping isn't declared, the loss is made so small that none binds. A training that
    diverges is followed until it does.

    Args:
        loss: The loss of all calls; None for the trainer's own.
        rate_of: The learning rate to replay an update with, from its number and the reported one.

    Raises:
        NotChecked: The optimizer isn't declared, or parameters can't be seen.
    """
    build, clip_norm = lab.target.optimizer, lab.target.clip_norm
    if build is None:
        raise NotChecked("the optimizer isn't declared", Need.DECLARED_OPTIMIZER)
    if clip_norm is None:
        if lab.dtype == torch.float16:  # gradients so small vanish in it
            raise NotChecked("whether and how it clips isn't declared", Need.DECLARED_CLIPPING)
        loss, clip_norm = times(_TOO_SMALL_TO_CLIP, loss or mean_nll), math.inf
    if math.isfinite(clip_norm) and not lab.sees_all_parameters:
        raise NotChecked(
            "the autograd graph may hide parameters, whose gradients the clipping counts",
            Need.IN_PROCESS,
        )
    subject = lab.fresh()
    parameters = parameters_of(lab, subject)
    names = parameters.some(seed=int(updates[0][0].input_ids.sum()))
    start = parameters.whole_weights(names)
    exact = Replay(build, start, torch.float64, clip_norm)
    plain = Replay(build, start, None, clip_norm)
    losses: list[float] = []
    for number, microbatches in enumerate(updates):
        losses += [subject.forward_backward(batch, loss).loss for batch in microbatches]
        if _diverges(losses, since=len(updates[0])):
            return
        scale = loss_scale_of(lab, subject)
        norm = None if len(names) == len(parameters.tensors) else parameters.gradient_norm() / scale
        gradients = {
            name: g.double() / scale for name, g in parameters.whole_gradients(names).items()
        }
        rate = rate_of(number, subject.optim_step().learning_rate)
        expected = exact.step(gradients, rate, norm)
        rounded = plain.step(_rounded_otherwise(gradients, start, seed=number), rate, norm)
        seen = parameters.whole_weights(names)
        for name, weight in expected.items():
            _expect_moved_alike(
                f"{name} {list(weight.shape)} after update {number}",
                seen[name],
                weight,
                rounded[name],
                total_norm({name: weight - start[name].double()}),
            )


_TOO_SMALL_TO_CLIP = 2.0**-20


def _diverges(losses: list[float], since: int) -> bool:
    """Whether a training's losses, `since` that index, are out of all proportion to those before:
    without clipping, a loss made large may drive it there."""
    usual = max(map(abs, losses[:since]))
    return not all(abs(loss) <= _DIVERGED * usual for loss in losses[since:])


_DIVERGED = 1000.0


def _rounded_otherwise(gradients: Tensors, weights: Tensors, seed: int) -> Tensors:
    """The gradients, each number two units in the last place of its weight's dtype larger or
    smaller: an update may hang on the last places, as where decay cancels a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: gradient
        * (1 + 2 * torch.finfo(weights[name].dtype).eps * _signs(gradient, generator))
        for name, gradient in gradients.items()
    }


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    ones = torch.randint(0, 2, like.shape, generator=generator, dtype=torch.float64)
    return (2 * ones - 1).to(like.device)


def _expect_moved_alike(
    what: str, seen: Tensor, exact: Tensor, rounded: Tensor, moved: float
) -> None:
    error = total_norm({what: seen.double() - exact})
    own = total_norm({what: rounded.double() - exact})
    allowed = FACTOR * own + ULPS * torch.finfo(seen.dtype).eps * total_norm({what: exact})
    expect(
        error <= allowed,
        expected=f"{what} as the declared optimizer moves it in float64",
        seen=f"off by {error / moved:.3g} of its way" if moved else "moved, but should stay",
        apart=f"{error:.3g}; allowed {allowed:.2g} ({FACTOR:g} times the error of plain PyTorch "
        f"with gradients rounded otherwise, plus {ULPS:g} units in the last place)",
    )
