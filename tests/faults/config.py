"""Faulty trainers of the area config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from forge.api import ForwardBackwardResult, LossFn, TextTrainBatch, TrainerConfig
from reference_impls.plain import PlainTrainer
from tests.faults.corpus import faulty


class Reports(PlainTrainer):
    """Reports some facts of the model, or of its parallelism, otherwise."""

    def __init__(self, facts: dict[str, Any] | None = None, **parallelism: Any) -> None:
        super().__init__()
        self.facts = facts or {}
        self.parallelism = parallelism

    async def get_config(self) -> TrainerConfig:
        config = await super().get_config()
        return replace(
            config,
            model_config={**config.model_config, **self.facts},
            parallelism=replace(config.parallelism, **self.parallelism),
        )


@faulty("config.fields", "the model has no name")
class HasNoName(PlainTrainer):
    async def get_config(self) -> TrainerConfig:
        return replace(await super().get_config(), model_name="")


@faulty("config.fields", "the vocabulary's size is a string, as read from a file")
def vocabulary_is_a_string() -> PlainTrainer:
    return Reports({"vocab_size": "256"})


@faulty("config.fields", "the model's facts are an object of the backend's own")
class HandsOutItsOwnConfig(PlainTrainer):
    async def get_config(self) -> TrainerConfig:
        return replace(await super().get_config(), model_config=self.model_config)


@faulty("config.fields", "the expert parallel degree is multiplied into the world size")
def multiplies_experts() -> PlainTrainer:
    return Reports(ep_degree=2, world_size=2)


@faulty("config.fields", "a degree of 0 stands for none")
def has_a_degree_of_zero() -> PlainTrainer:
    return Reports(pp_degree=0, world_size=0)


@faulty("config.fields", "ranks count from 1")
def counts_ranks_from_one() -> PlainTrainer:
    return Reports(dp_rank=1)


@faulty("config.fields", "the device is the name of the accelerator")
def names_the_card() -> PlainTrainer:
    return Reports(device="NVIDIA H100 80GB")


@faulty("config.common_keys", "the model's facts have the names of another library")
class TakesOverNames(PlainTrainer):
    async def get_config(self) -> TrainerConfig:
        config = await super().get_config()
        facts = dict(config.model_config)
        facts["num_hidden_layers"] = facts.pop("num_layers")
        return replace(config, model_config=facts)


@faulty("config.common_keys", "a dtype stands among the facts, which JSON can't hold")
def reports_a_dtype() -> PlainTrainer:
    return Reports({"dtype": torch.float32})


@faulty("config.static", "max_seq_len is the longest batch so far")
class ReportsTheLongestBatch(PlainTrainer):
    longest = 64

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        self.longest = batch.input_ids.shape[1]
        return await super().forward_backward(batch, loss_fn)

    async def get_config(self) -> TrainerConfig:
        config = await super().get_config()
        return replace(config, model_config={**config.model_config, "max_seq_len": self.longest})


@faulty("config.static", "the number of steps taken is among the model's facts")
class ReportsItsProgress(PlainTrainer):
    async def get_config(self) -> TrainerConfig:
        config = await super().get_config()
        return replace(config, model_config={**config.model_config, "trained_steps": self.step})


@faulty("config.static", "after a load the model is named after the checkpoint")
class TakesTheCheckpointsName(PlainTrainer):
    loaded = ""

    async def load(self, path: str | None = None) -> str:
        self.loaded = await super().load(path)
        return self.loaded

    async def get_config(self) -> TrainerConfig:
        config = await super().get_config()
        return replace(config, model_name=self.loaded or config.model_name)


class KeepsItsConfig(PlainTrainer):
    """Makes its configuration once."""

    kept: TrainerConfig | None = None

    async def _kept(self) -> TrainerConfig:
        if self.kept is None:
            made = await PlainTrainer.get_config(self)
            self.kept = replace(made, model_config={**made.model_config, "rope": {"factor": 8}})
        return self.kept


@faulty("config.not_aliased", "get_config hands out the object that it keeps")
class HandsOutWhatItKeeps(KeepsItsConfig):
    async def get_config(self) -> TrainerConfig:
        return await self._kept()


@faulty("config.not_aliased", "the copy is shallow: nested facts are shared")
class CopiesShallowly(KeepsItsConfig):
    async def get_config(self) -> TrainerConfig:
        kept = await self._kept()
        return replace(kept, model_config=dict(kept.model_config))


@faulty("config.not_aliased", "the facts are a copy, the parallelism is not")
class SharesItsParallelism(KeepsItsConfig):
    async def get_config(self) -> TrainerConfig:
        kept = await self._kept()
        fresh = await super().get_config()
        return replace(fresh, parallelism=kept.parallelism)
