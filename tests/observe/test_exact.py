"""A forward pass that asks for less precision is run in float64 all the same."""

from __future__ import annotations

import torch

from forge_conformance.observe.exact import in_float64
from forge_conformance.oracle.tolerance import apart


def model(dtype: torch.dtype, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = (torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8), torch.nn.RMSNorm(8))
    values = torch.nn.Sequential(*layers, torch.nn.Linear(8, 16)).bfloat16()
    return values.to(dtype)


IDS = torch.arange(16)


def test_narrow_weights_are_computed_with_in_float64():
    exact = model(torch.float64)(IDS)
    narrow = model(torch.bfloat16)
    assert apart(narrow(IDS), exact) > 1e-3
    assert apart(in_float64(lambda: narrow(IDS)), exact) < 1e-12


def test_autocast_narrows_nothing():
    exact, single = model(torch.float64)(IDS), model(torch.float32)

    def compute():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return single(IDS).float()

    assert apart(compute(), exact) > 1e-3
    assert apart(in_float64(compute), exact) < 1e-12


def test_weights_stay_what_they_are():
    narrow = model(torch.bfloat16)
    before = {name: weight.clone() for name, weight in narrow.named_parameters()}
    in_float64(lambda: narrow(IDS))
    for name, weight in narrow.named_parameters():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, before[name])
