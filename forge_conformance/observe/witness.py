"""A loss that remembers what a trainer called it with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from forge.api import TextTrainBatch


class Witness:
    """A loss that remembers what it was called with, for as long as it is called in this process.

    Args:
        loss: What it computes.
        on_call: Is given the logits of every call.

    Attributes:
        calls: How many calls were seen.
        logits, batch: Of the last call; None before the first, and for good where the trainer
            runs the loss elsewhere.
    """

    def __init__(
        self,
        loss: Callable[[dict[str, Any], TextTrainBatch], Tensor],
        on_call: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.loss = loss
        self.on_call = on_call
        self.calls = 0
        self.logits: Tensor | None = None
        self.batch: Any = None

    def forget(self) -> None:
        """Have seen nothing: of several ranks, not all run the loss."""
        self.calls, self.logits, self.batch = 0, None, None

    def __call__(self, outputs: dict[str, Any], batch: TextTrainBatch) -> Tensor:
        self.calls += 1
        logits = outputs["logits"]
        if self.on_call is not None:
            self.on_call(logits)
        self.logits = logits.detach().to("cpu", copy=True)
        self.batch = batch
        return self.loss(outputs, batch)
