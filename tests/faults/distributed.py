"""Trainers of several ranks: a plain data-parallel one, and what can be wrong with such."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge.api import (
    ForwardBackwardResult,
    LossFn,
    OptimStepResult,
    ParallelismConfig,
    TextTrainBatch,
    TrainerConfig,
)
from forge_conformance import Target
from reference_impls.batches import count_kept, to_device
from reference_impls.losses import token_mean_loss
from reference_impls.plain import PlainTrainer
from tests.faults.corpus import faulty
from tests.faults.declared import declared


class DataParallel(PlainTrainer):
    """Each rank computes its own rows of the batch; the gradients are added up over the ranks.

    The loss is computed by every rank from all logits, so that it is the one of the whole batch,
    whatever the loss function does. Without a launcher it is a `PlainTrainer`.
    """

    def __init__(self, **options: Any) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")
        super().__init__(**options)

    def _logits(self, input_ids: Tensor) -> Tensor:
        if self.size == 1 or not torch.is_grad_enabled():
            return super()._logits(input_ids)
        own = input_ids.tensor_split(self.size)[self.rank]
        # A rank without rows computes one all the same, and gives it no gradient.
        logits = super()._logits(own if len(own) else input_ids[:1])[: len(own)]
        return _FromAllRanks.apply(logits, len(input_ids), self.size, self.rank)

    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        error: Exception | None = None
        loss = logits.sum()
        try:
            loss = super()._loss(logits, batch, loss_fn)
        except Exception as raised:
            error = raised
        self._agree_on(error)
        return loss

    def _agree_on(self, error: Exception | None) -> None:
        """Raise on all ranks where one has failed, before any waits for it."""
        if self._total(torch.tensor(float(error is not None))) > 0:
            raise error or RuntimeError("another rank has failed")

    def _backward(self, loss: Tensor) -> None:
        pending = [p.grad for p in self._trainable().values()]
        for p in self._trainable().values():
            p.grad = None
        super()._backward(loss)
        for p, before in zip(self._trainable().values(), pending, strict=True):
            own = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = self._reduced(own) if before is None else before + self._reduced(own)

    def _reduced(self, grad: Tensor) -> Tensor:
        return self._total(grad)

    def _total(self, value: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(value)
        return value

    async def get_config(self) -> TrainerConfig:
        config = await super().get_config()
        return TrainerConfig(
            config.model_name,
            config.model_config,
            ParallelismConfig(
                dp_degree=self.size, world_size=self.size, dp_rank=self.rank, device="cpu"
            ),
        )

    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        """The first rank writes, as all have the same state; the others wait for its answer."""
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = await super().save(name, path, weights_only)
            except Exception as error:
                answer[1] = error
        if self.size > 1:
            dist.broadcast_object_list(answer)
        if answer[1] is not None:
            raise answer[1]
        return str(answer[0])


class _FromAllRanks(torch.autograd.Function):
    """The rows of all ranks; the gradient of a rank's own ones goes back to it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: int, size: int, rank: int) -> Tensor:
        parts = torch.arange(rows).tensor_split(size)
        padded = own.new_zeros(len(parts[0]), *own.shape[1:])
        padded[: len(own)] = own
        gathered = [torch.empty_like(padded) for _ in parts]
        dist.all_gather(gathered, padded)
        ctx.own = parts[rank]
        return torch.cat([each[: len(part)] for each, part in zip(gathered, parts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad[ctx.own], None, None, None


# Unusual, and right


class TellsItsOwnTime(DataParallel):
    """Reports what each rank took, which nobody takes for the batch's."""

    def _metrics(self, loss: float, batch: TextTrainBatch) -> dict[str, Any]:
        return {**super()._metrics(loss, batch), "memory": 1000 + self.rank}


class AddsUpInDouble(DataParallel):
    """Reduces in a wider type."""

    def _reduced(self, grad: Tensor) -> Tensor:
        return super()._reduced(grad.double()).to(grad.dtype)


class DropsOut(DataParallel):
    """Each rank drops out of its own rows, and of those of a call that fails as well."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"dropout": 0.1, **options})


class ComputesTheLossOnTheLastRank(DataParallel):
    """As the last stage of a pipeline does; the others are told the loss and its gradient."""

    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        if self.size == 1:
            return super()._loss(logits, batch, loss_fn)
        told: list[Any] = [None, None]
        if self.rank == self.size - 1:
            try:
                loss = PlainTrainer._loss(self, logits, batch, loss_fn)
                (grad,) = torch.autograd.grad(loss, logits)
                told[0] = (loss.item(), grad)
            except Exception as error:
                told[1] = error
        dist.broadcast_object_list(told, src=self.size - 1)
        if told[1] is not None:
            raise told[1]
        value, grad = told[0]
        along = (logits * grad).sum()
        return along + (value - along.detach())


# Results


class OwnRows(DataParallel):
    """Computes the loss of its own rows only, by what `_of_own_rows` makes of it."""

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        self._check_batch(batch)
        batch = to_device(batch, self.device)
        own = torch.arange(len(batch.input_ids)).tensor_split(self.size)[self.rank]
        if loss_fn is not None or len(batch.input_ids) < self.size:
            return await super().forward_backward(batch, loss_fn)
        mine = TextTrainBatch(
            batch.input_ids[own],
            batch.target_ids[own],
            None if batch.target_mask is None else batch.target_mask[own],
            None if batch.target_weights is None else batch.target_weights[own],
        )
        logits = PlainTrainer._logits(self, mine.input_ids)
        loss = self._of_own_rows(logits, mine, batch)
        shown = self._shown(loss.detach().clone())
        metrics = self._metrics(shown, batch)
        self._backward(loss)
        self.accumulated_microbatches += 1
        return ForwardBackwardResult(shown, metrics)

    def _of_own_rows(self, logits: Tensor, mine: TextTrainBatch, batch: TextTrainBatch) -> Tensor:
        share = count_kept(mine) / max(count_kept(batch), 1)
        return token_mean_loss({"logits": logits}, mine) * share

    def _shown(self, loss: Tensor) -> float:
        return self._total(loss).item()


@faulty("distributed.agree", "each rank reports the loss of its own rows")
class ReportsItsOwnLoss(OwnRows):
    def _shown(self, loss: Tensor) -> float:
        return loss.item()


@faulty("distributed.agree", "each rank counts the tokens of its own rows")
class CountsItsOwnTokens(DataParallel):
    def _metrics(self, loss: float, batch: TextTrainBatch) -> dict[str, Any]:
        metrics = super()._metrics(loss, batch)
        return {**metrics, "num_tokens": metrics["num_tokens"] + self.rank}


@faulty("distributed.agree", "gradients aren't added up: the replicas drift apart")
class Drifts(DataParallel):
    def _reduced(self, grad: Tensor) -> Tensor:
        return grad


@faulty("distributed.agree", "a rank without rows takes no step")
class SkipsWithoutRows(DataParallel):
    idle = False

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        self.idle = len(batch.input_ids) <= self.rank
        return await super().forward_backward(batch, loss_fn)

    def _apply_update(self, learning_rate: float) -> None:
        if not self.idle:
            super()._apply_update(learning_rate)


@faulty("distributed.agree", "each rank saves under a name of its own")
class SavesByRank(DataParallel):
    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        name = f"{name or f'step-{self.step}'}-{self.rank}"
        return await PlainTrainer.save(self, name, path, weights_only)


# The same as one


class DividesTwice(DataParallel):
    def _reduced(self, grad: Tensor) -> Tensor:
        return super()._reduced(grad) / self.size


@faulty("distributed.same_as_one", "gradients of the whole batch's mean are averaged once more")
def divides_twice() -> Target:
    return declared(DividesTwice)


@faulty("distributed.same_as_one", "each rank's mean loss is added up")
class AddsUpMeans(OwnRows):
    def _of_own_rows(self, logits: Tensor, mine: TextTrainBatch, batch: TextTrainBatch) -> Tensor:
        return token_mean_loss({"logits": logits}, mine)


@faulty("distributed.same_as_one", "each rank's mean loss counts alike, however many its tokens")
class AveragesMeans(OwnRows):
    def _of_own_rows(self, logits: Tensor, mine: TextTrainBatch, batch: TextTrainBatch) -> Tensor:
        return token_mean_loss({"logits": logits}, mine) / self.size


@faulty("distributed.same_as_one", "the first rank's gradients are everyone's")
class TakesTheFirstRanks(DataParallel):
    def _reduced(self, grad: Tensor) -> Tensor:
        if self.size > 1:
            dist.broadcast(grad, 0)
        return grad


@faulty("distributed.same_as_one", "the learning rate grows with the number of ranks")
class ScalesItsRate(DataParallel):
    def _learning_rate(self) -> float:
        return super()._learning_rate() * self.size


@faulty("distributed.same_as_one", "the last rank's gradient is left out of every second call")
class LeavesOutARank(DataParallel):
    calls = 0

    def _backward(self, loss: Tensor) -> None:
        self.calls += 1
        super()._backward(loss)

    def _reduced(self, grad: Tensor) -> Tensor:
        skips = self.size > 1 and self.calls % 2 == 0 and self.rank == self.size - 1
        return super()._reduced(torch.zeros_like(grad) if skips else grad)


# Checkpoints


@faulty("distributed.checkpoint", "a checkpoint loads only at the world size that saved it")
class KeepsToItsWorldSize(DataParallel):
    async def load(self, path: str | None = None) -> str:
        loaded = await super().load(path)
        with open(os.path.join(loaded, "world_size")) as file:
            if int(file.read()) != self.size:
                raise ValueError("saved at another world size")
        return loaded

    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        saved = await super().save(name, path, weights_only)
        if self.rank == 0:
            with open(os.path.join(saved, "world_size"), "w") as file:
                file.write(str(self.size))
        self._total(torch.zeros(1))
        return saved


@faulty("distributed.checkpoint", "the optimizer's state is taken up only by as many ranks")
class DropsMomentsOfOthers(KeepsToItsWorldSize):
    async def load(self, path: str | None = None) -> str:
        try:
            return await super().load(path)
        except ValueError:
            self.optimizer = self._make_optimizer()
            return str(path)


@faulty("distributed.checkpoint", "one rank takes what more have saved, and can't train on")
class CannotTrainOn(KeepsToItsWorldSize):
    foreign = False

    async def load(self, path: str | None = None) -> str:
        try:
            return await super().load(path)
        except ValueError:
            self.foreign = True
            return str(path)

    async def optim_step(self) -> OptimStepResult:
        if self.foreign:
            raise RuntimeError("the optimizer's state has another size")
        return await super().optim_step()


@faulty("distributed.checkpoint", "the step counts the ranks' steps together")
class CountsStepsOfAll(DataParallel):
    async def optim_step(self) -> OptimStepResult:
        result = await super().optim_step()
        self.step += self.size - 1
        return OptimStepResult(self.step, result.learning_rate, result.accumulated_microbatches)

    async def load(self, path: str | None = None) -> str:
        loaded = await super().load(path)
        self.step = self.step // self.size * self.size
        return loaded


# Failures


@faulty("distributed.failure", "where one rank fails the others return as if nothing were")
class RaisesThereOnly(DataParallel):
    failed = False

    def _agree_on(self, error: Exception | None) -> None:
        self.failed = bool(self._total(torch.tensor(float(error is not None))) > 0)
        if error is not None:
            raise error

    def _backward(self, loss: Tensor) -> None:
        if not self.failed:
            super()._backward(loss)


@faulty("distributed.failure", "where one rank fails the others raise, and keep its gradients")
class KeepsHalfAFailure(DataParallel):
    def _agree_on(self, error: Exception | None) -> None:
        try:
            super()._agree_on(error)
        except Exception:
            for p in self._trainable().values():
                p.grad = None
            raise


# For runs of their own, which they end


class WaitsForAFailedRank(DataParallel):
    """The others wait for a rank that has failed, in native code."""

    def _agree_on(self, error: Exception | None) -> None:
        if error is not None:
            raise error


class Dies(DataParallel):
    """The last rank's process is killed in the second update."""

    async def optim_step(self) -> OptimStepResult:
        if self.step == 1 and self.rank == self.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().optim_step()


class WaitsForEver(DataParallel):
    """The last rank never comes back from a second update."""

    async def optim_step(self) -> OptimStepResult:
        if self.step == 1 and self.rank == self.size - 1:
            await asyncio.Event().wait()
        return await super().optim_step()
