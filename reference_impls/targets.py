"""What the reference trainers declare to the conformance kit, so that every clause is checked.

    pytest --trainer=reference_impls.targets:plain

To read as an example: a trainer's own declaration says what its documentation says, in code.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_conformance import Target
from reference_impls.hf import HFTrainer, small_config
from reference_impls.losses import token_mean_loss
from reference_impls.monarch import MonarchTrainer, spawn_titan
from reference_impls.optimization import CLIP_NORM, adamw, sgd, warm_up_then_decay
from reference_impls.plain import PlainTrainer

if TYPE_CHECKING:
    from reference_impls.titan import TitanTrainer


def named_parameters(trainer: PlainTrainer | HFTrainer | TitanTrainer) -> Mapping[str, Tensor]:
    """The trainable parameters by name; a tied weight appears once."""
    return {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}


def plain_trainer(**options: Any) -> Target:
    """`PlainTrainer(**options)` with all that is known about it."""

    def other_model() -> PlainTrainer:
        return PlainTrainer(**{**options, "num_layers": 3})

    return _declared(lambda **more: PlainTrainer(**{**options, **more}), other_model, **options)


def hf_trainer(model: str = "llama", **options: Any) -> Target:
    """`HFTrainer(model, **options)` with all that is known about it."""

    def other_model() -> HFTrainer:
        return HFTrainer(small_config(model, tie_weights=False, dropout=0.0, num_layers=3))

    return _declared(lambda **more: HFTrainer(model, **{**options, **more}), other_model, **options)


def titan_trainer(model: str = "llama3", *, degree: str = "shard", **options: Any) -> Target:
    """`TitanTrainer(model, **options)` with all that is known about it; needs the extra [titan].

    Args:
        degree: What a launcher's processes are for: "shard", "replicate" or "tensor". Without a
            launcher there is one process.
    """

    def make(**more: Any) -> TitanTrainer:
        # Here, so that the other targets do without torchtitan.
        from torchtitan.config import ParallelismConfig

        from reference_impls.titan import TitanTrainer

        degrees = {"shard": 1, "replicate": 1, "tensor": 1}
        degrees[degree] = int(os.environ.get("WORLD_SIZE", "1"))
        parallelism = ParallelismConfig(
            data_parallel_shard_degree=degrees["shard"],
            data_parallel_replicate_degree=degrees["replicate"],
            tensor_parallel_degree=degrees["tensor"],
        )
        return TitanTrainer(model, **{"parallelism": parallelism, **options, **more})

    def titan_sgd() -> Any:
        from reference_impls.titan_components import sgd

        return sgd()

    def other_model() -> TitanTrainer:
        from reference_impls.titan import TitanTrainer

        return TitanTrainer(model, flavour="debugmodel")

    return _declared(make, other_model, make_sgd=titan_sgd, **options)


def monarch_trainer(**options: Any) -> Target:
    """`spawn_titan(**options)` with what can be said of a trainer in other processes; needs the
    extra [monarch]."""

    async def plain_sgd() -> MonarchTrainer:
        from reference_impls.titan_components import sgd

        plain = {"optimizer": sgd(), "schedule": lambda _: 0.1, "clip_norm": math.inf}
        return await spawn_titan(**{**options, **plain})

    return Target(
        factory=partial(spawn_titan, **options),
        variants={
            "sgd": plain_sgd,
            "other_model": partial(spawn_titan, flavour="debugmodel", **options),
        },
        learning_rate=lambda update: warm_up_then_decay(update + 1),
        default_loss=token_mean_loss,
        deterministic=True,
        compute_dtype=torch.float32,
    )


def _declared(
    make: Callable[..., PlainTrainer | HFTrainer | TitanTrainer],
    other_model: Callable[[], Any],
    *,
    make_sgd: Callable[[], Any] = lambda: sgd,
    compute_dtype: torch.dtype = torch.float32,
    **_options: Any,
) -> Target:
    def plain_sgd() -> PlainTrainer | HFTrainer | TitanTrainer:
        return make(optimizer=make_sgd(), schedule=lambda _: 0.1, clip_norm=math.inf)

    return Target(
        factory=make,
        variants={"sgd": plain_sgd, "other_model": other_model},
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
titan = titan_trainer("llama3")
titan_qwen3 = titan_trainer("qwen3")
titan_replicated = titan_trainer("llama3", degree="replicate")
titan_tensor_parallel = titan_trainer("llama3", degree="tensor")
monarch = monarch_trainer()
monarch_two = monarch_trainer(procs=2)
