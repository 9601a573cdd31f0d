"""How accumulated gradients are compared where the arithmetic is the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from forge_conformance.checks.comparing import expect_same_effect
from forge_conformance.effects import Effect
from forge_conformance.finding import Broken
from forge_conformance.lab import Lab
from forge_conformance.target import Target
from reference_impls.plain import PlainTrainer

UNDERFLOWING = 3e-45


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab(Target(PlainTrainer), timeout=20)
    yield lab
    lab.close()


def gradient(*numbers: float) -> Effect:
    return Effect({"weight": torch.tensor(numbers)}, from_gradients=True)


def test_halves_may_differ_by_what_underflows(lab: Lab) -> None:
    halves, once = gradient(1.0, 0.0), gradient(1.0, UNDERFLOWING)
    expect_same_effect(lab, halves, once, "halves as one", exact=True, halved=True)
    with pytest.raises(Broken, match="halves as one"):
        expect_same_effect(lab, halves, once, "halves as one", exact=True)


def test_halves_may_not_differ_by_a_unit_in_the_last_place(lab: Lab) -> None:
    halves, once = gradient(1.0, 1e-20), gradient(1.0, 1e-20 * (1 + 2**-22))
    with pytest.raises(Broken) as found:
        expect_same_effect(lab, halves, once, "halves as one", exact=True, halved=True)
    assert found.value.apart == (
        "relative distance 2.4e-27; allowed 9.9e-32 (bitwise expected but for what underflows in "
        "float32)"
    )
