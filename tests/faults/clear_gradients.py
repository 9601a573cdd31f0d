"""Faulty trainers of the area clear_gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.api import ForwardBackwardResult, LossFn, TextTrainBatch
from reference_impls.plain import PlainTrainer
from reference_impls.random_stream import RandomStream
from tests.faults.corpus import faulty
from tests.faults.forward_backward_failures import KeepsTheFailedBatch
from tests.faults.optim_step import MainGradients


class Clears(PlainTrainer):
    """Clears in a way of its own when it is asked to; an update clears as `PlainTrainer`'s."""

    async def clear_gradients(self) -> None:
        self._clear_when_asked()

    def _clear_when_asked(self) -> None:
        raise NotImplementedError


# Discarded


@faulty("clear_gradients.discards", "clear_gradients is a stub")
class ClearsNothing(Clears):
    def _clear_when_asked(self) -> None:
        return


@faulty("clear_gradients.discards", "the count is cleared, the gradients stay (B40)")
class ClearsTheCountOnly(Clears):
    def _clear_when_asked(self) -> None:
        self.accumulated_microbatches = 0


@faulty("clear_gradients.discards", "the gradients are cleared, the count stays (B47)")
class ClearsTheGradientsOnly(Clears):
    def _clear_when_asked(self) -> None:
        self.model.zero_grad()


@faulty("clear_gradients.discards", "the head keeps its gradient: it is in another module")
class ClearsTheDecoderOnly(Clears):
    def _clear_when_asked(self) -> None:
        self.model.model.zero_grad()
        self.accumulated_microbatches = 0


@faulty("clear_gradients.discards", "1% of the gradient stays")
class ClearsAllButOnePercent(Clears):
    def _clear_when_asked(self) -> None:
        self.accumulated_microbatches = 0
        for p in self._trainable().values():
            if p.grad is not None:
                p.grad *= 0.01


@faulty("clear_gradients.discards", "the accumulator beside .grad isn't cleared (B40)")
class ClearsNoAccumulator(MainGradients):
    async def clear_gradients(self) -> None:
        PlainTrainer._clear(self)


@faulty("clear_gradients.discards", "a second clear swaps the old buffers in again")
class SwapsBuffers(Clears):
    def __init__(self) -> None:
        super().__init__()
        self.other: dict[str, Tensor | None] = {}

    def _clear_when_asked(self) -> None:
        parameters = self._trainable()
        kept = {name: p.grad for name, p in parameters.items()}
        self._clear()
        for name, p in parameters.items():
            p.grad = self.other.get(name)
        self.other = kept if not self.other else {}


@faulty("clear_gradients.discards", "tokens of cleared microbatches divide later gradients (B10)")
class CountsClearedTokens(Clears):
    cleared = 0

    def _clear_when_asked(self) -> None:
        self.cleared += self.accumulated_microbatches
        self._clear()

    def _backward(self, loss: Tensor) -> None:
        super()._backward(loss / (1 + self.cleared))
        self.cleared = 0


@faulty("clear_gradients.discards", "gradients are multiplied by 0: NaN stays NaN (B42)")
class MultipliesByZero(Clears):
    def _clear_when_asked(self) -> None:
        self.accumulated_microbatches = 0
        for p in self._trainable().values():
            if p.grad is not None:
                p.grad *= 0


# Nothing else


class AlsoChanges(Clears):
    """Clears, and does something else as well."""

    def _clear_when_asked(self) -> None:
        self._clear()
        self._change()

    def _change(self) -> None:
        raise NotImplementedError


@faulty("clear_gradients.only_gradients", "clearing makes a new optimizer, without its moments")
class ResetsTheOptimizer(AlsoChanges):
    def _change(self) -> None:
        self.optimizer = self._make_optimizer()


@faulty("clear_gradients.only_gradients", "clearing fades the moments by 1%")
class FadesMoments(AlsoChanges):
    def _change(self) -> None:
        for state in self.optimizer.state.values():
            state["exp_avg"] *= 0.99


@faulty("clear_gradients.only_gradients", "clearing counts as a step")
class CountsAStep(AlsoChanges):
    def _change(self) -> None:
        self.step += 1


@faulty("clear_gradients.only_gradients", "clearing advances the schedule")
class ClearsByAStep(AlsoChanges):
    cleared = 0

    def _change(self) -> None:
        self.cleared += 1

    def _learning_rate(self) -> float:
        return self.schedule(self.step + 1 + self.cleared)


@faulty("clear_gradients.only_gradients", "an update of gradients of 0 clears: weights decay (B77)")
class DecaysWeights(AlsoChanges):
    def _change(self) -> None:
        with torch.no_grad():
            for p in self._trainable().values():
                p *= 1 - 1e-6


@faulty("clear_gradients.only_gradients", "clearing starts dropout's random stream anew")
class ReseedsDropout(AlsoChanges):
    def __init__(self) -> None:
        super().__init__(dropout=0.2)

    def _change(self) -> None:
        self.random = RandomStream(0, self.device)


# Recovery


@faulty("clear_gradients.recovers", "a failed call leaves the trainer busy for good")
class StaysBusyAfterAFailure(PlainTrainer):
    busy = False

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        if self.busy:
            raise RuntimeError("another forward_backward is running")
        self.busy = True
        result = await super().forward_backward(batch, loss_fn)
        self.busy = False
        return result


@faulty("clear_gradients.recovers", "a failed call leaves gradients off")
class LeavesGradientsOff(PlainTrainer):
    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        if loss_fn is None:
            return super()._loss(logits, batch, None)
        torch.set_grad_enabled(False)
        loss_fn({"logits": logits}, batch)
        torch.set_grad_enabled(True)
        return super()._loss(logits, batch, loss_fn)


@faulty("clear_gradients.recovers", "half a backward stays where nothing was counted")
class ClearsCountedGradients(PlainTrainer):
    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _clear(self) -> None:
        if self.accumulated_microbatches:
            super()._clear()


@faulty("clear_gradients.recovers", "a failed batch waits and is trained on with the next one")
class TrainsOnTheFailedBatch(KeepsTheFailedBatch):
    pass


@faulty("clear_gradients.recovers", "once memory has run out, batches are halved for good")
class HalvesBatchesForGood(PlainTrainer):
    halves = False

    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        rows = len(logits) // 2 or 1
        if self.halves:
            logits, batch = logits[:rows], first_rows(batch, rows)
        try:
            return super()._loss(logits, batch, loss_fn)
        except RuntimeError as error:
            self.halves = "allocate" in str(error)
            raise


def first_rows(batch: TextTrainBatch, rows: int) -> TextTrainBatch:
    parts = (batch.input_ids, batch.target_ids, batch.target_mask, batch.target_weights)
    return TextTrainBatch(*(None if part is None else part[:rows] for part in parts))


@faulty("clear_gradients.recovers", "what memory ran out for is skipped without a word")
class SkipsWhatIsTooLarge(PlainTrainer):
    def _backward(self, loss: Tensor) -> None:
        try:
            super()._backward(loss)
        except RuntimeError as error:
            if "allocate" not in str(error):
                raise


@faulty("clear_gradients.recovers", "each failure halves a scale that nobody takes out again (B52)")
class BacksOffForGood(PlainTrainer):
    scale = 1.0

    def _backward(self, loss: Tensor) -> None:
        try:
            super()._backward(loss * self.scale)
        except Exception:
            self.scale /= 2
            raise
