"""Trainers whose loss and parameters are out of reach, as those of another process are."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from forge.api import LossFn, TextTrainBatch
from forge_conformance import Target
from reference_impls.optimization import sgd
from reference_impls.plain import PlainTrainer
from tests.faults.corpus import faulty, honest
from tests.faults.declared import constant_rate


class RunsElsewhere(PlainTrainer):
    """Calls a copy of the loss function: what it notes down stays where it runs."""

    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        return super()._loss(logits, batch, None if loss_fn is None else without_effects(loss_fn))


def without_effects(loss_fn: LossFn) -> LossFn:
    """The loss that a watching one was made from; in another process nothing could be watched."""
    watched: LossFn | None = getattr(loss_fn, "loss", None)
    return loss_fn if watched is None else without_effects(watched)


def with_sgd(make: Callable[..., Any]) -> Target:
    plain = {"optimizer": sgd, "schedule": constant_rate, "clip_norm": math.inf}
    return Target(make, name=make.__name__, variants={"sgd": partial(make, **plain)})


@honest("loss and parameters are in another process")
def runs_elsewhere() -> PlainTrainer:
    return RunsElsewhere()


@honest("loss and parameters are in another process; plain SGD is declared")
def runs_elsewhere_with_sgd() -> Target:
    return with_sgd(RunsElsewhere)


class AveragesElsewhere(RunsElsewhere):
    def _clip(self) -> None:
        for p in self._trainable().values():
            if p.grad is not None:
                p.grad /= self.accumulated_microbatches
        super()._clip()


@faulty("numerics.microbatches", "out of sight, the update averages its microbatches (B04)")
def averages_elsewhere() -> Target:
    return with_sgd(AveragesElsewhere)


class AveragesUnseen(AveragesElsewhere):
    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        saved = await super().save(name, path, weights_only)
        for file in Path(saved).glob("*.safetensors"):
            file.write_bytes(b"a format of its own" + file.read_bytes())
        return saved


@faulty("forward_backward.accumulates", "the same, and what it exports can't be read")
def averages_unseen() -> Target:
    return with_sgd(AveragesUnseen)


class ShrinksElsewhere(RunsElsewhere):
    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        return super()._loss(logits, batch, loss_fn) / len(logits) ** 0.01


@faulty("numerics.microbatches", "out of sight, a gradient shrinks a little with the rows")
def shrinks_elsewhere() -> Target:
    return with_sgd(ShrinksElsewhere)
