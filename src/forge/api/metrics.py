"""Metrics: one measured value, how several of them reduce to one, and what a trainer promises."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor


class Reduce(StrEnum):
    """How values of one metric, of several microbatches or ranks, become one value.

    A member is its name in lower case, so that it can be written as JSON and read back.

    Example:
        >>> Reduce("mean") is Reduce.MEAN
        True
        >>> Reduce.SUM == "sum"
        True
    """

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    STD = "std"


@dataclass
class Metric:
    """One value of a metric, with what is needed to combine it with others of its key.

    Args:
        key: The metric's name, non-empty.
        value: A number, or a tensor without an autograd graph.
        reduction: How it combines with other values of the same key.
        timestamp: When it was measured, in seconds since the Unix epoch; None if that isn't kept.

    Example:
        >>> kept = Metric("num_tokens", 12, Reduce.SUM)
        >>> kept.value, kept.reduction.value, kept.timestamp
        (12, 'sum', None)
    """

    key: str
    value: float | Tensor
    reduction: Reduce
    timestamp: float | None = None


@dataclass(frozen=True)
class MetricSpec:
    """What a trainer promises about one of its metrics.

    Args:
        kind: The Python type or types of the value, as for `isinstance`. `float` takes ints too;
            a `Metric` is judged by its `value`.
        minimum: The least value, itself allowed; None for no bound.
        maximum: The greatest value, itself allowed; None for no bound.
        reduction: How values of several microbatches or ranks combine; None if it isn't said.
        unit: What the number counts (`"tokens"`, `"nats"`), for people.
        required: False for a metric that some calls leave out.

    Example:
        >>> MetricSpec(int, minimum=0, reduction=Reduce.SUM, unit="tokens").required
        True
    """

    kind: type | tuple[type, ...] = float
    minimum: float | None = None
    maximum: float | None = None
    reduction: Reduce | None = None
    unit: str = ""
    required: bool = True
