"""Central differences of a loss along a direction of one parameter, and how far to trust them.

Directions follow the reported gradient (along others the derivative may be near zero and say
nothing), spread by random factors so that no part of it hides; where the reported gradient is zero,
noise is tried instead. The step is chosen by the change of the loss that it makes, not by its
length; what the weights were really moved by, rounded, is what the gradient is multiplied with; and
two step sizes are combined (Richardson), whose difference bounds the error of cutting the series
off.

The construction follows what numerical analysis teaches of differentiation (any textbook's chapter
on it); the choice of the step by the change of the loss was measured for this kit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PARTS = (1.0, 0.5)
"""Parts of the best step that differences are repeated with: curvature shrinks, rounding grows."""


@dataclass(frozen=True)
class Derivative:
    """A directional derivative of the loss, measured and as the reported gradient has it.

    Attributes:
        measured: By central differences, Richardson-extrapolated.
        reported: The reported gradient times the same direction.
        cut_off: How much the extrapolation changed the finer difference, relative to the
            derivative: a bound of what cutting the series off has cost.
        length: The length of the step.
    """

    measured: float
    reported: float
    cut_off: float
    length: float

    @property
    def error(self) -> float:
        """How far the two are apart, relative to the larger one."""
        return abs(self.signed_error)

    @property
    def change_apart(self) -> float:
        """How much of the loss the disagreement is, over the step that was made."""
        return abs(self.measured - self.reported) * self.length

    @property
    def signed_error(self) -> float:
        """The same; positive where the gradient reports too much."""
        size = max(abs(self.measured), abs(self.reported))
        return (self.reported - self.measured) / size if size else 0.0


def along(
    loss: Callable[[], float],
    weight: Tensor,
    direction: Tensor,
    gradient: Tensor,
    change: float,
) -> Derivative | None:
    """The derivative of `loss` along `direction`, by moving `weight` in place (and back).

    It takes four evaluations of the loss, and memory for four copies of the weight in float64.

    Args:
        loss: The loss at the weights as they are, in float64.
        weight: The parameter, of any floating dtype and device; restored bitwise.
        direction: Of length 1, of the weight's shape; float64 on the CPU.
        gradient: The reported gradient, of the weight's shape; float64 on the CPU.
        change: The change of the loss to aim at.

    Returns:
        None where rounding swallows the step or the loss isn't finite along it.
    """
    slope = float((gradient * direction).sum())
    original = weight.detach().clone()
    origin = original.to("cpu", torch.float64)
    if not slope:
        return None
    # A slope that is all but zero would take the weight out of the world.
    length = min(change / abs(slope), origin.norm().item() or 1.0)
    rates = []
    try:
        for step in (length, length / 2):
            high, above = _moved(loss, weight, origin + step * direction)
            low, below = _moved(loss, weight, origin - step * direction)
            moved = above - below
            if not moved.any() or not (math.isfinite(high) and math.isfinite(low)):
                return None
            rates.append(((high - low) / (2 * step), float((gradient * moved).sum()) / (2 * step)))
    finally:
        with torch.no_grad():
            weight.copy_(original)
    (coarse, coarse_reported), (fine, reported) = rates
    coarse_error, fine_error = coarse - coarse_reported, fine - reported
    error = (4 * fine_error - coarse_error) / 3
    size = max(abs(reported), abs(reported + error))
    return Derivative(
        measured=reported + error,
        reported=reported,
        cut_off=abs(fine_error - coarse_error) / (3 * size) if size else 0.0,
        length=length,
    )


def change_between(loss: Callable[[], float], weight: Tensor, step: Tensor) -> float:
    """How much the loss changes from `weight - step` to `weight + step`; the weight is restored."""
    original = weight.detach().clone()
    origin = original.to("cpu", torch.float64)
    try:
        high, _ = _moved(loss, weight, origin + step)
        low, _ = _moved(loss, weight, origin - step)
    finally:
        with torch.no_grad():
            weight.copy_(original)
    return high - low


def _moved(loss: Callable[[], float], weight: Tensor, to: Tensor) -> tuple[float, Tensor]:
    """The loss with `weight` set to `to`, and what it was really set to."""
    with torch.no_grad():
        weight.copy_(to)
    return loss(), weight.detach().to("cpu", torch.float64, copy=True)


def along_gradient(gradient: Tensor, seed: int) -> Tensor | None:
    """A unit direction along a reported gradient (float64, on the CPU); None where that is zero."""
    if not gradient.any():
        return None
    generator = torch.Generator().manual_seed(seed)
    spread = gradient * (torch.rand(gradient.shape, generator=generator, dtype=torch.float64) + 0.5)
    direction: Tensor = spread / spread.norm()
    return direction


def noise_where_zero(gradient: Tensor, weight: Tensor, seed: int) -> Tensor | None:
    """A step of noise a tenth as large as the weight, where the reported gradient is zero.

    None where it is zero nowhere.
    """
    zero = gradient == 0
    if not zero.any():
        return None
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
    size = weight.detach().to("cpu", torch.float64).square().mean().sqrt().item() or 1.0
    return 0.1 * size * noise * zero
