"""Faulty trainers of the area status."""

from __future__ import annotations

from typing import Any

import torch

from forge.api import (
    ForwardBackwardResult,
    LossFn,
    OptimStepResult,
    TextTrainBatch,
    TrainerConfig,
    TrainerStatus,
)
from reference_impls.byte_tokenizer import ByteTokenizer
from reference_impls.plain import PlainTrainer
from tests.faults.corpus import faulty


@faulty("status.counts", "rows are counted in place of microbatches")
class CountsRows(PlainTrainer):
    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        result = await super().forward_backward(batch, loss_fn)
        self.accumulated_microbatches += batch.input_ids.shape[0] - 1
        return result


@faulty("status.counts", "a microbatch is counted before it has succeeded (B47)")
class CountsFailures(PlainTrainer):
    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        before = self.accumulated_microbatches
        try:
            return await super().forward_backward(batch, loss_fn)
        finally:
            self.accumulated_microbatches = before + 1


@faulty("status.counts", "microbatches with a custom loss aren't counted")
class CountsItsOwnLossOnly(PlainTrainer):
    shown = 0

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        result = await super().forward_backward(batch, loss_fn)
        self.shown += loss_fn is None
        return result

    def _clear(self) -> None:
        super()._clear()
        self.shown = 0

    async def get_status(self) -> TrainerStatus:
        return TrainerStatus(self.step, self.shown)


@faulty("status.counts", "a microbatch without a kept target isn't counted (B09)")
class SkipsMaskedMicrobatches(PlainTrainer):
    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        result = await super().forward_backward(batch, loss_fn)
        if batch.target_mask is not None and not batch.target_mask.any():
            self.accumulated_microbatches -= 1
        return result


@faulty("status.counts", "clear_gradients drops the gradients and keeps the count (B47)")
class KeepsTheCountWhenClearing(PlainTrainer):
    async def clear_gradients(self) -> None:
        self.model.zero_grad()


@faulty("status.counts", "load drops the gradients and keeps the count")
class KeepsTheCountWhenLoading(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        before = self.accumulated_microbatches
        location = await super().load(path)
        self.accumulated_microbatches = before
        return location


@faulty("status.counts", "the count goes on over updates")
class NeverStartsAnew(PlainTrainer):
    async def optim_step(self) -> OptimStepResult:
        before = self.accumulated_microbatches
        result = await super().optim_step()
        self.accumulated_microbatches = before
        return result


@faulty("status.step", "the step counts microbatches (B105)")
class StepsByMicrobatch(PlainTrainer):
    async def optim_step(self) -> OptimStepResult:
        self.step += self.accumulated_microbatches - 1
        return await super().optim_step()


@faulty("status.step", "the step is counted by trainer and by schedule (B67)")
class StepsTwice(PlainTrainer):
    async def optim_step(self) -> OptimStepResult:
        result = await super().optim_step()
        self.step += 1
        return result


@faulty("status.step", "a full checkpoint doesn't bring its step back (B87)")
class StartsAnewAfterLoading(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        location = await super().load(path)
        self.step = 0
        return location


@faulty("status.step", "a full checkpoint leaves the step at what it was")
class GoesOnAfterLoading(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        before = self.step
        location = await super().load(path)
        self.step = before
        return location


@faulty("status.step", "the step is counted before it is decided to save (B104)")
class SavesTheNextStep(PlainTrainer):
    def _training_state(self) -> dict[str, Any]:
        return {**super()._training_state(), "step": self.step + 1}


@faulty("status.step", "saving counts as a step")
class StepsBySaving(PlainTrainer):
    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        location = await super().save(name, path, weights_only)
        self.step += 1
        return location


@faulty("status.step", "the step is written in bfloat16, as all numbers of the checkpoint (B90)")
class RoundsTheStep(PlainTrainer):
    def __init__(self) -> None:
        super().__init__()
        self.step = 1000  # a run that goes on: bfloat16 counts by 4 and 8 here

    def _training_state(self) -> dict[str, Any]:
        return {**super()._training_state(), "step": int(torch.tensor(self.step).bfloat16())}


@faulty("status.read_only", "get_status gives the count and sets it to 0")
class ReadsAndResets(PlainTrainer):
    async def get_status(self) -> TrainerStatus:
        status = await super().get_status()
        self.accumulated_microbatches = 0
        return status


@faulty("status.read_only", "asking for the configuration drops a pending window (B45)")
class DropsGradientsWhenAsked(PlainTrainer):
    async def get_config(self) -> TrainerConfig:
        self.model.zero_grad()
        return await super().get_config()


@faulty("status.read_only", "loading the tokenizer seeds the stream that dropout draws from")
class SeedsWithTheTokenizer(PlainTrainer):
    def __init__(self) -> None:
        super().__init__(dropout=0.2)

    async def get_tokenizer(self) -> ByteTokenizer:
        self.random = type(self.random)(0, self.device)
        return await super().get_tokenizer()


@faulty("status.read_only", "asking for the status leaves the model in eval mode: no dropout")
class FallsIntoEvalMode(PlainTrainer):
    def __init__(self) -> None:
        super().__init__(dropout=0.2)

    async def get_status(self) -> TrainerStatus:
        self.model.eval()
        return await super().get_status()
