"""forge.api: the shapes of its dataclasses, conformance by structure, and its examples."""

from __future__ import annotations

import ast
import asyncio
import doctest
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

import forge.api
from forge.api import (
    Closable,
    DeclaresMetrics,
    ForwardBackwardResult,
    Metric,
    MetricSpec,
    OptimStepResult,
    ParallelismConfig,
    Reduce,
    TextTrainBatch,
    Trainer,
    TrainerConfig,
    TrainerStatus,
)

REQUIRED = MISSING
SOURCES = sorted(Path(forge.api.__file__).parent.glob("*.py"))
MODULES = [f"forge.api.{source.stem}" for source in SOURCES if source.stem != "__init__"]


class Stranger:
    """Has the nine methods, and has never heard of forge."""

    async def forward_backward(self, batch, loss_fn=None): ...
    async def optim_step(self): ...
    async def clear_gradients(self): ...
    async def forward(self, inputs): ...
    async def save(self, name=None, path=None, weights_only=False): ...
    async def load(self, path=None): ...
    async def get_config(self): ...
    async def get_status(self): ...
    async def get_tokenizer(self): ...


METHODS = [name for name in vars(Stranger) if not name.startswith("_")]


def test_a_class_that_inherits_nothing_is_a_trainer():
    assert isinstance(Stranger(), Trainer)


@pytest.mark.parametrize("missing", METHODS)
def test_a_class_without_one_of_the_methods_is_no_trainer(missing):
    rest = {name: method for name, method in vars(Stranger).items() if name != missing}
    assert not isinstance(type("Partial", (), rest)(), Trainer)


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_async_and_annotated_with_names_that_resolve(name):
    method = getattr(Trainer, name)
    assert inspect.iscoroutinefunction(method)
    assert {*get_type_hints(method)} == {*inspect.signature(method).parameters, "return"} - {"self"}


def test_methods_take_the_contract_s_parameters_and_defaults():
    def parameters(name: str) -> dict[str, Any]:
        found = list(inspect.signature(getattr(Trainer, name)).parameters.values())[1:]
        assert all(each.kind is each.POSITIONAL_OR_KEYWORD for each in found)
        return {each.name: each.default for each in found}

    required = inspect.Parameter.empty
    assert {name: parameters(name) for name in METHODS} == {
        "forward_backward": {"batch": required, "loss_fn": None},
        "optim_step": {},
        "clear_gradients": {},
        "forward": {"inputs": required},
        "save": {"name": None, "path": None, "weights_only": False},
        "load": {"path": None},
        "get_config": {},
        "get_status": {},
        "get_tokenizer": {},
    }


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (
            TextTrainBatch,
            {
                "input_ids": REQUIRED,
                "target_ids": REQUIRED,
                "target_mask": None,
                "target_weights": None,
            },
        ),
        (ForwardBackwardResult, {"loss": REQUIRED, "metrics": REQUIRED}),
        (
            OptimStepResult,
            {"step": REQUIRED, "learning_rate": REQUIRED, "accumulated_microbatches": REQUIRED},
        ),
        (
            ParallelismConfig,
            {
                "dp_degree": 1,
                "tp_degree": 1,
                "pp_degree": 1,
                "cp_degree": 1,
                "ep_degree": 1,
                "world_size": 1,
                "dp_rank": 0,
                "tp_rank": 0,
                "device": "cpu",
            },
        ),
        (
            TrainerConfig,
            {"model_name": REQUIRED, "model_config": REQUIRED, "parallelism": REQUIRED},
        ),
        (TrainerStatus, {"step": REQUIRED, "accumulated_microbatches": REQUIRED}),
        (
            Metric,
            {"key": REQUIRED, "value": REQUIRED, "reduction": REQUIRED, "timestamp": None},
        ),
        (
            MetricSpec,
            {
                "kind": float,
                "minimum": None,
                "maximum": None,
                "reduction": None,
                "unit": "",
                "required": True,
            },
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_dataclass_fields_in_order_with_defaults(cls, expected):
    assert [(field.name, field.default) for field in fields(cls)] == list(expected.items())


def test_batches_compare_by_identity_since_tensors_have_no_truth_value():
    ids = torch.tensor([[1, 2]])
    batch = TextTrainBatch(ids, ids)
    assert batch == batch
    assert batch != TextTrainBatch(ids, ids)


def test_a_reduction_survives_json():
    assert Reduce(json.loads(json.dumps(Reduce.MAX))) is Reduce.MAX


def test_traits_are_asked_for_one_by_one():
    class Closing:
        async def close(self):
            self.closed = True

    class Declaring(Closing):
        async def metric_schema(self):
            return {"num_tokens": MetricSpec(int, minimum=0, unit="tokens")}

    assert not isinstance(Stranger(), Closable)
    assert isinstance(Closing(), Closable)
    assert not isinstance(Closing(), DeclaresMetrics)
    assert isinstance(Declaring(), DeclaresMetrics)
    assert asyncio.run(Declaring().metric_schema())["num_tokens"].kind is int


def test_everything_public_is_exported_and_documented():
    defined = {
        name
        for module in map(importlib.import_module, MODULES)
        for name, value in vars(module).items()
        if getattr(value, "__module__", "").startswith("forge.") and not name.startswith("_")
    }
    assert set(forge.api.__all__) == defined | {"LossFn"}
    assert list(forge.api.__all__) == sorted(forge.api.__all__)
    assert all(getattr(forge.api, name).__doc__ for name in defined)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_imports_only_torch_and_the_standard_library(source):
    def imported() -> Iterator[str]:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module or ""

    outside = {name.partition(".")[0] for name in imported()} - sys.stdlib_module_names
    assert outside <= {"forge", "torch"}


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_run(module):
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted
    assert results.failed == 0


def test_every_dataclass_protocol_and_method_has_an_example():
    documented = [
        value
        for name in set(forge.api.__all__) - {"LossFn"}
        if inspect.isclass(value := getattr(forge.api, name))
    ]
    documented += [getattr(Trainer, name) for name in METHODS]
    assert [each.__qualname__ for each in documented if ">>>" not in each.__doc__] == []
