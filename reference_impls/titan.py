"""`TitanTrainer`: the contract kept on torchtitan's components, in one process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
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
from reference_impls.checkpoints import CheckpointError, CheckpointStore, check_same_model
from reference_impls.losses import check_loss, token_mean_loss
from reference_impls.optimization import (
    CLIP_NORM,
    Schedule,
    backward_or_restore,
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
    one_process,
    runnable,
    small_spec,
)


class TitanTrainer:
    """Trains a dense model of torchtitan, from fresh weights, in one process without a group.

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
        parallelism: Torchtitan's degrees, all of which must be 1.
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
        self.parallel_dims = one_process(parallelism or TitanParallelism())
        self.spec = runnable(_spec(model, flavour), max_seq_len)
        self.tokenizer = ByteTokenizer()
        if self.tokenizer.vocab_size > self.spec.model.vocab_size:
            raise ValueError(
                f"vocab_size is {self.spec.model.vocab_size}; the tokenizer needs "
                f"{self.tokenizer.vocab_size}"
            )
        self.device = torch.device(device)
        self.schedule = schedule
        self.clip_norm = clip_norm
        self.store = CheckpointStore(checkpoint_dir, trainer="titan")
        self.adapter = self.spec.state_dict_adapter(self.spec.model, None)
        # Only initial weights are random: torchtitan's models have no dropout.
        with RandomStream(seed, self.device).active():
            self.model = build_model(self.spec, self.device)
        self._optimizer_config = optimizer or adamw()
        self.optimizers, self.schedulers = self._make_optimizers()
        self.step = 0
        self.accumulated_microbatches = 0

    # Training

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        check_batch(batch, **self._limits())
        batch = to_device(batch, self.device)
        loss = (loss_fn or token_mean_loss)({"logits": self.model(batch.input_ids)}, batch)
        check_loss(loss)
        value = loss.item()
        metrics = {"loss": value, "num_tokens": count_kept(batch)}
        backward_or_restore(loss, self._trainable())
        self.accumulated_microbatches += 1
        return ForwardBackwardResult(value, metrics)

    async def optim_step(self) -> OptimStepResult:
        if self.accumulated_microbatches == 0:
            raise RuntimeError("there is no gradient to apply; call forward_backward first")
        learning_rate = float(self.schedulers.schedulers[0].get_last_lr()[0])
        applied = self.accumulated_microbatches
        try:
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
        check_inputs(inputs, **self._limits())
        input_ids = inputs["input_ids"]
        with torch.no_grad():
            logits: Tensor = self.model(input_ids.to(self.device))
        return logits.to(input_ids.device)

    # Checkpoints
    #
    # They are those of `CheckpointStore`, not of torch.distributed.checkpoint: what that writes
    # needs an unrestricted unpickler, it writes in place, reads into the live weights file by
    # file, and raises a BaseException where a file is damaged.

    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        training = {
            "step": self.step,
            "optimizers": self.optimizers.state_dict(),
            "schedulers": self.schedulers.state_dict(),
        }
        return self.store.save(
            name,
            path,
            step=self.step,
            model_config=self._model_facts(),
            hf_config=hf_config(self.spec),
            weights=self._hf_weights(),
            training=None if weights_only else training,
        )

    async def load(self, path: str | None = None) -> str:
        """As the protocol has it; weights alone start afresh, with step 0 and a new optimizer."""
        checkpoint = self.store.read(path)
        check_same_model(checkpoint, self._model_facts(), self._hf_weights())
        training = checkpoint.training
        if training is not None:
            _check_same_optimizers(training["optimizers"], self.optimizers.state_dict())
        # Nothing below can fail. New optimizers are made once no gradient is pending.
        self._clear()
        self.model.load_state_dict(self.adapter.from_hf(dict(checkpoint.weights)))
        self.optimizers, self.schedulers = self._make_optimizers()
        self.step = 0
        if training is not None:
            self.optimizers.load_state_dict(training["optimizers"])
            with warnings.catch_warnings():
                # Torchtitan's container calls what torch wants called within a step only.
                warnings.filterwarnings("ignore", "To get the last learning rate")
                self.schedulers.load_state_dict(training["schedulers"])
            self.step = training["step"]
        return checkpoint.path

    # What it is

    async def get_config(self) -> TrainerConfig:
        dims = self.parallel_dims
        return TrainerConfig(
            model_name=f"{self.spec.name}-{self.spec.flavor}",
            model_config=self._model_facts(),
            parallelism=ParallelismConfig(
                dp_degree=dims.dp_replicate * dims.dp_shard,
                tp_degree=dims.tp,
                pp_degree=dims.pp,
                cp_degree=dims.cp,
                ep_degree=dims.ep,
                world_size=dims.world_size,
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

    def _hf_weights(self) -> dict[str, Tensor]:
        """The weights by Hugging Face's names; the output layer's only if it isn't tied."""
        weights: dict[str, Tensor] = self.adapter.to_hf(self.model.state_dict())
        return weights

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


def _check_same_optimizers(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse state that torchtitan's container would take in part, or fail on midway."""
    differing = sorted(saved.keys() ^ own.keys()) or sorted(
        key
        for key, value in own.items()
        if isinstance(value, Tensor) and value.shape != saved[key].shape
    )
    if differing:
        raise CheckpointError(
            f"the checkpoint's optimizer state doesn't fit: {', '.join(differing[:3])} and in all "
            f"{len(differing)} entries differ; load into a trainer with the same optimizers"
        )
