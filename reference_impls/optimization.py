"""From a loss to an update: backward that is all or nothing, clipping, AdamW, the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

OptimizerFactory = Callable[[Mapping[str, Tensor]], torch.optim.Optimizer]
"""Builds an optimizer over parameters by name; the trainer sets its learning rates."""

Schedule = Callable[[int], float]
"""A learning rate by position; a trainer says at which position its first update is."""

CLIP_NORM = 1.0


class NonFiniteGradientError(ArithmeticError):
    """The accumulated gradient has no finite norm, so it can't be applied."""


def adamw(parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """AdamW that decays matrices and leaves one-dimensional parameters undecayed."""
    matrices = [p for p in parameters.values() if p.dim() > 1]
    vectors = [p for p in parameters.values() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.9, 0.95), eps=1e-8)


def sgd(parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """Plain SGD: no momentum, no decay."""
    return torch.optim.SGD(list(parameters.values()))


def warm_up_then_decay(position: int, *, peak: float = 0.01, warm_up: int = 10) -> float:
    """Learning rate that rises in a line to `peak` at `warm_up`, then falls as 1/√position.

    Example:
        >>> [warm_up_then_decay(position) for position in (0, 5, 10, 40)]
        [0.0, 0.005, 0.01, 0.005]
    """
    if position <= warm_up:
        return peak * position / warm_up
    return float(peak * (warm_up / position) ** 0.5)


def backward_or_restore(loss: Tensor, parameters: Sequence[Tensor]) -> None:
    """Add the gradient of `loss` to each parameter's `.grad`, or raise and leave all as they were.

    A backward that fails midway has added to some gradients and not to others. So each call's
    gradient is computed apart and added once it is complete, at the cost of a second copy.
    """
    pending = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        loss.backward()
    except BaseException:
        for p, grad in zip(parameters, pending, strict=True):
            p.grad = grad
        raise
    for p, grad in zip(parameters, pending, strict=True):
        if grad is not None:
            p.grad = grad if p.grad is None else grad.add_(p.grad)


def clip(parameters: Sequence[Tensor], max_norm: float) -> None:
    """Scale the gradients down to a total 2-norm of at most `max_norm`.

    Raises:
        NonFiniteGradientError: The norm is NaN or infinite; the gradients are as they were.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if not torch.isfinite(norm):
        raise NonFiniteGradientError(
            f"the accumulated gradient has norm {norm.item()}: nothing was applied and the "
            "gradients are cleared; look at the loss and weights of the last batches"
        )
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, object]) -> None:
    """`optimizer.load_state_dict(state)`, which alone would take another optimizer's state.

    Raises:
        ValueError: The state is of another kind of optimizer, or of other parameter groups.
    """
    own, saved = optimizer.param_groups, state["param_groups"]
    assert isinstance(saved, list)
    if [set(group) for group in own] != [set(group) for group in saved]:
        raise ValueError(
            f"the checkpoint's optimizer state doesn't fit {type(optimizer).__name__}: its "
            "parameter groups have other settings; load into a trainer with the same optimizer"
        )
    optimizer.load_state_dict(state)
