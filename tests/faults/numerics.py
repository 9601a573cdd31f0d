"""Faulty trainers of the area numerics: what runs, and learns, and is wrong."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from forge.api import TextTrainBatch
from forge_conformance import Target
from reference_impls.plain import PlainTrainer
from tests.faults.corpus import faulty
from tests.faults.declared import declared


class ChangesGradients(PlainTrainer):
    """Does something to each call's gradients before they are added."""

    def _backward(self, loss: Tensor) -> None:
        pending = {name: p.grad for name, p in self._trainable().items()}
        self.model.zero_grad()
        super()._backward(loss)
        for name, p in self._trainable().items():
            if p.grad is not None:
                p.grad = self._changed(name, p.grad)
            if pending[name] is not None:
                p.grad = pending[name] if p.grad is None else pending[name] + p.grad

    def _changed(self, name: str, gradient: Tensor) -> Tensor | None:
        raise NotImplementedError


@faulty("numerics.gradient", "one layer's gradient is a hundredth too large")
class MistakesOneLayerByAHundredth(ChangesGradients):
    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        return 1.01 * gradient if name.endswith("layers.1.mlp.up_proj.weight") else gradient


@faulty("numerics.gradient", "the norms' gradients are halved")
class HalvesTheNormsGradients(ChangesGradients):
    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        return gradient / 2 if gradient.dim() == 1 else gradient


@faulty("numerics.gradient", "a projection's gradient has the wrong sign")
class TurnsAProjection(ChangesGradients):
    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        return -gradient if name.endswith("layers.0.self_attn.v_proj.weight") else gradient


@faulty("numerics.gradient", "the head has no gradient: its group was never built (B75)")
class ForgetsTheHead(ChangesGradients):
    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient) if name == "lm_head.weight" else gradient


@faulty("numerics.gradient", "half of the rows' gradients are lost with a shard")
class LosesAShard(ChangesGradients):
    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        if name.endswith("layers.0.mlp.down_proj.weight"):
            gradient = gradient.clone()
            gradient[::2] = 0
        return gradient


@faulty("numerics.gradient", "a hundredth of the gradient before stays (B40)")
class KeepsAStalePart(ChangesGradients):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.before: dict[str, Tensor] = {}

    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        stale = self.before.get(name, torch.zeros_like(gradient))
        self.before[name] = gradient.clone()
        return gradient + 0.01 * stale


@faulty("numerics.gradient", "all gradients are halved, as by a mean over two ranks (B204)")
class HalvesAll(ChangesGradients):
    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        return gradient / 2


@faulty("numerics.gradient", "each call's gradient is clipped by value")
class ClipsByValue(ChangesGradients):
    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        largest = float(gradient.abs().max())
        return gradient.clamp(-largest / 2, largest / 2)


@faulty("numerics.microbatches", "the gradient is a mean over the rows of a call (B10)")
class AveragesOverRows(PlainTrainer):
    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: Any) -> Tensor:
        loss = super()._loss(logits, batch, loss_fn)
        return loss / len(logits) if loss_fn is not None else loss


@faulty("numerics.microbatches", "a call is weighted by its share of kept targets (B207)")
class WeightsByKeptTargets(PlainTrainer):
    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: Any) -> Tensor:
        loss = super()._loss(logits, batch, loss_fn)
        mask = batch.target_mask
        share = 1.0 if mask is None else float(mask.float().mean())
        return loss * (0.5 + share / 2) if loss_fn is not None else loss


class UsesAnotherRate(PlainTrainer):
    def _apply_update(self, learning_rate: float) -> None:
        super()._apply_update(learning_rate * (0.99 if self.step == 3 else 1.0))


@faulty("numerics.train_step", "the rate of one update is another than reported (B52)")
def uses_another_rate() -> Target:
    return declared(UsesAnotherRate)


class ScalesByMicrobatches(PlainTrainer):
    def _clip(self) -> None:
        for p in self._trainable().values():
            if p.grad is not None and self.accumulated_microbatches > 2:
                p.grad /= self.accumulated_microbatches
        super()._clip()


@faulty("numerics.train_step", "from three microbatches on the update averages them (B02)")
def scales_by_microbatches() -> Target:
    return declared(ScalesByMicrobatches)


class RestartsMoments(PlainTrainer):
    def _apply_update(self, learning_rate: float) -> None:
        if self.step == 2:
            self.optimizer.state.clear()
        super()._apply_update(learning_rate)


@faulty("numerics.train_step", "the optimizer forgets its moments after two updates (B84)")
def restarts_moments() -> Target:
    return declared(RestartsMoments)


_seeds = itertools.count()


@faulty("numerics.deterministic", "the weights are not seeded, though determinism is declared")
def is_not_seeded() -> Target:
    return declared(lambda **options: PlainTrainer(seed=next(_seeds), **options))


class AddsInAnyOrder(PlainTrainer):
    made = itertools.count()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.order = next(AddsInAnyOrder.made) % 2

    def _backward(self, loss: Tensor) -> None:
        super()._backward(loss)
        for p in self._trainable().values():
            if self.order and p.grad is not None:
                p.grad += p.grad * torch.finfo(p.dtype).eps


@faulty("numerics.deterministic", "gradients differ in the last place, as with atomic adds")
def adds_in_any_order() -> Target:
    return declared(AddsInAnyOrder)


@faulty("numerics.parity", "the learning rate is another one's after two updates")
class ForgetsTheWarmUp(PlainTrainer):
    def _learning_rate(self) -> float:
        return super()._learning_rate() if self.step < 2 else 0.01


@faulty("numerics.parity", "clipping is missing, which no other clause sees undeclared")
class NeverClips(PlainTrainer):
    def _clip(self) -> None:
        pass


@faulty("numerics.parity", "logits are a thousandth larger in one trainer's head")
class ScalesItsHead(PlainTrainer):
    def _logits(self, input_ids: Tensor) -> Tensor:
        return super()._logits(input_ids) * 1.001
