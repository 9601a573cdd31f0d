"""A small Llama in plain torch, whose weights have the names that `transformers` gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NORM_EPS = 1e-6
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class LlamaConfig:
    """The model's sizes.

    Args:
        vocab_size: Number of token ids.
        hidden_size: Width of the residual stream, a multiple of twice the number of heads.
        num_layers: Number of transformer blocks.
        num_attention_heads: Heads of each attention.
        max_seq_len: The longest row of tokens.
        tie_weights: Whether the output layer is the embedding.
        dropout: Probability of dropping an attention weight or a block's output, in training.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    max_seq_len: int
    tie_weights: bool
    dropout: float

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def intermediate_size(self) -> int:
        """Width inside the feed-forward layers."""
        return 2 * self.hidden_size

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of twice "
                f"num_attention_heads={self.num_attention_heads}: rotary positions pair dimensions"
            )

    def to_hf(self) -> dict[str, Any]:
        """The same model as a `config.json` of Hugging Face."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_attention_heads,
            "max_position_embeddings": self.max_seq_len,
            "tie_word_embeddings": self.tie_weights,
            "attention_dropout": self.dropout,
            "rms_norm_eps": NORM_EPS,
            "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        }


class Llama(nn.Module):
    """Token ids `[batch, seq]` to logits `[batch, seq, vocab_size]`, each of its own past alone."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=config.hidden_size**-0.5)
        if config.tie_weights:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits at `[b, t]` for the token after `input_ids[b, :t + 1]`."""
        logits: Tensor = self.lm_head(self.model(input_ids))
        return logits


class Decoder(nn.Module):
    """The stack of blocks between the embedding and the output layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=NORM_EPS)
        pairs = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.outer(torch.arange(config.max_seq_len), ROPE_THETA**-pairs)
        self.register_buffer(
            "rotation", torch.stack((angles.cos(), angles.sin())), persistent=False
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        """Normalised hidden states `[batch, seq, hidden_size]`."""
        hidden = self.embed_tokens(input_ids)
        rotation = self.get_buffer("rotation")[:, : input_ids.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden, rotation)
        normed: Tensor = self.norm(hidden)
        return normed


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its own normalised input's stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=NORM_EPS)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=NORM_EPS)
        self.mlp = FeedForward(config)
        self.dropout = config.dropout

    def forward(self, hidden: Tensor, rotation: Tensor) -> Tensor:
        """The stream `[batch, seq, hidden_size]` after this block."""
        attended = self.self_attn(self.input_layernorm(hidden), rotation)
        hidden = hidden + F.dropout(attended, self.dropout, self.training)
        fed = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + F.dropout(fed, self.dropout, self.training)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.dropout = config.dropout
        width = config.hidden_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, rotation: Tensor) -> Tensor:
        """What each position takes from itself and those before it."""
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(
            rotate(query, rotation),
            rotate(key, rotation),
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """A gated feed-forward layer (SwiGLU)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Each position by itself."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


def rotate(heads: Tensor, rotation: Tensor) -> Tensor:
    """Turn pairs of dimensions of `heads` `[batch, head, seq, dim]` by angles of the position.

    `rotation` holds cosine and sine, `[2, seq, dim / 2]`; dimension i pairs with i + dim / 2.
    """
    cos, sin = rotation
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
