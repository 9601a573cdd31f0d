"""`PlainTrainer`: the contract kept in plain torch, on one device, to read and to start from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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
from reference_impls.checkpoints import CheckpointStore, check_same_model, named_tensors
from reference_impls.llama import Llama, LlamaConfig
from reference_impls.losses import check_loss, token_mean_loss
from reference_impls.optimization import (
    CLIP_NORM,
    OptimizerFactory,
    Schedule,
    adamw,
    backward_or_restore,
    clip,
    load_optimizer,
    warm_up_then_decay,
)
from reference_impls.random_stream import RandomStream


class PlainTrainer:
    """Trains a small Llama.

    No method gives up the event loop before it is done: calls that overlap run one after the
    other in the order they were issued, and a cancelled one has either not begun or is complete.

    Args:
        seed: Of the initial weights and of dropout; the caller's random streams are never used.
        hidden_size, num_layers, num_attention_heads, max_seq_len, tie_weights, dropout: The model;
            see `LlamaConfig`.
        compute_dtype: `torch.float32`, or `torch.bfloat16` to multiply matrices in it. The
            weights are float32 either way.
        device: Where to compute.
        optimizer: Builds the optimizer from the trainable parameters by name.
        schedule: The learning rate; the first update is at position 1.
        clip_norm: The 2-norm that an update's gradient is scaled down to; `math.inf` for no limit.
        checkpoint_dir: The default folder of checkpoints, made by the first `save`.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        hidden_size: int = 32,
        num_layers: int = 2,
        num_attention_heads: int = 4,
        max_seq_len: int = 64,
        tie_weights: bool = False,
        dropout: float = 0.0,
        compute_dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        optimizer: OptimizerFactory = adamw,
        schedule: Schedule = warm_up_then_decay,
        clip_norm: float = CLIP_NORM,
        checkpoint_dir: str | os.PathLike[str] = "checkpoints",
    ) -> None:
        if compute_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"compute_dtype is {compute_dtype}; take float32 or bfloat16")
        self.tokenizer = ByteTokenizer()
        self.model_config = LlamaConfig(
            vocab_size=self.tokenizer.vocab_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_attention_heads=num_attention_heads,
            max_seq_len=max_seq_len,
            tie_weights=tie_weights,
            dropout=dropout,
        )
        self.device = torch.device(device)
        self.compute_dtype = compute_dtype
        self.schedule = schedule
        self.clip_norm = clip_norm
        self.store = CheckpointStore(checkpoint_dir, trainer="plain")
        self.random = RandomStream(seed, self.device)
        with self.random.active():
            self.model = self._make_model()
        self._optimizer_factory = optimizer
        self.optimizer = self._make_optimizer()
        self.step = 0
        self.accumulated_microbatches = 0

    # Training

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        self._check_batch(batch)
        batch = to_device(batch, self.device)
        with self.random.active():
            logits = self._logits(batch.input_ids)
        loss = self._loss(logits, batch, loss_fn)
        value = loss.item()
        result = ForwardBackwardResult(value, self._metrics(value, batch))
        self._backward(loss)
        self.accumulated_microbatches += 1
        return result

    async def optim_step(self) -> OptimStepResult:
        if self.accumulated_microbatches == 0:
            raise RuntimeError("there is no gradient to apply; call forward_backward first")
        learning_rate = self._learning_rate()
        applied = self.accumulated_microbatches
        try:
            self._clip()
            self._apply_update(learning_rate)
            self.step += 1
        finally:
            self._clear()
        return OptimStepResult(self.step, learning_rate, applied)

    async def clear_gradients(self) -> None:
        self._clear()

    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        self._check_inputs(inputs)
        input_ids = inputs["input_ids"]
        self.model.eval()
        try:
            with torch.no_grad():
                return self._logits(input_ids.to(self.device)).to(input_ids.device)
        finally:
            self.model.train()

    # Checkpoints

    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        return self.store.save(
            name,
            path,
            step=self.step,
            model_config=self._model_facts(),
            hf_config=self.model_config.to_hf(),
            weights=named_tensors(self.model),
            training=None if weights_only else self._training_state(),
        )

    async def load(self, path: str | None = None) -> str:
        """As the protocol has it; weights alone start afresh, with step 0 and a new optimizer."""
        checkpoint = self.store.read(path)
        tensors = named_tensors(self.model)
        check_same_model(checkpoint, self._model_facts(), tensors)
        # What may still fail comes first, then what can't.
        optimizer = self._make_optimizer()
        if checkpoint.training is not None:
            load_optimizer(optimizer, checkpoint.training["optimizer"])
            self.random.load_state_dict(checkpoint.training["random"])
        self.step = 0 if checkpoint.training is None else checkpoint.training["step"]
        self.optimizer = optimizer
        for name, tensor in tensors.items():
            tensor.copy_(checkpoint.weights[name])
        self._clear()
        return checkpoint.path

    # What it is

    async def get_config(self) -> TrainerConfig:
        return TrainerConfig(
            model_name="plain-llama",
            model_config=self._model_facts(),
            parallelism=ParallelismConfig(device=str(self.device)),
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

    # The parts, each with one meaning

    def _make_model(self) -> Llama:
        return Llama(self.model_config).to(self.device, torch.float32)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer_factory(self._trainable())

    def _trainable(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _check_batch(self, batch: TextTrainBatch) -> None:
        config = self.model_config
        check_batch(batch, vocab_size=config.vocab_size, max_seq_len=config.max_seq_len)

    def _check_inputs(self, inputs: dict[str, Tensor]) -> None:
        config = self.model_config
        check_inputs(inputs, vocab_size=config.vocab_size, max_seq_len=config.max_seq_len)

    def _logits(self, input_ids: Tensor) -> Tensor:
        reduced = self.compute_dtype is torch.bfloat16
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=reduced):
            logits: Tensor = self.model(input_ids)
        return logits.float()

    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        if loss_fn is None:
            return self._default_loss(logits, batch)
        loss = loss_fn({"logits": logits}, batch)
        check_loss(loss)
        return loss

    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        return token_mean_loss({"logits": logits}, batch)

    def _metrics(self, loss: float, batch: TextTrainBatch) -> dict[str, Any]:
        return {"loss": loss, "num_tokens": count_kept(batch)}

    def _backward(self, loss: Tensor) -> None:
        backward_or_restore(loss, list(self._trainable().values()))

    def _learning_rate(self) -> float:
        return self.schedule(self.step + 1)

    def _clip(self) -> None:
        clip(list(self._trainable().values()), self.clip_norm)

    def _apply_update(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

    def _clear(self) -> None:
        self.model.zero_grad()
        self.accumulated_microbatches = 0

    def _model_facts(self) -> dict[str, Any]:
        config = self.model_config
        return {
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "num_layers": config.num_layers,
            "num_attention_heads": config.num_attention_heads,
            "max_seq_len": config.max_seq_len,
            "tie_weights": config.tie_weights,
        }

    def _training_state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "optimizer": self.optimizer.state_dict(),
            "random": self.random.state_dict(),
        }
