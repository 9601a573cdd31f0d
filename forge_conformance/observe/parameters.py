"""A trainer's parameters and accumulated gradients, where they can be read in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Parameters:
    """Trainable parameters by name, and how to read their accumulated gradients.

    `weights` and `gradients` copy; what they return doesn't follow the trainer. Sharded tensors
    are read by their local shard. A parameter without a gradient is left out of `gradients`.
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
        found = self.read_gradients()
        return {name: copy_of(gradient) for name, gradient in found.items() if gradient is not None}


def copy_of(tensor: Tensor) -> Tensor:
    """A dense copy on the CPU in the tensor's own dtype; of a sharded one, its local shard."""
    detached = local_part(tensor).detach()
    if detached.is_sparse:
        detached = detached.to_dense()
    return detached.to("cpu", copy=True)


def local_part(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that lives in this process; any other tensor itself."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
