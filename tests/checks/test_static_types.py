"""Which annotations a static checker takes for the protocol's."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest
import torch

from forge.api import ForwardBackwardResult, LossFn, TextTrainBatch, Trainer, TrainerConfig
from forge_conformance.checks.static_types import objections

if TYPE_CHECKING:
    from torch import Tensor
    from unknown_at_run_time import Something  # type: ignore[import-not-found]


class Fits:
    async def forward(self, inputs: Mapping[str, Tensor]) -> torch.Tensor: ...

    async def forward_backward(
        self, batch: object, loss_fn: Callable[..., Tensor] | None = None, **more: int
    ) -> ForwardBackwardResult: ...

    async def save(
        self,
        name: str | None = None,
        path: str | os.PathLike[str] | None = None,
        weights_only: bool = False,
    ) -> str: ...

    async def load(self, path: Something = None) -> str: ...

    async def get_config(self) -> Any: ...


class Result:
    loss: float
    metrics: dict[str, Any]


class Misses:
    async def forward(self, inputs: dict[str, int]) -> Tensor: ...

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn = None
    ) -> ForwardBackwardResult: ...

    async def save(self, name: str = "", path: str = "", weights_only: bool = False) -> str: ...

    async def load(self, path: str | None = None): ...

    def get_config(self) -> Awaitable[TrainerConfig]: ...

    async def optim_step(self) -> Result: ...

    async def clear_gradients(self): ...


@pytest.mark.parametrize("name", [name for name in vars(Fits) if not name.startswith("_")])
def test_wider_parameters_and_narrower_results_fit(name: str) -> None:
    assert objections(getattr(Fits(), name), getattr(Trainer, name)) == []


@pytest.mark.parametrize(
    ("name", "objection"),
    [
        ("forward", "inputs is dict"),
        ("forward_backward", "loss_fn is Callable"),
        ("save", "name is str, which is narrower than str | None"),
        ("load", "no annotation of the result"),
        ("get_config", "no coroutine"),
        ("optim_step", "returns Result, which is no OptimStepResult"),
        ("clear_gradients", "not annotated"),
    ],
)
def test_what_a_static_checker_objects_to(name: str, objection: str) -> None:
    found = objections(getattr(Misses(), name), getattr(Trainer, name))
    assert objection in " ".join(found).replace("Optional[str]", "str | None")
