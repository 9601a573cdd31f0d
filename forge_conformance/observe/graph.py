"""What the autograd graph of the logits shows: the parameters behind them, and the precisions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Graph:
    """What one walk from the logits to the leaves has found.

    Attributes:
        leaves: The leaf tensors that gradients accumulate in, in the order of the walk.
        readable: Whether the leaves' memory may be touched. A sharded trainer computes on
            unsharded copies whose storage is freed afterwards; reading one ends the process.
        dtypes: The floating-point types that matrices are multiplied in; of all results in the
            graph where it doesn't show that (a compiled one).
        whole: Whether every operation is autograd's own. One written in Python may hide a graph
            of its own, with parameters that the walk doesn't find (recomputed activations do).
    """

    leaves: tuple[Tensor, ...]
    readable: bool
    dtypes: frozenset[torch.dtype]
    whole: bool


_PRODUCTS = re.compile(r"(Mm|Addmm|Bmm|Baddbmm|Mv|Dot|Linear|Convolution|ScaledDot)\w*Backward")


def walk(logits: Tensor) -> Graph:
    """The graph behind `logits`, without reading the memory of any tensor in it."""
    leaves: list[Tensor] = []
    all_dtypes: set[torch.dtype] = {logits.dtype}
    product_dtypes: set[torch.dtype] = set()
    whole = True
    for node in _nodes(logits.grad_fn):
        dtypes = {metadata.dtype for metadata in node._input_metadata}
        all_dtypes |= dtypes
        if _PRODUCTS.match(node.name()):
            product_dtypes |= dtypes
        whole = whole and not isinstance(node, torch.autograd.function.BackwardCFunction)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
            all_dtypes.add(leaf.dtype)
    if torch.float32 in all_dtypes:
        # Float64 trainers often keep a part in float32; narrower parts are the products' business.
        product_dtypes |= {torch.float32} if product_dtypes else set()
    return Graph(
        leaves=tuple(leaves),
        readable=bool(leaves) and all(_has_memory(leaf) for leaf in leaves),
        dtypes=frozenset(d for d in product_dtypes or all_dtypes if d.is_floating_point),
        whole=whole,
    )


def _nodes(root: Any) -> Iterator[Any]:
    seen = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(reversed([following for following, _ in node.next_functions]))


def _has_memory(tensor: Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() == 0 or local.untyped_storage().size() > 0
