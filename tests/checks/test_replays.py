"""Updates beside the declared optimizer's: which errors are rounding, and which trainings end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch

from forge.api import TextTrainBatch
from forge_conformance.checks.replays import expect_declared_updates
from forge_conformance.finding import Broken
from forge_conformance.lab import Lab
from forge_conformance.scenarios.losses import mean_nll, times
from reference_impls.optimization import adamw
from reference_impls.plain import PlainTrainer
from tests.faults.declared import declared
from tests.faults.honest_training import uses_adam, uses_nesterov


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    lab = Lab(request.param, timeout=20)
    yield lab
    lab.close()


def batch(input_ids: list[list[int]], target_ids: list[list[int]]) -> TextTrainBatch:
    return TextTrainBatch(torch.tensor(input_ids), torch.tensor(target_ids))


ONE = batch([[172]], [[47]])
ANOTHER = batch([[37]], [[235]])
TEN = batch(
    [[49, 53, 33, 255, 109], [172, 0, 113, 148, 118]],
    [[81, 119, 179, 80, 154], [137, 202, 225, 213, 250]],
)


@pytest.mark.parametrize("lab", [uses_adam()], indirect=True)
def test_where_decay_cancels_a_gradient_its_last_places_decide(lab: Lab) -> None:
    expect_declared_updates(lab, [[TEN], [ONE, TEN, ONE]], mean_nll)


@pytest.mark.parametrize("lab", [uses_nesterov()], indirect=True)
def test_a_training_is_followed_until_it_diverges(lab: Lab) -> None:
    rounds = [[ONE], [ANOTHER, ONE, ANOTHER], [ANOTHER]]
    expect_declared_updates(lab, rounds * 4, times(1000, mean_nll))


def adamw_with_a_larger_epsilon(parameters: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
    optimizer = adamw(parameters)
    for group in optimizer.param_groups:
        group["eps"] = 2e-8
    return optimizer


@pytest.mark.parametrize(
    "lab",
    [
        replace(
            declared(PlainTrainer),
            factory=partial(PlainTrainer, optimizer=adamw_with_a_larger_epsilon),
        )
    ],
    indirect=True,
)
def test_twice_the_declared_epsilon_is_no_rounding(lab: Lab) -> None:
    with pytest.raises(Broken, match="as the declared optimizer moves it"):
        expect_declared_updates(lab, [[TEN]], mean_nll)
