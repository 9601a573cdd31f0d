"""Parameters are read whole where they are small, by a part where they are large."""

from __future__ import annotations

import torch

from forge_conformance.observe import parameters
from forge_conformance.observe.parameters import Parameters, copy_of, part_of


def test_of_a_large_tensor_a_part_is_read_that_spreads_over_rows_and_columns(monkeypatch):
    monkeypatch.setattr(parameters, "LARGEST", 100)
    large = torch.arange(10_000).view(100, 100)
    part = part_of(large)
    assert part.numel() <= 100
    assert len({int(entry) % 100 for entry in part}) > 50
    assert len({int(entry) // 100 for entry in part}) > 50
    assert torch.equal(copy_of(large.t().contiguous().t()), part)


def test_a_large_tensor_can_be_changed_through_its_part(monkeypatch):
    monkeypatch.setattr(parameters, "LARGEST", 100)
    large = torch.zeros(100, 100)
    part_of(large).fill_(1)
    assert 50 < large.sum() <= 100


def test_of_a_large_model_some_parameters_are_copied_whole(monkeypatch):
    monkeypatch.setattr(parameters, "MOST_AT_ONCE", 25)
    tensors = {f"layer {number}": torch.ones(10, requires_grad=True) for number in range(5)}
    found = Parameters.with_grad_attribute(tensors)
    choices = {tuple(found.some(seed)) for seed in range(10)}
    assert {len(names) for names in choices} == {2}
    assert len({name for names in choices for name in names}) == 5
    assert found.whole_weights(["layer 3"])["layer 3"].shape == (10,)


def test_the_norm_is_that_of_all_gradients():
    tensors = {name: torch.zeros(1, requires_grad=True) for name in ("three", "four", "none")}
    for name, size in (("three", 3.0), ("four", 4.0)):
        tensors[name].grad = torch.tensor([size])
    assert Parameters.with_grad_attribute(tensors).gradient_norm() == 5
