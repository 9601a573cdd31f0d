"""The learning rates that torch's optimizers step with in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


@contextmanager
def rates_used() -> Iterator[set[float]]:
    """Collect the rates of all parameter groups whenever an optimizer steps inside.

    Those at the start and those at the end of each step: an optimizer may set its rate within it.
    Nothing is collected of what isn't a `torch.optim.Optimizer`, is compiled, or runs in another
    process.
    """
    rates: set[float] = set()

    def collect(optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, (int, float, Tensor)):
                rates.add(float(rate))

    hooks = [
        register_optimizer_step_pre_hook(collect),
        register_optimizer_step_post_hook(collect),
    ]
    try:
        yield rates
    finally:
        for hook in hooks:
            hook.remove()
