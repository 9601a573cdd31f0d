"""Faulty trainers of the area structure."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge.api import (
    ForwardBackwardResult,
    LossFn,
    OptimStepResult,
    TextTrainBatch,
    TrainerConfig,
    TrainerStatus,
)
from reference_impls.plain import PlainTrainer
from tests.faults.corpus import faulty


@faulty("structure.methods", "the step is called optimizer_step")
class NamesItsStepOtherwise(PlainTrainer):
    optimizer_step = PlainTrainer.optim_step

    @property
    def optim_step(self) -> Any:
        raise AttributeError("optim_step")


@faulty("structure.methods", "clear_gradients is left empty for a subclass to fill in")
class LeavesAMethodOut(PlainTrainer):
    clear_gradients = None


@faulty("structure.methods", "get_status is a property")
class StatusIsAProperty(PlainTrainer):
    @property
    def get_status(self) -> TrainerStatus:
        return TrainerStatus(self.step, self.accumulated_microbatches)


@faulty("structure.awaitable", "get_status is a plain function")
class AnswersAtOnce(PlainTrainer):
    def get_status(self) -> TrainerStatus:
        return TrainerStatus(self.step, self.accumulated_microbatches)


class Endpoint:
    """What a remote handle has in place of a method."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.call = self.route = method

    def __call__(self, *args: Any) -> None:
        raise TypeError("'Endpoint' object is not to be called; use .call() or .route()")


@faulty("structure.awaitable", "forward is a remote endpoint, to be called by .call() or .route()")
class HandsOutAnEndpoint(PlainTrainer):
    def __init__(self) -> None:
        super().__init__()
        self.forward = Endpoint(super().forward)


@faulty("structure.awaitable", "optim_step gives a task that has to be awaited in turn")
class AwaitsHalf(PlainTrainer):
    async def optim_step(self) -> asyncio.Task[OptimStepResult]:
        return asyncio.ensure_future(super().optim_step())


@faulty("structure.awaitable", "save returns the future of a thread pool, with .result()")
class ReturnsAThreadsFuture(PlainTrainer):
    def save(self, name: Any = None, path: Any = None, weights_only: bool = False) -> Future[str]:
        future: Future[str] = Future()
        with torch.no_grad():
            coroutine = super().save(name, path, weights_only)
            try:
                coroutine.send(None)
            except StopIteration as stop:
                future.set_result(stop.value)
        return future


@faulty("structure.signatures", "the batch is called microbatch")
class NamesTheBatchOtherwise(PlainTrainer):
    async def forward_backward(self, microbatch: Any, loss_fn: Any = None) -> Any:
        return await super().forward_backward(microbatch, loss_fn)


@faulty("structure.signatures", "save writes weights alone unless told otherwise")
class DefaultsToWeightsOnly(PlainTrainer):
    async def save(self, name: Any = None, path: Any = None, weights_only: bool = True) -> str:
        return await super().save(name, path, weights_only)


@faulty("structure.signatures", "forward can't be called without an attention mask")
class WantsAnAttentionMask(PlainTrainer):
    async def forward(self, inputs: Any, attention_mask: Any) -> Tensor:
        return await super().forward(inputs)


@faulty("structure.signatures", "save takes the folder first, then the name")
class SwapsNameAndPath(PlainTrainer):
    async def save(self, path: Any = None, name: Any = None, weights_only: bool = False) -> str:
        return await super().save(name, path, weights_only)


@faulty("structure.signatures", "loss_fn must be given by keyword")
class TakesTheLossByKeywordOnly(PlainTrainer):
    async def forward_backward(self, batch: Any, *, loss_fn: Any = None) -> Any:
        return await super().forward_backward(batch, loss_fn)


@faulty("structure.signatures", "a wrapper looks for loss_fn among the positions only")
class DropsKeywords(PlainTrainer):
    async def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        batch = args[0] if args else kwargs["batch"]
        return await super().forward_backward(batch, *args[1:2])


@faulty("structure.signatures", "a decorator hands on positions only, under the method's own name")
class DecoratesAway(PlainTrainer):
    @functools.wraps(PlainTrainer.load)
    async def load(self, *args: Any) -> str:
        return await super().load(*args)


@faulty("structure.result_types", "the loss is a tensor")
class LossIsATensor(PlainTrainer):
    async def forward_backward(self, batch: Any, loss_fn: Any = None) -> Any:
        result = await super().forward_backward(batch, loss_fn)
        return replace(result, loss=torch.tensor(result.loss))


@faulty("structure.result_types", "the step comes back from a checkpoint as a float")
class StepIsAFloatAfterLoading(PlainTrainer):
    async def load(self, path: Any = None) -> str:
        location = await super().load(path)
        self.step = float(self.step)
        return location


@faulty("structure.result_types", "the number of microbatches is whether there are any")
class CountIsABool(PlainTrainer):
    async def get_status(self) -> TrainerStatus:
        return TrainerStatus(self.step, self.accumulated_microbatches > 0)


@faulty("structure.result_types", "the learning rate is the tensor of a capturable optimizer")
class RateIsATensor(PlainTrainer):
    async def optim_step(self) -> OptimStepResult:
        result = await super().optim_step()
        return replace(result, learning_rate=torch.tensor(result.learning_rate))


@faulty("structure.result_types", "save returns a Path")
class ReturnsAPath(PlainTrainer):
    async def save(self, name: Any = None, path: Any = None, weights_only: bool = False) -> Any:
        return Path(await super().save(name, path, weights_only))


@faulty("structure.result_types", "metrics are a list of pairs")
class MetricsAreAList(PlainTrainer):
    def _metrics(self, loss: float, batch: TextTrainBatch) -> Any:
        return list(super()._metrics(loss, batch).items())


@faulty("structure.result_types", "the loss is None with a custom loss, for the caller has it")
class LeavesTheLossOut(PlainTrainer):
    async def forward_backward(self, batch: Any, loss_fn: Any = None) -> Any:
        result = await super().forward_backward(batch, loss_fn)
        return replace(result, loss=None) if loss_fn else result


@dataclass
class Update:
    step: int
    learning_rate: float
    accumulated_microbatches: int


@faulty("structure.annotations", "the result is of a class of its own, which is nominal when typed")
class ReturnsAClassOfItsOwn(PlainTrainer):
    async def optim_step(self) -> Update:
        result = await super().optim_step()
        return Update(result.step, result.learning_rate, result.accumulated_microbatches)


@faulty("structure.annotations", "loss_fn isn't annotated to be None")
class ForgetsNone(PlainTrainer):
    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn = None
    ) -> ForwardBackwardResult:
        return await super().forward_backward(batch, loss_fn)


@faulty("structure.annotations", "nothing is annotated")
class AnnotatesNothing(PlainTrainer):
    async def get_config(self):
        return await super().get_config()


@faulty("structure.annotations", "a plain function is annotated to return an Awaitable")
class ReturnsAnAwaitable(PlainTrainer):
    def get_config(self) -> asyncio.Future[TrainerConfig]:
        return asyncio.ensure_future(super().get_config())
