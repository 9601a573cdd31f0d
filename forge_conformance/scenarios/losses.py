"""Custom losses that the kit hands to a trainer. All are in float32 or better and scalar."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.api import TextTrainBatch
from forge_conformance.scenarios.batches import kept_mask

Loss: TypeAlias = Callable[[dict[str, Any], TextTrainBatch], Tensor]


def summed_nll(outputs: dict[str, Any], batch: TextTrainBatch) -> Tensor:
    """The negative log-likelihood of the kept targets, weighted and summed: additive over rows."""
    logits = _wide(outputs["logits"])
    targets = batch.target_ids.to(logits.device)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    losses = losses.view_as(targets) * kept_mask(batch).to(losses.device)
    if batch.target_weights is not None:
        losses = losses * batch.target_weights.to(losses)
    return losses.sum()


def mean_nll(outputs: dict[str, Any], batch: TextTrainBatch) -> Tensor:
    """`summed_nll` over the number of kept targets."""
    return summed_nll(outputs, batch) / kept_mask(batch).sum().clamp(min=1)


def every_logit(outputs: dict[str, Any], batch: TextTrainBatch) -> Tensor:
    """A smooth function that every logit takes part in, masked or not; of no use for training."""
    logits = _wide(outputs["logits"])
    count = logits.numel()
    factors = torch.cos(torch.arange(count, device=logits.device, dtype=logits.dtype))
    wave: Tensor = (logits.flatten() * factors).sum() / math.sqrt(count)
    return wave + logits.square().mean()


def times(factor: float, loss: Loss) -> Loss:
    """`factor` times `loss`."""

    def scaled(outputs: dict[str, Any], batch: TextTrainBatch) -> Tensor:
        return factor * loss(outputs, batch)

    return scaled


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
