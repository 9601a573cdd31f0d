"""The value of a loss in float64, and in plain PyTorch, from logits that a trainer gave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class LossValue(NamedTuple):
    """`exact` in float64; `plain` computed in the logits' own dtype, for the tolerance rule."""

    exact: float
    plain: float


def loss_value(
    loss: Callable[[dict[str, Any], Any], Tensor], logits: Tensor, batch: Any
) -> LossValue:
    """`loss` of `logits` `[batch, seq, vocab]` and the batch."""
    with torch.no_grad():
        return LossValue(
            exact=float(loss({"logits": logits.double()}, batch)),
            plain=float(loss({"logits": logits}, batch)),
        )
