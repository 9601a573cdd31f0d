"""The loss along single parameters, beside their gradients: what `numerics.gradient` compares."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from forge_conformance.finding import broken, expect
from forge_conformance.oracle import differences
from forge_conformance.oracle.differences import Derivative
from forge_conformance.oracle.tolerance import (
    FACTOR,
    Allowed,
    Arithmetic,
    change_of_loss,
    loss_noise,
)

_REPEATS = 9
"""Directions that a suspicion is repeated with."""


@dataclass(frozen=True)
class Meter:
    """How to read the loss at the weights as they are, and what it is computed with.

    Where the trainer's forward pass can be made to run in float64, it is: in less precision
    differences are too coarse for all but gross errors.
    """

    read: Callable[[], float]
    arithmetic: Arithmetic

    @cached_property
    def at_rest(self) -> float:
        """The loss at the weights that every look leaves as it found them: how large it is."""
        return self.read()


@dataclass(frozen=True)
class Look:
    """The loss along one parameter, beside the parameter's accumulated gradient."""

    name: str
    weight: Tensor
    reported: Tensor | None
    meter: Meter
    blur: float
    """The 2-norm of what rounding may have added to a gradient, or taken from it."""

    @property
    def measure(self) -> Callable[[], float]:
        return self.meter.read

    @property
    def gradient(self) -> Tensor:
        """The reported one; zero where there is none."""
        if self.reported is None:
            return torch.zeros(self.weight.shape, dtype=torch.float64)
        return self.reported

    def derivative(self, seed: int, part: float = 1.0) -> Derivative | None:
        """The derivative along the gradient, with so large a part of the best step."""
        direction = differences.along_gradient(self.gradient, seed)
        if direction is None:
            return None
        narrowest = max(
            (self.meter.arithmetic.dtype, self.weight.dtype), key=lambda t: torch.finfo(t).eps
        )
        change = part * change_of_loss(narrowest, self.meter.at_rest)
        return differences.along(self.measure, self.weight, direction, self.gradient, change)

    def repeated(
        self, seed: int, parts: Sequence[float], allowed: Allowed | None
    ) -> list[Derivative]:
        """Derivatives along several directions, with these parts of the best step in turn.

        Those whose two step sizes disagree by more than is allowed are left out.
        """
        found = [
            self.derivative(seed + 1 + repeat, parts[repeat % len(parts)])
            for repeat in range(_REPEATS)
        ]
        return [
            each
            for each in found
            if each is not None and (allowed is None or each.cut_off <= allowed.error)
        ]

    def suspicious(self, found: Derivative, allowed: Allowed) -> bool:
        """Whether rounding and curvature don't explain how far it is from the gradient."""
        noise = loss_noise(self.meter.arithmetic, self.meter.at_rest)
        limit = allowed.error + FACTOR * found.cut_off + self.blurred(found)
        return found.error > limit and found.change_apart > noise

    def blurred(self, found: Derivative) -> float:
        """How far from the derivative rounding may have put the gradient, relative: a gradient
        that ought to be zero consists of it."""
        size = max(abs(found.measured), abs(found.reported))
        return self.blur / size if size else 0.0


def expect_right_along(look: Look, seed: int, allowed: Allowed) -> None:
    """Break the clause if a gradient is wrong along most of several directions and steps.

    Rounding and curvature differ from one to the next; a wrong gradient stays wrong. Where the
    loss jumps (a token goes to another expert) two steps disagree, and neither is trusted.
    """
    found = look.repeated(seed, differences.PARTS, allowed)
    if len(found) < _REPEATS / 3:
        return
    typical = _median(found)
    scatter = statistics.median(abs(each.signed_error - typical.signed_error) for each in found)
    limit = allowed.error + FACTOR * scatter + look.blurred(typical)
    if typical.error <= limit or not _persists(look, seed, typical):
        return
    broken(
        expected=f"the derivative of the loss along {look.name}: {typical.measured:.6g}",
        seen=f"{typical.reported:.6g} by the accumulated gradient: {_ratio(typical)}",
        apart=f"relative {typical.error:.3g}, the median of {len(found)} directions; allowed "
        f"{limit:.2g} ({allowed.why}, as many times their scatter, and a unit in the last place of "
        "the whole gradient)",
        barely=replace(allowed, error=limit).barely_exceeded(typical.error),
    )


def _persists(look: Look, seed: int, typical: Derivative) -> bool:
    """Whether the error is there at much smaller steps too, which a bend of the loss is not."""
    return all(
        0.7 * typical.error < _median(found).signed_error * math.copysign(1, typical.signed_error)
        for part in _SMALL_PARTS
        if (found := look.repeated(seed, (part,), None))
    )


_SMALL_PARTS = (1 / 8, 1 / 32)


def _median(found: list[Derivative]) -> Derivative:
    return sorted(found, key=lambda each: each.signed_error)[len(found) // 2]


def expect_unmoved_where_zero(look: Look, seed: int) -> None:
    """Break the clause if noise moves the loss where the gradient is zero, in proportion to it.

    In proportion: an inactive unit or an expert that isn't chosen has no gradient either, and a
    long step may wake it.
    """
    narrow = torch.finfo(look.weight.dtype).eps > torch.finfo(torch.float32).eps
    steps, least, most = (_NARROW_STEPS, 3, 5.5) if narrow else (_STEPS, 6, 11)
    changes: list[list[float]] = [[] for _ in steps]
    spread = 0.0
    for repeat in range(_REPEATS):
        step = differences.noise_where_zero(look.gradient, look.weight, seed + repeat)
        if step is None:
            return
        spread = step.norm().item() / math.sqrt(step.count_nonzero().item() or 1)
        for part, found in zip(steps, changes, strict=True):
            found.append(abs(differences.change_between(look.measure, look.weight, part * step)))
        if not any(found[0] for found in changes):
            return
    noise = loss_noise(look.meter.arithmetic, look.meter.at_rest)
    noise += 2 * steps[-1] * spread * look.blur
    by_step = [statistics.median(found) for found in changes]
    in_proportion = by_step[-1] > noise and all(
        least < longer / shorter < most for longer, shorter in itertools.pairwise(by_step)
    )
    share = float((look.gradient == 0).double().mean())
    expect(
        not in_proportion,
        expected=f"the loss not to change with {look.name} where its gradient is zero "
        f"({share:.0%} of it)",
        seen=f"a change of {by_step[0]:.3g} when it moves by {steps[0] / 10:g} of its size, and "
        "in proportion to shorter steps",
        apart=f"by {steps[-1] / 10:.2g} of its size {by_step[-1]:.3g}; allowed {noise:.2g}, the "
        f"noise of a loss in {look.meter.arithmetic.name} and of such a gradient",
    )


_STEPS = (1.0, 1 / 8, 1 / 64)
_NARROW_STEPS = (4.0, 1.0, 1 / 4)
"""For weights that shorter steps wouldn't move."""


def _ratio(found: Derivative) -> str:
    if found.reported == 0:
        return "no gradient"
    if found.measured == 0:
        return "the loss doesn't change"
    return f"{found.reported / found.measured:.6g} times as large"
