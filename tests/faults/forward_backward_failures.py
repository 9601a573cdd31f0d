"""Faulty trainers of the area forward_backward, where a call fails or a loss isn't finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forge.api import ForwardBackwardResult, LossFn, OptimStepResult, TextTrainBatch
from reference_impls.plain import PlainTrainer
from tests.faults.corpus import faulty
from tests.faults.forward_backward import Reports

# Failures before backward


@faulty("forward_backward.failure_atomic", "a microbatch is counted before its loss is known (B47)")
class CountsBeforeTheLoss(PlainTrainer):
    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        self.accumulated_microbatches += 1
        loss = super()._loss(logits, batch, loss_fn)
        self.accumulated_microbatches -= 1
        return loss


class Guards(PlainTrainer):
    """Does something about a call that failed."""

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        try:
            return await super().forward_backward(batch, loss_fn)
        except Exception as error:
            return self._failed(error)

    def _failed(self, error: Exception) -> ForwardBackwardResult:
        raise NotImplementedError


@faulty("forward_backward.failure_atomic", "a failed call drops the gradients, not the count (B47)")
class DropsGradientsOnFailure(Guards):
    def _failed(self, error: Exception) -> ForwardBackwardResult:
        self.model.zero_grad(set_to_none=False)
        raise error


@faulty("forward_backward.failure_atomic", "a failed call is answered by a loss of NaN")
class AnswersFailuresWithNaN(Guards):
    def _failed(self, error: Exception) -> ForwardBackwardResult:
        return ForwardBackwardResult(math.nan, {"loss": math.nan, "num_tokens": 0})


@faulty("forward_backward.failure_atomic", "the loss's own error is lost on the way")
class LosesTheError(Guards):
    def _failed(self, error: Exception) -> ForwardBackwardResult:
        raise RuntimeError("the worker failed; see its log") from None


@faulty("forward_backward.failure_atomic", "a loss of many numbers is averaged")
class AveragesVectors(PlainTrainer):
    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        if loss_fn is None:
            return super()._loss(logits, batch, None)
        return loss_fn({"logits": logits}, batch).mean()


@faulty("forward_backward.failure_atomic", "a failed call advances the schedule")
class AdvancesTheSchedule(Guards):
    failures = 0

    def _failed(self, error: Exception) -> ForwardBackwardResult:
        self.failures += 1
        raise error

    def _learning_rate(self) -> float:
        return self.schedule(self.step + 1 + self.failures)


@faulty("forward_backward.failure_atomic", "a failed batch is trained on with the next one")
class KeepsTheFailedBatch(PlainTrainer):
    waiting: Tensor | None = None

    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        before = self.waiting
        self.waiting = 1e-3 * logits.square().mean()
        loss = super()._loss(logits, batch, loss_fn)
        self.waiting = None
        return loss if before is None else loss + before


@faulty("forward_backward.failure_atomic", "a failed call leaves the model in eval mode")
class FailsIntoEvalMode(PlainTrainer):
    def __init__(self) -> None:
        super().__init__(dropout=0.2)

    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        self.model.eval()
        loss = super()._loss(logits, batch, loss_fn)
        self.model.train()
        return loss


@faulty("forward_backward.failure_atomic", "after a failed call dropout is off until an update")
class DropsNothingUntilAnUpdate(FailsIntoEvalMode):
    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        was_training = self.model.training
        self.model.eval()
        loss = PlainTrainer._loss(self, logits, batch, loss_fn)
        self.model.train(was_training)
        return loss

    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        was_training = self.model.training
        logits = await super().forward(inputs)
        self.model.train(was_training)
        return logits

    async def optim_step(self) -> OptimStepResult:
        self.model.train()
        return await super().optim_step()


# Failures inside backward


@faulty("forward_backward.failure_in_backward", "a microbatch is counted before its backward")
class CountsBeforeBackward(PlainTrainer):
    def _backward(self, loss: Tensor) -> None:
        self.accumulated_microbatches += 1
        super()._backward(loss)
        self.accumulated_microbatches -= 1


class PlainBackward(PlainTrainer):
    """Adds to the gradients while backward runs."""

    def _backward(self, loss: Tensor) -> None:
        loss.backward()


@faulty("forward_backward.failure_in_backward", "nothing is cleared where nothing was counted")
class ClearsWhatItCounted(PlainBackward):
    def _clear(self) -> None:
        if self.accumulated_microbatches:
            super()._clear()


@faulty("forward_backward.failure_in_backward", "a failed backward leaves the trainer busy")
class StaysBusy(PlainTrainer):
    busy = False

    def _backward(self, loss: Tensor) -> None:
        if self.busy:
            raise RuntimeError("another backward is running")
        self.busy = True
        super()._backward(loss)
        self.busy = False


@faulty("forward_backward.failure_in_backward", "a failed backward is logged and passed over")
class PassesOverFailures(PlainTrainer):
    def _backward(self, loss: Tensor) -> None:
        try:
            super()._backward(loss)
        except Exception:
            return


@faulty("forward_backward.failure_in_backward", "a failed backward scales later gradients down")
class BacksOff(PlainTrainer):
    scale = 1.0

    def _backward(self, loss: Tensor) -> None:
        try:
            super()._backward(loss * self.scale)
        except Exception:
            self.scale /= 2
            raise


@faulty("forward_backward.failure_keeps_gradients", "a half-done backward stays in the gradients")
class LeavesHalfABackward(PlainBackward):
    pass


@faulty("forward_backward.failure_keeps_gradients", "a failed backward drops all gradients")
class DropsAllGradients(PlainTrainer):
    def _backward(self, loss: Tensor) -> None:
        try:
            super()._backward(loss)
        except Exception:
            self.model.zero_grad()
            raise


# Losses that aren't finite


@faulty("forward_backward.nonfinite_visible", "NaN is replaced by the last good loss (B159)")
class ReportsTheLastGoodLoss(Reports):
    good = 0.0

    def _reported(self, loss: float) -> float:
        self.good = loss if math.isfinite(loss) else self.good
        return self.good


@faulty("forward_backward.nonfinite_visible", "NaN becomes 0, infinity a large number")
class TurnsNaNIntoZero(Reports):
    def _reported(self, loss: float) -> float:
        return torch.tensor(loss).nan_to_num().item()


@faulty("forward_backward.nonfinite_visible", "an infinite loss is cut to a largest one")
class CutsInfinity(Reports):
    def _reported(self, loss: float) -> float:
        return min(loss, 1e4)


@faulty("forward_backward.nonfinite_visible", "a batch of NaN is skipped and has the loss 0")
class SkipsNaN(PlainTrainer):
    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        loss = super()._loss(logits, batch, loss_fn)
        return loss if loss.isfinite() else 0.0 * logits.sum()
