"""What a trainer has returned, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from forge.api import Metric, Reduce
from forge_conformance.observe.values import changed, difference, leaves, numbers_of


@dataclass
class Model:
    name: str = "tiny"
    facts: dict[str, Any] = field(default_factory=lambda: {"rope": {"factor": 8}, "sizes": [4, 8]})


def test_leaves_are_named_by_their_path() -> None:
    assert leaves(Model()) == {
        ("name",): "tiny",
        ("facts", "rope", "factor"): 8,
        ("facts", "sizes", "[0]"): 4,
        ("facts", "sizes", "[1]"): 8,
    }


def test_leaves_dont_follow_a_tensor() -> None:
    weight = torch.ones(2)
    before = leaves({"norm": Metric("norm", weight, Reduce.MEAN)})
    weight.zero_()
    assert before["norm", "value"].tolist() == [1, 1]


def test_a_cycle_ends() -> None:
    value: list[Any] = []
    value.append(value)
    assert list(leaves(value).values()) == ["…"]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"a": 1}, {"a": 2}, ("a = 1", "2")),
        ({"a": 1}, {}, ("a = 1", "gone")),
        ({"a": {}}, {"a": {"b": 1}}, ("a = 'empty dict'", "gone")),
        ({"a": float("nan")}, {"a": float("nan")}, None),
        ({"a": torch.ones(1)}, {"a": torch.ones(1)}, None),
    ],
)
def test_difference(before: Any, after: Any, told: tuple[str, str] | None) -> None:
    assert difference(leaves(after), leaves(before)) == told


def test_changed_reaches_all_and_puts_it_back() -> None:
    model = Model()
    before = leaves(model)
    with changed(model):
        during = leaves(model)
        assert not [path for path in before if during.get(path) == before[path]]
    assert leaves(model) == before


def test_numbers_of_leaves_booleans_out() -> None:
    assert numbers_of(True) == numbers_of("1") == []
    assert numbers_of(torch.tensor([1, 2])) == [1.0, 2.0]
    assert numbers_of(10**400)[0] < float("inf")
