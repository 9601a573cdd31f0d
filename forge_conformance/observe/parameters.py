"""A trainer's parameters and accumulated gradients, where they can be read in this process.

So that a run stays possible on billions of parameters, of a large tensor only a part is read: at
most `LARGEST` entries, evenly spread, the same ones each time and the same ones of its gradient.
Entry by entry a part obeys the same laws as the whole, and a fault that touches a layer, a shard
or a row is in it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

LARGEST = 2**20
"""Entries of a tensor up to which all of it is read."""

MOST_AT_ONCE = 2**26
"""Entries of all parameters together up to which all are copied whole, where parts won't do."""


@dataclass(frozen=True)
class Parameters:
    """Trainable parameters by name, and how to read their accumulated gradients.

    `weights` and `gradients` copy; what they return doesn't follow the trainer. Sharded tensors
    are read by their local shard, large ones by a part. A parameter without a gradient is left
    out of `gradients`.
    """

    tensors: Mapping[str, Tensor]
    read_gradients: Callable[[], Mapping[str, Tensor | None]]

    @classmethod
    def with_grad_attribute(cls, tensors: Mapping[str, Tensor]) -> Parameters:
        """Parameters whose gradients accumulate in `.grad`."""
        return cls(tensors, lambda: {name: tensor.grad for name, tensor in tensors.items()})

    def weights(self) -> Tensors:
        return {name: copy_of(tensor) for name, tensor in self.tensors.items()}

    def gradients(self) -> Tensors:
        return {name: copy_of(gradient) for name, gradient in self._present().items()}

    def whole_weights(self, names: Iterable[str]) -> Tensors:
        """Copies of these parameters, however large."""
        return {name: _on_cpu(self.tensors[name]) for name in names}

    def whole_gradients(self, names: Iterable[str]) -> Tensors:
        """Copies of the gradients of these parameters, however large."""
        present = self._present()
        return {name: _on_cpu(present[name]) for name in names if name in present}

    def some(self, seed: int) -> list[str]:
        """Names of parameters that may be copied whole: all, or of a large model a random choice
        of `MOST_AT_ONCE` entries."""
        names = sorted(self.tensors)
        random.Random(seed).shuffle(names)
        sizes = itertools.accumulate(local_part(self.tensors[name]).numel() for name in names)
        fitting = [name for name, size in zip(names, sizes, strict=True) if size <= MOST_AT_ONCE]
        return fitting or names[:1]

    def gradient_norm(self) -> float:
        """The 2-norm of all gradients together, computed where they are."""
        norms = [
            torch.linalg.vector_norm(local_part(gradient).to_dense(), dtype=torch.float64).item()
            for gradient in self._present().values()
        ]
        return math.hypot(*norms)

    def _present(self) -> dict[str, Tensor]:
        found = self.read_gradients()
        return {name: gradient for name, gradient in found.items() if gradient is not None}


def copy_of(tensor: Tensor) -> Tensor:
    """A dense copy on the CPU of what is read of a tensor, in the tensor's own dtype."""
    return _on_cpu(part_of(local_part(tensor).detach().to_dense()))


def part_of(tensor: Tensor) -> Tensor:
    """What is read of a tensor: all, or `LARGEST` entries at most, one-dimensional.

    Of a contiguous tensor this is a view, through which it can be changed.
    """
    if tensor.numel() <= LARGEST:
        return tensor
    stride = math.ceil(tensor.numel() / LARGEST)
    while math.gcd(stride, tensor.shape[-1]) > 1:  # else it would read the same columns only
        stride += 1
    return tensor.reshape(-1)[::stride]


def local_part(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that lives in this process; any other tensor itself."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _on_cpu(tensor: Tensor) -> Tensor:
    return local_part(tensor).detach().to_dense().to("cpu", copy=True)
