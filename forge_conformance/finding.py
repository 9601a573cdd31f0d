"""What a check can conclude, and the comparisons that explain themselves when they fail."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from forge_conformance.contract import Need
from forge_conformance.oracle.tolerance import Allowed, apart


class Broken(Exception):
    """The clause is broken: what was expected, what was seen, and how far apart they are.

    Args:
        barely: The weights of a trainer that has long been trained may explain it.
    """

    def __init__(self, *, expected: str, seen: str, apart: str = "", barely: bool = False) -> None:
        super().__init__(f"expected {expected}; seen {seen}")
        self.expected = expected
        self.seen = seen
        self.apart = apart
        self.barely = barely


class NotChecked(Exception):
    """The clause can't be judged on this trainer; `needs` names what would unlock it."""

    def __init__(self, reason: str, *needs: Need) -> None:
        super().__init__(reason)
        self.reason = reason
        self.needs = needs


class Undecided(Exception):
    """This example shows nothing either way (no update happened, say); others may."""


def broken(*, expected: str, seen: str, apart: str = "", barely: bool = False) -> NoReturn:
    """Break the clause."""
    raise Broken(expected=expected, seen=seen, apart=apart, barely=barely)


def expect(holds: bool, *, expected: str, seen: str, apart: str = "") -> None:
    """Break the clause unless `holds`."""
    if not holds:
        broken(expected=expected, seen=seen, apart=apart)


def expect_same(seen: Tensor, reference: Tensor, what: str, allowed: Allowed | None = None) -> None:
    """Break the clause unless two tensors are equal: bitwise, or as near as `allowed` says.

    Args:
        what: Names both, as in "the logits after a save are those before it".

    Raises:
        Undecided: Both are the same and not finite: two trainings that have diverged, say.
    """
    if seen.shape != reference.shape:
        broken(
            expected=what,
            seen=f"shape {list(seen.shape)} where it is {list(reference.shape)}",
        )
    if identical(seen, reference):
        if not seen.isfinite().all():
            raise Undecided(f"{what}, but they aren't finite")
        return
    distance = apart(seen, reference)
    if allowed is None:
        broken(expected=f"{what}, bitwise", seen=_worst(seen, reference), apart=_far(distance))
    elif not distance <= allowed.error:
        broken(
            expected=what,
            seen=_worst(seen, reference),
            apart=f"{_far(distance)}; allowed {allowed.error:.2g} ({allowed.why})",
            barely=allowed.barely_exceeded(distance),
        )


def expect_near(seen: float, reference: float, what: str, allowed: Allowed) -> None:
    """Break the clause unless two numbers are as near as `allowed` says (absolutely)."""
    difference = abs(seen - reference)
    if difference <= allowed.error or seen == reference:
        return
    broken(
        expected=f"{what} = {reference:.9g}",
        seen=f"{seen:.9g}",
        apart=f"{difference:.3g}; allowed {allowed.error:.2g} ({allowed.why})",
        barely=allowed.barely_exceeded(difference, abs(reference)),
    )


def identical(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, NaN equal to NaN."""
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and bool(((left == right) | (left.isnan() & right.isnan())).all())
    )


def _worst(seen: Tensor, reference: Tensor) -> str:
    difference = (seen.double() - reference.double()).abs().nan_to_num(nan=math.inf)
    flat = int(difference.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), seen.shape)]
    return (
        f"{seen[tuple(index)].item():.9g} where it is {reference[tuple(index)].item():.9g} "
        f"(worst of {seen.numel()}, at {index})"
    )


def _far(distance: float) -> str:
    return f"relative distance {distance:.3g}"
