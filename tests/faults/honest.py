"""Trainers that keep the contract in unusual ways, none of which may be failed."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forge.api import (
    ForwardBackwardResult,
    LossFn,
    Metric,
    OptimStepResult,
    Reduce,
    TextTrainBatch,
    TrainerStatus,
)
from forge_conformance import Target
from reference_impls.llama import Block, Llama, LlamaConfig
from reference_impls.optimization import sgd, warm_up_then_decay
from reference_impls.plain import PlainTrainer
from reference_impls.random_stream import RandomStream
from tests.faults import declared
from tests.faults.corpus import honest
from tests.faults.forward_backward import kept, weighted_nll
from tests.faults.optim_step import MainGradients, gradients

# Losses


@honest("masked targets are multiplied by 0, which a weight of NaN would get through (B17)")
class MultipliesByTheMask(PlainTrainer):
    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        nll = weighted_nll(logits, batch) * kept(batch)
        return nll.sum() / kept(batch).sum().clamp(min=1)


# Steps, optimizers and schedules


@honest("all that can be declared is")
def declares_all() -> Target:
    return declared.base()


@honest("the first step is 1, and the model has been trained before")
class CountsFromElsewhere(PlainTrainer):
    def __init__(self) -> None:
        super().__init__()
        self.step = 1000

    async def optim_step(self) -> OptimStepResult:
        result = await super().optim_step()
        return replace(result, step=result.step + 1)

    async def get_status(self) -> TrainerStatus:
        return TrainerStatus(self.step + 1, self.accumulated_microbatches)

    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        kind = "weights" if weights_only else "step"
        return await super().save(name or f"{kind}-{self.step + 1}", path, weights_only)


@honest("plain SGD without clipping")
def uses_plain_sgd() -> PlainTrainer:
    return PlainTrainer(optimizer=sgd, schedule=declared.constant_rate, clip_norm=math.inf)


@honest("warm-up begins with two rates of 0")
def warms_up_from_zero() -> PlainTrainer:
    return PlainTrainer(schedule=lambda position: warm_up_then_decay(max(0, position - 2)))


@honest("the schedule ends after four updates: the rate is 0 from there on")
def ends_early() -> PlainTrainer:
    return PlainTrainer(schedule=lambda position: 0.01 if position <= 4 else 0.0)


@honest("an update of nothing does nothing")
class StepsOnNothing(PlainTrainer):
    async def optim_step(self) -> OptimStepResult:
        if self.accumulated_microbatches == 0:
            return OptimStepResult(self.step, self._learning_rate(), 0)
        return await super().optim_step()


@honest("a gradient that isn't finite is skipped, as a step")
class SkipsNaN(PlainTrainer):
    async def optim_step(self) -> OptimStepResult:
        if all(bool(grad.isfinite().all()) for grad in gradients(self)):
            return await super().optim_step()
        result = OptimStepResult(
            self.step + 1, self._learning_rate(), self.accumulated_microbatches
        )
        self.step += 1
        self._clear()
        return result


# Losses


@honest("the default loss is a sum")
class SumsItsLoss(PlainTrainer):
    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        return super()._default_loss(logits, batch) * kept(batch).sum().clamp(min=1)


@honest("the default loss is divided by the sum of the weights")
class DividesByWeights(PlainTrainer):
    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        loss = super()._default_loss(logits, batch)
        if batch.target_weights is None:
            return loss
        total = batch.target_weights[kept(batch)].sum()
        return loss * kept(batch).sum() / total if total else loss


@honest("refused is what may be: masks that keep nothing, and junk under a mask")
class RefusesWhatItMay(PlainTrainer):
    def _check_batch(self, batch: TextTrainBatch) -> None:
        super()._check_batch(batch)
        super()._check_batch(replace(batch, target_mask=None))
        if not kept(batch).any():
            raise ValueError("target_mask keeps no target; leave the batch out")


@honest("a loss or weight of NaN is refused at once")
class RefusesNaN(PlainTrainer):
    def _check_batch(self, batch: TextTrainBatch) -> None:
        super()._check_batch(batch)
        if batch.target_weights is not None and not batch.target_weights.isfinite().all():
            raise ValueError("target_weights holds a value that isn't finite")

    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        loss = super()._loss(logits, batch, loss_fn)
        if not loss.isfinite():
            raise ArithmeticError(f"the loss is {loss.item()}")
        return loss


@honest("more is taken than must be: int32 ids, and sequences over max_seq_len in full")
class TakesMoreThanItMust(PlainTrainer):
    def __init__(self) -> None:
        super().__init__(max_seq_len=256)

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        if batch.input_ids.dtype == batch.target_ids.dtype == torch.int32:
            batch = replace(
                batch, input_ids=batch.input_ids.long(), target_ids=batch.target_ids.long()
            )
        return await super().forward_backward(batch, loss_fn)

    def _model_facts(self) -> dict[str, Any]:
        return {**super()._model_facts(), "max_seq_len": 64}


@honest("the model is compiled for two shapes")
def takes_two_shapes() -> Target:
    shapes = [(2, 8), (4, 16)]

    class TakesTwoShapes(PlainTrainer):
        def _check_batch(self, batch: TextTrainBatch) -> None:
            super()._check_batch(batch)
            self._check_inputs({"input_ids": batch.input_ids})

        def _check_inputs(self, inputs: dict[str, Tensor]) -> None:
            super()._check_inputs(inputs)
            shape = tuple(inputs["input_ids"].shape)
            if shape not in shapes:
                raise ValueError(f"compiled for {shapes}, not for {shape}")

    return Target(TakesTwoShapes, shapes=shapes)


@honest("the model takes one row of one length")
def takes_one_row() -> Target:
    class TakesOneRow(PlainTrainer):
        def _check_inputs(self, inputs: dict[str, Tensor]) -> None:
            super()._check_inputs(inputs)
            if inputs["input_ids"].shape != (1, 16):
                raise ValueError("compiled for [1, 16]")

        def _check_batch(self, batch: TextTrainBatch) -> None:
            super()._check_batch(batch)
            self._check_inputs({"input_ids": batch.input_ids})

    return Target(TakesOneRow, shapes=[(1, 16)])


# Models and precision


@honest("dropout, from a stream of the trainer's own, and all is declared")
def drops() -> Target:
    return declared.declared(PlainTrainer, dropout=0.2)


class CallersStream(RandomStream):
    """Torch's own generators, whoever else draws from them."""

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def state_dict(self) -> dict[str, Tensor | None]:
        return {"cpu": torch.get_rng_state(), "cuda": None}

    def load_state_dict(self, state: dict[str, Tensor | None]) -> None:
        assert state["cpu"] is not None
        torch.set_rng_state(state["cpu"])


@honest("dropout, from the global stream")
class DropsByTheGlobalStream(PlainTrainer):
    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.random = CallersStream(0, self.device)


class Adapter(nn.Module):
    """A frozen layer and a low-rank one beside it, which has dropout and adds nothing at first."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        dropped = nn.functional.dropout(hidden, 0.2, self.training)
        adapted: Tensor = self.layer(hidden) + self.up(self.down(dropped))
        return adapted


@honest("low-rank adapters of a frozen model, whose dropout shows once they have been updated")
class AdaptsWithDropout(PlainTrainer):
    def _make_model(self) -> Llama:
        model = super()._make_model().requires_grad_(False)
        for block in model.model.layers:
            block.self_attn.o_proj = Adapter(block.self_attn.o_proj)
            block.mlp.down_proj = Adapter(block.mlp.down_proj)
        return model


@honest("every trainer starts from other weights")
def starts_anywhere() -> Target:
    seeds = itertools.count()
    return Target(lambda: PlainTrainer(seed=next(seeds)))


@honest("matrices are multiplied in bfloat16")
def computes_in_bfloat16() -> PlainTrainer:
    return PlainTrainer(compute_dtype=torch.bfloat16)


@honest("weights and gradients are bfloat16")
class HoldsBfloat16(PlainTrainer):
    def _make_model(self) -> Llama:
        return super()._make_model().bfloat16()


@honest("everything is float64")
class ComputesInDouble(PlainTrainer):
    def _make_model(self) -> Llama:
        return super()._make_model().double()

    def _logits(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids)
        return logits


@honest("the embedding and the first layer are frozen")
class FreezesLayers(PlainTrainer):
    def _make_model(self) -> Llama:
        model = super()._make_model()
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        return model


@honest("the head starts at zero: at first all logits are equal")
class StartsWithEqualLogits(PlainTrainer):
    def _make_model(self) -> Llama:
        model = super()._make_model()
        torch.nn.init.zeros_(model.lm_head.weight)
        return model


@honest("the head is the embedding")
def ties_weights() -> Target:
    return declared.declared(PlainTrainer, tie_weights=True)


@honest("the model is one layer deep and two heads wide")
def is_tiny() -> PlainTrainer:
    return PlainTrainer(hidden_size=8, num_layers=1, num_attention_heads=2, max_seq_len=4)


class Recomputes(Llama):
    """Computes its blocks again in backward."""

    def __init__(
        self, config: LlamaConfig, use_reentrant: bool, preserve_rng_state: bool = True
    ) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            assert isinstance(layer, Block)
            layer.forward = partial(  # type: ignore[method-assign]
                checkpoint,
                layer.forward,
                use_reentrant=use_reentrant,
                preserve_rng_state=preserve_rng_state,
            )


@honest("activations are recomputed, the graph whole (non-reentrant)")
class RecomputesActivations(PlainTrainer):
    def _make_model(self) -> Llama:
        return Recomputes(self.model_config, use_reentrant=False)


@honest("activations are recomputed, the graph in pieces (reentrant), and all is declared")
def recomputes_in_pieces() -> Target:
    class RecomputesInPieces(PlainTrainer):
        def _make_model(self) -> Llama:
            return Recomputes(self.model_config, use_reentrant=True)

    return declared.declared_sgd(RecomputesInPieces)


@honest("the head's backward runs apart from the decoder's: the graph ends at the hidden states")
class SplitsBackward(PlainTrainer):
    hidden = torch.empty(0)
    head_input = torch.empty(0)

    def _logits(self, input_ids: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super()._logits(input_ids)
        self.hidden = self.model.model(input_ids)
        self.head_input = self.hidden.detach().requires_grad_()
        logits: Tensor = self.model.lm_head(self.head_input)
        return logits

    def _backward(self, loss: Tensor) -> None:
        super()._backward(loss)
        assert self.head_input.grad is not None
        super()._backward((self.hidden * self.head_input.grad).sum())


@honest("the embedding's gradient is sparse")
class HasSparseGradients(PlainTrainer):
    def __init__(self) -> None:
        super().__init__(optimizer=sgd, schedule=declared.constant_rate, clip_norm=math.inf)

    def _make_model(self) -> Llama:
        model = super()._make_model()
        model.model.embed_tokens.sparse = True
        return model

    def _clip(self) -> None:
        return


# Where gradients are


@honest("gradients accumulate beside .grad, which isn't declared")
class KeepsMainGradients(MainGradients):
    pass


@honest("gradients accumulate beside .grad, as declared")
def declares_its_gradients() -> Target:
    return Target(
        MainGradients,
        parameters=lambda trainer: trainer._trainable(),
        gradients=lambda trainer: trainer.main,
    )


class ScalesItsLoss(PlainTrainer):
    """Keeps its gradients 2¹⁶ times as large until the update."""

    scale = 2.0**16

    def _backward(self, loss: Tensor) -> None:
        super()._backward(loss * self.scale)

    def _clip(self) -> None:
        for grad in gradients(self):
            grad /= self.scale
        super()._clip()


@honest("the loss is scaled, as declared")
def declares_its_loss_scale() -> Target:
    return replace(
        declared.declared(ScalesItsLoss), loss_scale=lambda trainer: float(trainer.scale)
    )


@honest("the loss is scaled, which isn't declared")
class ScalesWithoutAWord(ScalesItsLoss):
    pass


# Results and calls


FewFields = namedtuple("FewFields", ["loss", "metrics"])


@honest("results are a namedtuple, a namespace and an object with one field more")
class ReturnsItsOwnResults(PlainTrainer):
    async def forward_backward(self, batch: TextTrainBatch, loss_fn: LossFn | None = None) -> Any:
        result = await super().forward_backward(batch, loss_fn)
        return FewFields(result.loss, result.metrics)

    async def optim_step(self) -> Any:
        return SimpleNamespace(**vars(await super().optim_step()), skipped=False)

    async def get_status(self) -> Any:
        return SimpleNamespace(**vars(await super().get_status()))


@honest("metrics are many and nested")
class ReportsMuch(PlainTrainer):
    metric_schema = None  # type: ignore[assignment]

    def _metrics(self, loss: float, batch: TextTrainBatch) -> dict[str, Any]:
        rows = [int(count) for count in kept(batch).sum(1)]
        return {
            **super()._metrics(loss, batch),
            "phase": "train",
            "masked": batch.target_mask is not None,
            "kept_per_row": rows,
            "lengths": {"most": max(rows), "fewest": min(rows)},
            "input_mean": batch.input_ids.float().mean(),
            "rows": Metric("rows", float(len(rows)), Reduce.SUM),
        }


@honest("methods have further parameters, all optional")
class TakesMore(PlainTrainer):
    async def forward_backward(
        self,
        batch: TextTrainBatch,
        loss_fn: LossFn | None = None,
        return_logits: bool = False,
        *,
        tag: str = "",
    ) -> ForwardBackwardResult:
        return await super().forward_backward(batch, loss_fn)

    async def save(
        self,
        name: str | None = None,
        path: str | None = None,
        weights_only: bool = False,
        *,
        blocking: bool = True,
    ) -> str:
        return await super().save(name, path, weights_only)


def _passed_on(method: str) -> Any:
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self.wrapped, method)(*args, **kwargs)

    return call


@honest("a wrapper hands on whatever arguments it is given")
class HandsOn:
    def __init__(self) -> None:
        self.wrapped = PlainTrainer()

    forward_backward = _passed_on("forward_backward")
    optim_step = _passed_on("optim_step")
    clear_gradients = _passed_on("clear_gradients")
    forward = _passed_on("forward")
    save = _passed_on("save")
    load = _passed_on("load")
    get_config = _passed_on("get_config")
    get_status = _passed_on("get_status")
    get_tokenizer = _passed_on("get_tokenizer")


@honest("training runs in a thread of its own, and calls wait for each other")
class ComputesInAThread(PlainTrainer):
    def __init__(self) -> None:
        super().__init__()
        self.lock = asyncio.Lock()

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        async with self.lock:
            return await asyncio.to_thread(
                lambda: asyncio.run(super(ComputesInAThread, self).forward_backward(batch, loss_fn))
            )


async def is_made_slowly() -> PlainTrainer:
    await asyncio.sleep(0)
    return PlainTrainer()


honest("the factory is async")(is_made_slowly)
