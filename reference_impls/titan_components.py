"""Torchtitan's own pieces as `TitanTrainer` uses them: models, optimizers, export."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import (
    ComplexRoPE,
    CosSinRoPE,
    Embedding,
    Linear,
    RMSNorm,
    ScaledDotProductAttention,
)
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.utils import set_default_dtype

_FAMILIES = {"llama3": llama3, "qwen3": qwen3}
_HF_NAMES = {"llama3": ("llama", "LlamaForCausalLM"), "qwen3": ("qwen3", "Qwen3ForCausalLM")}
_NORM_EPS = 1e-6


# Models


def small_spec(
    family: str,
    *,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_attention_heads: int = 4,
    max_seq_len: int = 64,
    tie_weights: bool = False,
) -> ModelSpec:
    """A model of torchtitan's family `"llama3"` or `"qwen3"` in sizes of one's own.

    By default it has the sizes of `HFTrainer`'s small llama or qwen3: 256 token ids, a
    feed-forward layer of twice the hidden size, and for qwen3 half as many key-value heads.

    Raises:
        ValueError: The family is another, or the sizes don't go together.
    """
    if hidden_size % (2 * num_attention_heads):
        raise ValueError(
            f"hidden_size={hidden_size} must be a multiple of twice num_attention_heads="
            f"{num_attention_heads}: rotary positions pair dimensions"
        )
    own = _family(family).model_registry("debugmodel")
    qwen = family == "qwen3"
    # The families' own deviation of 0.02 is for wide models; weights near zero hide errors.
    init = {"weight": partial(nn.init.normal_, std=hidden_size**-0.5)}
    norm = partial(RMSNorm.Config, eps=_NORM_EPS, param_init={"weight": nn.init.ones_})
    head_dim = hidden_size // num_attention_heads
    rope = (CosSinRoPE if qwen else ComplexRoPE).Config(dim=head_dim, max_seq_len=max_seq_len)
    attention = make_gqa_config(
        dim=hidden_size,
        n_heads=num_attention_heads,
        n_kv_heads=num_attention_heads // 2 if qwen else num_attention_heads,
        head_dim=head_dim,
        wqkv_param_init=init,
        wo_param_init=init,
        inner_attention=ScaledDotProductAttention.Config(),
        rope=rope,
        fuse_qkv=True,
        qk_norm=norm(normalized_shape=head_dim) if qwen else None,
    )
    block = (Qwen3TransformerBlock if qwen else Llama3TransformerBlock).Config(
        attention=attention,
        feed_forward=make_ffn_config(
            dim=hidden_size,
            hidden_dim=2 * hidden_size,
            w1_param_init=init,
            w2w3_param_init=init,
        ),
        attention_norm=norm(normalized_shape=hidden_size),
        ffn_norm=norm(normalized_shape=hidden_size),
    )
    config = (Qwen3Model if qwen else Llama3Model).Config(
        dim=hidden_size,
        vocab_size=256,
        enable_weight_tying=tie_weights,
        # A tied embedding is the output layer's weight, which is initialised as such.
        tok_embeddings=Embedding.Config(
            num_embeddings=256,
            embedding_dim=hidden_size,
            param_init={"weight": _leave_as_is} if tie_weights else init,
        ),
        norm=norm(normalized_shape=hidden_size),
        lm_head=Linear.Config(in_features=hidden_size, out_features=256, param_init=init),
        layers=[copy.deepcopy(block) for _ in range(num_layers)],
    )
    return replace(own, flavor="small", model=config)


def flavour_spec(family: str, flavour: str) -> ModelSpec:
    """One of torchtitan's own models, such as `("llama3", "8B")`.

    Raises:
        ValueError: There is no such family or flavour.
    """
    module = _family(family)
    flavours = getattr(module, f"{family}_configs")
    if flavour not in flavours:
        raise ValueError(f"{family} has no flavour {flavour!r}; it has {', '.join(flavours)}")
    spec: ModelSpec = module.model_registry(flavour)
    return spec


def runnable(spec: ModelSpec, max_seq_len: int | None) -> ModelSpec:
    """A copy that runs on any device, for rows of up to `max_seq_len` tokens.

    Raises:
        ValueError: It is a mixture of experts, of another family, or can't take so long a row.
    """
    _family(spec.name)
    spec = replace(spec, model=copy.deepcopy(spec.model))
    longest = spec.model.max_seq_len
    if max_seq_len is None:
        max_seq_len = longest
    elif not 1 <= max_seq_len <= longest:
        raise ValueError(f"max_seq_len is {max_seq_len}; {spec.flavor} takes 1 to {longest}")
    for layer in spec.model.layers:
        if layer.feed_forward is None:
            raise ValueError(f"{spec.flavor} is a mixture of experts; take a dense model")
        layer.attention.rope = replace(layer.attention.rope, max_seq_len=max_seq_len)
        # FlexAttention, the default, has no backward on CPU and is compiled for each shape. What
        # it is for, several documents in a row, no batch here has.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def build_model(spec: ModelSpec, device: torch.device) -> Any:
    """The module with initial weights, drawn on `device` from the default generator, in float32."""
    with set_default_dtype(torch.float32):
        with torch.device("meta"):
            model = spec.model.build()
        model.to_empty(device=device)
        # Also ties weights, which to_empty unties, and fills the buffers.
        model.init_weights(buffer_device=None)
    return model


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """The same model as a `config.json` of Hugging Face."""
    model_type, architecture = _HF_NAMES[spec.name]
    config, layer = spec.model, spec.model.layers[0]
    attention = layer.attention
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": attention.rope.theta}
    if attention.rope.scaling == "llama":
        rope |= {
            "rope_type": "llama3",
            "factor": attention.rope.scaling_factor,
            "low_freq_factor": attention.rope.low_freq_factor,
            "high_freq_factor": attention.rope.high_freq_factor,
            "original_max_position_embeddings": attention.rope.original_max_position_embeddings,
        }
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": layer.feed_forward.w1.out_features,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.head_dim or config.dim // attention.n_heads,
        "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": config.enable_weight_tying,
        "rms_norm_eps": config.norm.eps,
        "rope_parameters": rope,
    }


def _family(name: str) -> Any:
    if name not in _FAMILIES:
        raise ValueError(f"{name!r} is no family of models here; take {' or '.join(_FAMILIES)}")
    return _FAMILIES[name]


def _leave_as_is(_parameter: nn.Parameter) -> None: ...


# Optimizers


class Optimizers(OptimizersContainer):  # type: ignore[misc]  # torchtitan has no types
    """Torchtitan's container, with `"SGD"` beside its own optimizers, and state from the start.

    The container makes the optimizers' state when it is first asked for it, by a step with
    learning rate 0: from then on Adam counts one step too many, so that a run which was saved
    before its first step trains otherwise than one which wasn't. And with gradients pending it
    makes none, and what is saved then can't be loaded. Here the state is there, at step 0, from
    the start.

    Args:
        config: Of torchtitan's container.
        model: What it optimizes; no gradient may be pending.
    """

    def __init__(self, config: OptimizersContainer.Config, model: nn.Module) -> None:
        super().__init__(config, model_parts=[model])
        self.state_dict()
        for optimizer in self:
            for state in optimizer.state.values():
                if "step" in state:
                    state["step"].zero_()

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name == "SGD":
            return torch.optim.SGD
        factory: Callable[..., torch.optim.Optimizer] = (
            OptimizersContainer._resolve_optimizer_factory(name)
        )
        return factory


def adamw() -> OptimizersContainer.Config:
    """AdamW as in `optimization.adamw`: matrices decay, one-dimensional parameters don't."""
    adam = {"lr": 1.0, "betas": (0.9, 0.95), "eps": 1e-8}
    return OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(
                pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={**adam, **decay}
            )
            for pattern, decay in {
                r"norm": {"weight_decay": 0.0},
                r".*": {"weight_decay": 0.1},
            }.items()
        ]
    )


def sgd() -> OptimizersContainer.Config:
    """Plain SGD: no momentum, no decay."""
    return OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(pattern=r".*", optimizer_name="SGD", optimizer_kwargs={"lr": 1.0})
        ],
        # Torch has no fused SGD, the container's default, for shards.
        implementation="foreach",
    )
