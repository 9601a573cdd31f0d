"""`PlainTrainer` with all declared that can be, for faults which only that brings to light."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from forge_conformance import Target
from reference_impls.losses import token_mean_loss
from reference_impls.optimization import CLIP_NORM, adamw, sgd, warm_up_then_decay
from reference_impls.plain import PlainTrainer


def constant_rate(_position: int) -> float:
    return 0.05


def declared(make: Callable[..., Any], **options: Any) -> Target:
    """A trainer that takes `PlainTrainer`'s options, said to do what `PlainTrainer` does."""
    optimizer = options.get("optimizer", adamw)
    schedule = options.get("schedule", warm_up_then_decay)
    plain = {"optimizer": sgd, "schedule": constant_rate, "clip_norm": math.inf}
    return Target(
        partial(make, **options),
        name=getattr(make, "__name__", "trainer"),
        variants={
            "sgd": partial(make, **{**options, **plain}),
            "other_model": partial(PlainTrainer, num_layers=3),
        },
        optimizer=optimizer,
        learning_rate=lambda update: schedule(update + 1),
        clip_norm=options.get("clip_norm", CLIP_NORM),
        default_loss=token_mean_loss,
        deterministic=True,
    )


def declared_sgd(make: Callable[..., Any]) -> Target:
    """The same with plain SGD, which hides nothing of the gradient's size, and clipping."""
    return declared(make, optimizer=sgd, schedule=constant_rate)


def base() -> Target:
    """The honest trainer that every faulty one is one change away from."""
    return declared(PlainTrainer)
