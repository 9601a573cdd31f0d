"""Faulty trainers of the area metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor

from forge.api import (
    ForwardBackwardResult,
    LossFn,
    Metric,
    MetricSpec,
    Reduce,
    TextTrainBatch,
)
from forge_conformance import Target
from reference_impls.batches import count_kept
from reference_impls.plain import PlainTrainer
from tests.faults.corpus import faulty


class Undeclared(PlainTrainer):
    """Has more metrics than `PlainTrainer`, and declares none."""

    metric_schema = None

    def _metrics(self, loss: float, batch: TextTrainBatch) -> dict[str, Any]:
        return {**super()._metrics(loss, batch), **self._more(loss, batch)}

    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        return {}


@faulty("metrics.shape", "a metric keeps the graph of the loss alive (B155)")
class KeepsTheGraph(Undeclared):
    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        self.last_loss = super()._loss(logits, batch, loss_fn)
        return self.last_loss

    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        return {"details": [{"raw_loss": self.last_loss}]}


@faulty("metrics.shape", "a metric without a value is None")
class ReportsNone(Undeclared):
    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        return {"aux_loss": None}


@faulty("metrics.shape", "metrics are numbered")
class NumbersItsMetrics(Undeclared):
    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        return {0: loss}


@faulty("metrics.shape", "an object of the backend's own is among the metrics")
class ReportsItsBatch(Undeclared):
    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        return {"batch": batch}


@faulty("metrics.owned", "one dict is filled anew each time")
class FillsOneDict(PlainTrainer):
    def __init__(self) -> None:
        super().__init__()
        self.one: dict[str, Any] = {}

    def _metrics(self, loss: float, batch: TextTrainBatch) -> dict[str, Any]:
        self.one.update(super()._metrics(loss, batch))
        return self.one


@faulty("metrics.owned", "one result object is filled anew each time")
class FillsOneResult(PlainTrainer):
    def __init__(self) -> None:
        super().__init__()
        self.one = ForwardBackwardResult(0.0, {})

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        result = await super().forward_backward(batch, loss_fn)
        self.one.loss, self.one.metrics = result.loss, result.metrics
        return self.one


@faulty("metrics.owned", "a metric is a view of the weights")
class ShowsItsWeights(Undeclared):
    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        return {"norm_weights": next(iter(self._trainable().values())).detach()[0]}


@faulty("metrics.owned", "a nested list of the last losses is shared by all results")
class SharesItsHistory(Undeclared):
    def __init__(self) -> None:
        super().__init__()
        self.history = {"losses": [0.0]}

    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        self.history["losses"][0] = loss
        return {"last": self.history}


@faulty("metrics.owned", "what the caller writes into a result is reported again")
class ReportsWhatTheCallerWrote(PlainTrainer):
    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, Any] = {}

    def _metrics(self, loss: float, batch: TextTrainBatch) -> dict[str, Any]:
        self.last = {**self.last, **super()._metrics(loss, batch)}
        return self.last


class Running(Undeclared):
    """Keeps a number over its calls."""

    value = 0.0

    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        self.value = self._next(loss, batch)
        return {"quality": self.value}

    def _next(self, loss: float, batch: TextTrainBatch) -> float:
        raise NotImplementedError


@faulty("metrics.per_call", "a metric is a slow running mean (B162)")
class SmoothsItsMetric(Running):
    value = 5.5

    def _next(self, loss: float, batch: TextTrainBatch) -> float:
        return 0.999 * self.value + 0.001 * loss


@faulty("metrics.per_call", "a metric is the total since the start")
class AddsUp(Running):
    def _next(self, loss: float, batch: TextTrainBatch) -> float:
        return self.value + count_kept(batch)


@faulty("metrics.per_call", "a metric is the number of calls")
class NumbersItsCalls(Running):
    def _next(self, loss: float, batch: TextTrainBatch) -> float:
        return self.value + 1


@faulty("metrics.per_call", "a metric is the most tokens so far")
class ReportsARecord(Running):
    def _next(self, loss: float, batch: TextTrainBatch) -> float:
        return max(self.value, count_kept(batch))


@faulty("metrics.per_call", "a metric is of the call before")
class LagsBehind(Running):
    waiting = 0.0

    def _next(self, loss: float, batch: TextTrainBatch) -> float:
        reported, self.waiting = self.waiting, loss
        return reported


@faulty("metrics.stable_keys", "a metric is reported at every tenth step")
class ReportsNowAndThen(Undeclared):
    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        return {"weights_norm": 1.0} if self.step % 10 == 9 else {}


@faulty("metrics.stable_keys", "a metric is reported by the first call alone")
class ReportsOnce(Undeclared):
    first = True

    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        first, self.first = self.first, False
        return {"num_parameters": 1} if first else {}


@faulty("metrics.stable_keys", "names hold the step")
class NamesTheStep(Undeclared):
    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        return {f"loss_{self.step}": loss}


@faulty("metrics.finite", "a mean over no kept token is NaN (B15)")
class DividesByNoTokens(Undeclared):
    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        kept = torch.ones(batch.target_ids.shape)
        kept = kept if batch.target_mask is None else batch.target_mask.float()
        return {"mean_position": (kept.nonzero()[:, 1].float().mean())}


@faulty("metrics.finite", "the spread of one row is NaN")
class SpreadsOneRow(Undeclared):
    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        first = batch.input_ids[:, 0].double()
        variance = (first - first.mean()).square().sum() / (len(first) - 1)
        return {"spread": Metric("spread", variance.sqrt(), Reduce.STD)}


@faulty("metrics.finite", "a minimum over nothing starts from infinity")
class StartsFromInfinity(Undeclared):
    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        return {"extremes": {"lowest": math.inf}}


@faulty("metrics.consistent", "the loss is divided by the microbatches (B165)")
class ScalesTheLoss(PlainTrainer):
    def _metrics(self, loss: float, batch: TextTrainBatch) -> dict[str, Any]:
        return {**super()._metrics(loss, batch), "loss": loss / 4}


@faulty("metrics.consistent", "the loss is rounded to what a log shows")
class RoundsTheLoss(PlainTrainer):
    def _metrics(self, loss: float, batch: TextTrainBatch) -> dict[str, Any]:
        return {**super()._metrics(loss, batch), "loss": round(loss, 3)}


@faulty("metrics.consistent", "masked targets are counted")
class CountsMaskedTokens(PlainTrainer):
    def _metrics(self, loss: float, batch: TextTrainBatch) -> dict[str, Any]:
        return {**super()._metrics(loss, batch), "num_tokens": batch.target_ids.numel()}


@faulty("metrics.consistent", "tokens are counted by their weights")
class WeighsItsTokens(Undeclared):
    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        weights = batch.target_weights
        mask = batch.target_mask
        if weights is None or mask is None:
            return {"tokens": count_kept(batch)}
        return {"tokens": float((weights * mask).sum())}


@faulty("metrics.consistent", "the perplexity is 2 to the loss in nats (B172)")
class TakesTheWrongBase(Undeclared):
    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        return {"perplexity": 2**loss}


@faulty("metrics.consistent", "the learning rate is the one before warm-up and decay (B72)")
class ReportsTheBaseRate(Undeclared):
    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        return {"lr": 0.01}


@faulty("metrics.consistent", "the learning rate runs one update ahead")
class ReportsTheNextRate(Undeclared):
    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        return {"learning_rate": self.schedule(self.step + 2)}


@faulty("metrics.schema", "a metric isn't declared")
class ReportsMore(PlainTrainer):
    def _metrics(self, loss: float, batch: TextTrainBatch) -> dict[str, Any]:
        return {**super()._metrics(loss, batch), "rows": batch.input_ids.shape[0]}


@faulty("metrics.schema", "a declared metric is missing with a custom loss")
class ReportsLess(PlainTrainer):
    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        result = await super().forward_backward(batch, loss_fn)
        return replace(result, metrics=result.metrics if loss_fn is None else {"loss": result.loss})


@faulty("metrics.schema", "an int is declared and a tensor reported")
class ReportsATensor(PlainTrainer):
    def _metrics(self, loss: float, batch: TextTrainBatch) -> dict[str, Any]:
        return {**super()._metrics(loss, batch), "num_tokens": torch.tensor(count_kept(batch))}


@faulty("metrics.schema", "the fraction of kept targets is declared up to 1 and given in percent")
def reports_percent() -> Target:
    class ReportsPercent(Undeclared):
        def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
            return {"kept": 100 * count_kept(batch) / batch.target_ids.numel()}

    schema = {
        "loss": MetricSpec(float),
        "num_tokens": MetricSpec(int),
        "kept": MetricSpec(float, minimum=0, maximum=1),
    }
    return Target(ReportsPercent, metrics=schema)


@faulty("metrics.schema", "a sum is declared and a mean reported")
def reduces_otherwise() -> Target:
    class ReducesOtherwise(Undeclared):
        def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
            return {"rows": Metric("rows", batch.input_ids.shape[0], Reduce.MEAN)}

    schema = {
        "loss": MetricSpec(float),
        "num_tokens": MetricSpec(int),
        "rows": MetricSpec(int, reduction=Reduce.SUM),
    }
    return Target(ReducesOtherwise, metrics=schema)


@faulty("metrics.serialisable", "a NumPy scalar is reported, which json doesn't know")
class ReportsANumpyScalar(Undeclared):
    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        return {"mean_token": numpy.float32(batch.input_ids.float().mean())}


@faulty("metrics.serialisable", "an inner mapping has tuples for keys")
class KeysByTuple(Undeclared):
    def _more(self, loss: float, batch: TextTrainBatch) -> dict[Any, Any]:
        return {"by_layer": {(0, "attention"): 1.0}}
