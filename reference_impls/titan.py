"""`TitanTrainer`: the contract kept on torchtitan's components, in one process or in several."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.config import ParallelismConfig as TitanParallelism
from torchtitan.protocols.model_spec import ModelSpec

from forge.api import (
    ForwardBackwardResult,
    LossFn,
    MetricSpec,
    OptimStepResult,
    ParallelismConfig,
    Reduce,
    TextTrainBatch,
    TrainerConfig,
    TrainerStatus,
)
from reference_impls.batches import check_batch, check_inputs, count_kept, to_device
from reference_impls.byte_tokenizer import ByteTokenizer
from reference_impls.checkpoints import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    check_same_model,
)
from reference_impls.losses import check_loss, token_mean_loss
from reference_impls.optimization import (
    CLIP_NORM,
    Schedule,
    clip,
    warm_up_then_decay,
)
from reference_impls.random_stream import RandomStream
from reference_impls.titan_components import (
    Optimizers,
    adamw,
    build_model,
    flavour_spec,
    hf_config,
    runnable,
    small_spec,
)
from reference_impls.titan_parallel import Parallel, sharded_like
from reference_impls.titan_shards import Shape, read_shards, shapes_in, write_shards

_SHARDS = "optimizers"


class TitanTrainer:
    """Trains a dense model of torchtitan, from fresh weights, in one process or in several.

    Under a launcher such as torchrun every rank makes a trainer with the same arguments and calls
    it with the same ones, batches whole; every rank gets the same results, which are those of one
    process. The trainer divides the rows itself. What fails on one rank raises on all of them.

    No method gives up the event loop before it is done: calls that overlap run one after the
    other in the order they were issued, and a cancelled one has either not begun or is complete.

    Args:
        model: `"llama3"` or `"qwen3"`, of which a small one is made, or with `flavour` one of
            torchtitan's own; or any specification of a dense one, for example from `small_spec`.
        flavour: One of torchtitan's own sizes: `"debugmodel"`, `"8B"`, …
        max_seq_len: The longest row of tokens, if it is to be less than the model can take.
        seed: Of the initial weights; the caller's random streams are never used.
        device: Where to compute.
        optimizer: Torchtitan's configuration of the optimizers; its rates multiply the schedule's.
        schedule: The learning rate; the first update is at position 1.
        clip_norm: The 2-norm that an update's gradient is scaled down to; `math.inf` for no limit.
        parallelism: Torchtitan's degrees of data and tensor parallelism, which must multiply to
            the number of processes; by default each has a shard of the weights. Degrees that are
            all 1 make a trainer of this process alone.
        checkpoint_dir: The default folder of checkpoints, made by the first `save`.
    """

    def __init__(
        self,
        model: str | ModelSpec = "llama3",
        *,
        flavour: str | None = None,
        max_seq_len: int | None = None,
        seed: int = 0,
        device: str | torch.device = "cpu",
        optimizer: OptimizersContainer.Config | None = None,
        schedule: Schedule = warm_up_then_decay,
        clip_norm: float = CLIP_NORM,
        parallelism: TitanParallelism | None = None,
        checkpoint_dir: str | os.PathLike[str] = "checkpoints",
    ) -> None:
        self.parallel = Parallel(parallelism or TitanParallelism(), torch.device(device))
        self.ranks = self.parallel.ranks
        self.device = self.parallel.device
        self.spec = runnable(_spec(model, flavour), max_seq_len)
        self.tokenizer = ByteTokenizer()
        if self.tokenizer.vocab_size > self.spec.model.vocab_size:
            raise ValueError(
                f"vocab_size is {self.spec.model.vocab_size}; the tokenizer needs "
                f"{self.tokenizer.vocab_size}"
            )
        self.parallel.prepare(self.spec)
        self.schedule = schedule
        self.clip_norm = clip_norm
        self.store = CheckpointStore(checkpoint_dir, trainer="titan")
        self.adapter = self.spec.state_dict_adapter(self.spec.model, None)
        # Only initial weights are random: torchtitan's models have no dropout. Every rank draws
        # all of them and keeps its shards, so that they are the same over any number of ranks.
        with RandomStream(seed, self.device).active():
            self.model = build_model(self.spec, self.device)
        self._hf_shapes = self._shapes_by_hf_names()
        self.parallel.shard(self.model, self.spec)
        self._optimizer_config = optimizer or adamw()
        self.optimizers, self.schedulers = self._make_optimizers()
        self.step = 0
        self.accumulated_microbatches = 0

    # Training

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        with self.ranks.all_or_none():
            check_batch(batch, **self._limits())
        self.ranks.check_same("batch", _tensors(batch))
        batch = to_device(batch, self.device)
        logits = self.parallel.logits(self.model, batch.input_ids)
        with self.ranks.all_or_none():
            loss = (loss_fn or token_mean_loss)({"logits": logits}, batch)
            check_loss(loss)
            value = loss.item()
            metrics = {"loss": value, "num_tokens": count_kept(batch)}
        self.parallel.backward(loss, logits, self._trainable())
        self.accumulated_microbatches += 1
        return ForwardBackwardResult(value, metrics)

    async def optim_step(self) -> OptimStepResult:
        if self.accumulated_microbatches == 0:
            raise RuntimeError("there is no gradient to apply; call forward_backward first")
        learning_rate = float(self.schedulers.schedulers[0].get_last_lr()[0])
        applied = self.accumulated_microbatches
        try:
            with self.ranks.all_or_none():
                clip(self._trainable(), self.clip_norm)
                self.optimizers.step()
                self.schedulers.step()
                self.step += 1
        finally:
            self._clear()
        return OptimStepResult(self.step, learning_rate, applied)

    async def clear_gradients(self) -> None:
        self._clear()

    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        # Longer rows than the model's are refused here: of the rotary cache, cut short, torchtitan
        # would only say that a view doesn't fit.
        with self.ranks.all_or_none():
            check_inputs(inputs, **self._limits())
        self.ranks.check_same("inputs", inputs)
        input_ids = inputs["input_ids"]
        with torch.no_grad():
            logits = self.parallel.logits(self.model, input_ids.to(self.device))
        return logits.to(input_ids.device)

    # Checkpoints
    #
    # Whole weights, which other trainers and `transformers` read, and the optimizers' state in
    # shards, by torch.distributed.checkpoint, which rank 0 moves into place together.

    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        weights = self.parallel.gathered(self.model.state_dict())
        tensors: dict[str, Tensor] = {}
        training: dict[str, Any] | None = None
        if not weights_only:
            tensors, others = _split(self.optimizers.state_dict())
            training = {
                "step": self.step,
                "optimizers": others,
                "schedulers": self.schedulers.state_dict(),
            }
        with ExitStack() as stack:
            saving = None
            with self.ranks.all_or_none():
                if self.ranks.rank == 0:
                    saving = stack.enter_context(
                        self.store.begin(name, path, step=self.step, weights_only=weights_only)
                    )
            folder = self.ranks.from_first(Path() if saving is None else saving.folder)
            with self.ranks.all_or_none():
                _check_seen(folder, self.ranks.rank)
            if tensors:
                with self.ranks.all_or_none():
                    write_shards(tensors, folder / _SHARDS, self.ranks.group)
            saved = ""
            with self.ranks.all_or_none():
                if saving is not None:
                    saved = saving.finish(
                        self._model_facts(),
                        hf_config(self.spec),
                        self.adapter.to_hf(weights),
                        training,
                    )
            return self.ranks.from_first(saved)

    async def load(self, path: str | None = None) -> str:
        """As the protocol has it; weights alone start afresh, with step 0 and a new optimizer."""
        checkpoint = self._read(path)
        state = self._read_optimizers(checkpoint)
        # Nothing below can fail. New optimizers are made once no gradient is pending.
        self._clear()
        weights = self.adapter.from_hf(dict(checkpoint.weights))
        self.model.load_state_dict(sharded_like(weights, self.model.state_dict()))
        self.optimizers, self.schedulers = self._make_optimizers()
        self.step = 0
        if checkpoint.training is not None:
            self.optimizers.load_state_dict(state)
            with warnings.catch_warnings():
                # Torchtitan's container calls what torch wants called within a step only.
                warnings.filterwarnings("ignore", "To get the last learning rate")
                self.schedulers.load_state_dict(checkpoint.training["schedulers"])
            self.step = checkpoint.training["step"]
        return checkpoint.path

    # What it is

    async def get_config(self) -> TrainerConfig:
        dims = self.parallel.dims
        return TrainerConfig(
            model_name=f"{self.spec.name}-{self.spec.flavor}",
            model_config=self._model_facts(),
            parallelism=ParallelismConfig(
                dp_degree=self.parallel.data_degree,
                tp_degree=dims.tp,
                pp_degree=dims.pp,
                cp_degree=dims.cp,
                ep_degree=dims.ep,
                world_size=dims.world_size,
                dp_rank=self.parallel.data_rank,
                tp_rank=self.parallel.tensor_rank,
                device=str(self.device),
            ),
        )

    async def get_status(self) -> TrainerStatus:
        return TrainerStatus(self.step, self.accumulated_microbatches)

    async def get_tokenizer(self) -> ByteTokenizer:
        return self.tokenizer

    async def metric_schema(self) -> Mapping[str, MetricSpec]:
        return {
            "loss": MetricSpec(float, reduction=Reduce.MEAN, unit="nats"),
            "num_tokens": MetricSpec(int, minimum=0, reduction=Reduce.SUM, unit="tokens"),
        }

    async def close(self) -> None:
        """Give back the gradients; no thread, file or process is ever held between calls."""
        self._clear()

    # The parts

    def _make_optimizers(self) -> tuple[Optimizers, LRSchedulersContainer]:
        optimizers = Optimizers(self._optimizer_config, self.model)
        schedule = self.schedule
        return optimizers, LRSchedulersContainer(optimizers, lambda n: schedule(n + 1))

    def _trainable(self) -> list[Tensor]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _read(self, path: str | None) -> Checkpoint:
        """A checkpoint that fits, on every rank; or an error on every rank."""
        checkpoint = None
        with self.ranks.all_or_none():
            # Rank 0 first: it tells which is the latest, and settles what a killed save left.
            if self.ranks.rank == 0:
                checkpoint = self.store.read(path)
        path = self.ranks.from_first(path if checkpoint is None else checkpoint.path)
        with self.ranks.all_or_none():
            if checkpoint is None:
                checkpoint = self.store.read(path)
            check_same_model(checkpoint, self._model_facts(), self._hf_shapes)
        return checkpoint

    def _read_optimizers(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """The optimizers' state, sharded as their own is; none if it isn't saved."""
        if checkpoint.training is None:
            return {}
        folder = Path(checkpoint.path, _SHARDS)
        tensors, _ = _split(self.optimizers.state_dict())
        with self.ranks.all_or_none():
            saved = shapes_in(folder) if folder.exists() else {}
            saved_others = checkpoint.training["optimizers"]
            _check_same_optimizers(saved, saved_others, self.optimizers.state_dict())
        with self.ranks.all_or_none():
            read = read_shards(tensors, folder, self.ranks.group) if tensors else {}
        return {**saved_others, **read}

    def _shapes_by_hf_names(self) -> dict[str, Tensor]:
        """What the weights are, on no device; the output layer's only if it isn't tied."""
        shapes: dict[str, Tensor] = self.adapter.to_hf(
            {
                name: torch.empty(weight.shape, dtype=weight.dtype, device="meta")
                for name, weight in self.model.state_dict().items()
            }
        )
        return shapes

    def _limits(self) -> dict[str, int]:
        config = self.spec.model
        return {"vocab_size": config.vocab_size, "max_seq_len": config.max_seq_len}

    def _clear(self) -> None:
        self.model.zero_grad()
        self.accumulated_microbatches = 0

    def _model_facts(self) -> dict[str, Any]:
        config = hf_config(self.spec)
        return {
            "model_type": config["model_type"],
            "hidden_size": config["hidden_size"],
            "num_layers": config["num_hidden_layers"],
            "num_attention_heads": config["num_attention_heads"],
            "tie_weights": config["tie_word_embeddings"],
            **self._limits(),
        }


def _spec(model: str | ModelSpec, flavour: str | None) -> ModelSpec:
    if not isinstance(model, str):
        if flavour is not None:
            raise ValueError("flavour is of a model by name; a specification has its sizes already")
        return model
    return small_spec(model) if flavour is None else flavour_spec(model, flavour)


def _tensors(batch: TextTrainBatch) -> dict[str, Tensor]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _split(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a state, and its plain values."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def _check_seen(folder: Path, rank: int) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"rank {rank} doesn't see {folder}, which rank 0 made; save to a folder that all "
            "ranks share"
        )


def _check_same_optimizers(
    tensors: Mapping[str, Shape], others: Mapping[str, Any], own: Mapping[str, Any]
) -> None:
    """Refuse state that torchtitan's container would take in part, or fail on midway."""
    saved = {**others, **tensors}
    differing = sorted(saved.keys() ^ own.keys()) or sorted(
        name
        for name, value in own.items()
        if isinstance(value, Tensor) and saved[name] != (value.shape, value.dtype)
    )
    if differing:
        raise CheckpointError(
            f"the checkpoint's optimizer state doesn't fit: {', '.join(differing[:3])} and in all "
            f"{len(differing)} entries differ; load into a trainer with the same optimizers"
        )
