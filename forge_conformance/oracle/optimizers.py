"""An optimizer step as it should have been: the declared optimizer, replayed on copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from forge_conformance.observe.exact import InFloat64
from forge_conformance.observe.parameters import Tensors

Build = Callable[[dict[str, Tensor]], torch.optim.Optimizer]


class Replay:
    """The declared optimizer over copies of the parameters, driven by gradients that were seen.

    Args:
        build: The declared optimizer; takes the copies by name.
        weights: The parameters at the start.
        dtype: The precision to replay in: float64 for what should have been, the parameters' own
            (None) for what plain PyTorch makes of it.
        clip_norm: The total 2-norm that gradients are clipped to.
    """

    def __init__(
        self, build: Build, weights: Tensors, dtype: torch.dtype | None, clip_norm: float
    ) -> None:
        self.parameters = {
            name: torch.nn.Parameter(weight.to(dtype or weight.dtype).clone())
            for name, weight in weights.items()
        }
        self.optimizer = build(dict(self.parameters))
        self.exact = dtype is torch.float64
        self.clip_norm = clip_norm
        self._base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(
        self,
        gradients: Mapping[str, Tensor],
        learning_rate: float,
        norm: float | None = None,
    ) -> Tensors:
        """Update with the gradients at the rate of the first parameter group; the new weights.

        Other groups keep their rate's ratio to the first one's.

        Args:
            norm: The total 2-norm of all gradients, where these are not all.
        """
        for name, parameter in self.parameters.items():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype, copy=True)
        if math.isfinite(self.clip_norm):
            parameters = list(self.parameters.values())
            if norm is None:
                torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm)
            else:
                total = torch.tensor(norm, dtype=torch.float64)
                torch.nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, total)
        first = self._base_rates[0] or 1.0
        for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = learning_rate * base / first
        # An optimizer may compute in less precision inside, whatever its parameters' dtype is.
        with InFloat64() if self.exact else nullcontext():  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}


def total_norm(gradients: Mapping[str, Tensor]) -> float:
    """The 2-norm of all gradients together."""
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
