"""What the reference trainers declare to the conformance kit, so that every clause is checked.

    pytest --trainer=reference_impls.targets:plain

To read as an example: a trainer's own declaration says what its documentation says, in code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from forge_conformance import Target
from reference_impls.hf import HFTrainer
from reference_impls.losses import token_mean_loss
from reference_impls.optimization import CLIP_NORM, adamw, sgd, warm_up_then_decay
from reference_impls.plain import PlainTrainer


def named_parameters(trainer: PlainTrainer | HFTrainer) -> Mapping[str, Tensor]:
    """The trainable parameters by name; a tied weight appears once."""
    return {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}


def plain_trainer(**options: Any) -> Target:
    """`PlainTrainer(**options)` with all that is known about it."""
    return _declared(lambda **more: PlainTrainer(**{**options, **more}), **options)


def hf_trainer(model: str = "llama", **options: Any) -> Target:
    """`HFTrainer(model, **options)` with all that is known about it."""
    return _declared(lambda **more: HFTrainer(model, **{**options, **more}), **options)


def _declared(
    make: Callable[..., PlainTrainer | HFTrainer],
    *,
    compute_dtype: torch.dtype = torch.float32,
    **_options: Any,
) -> Target:
    return Target(
        factory=make,
        variants={"sgd": lambda: make(optimizer=sgd, schedule=lambda _: 0.1, clip_norm=math.inf)},
        optimizer=adamw,
        learning_rate=lambda update: warm_up_then_decay(update + 1),
        clip_norm=CLIP_NORM,
        default_loss=token_mean_loss,
        deterministic=True,
        compute_dtype=compute_dtype,
        parameters=named_parameters,
    )


plain = plain_trainer()
plain_tied = plain_trainer(tie_weights=True)
plain_dropout = plain_trainer(dropout=0.1)
plain_bf16 = plain_trainer(compute_dtype=torch.bfloat16)
hf_llama = hf_trainer("llama")
hf_llama_tied = hf_trainer("llama", tie_weights=True)
hf_llama_dropout = hf_trainer("llama", dropout=0.1)
hf_qwen2 = hf_trainer("qwen2")
hf_qwen3 = hf_trainer("qwen3", tie_weights=True, dropout=0.1)
