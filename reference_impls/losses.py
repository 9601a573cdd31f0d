"""The loss that the reference trainers use where the caller brings none."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from forge.api import TextTrainBatch


def token_mean_loss(outputs: dict[str, Any], batch: TextTrainBatch) -> Tensor:
    """Weighted cross entropy in nats, summed over the kept targets and divided by their number.

    Weights multiply; they are no part of the divisor, so that twice the weights is twice the loss.
    A batch whose mask keeps nothing has loss 0 and a zero gradient.

    Example:
        >>> import torch
        >>> batch = TextTrainBatch(
        ...     input_ids=torch.tensor([[1, 2, 3]]),
        ...     target_ids=torch.tensor([[2, 3, -100]]),
        ...     target_mask=torch.tensor([[1, 1, 0]]),
        ...     target_weights=torch.tensor([[1.0, 0.5, 1.0]]),
        ... )
        >>> uniform = torch.zeros(1, 3, 8)
        >>> round(token_mean_loss({"logits": uniform}, batch).item(), 4)  # 0.75 ln 8
        1.5596
    """
    targets, mask, weights = batch.target_ids, batch.target_mask, batch.target_weights
    kept = targets == targets if mask is None else mask != 0
    # Positions without a part are left out, not multiplied by 0: 0 times NaN is NaN.
    counted = kept if weights is None else kept & (weights != 0)
    nll = cross_entropy(outputs["logits"][counted], targets[counted], reduction="none")
    if weights is not None:
        nll = nll * weights[counted].to(nll.dtype)
    return nll.sum() / kept.sum().clamp(min=1)


def check_loss(loss: object) -> None:
    """Refuse what a loss function returned if it can't be differentiated.

    Raises:
        TypeError: It isn't a tensor.
        ValueError: It isn't a single number, or doesn't depend on the logits.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn returned {type(loss).__name__}; it must return a torch.Tensor")
    if loss.dim() != 0:
        raise ValueError(f"loss_fn returned shape {list(loss.shape)}; reduce it to shape []")
    if not loss.requires_grad:
        raise ValueError("loss_fn returned a tensor without a graph; compute it from the logits")
