"""A trainer's forward pass in float64, whatever precision it asks for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class InFloat64(TorchDispatchMode):
    """Inside it, operations of this thread compute floating-point results in float64.

    Weights and buffers stay what they are; what is computed from them is wide from the first
    operation on, and what narrows it again is passed over. Writing into a tensor that is there
    already rounds to that tensor's dtype, as ever. A compiled model isn't seen.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable or func.is_view:
            return func(*args, **kwargs)
        wide_args, wide_kwargs = tree_map(_widened, (args, kwargs))
        return func(*wide_args, **wide_kwargs)


def in_float64(compute: Callable[[], Tensor]) -> Tensor:
    """What `compute` returns when it runs in float64; narrower where something prevents that."""
    with warnings.catch_warnings(), InFloat64():  # type: ignore[no-untyped-call]
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        return compute()


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value
