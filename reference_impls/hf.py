"""`HFTrainer`: the contract kept on a model of `transformers`, on one device."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

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
from reference_impls.checkpoints import CheckpointStore, check_same_model, named_tensors
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

PAD_TOKEN, EOS_TOKEN = "<pad>", "<eos>"


class HFTrainer:
    """Trains a causal language model of `transformers`, from fresh weights.

    No method gives up the event loop before it is done: calls that overlap run one after the
    other in the order they were issued, and a cancelled one has either not begun or is complete.

    Args:
        model: A model type (`"llama"`, `"qwen2"`, `"qwen3"`, …), of which a small one is made, or
            the configuration of any causal language model, with a vocabulary of 256 or more.
        tie_weights: Whether the small model's output layer is its embedding.
        dropout: Probability of dropping an attention weight of the small model, in training.
        seed: Of the initial weights and of dropout; the caller's random streams are never used.
        device: Where to compute.
        optimizer: Builds the optimizer from the trainable parameters by name.
        schedule: The learning rate; the first update is at position 1.
        clip_norm: The 2-norm that an update's gradient is scaled down to; `math.inf` for no limit.
        checkpoint_dir: The default folder of checkpoints, made by the first `save`.
    """

    def __init__(
        self,
        model: str | PreTrainedConfig = "llama",
        *,
        tie_weights: bool = False,
        dropout: float = 0.0,
        seed: int = 0,
        device: str | torch.device = "cpu",
        optimizer: OptimizerFactory = adamw,
        schedule: Schedule = warm_up_then_decay,
        clip_norm: float = CLIP_NORM,
        checkpoint_dir: str | os.PathLike[str] = "checkpoints",
    ) -> None:
        if isinstance(model, str):
            self.config = small_config(model, tie_weights=tie_weights, dropout=dropout)
        elif tie_weights or dropout:
            raise ValueError(
                "tie_weights and dropout are of the small models; set tie_word_embeddings and "
                "attention_dropout in the configuration"
            )
        else:
            self.config = copy.deepcopy(model)
        self.tokenizer = byte_level_tokenizer()
        if len(self.tokenizer) > self.config.vocab_size:
            raise ValueError(
                f"vocab_size is {self.config.vocab_size}; the tokenizer needs {len(self.tokenizer)}"
            )
        # An embedding's padding row gets no gradient, but here no id is padding.
        self.config.pad_token_id = None
        self.device = torch.device(device)
        self.schedule = schedule
        self.clip_norm = clip_norm
        self.store = CheckpointStore(checkpoint_dir, trainer="hf")
        self.random = RandomStream(seed, self.device)
        with self.random.active():
            self.model = self._make_model()
        self._optimizer_factory = optimizer
        self.optimizer, self.scheduler = self._make_optimizer()
        self.step = 0
        self.accumulated_microbatches = 0

    # Training

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        check_batch(batch, **self._limits())
        batch = to_device(batch, self.device)
        with self.random.active():
            logits = self._logits(batch.input_ids)
        loss = (loss_fn or token_mean_loss)({"logits": logits}, batch)
        check_loss(loss)
        value = loss.item()
        metrics = {"loss": value, "num_tokens": count_kept(batch)}
        backward_or_restore(loss, list(self._trainable().values()))
        self.accumulated_microbatches += 1
        return ForwardBackwardResult(value, metrics)

    async def optim_step(self) -> OptimStepResult:
        if self.accumulated_microbatches == 0:
            raise RuntimeError("there is no gradient to apply; call forward_backward first")
        learning_rate = float(self.scheduler.get_last_lr()[0])
        applied = self.accumulated_microbatches
        try:
            clip(list(self._trainable().values()), self.clip_norm)
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
        finally:
            self._clear()
        return OptimStepResult(self.step, learning_rate, applied)

    async def clear_gradients(self) -> None:
        self._clear()

    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        check_inputs(inputs, **self._limits())
        input_ids = inputs["input_ids"]
        self.model.eval()  # type: ignore[no-untyped-call]
        try:
            with torch.no_grad():
                return self._logits(input_ids.to(self.device)).to(input_ids.device)
        finally:
            self.model.train()

    # Checkpoints

    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        training = {
            "step": self.step,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": self.random.state_dict(),
        }
        return self.store.save(
            name,
            path,
            step=self.step,
            model_config=self._model_facts(),
            hf_config=json.loads(self.model.config.to_json_string()),
            weights=named_tensors(self.model),
            training=None if weights_only else training,
        )

    async def load(self, path: str | None = None) -> str:
        """As the protocol has it; weights alone start afresh, with step 0 and a new optimizer."""
        checkpoint = self.store.read(path)
        tensors = named_tensors(self.model)
        check_same_model(checkpoint, self._model_facts(), tensors)
        # What may still fail comes first, then what can't.
        optimizer, scheduler = self._make_optimizer()
        step = 0
        if checkpoint.training is not None:
            load_optimizer(optimizer, checkpoint.training["optimizer"])
            scheduler.load_state_dict(checkpoint.training["scheduler"])
            self.random.load_state_dict(checkpoint.training["random"])
            step = checkpoint.training["step"]
        self.optimizer, self.scheduler, self.step = optimizer, scheduler, step
        for name, tensor in tensors.items():
            tensor.copy_(checkpoint.weights[name])
        self._clear()
        return checkpoint.path

    # What it is

    async def get_config(self) -> TrainerConfig:
        return TrainerConfig(
            model_name=self.config.model_type,
            model_config=self._model_facts(),
            parallelism=ParallelismConfig(device=str(self.device)),
        )

    async def get_status(self) -> TrainerStatus:
        return TrainerStatus(self.step, self.accumulated_microbatches)

    async def get_tokenizer(self) -> PreTrainedTokenizerFast:
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

    def _make_model(self) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            self.config, dtype=torch.float32
        )
        model.config.architectures = [type(model).__name__]
        model.to(self.device)  # type: ignore[arg-type]
        return model

    def _make_optimizer(
        self,
    ) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
        optimizer = self._optimizer_factory(self._trainable())
        for group in optimizer.param_groups:
            group["lr"] = 1.0  # a factor on what the schedule gives
        schedule = self.schedule
        # A function of its own: the scheduler would write another callable's attributes to disk.
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: schedule(n + 1))

    def _trainable(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _limits(self) -> dict[str, int]:
        return {
            "vocab_size": self.config.vocab_size,
            "max_seq_len": self.config.max_position_embeddings,
        }

    def _logits(self, input_ids: Tensor) -> Tensor:
        # No attention mask: targets that don't count are context all the same.
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits

    def _clear(self) -> None:
        self.model.zero_grad()
        self.accumulated_microbatches = 0

    def _model_facts(self) -> dict[str, Any]:
        return {
            "model_type": self.config.model_type,
            "hidden_size": self.config.hidden_size,
            "num_layers": self.config.num_hidden_layers,
            "num_attention_heads": self.config.num_attention_heads,
            "tie_weights": self.config.tie_word_embeddings,
            **self._limits(),
        }


def small_config(
    model_type: str, *, tie_weights: bool, dropout: float, num_layers: int = 2
) -> PreTrainedConfig:
    """A small model of this type; but for llama, with half as many key-value heads.

    The llama has the sizes of `PlainTrainer`'s, so that each can load the other's weights.
    """
    hidden_size, num_heads = 32, 4
    return AutoConfig.for_model(
        model_type,
        vocab_size=256,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads if model_type == "llama" else num_heads // 2,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=64,
        attention_dropout=dropout,
        tie_word_embeddings=tie_weights,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=255,
        # The default of 0.02 is for wide models; weights near zero hide errors.
        initializer_range=hidden_size**-0.5,
    )


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are UTF-8 bytes; 254 and 255, which UTF-8 lacks, pad and end a text."""
    vocabulary = {char: byte for byte, char in bytes_to_unicode().items() if byte < 254}  # type: ignore[no-untyped-call]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(PAD_TOKEN), AddedToken(EOS_TOKEN)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        clean_up_tokenization_spaces=False,
    )
