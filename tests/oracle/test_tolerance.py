"""The tolerance rule: what honest arithmetic does passes, what a fault does fails."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from forge_conformance.oracle.tolerance import (
    Arithmetic,
    apart,
    gradients_error,
    logits_error,
    noise,
    tensors_apart,
    value_error,
)
from reference_impls.plain import PlainTrainer


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_noise_is_of_the_size_of_the_dtypes_unit(dtype: torch.dtype) -> None:
    unit = torch.finfo(dtype).eps
    measured = noise(dtype)
    assert 0.1 * unit < measured.logits < 50 * unit
    assert 0.1 * unit < measured.gradients < 100 * unit


def test_a_wider_dtype_is_allowed_less() -> None:
    double, single, half = map(Arithmetic, (torch.float64, torch.float32, torch.bfloat16))
    assert logits_error(double).error < logits_error(single).error < logits_error(half).error
    assert gradients_error(single).error < 1e-4


def test_a_reordered_sum_passes_and_one_percent_does_not() -> None:
    values = torch.randn(100, 64)
    reordered = values.flip(0).sum(0)
    allowed = logits_error(Arithmetic(torch.float32)).error
    assert apart(reordered, values.sum(0)) <= allowed
    assert apart(1.01 * reordered, values.sum(0)) > allowed


def test_a_deeper_model_is_allowed_more() -> None:
    shallow, deep = (logits_error(Arithmetic(torch.float32, layers)).error for layers in (2, 32))
    assert shallow < deep < 8 * shallow


def test_the_error_of_plain_pytorch_sets_the_limit_of_a_value() -> None:
    tight = value_error(exact=2.0, plain=2.0, dtype=torch.float32)
    loose = value_error(exact=2.0, plain=2.01, dtype=torch.float32)
    assert tight.error == pytest.approx(4 * 2 * torch.finfo(torch.float32).eps)
    assert loose.error == pytest.approx(0.03, rel=1e-3)
    assert "units in the last place" in tight.why


def test_non_finite_values_are_infinitely_apart() -> None:
    assert apart(torch.tensor([math.nan]), torch.tensor([1.0])) == math.inf


def test_a_missing_tensor_counts_as_zero() -> None:
    weight = torch.ones(3)
    name, distance = tensors_apart({}, {"weight": weight}, floor=0.01)
    assert (name, round(distance, 2)) == ("weight", 0.99)
    assert tensors_apart({"weight": torch.zeros(3)}, {}, floor=0.01) == ("no tensor", 0.0)


def test_rounding_in_a_gradient_that_ought_to_be_zero_is_no_difference() -> None:
    large = torch.ones(100)
    name, distance = tensors_apart(
        {"weight": large, "key bias": torch.tensor([2e-9])},
        {"weight": large, "key bias": torch.tensor([-1e-9])},
        floor=0.01,
    )
    assert (name, distance < 1e-7) == ("key bias", True)


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_gradients_of_attention_to_a_single_token_are_rounding_alone(scale: float) -> None:
    """Those of queries and keys vanish, and what rounding leaves of them is allowed to differ."""
    torch.manual_seed(0)
    model = PlainTrainer().model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    allowed = gradients_error(Arithmetic(torch.float32))
    worst = worst_beside_a_hundredth = 0.0
    for _ in range(60):
        ids, targets = torch.randint(256, (2, 3, 2))
        together = gradients_of_first_tokens(model, (ids, targets))
        rows = zip(ids.split(1), targets.split(1), strict=True)
        apart = gradients_of_first_tokens(model, *rows)
        worst = max(worst, tensors_apart(apart, together, allowed.floor)[1])
        beside_a_hundredth = tensors_apart(apart, together, floor=0.01)[1]
        worst_beside_a_hundredth = max(worst_beside_a_hundredth, beside_a_hundredth)
    assert worst <= allowed.error < worst_beside_a_hundredth


def gradients_of_first_tokens(
    model: torch.nn.Module, *batches: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for ids, targets in batches:
        cross_entropy(model(ids)[:, 0], targets[:, 0], reduction="sum").backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
