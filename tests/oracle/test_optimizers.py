"""Replaying a declared optimizer on copies of the parameters."""

from __future__ import annotations

import math

import pytest
import torch

from forge_conformance.oracle.optimizers import Replay, total_norm

WEIGHTS = {"matrix": torch.ones(2, 2), "vector": torch.ones(2)}
GRADIENTS = {"matrix": torch.full((2, 2), 3.0), "vector": torch.full((2,), 4.0)}


def sgd(parameters: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters.values()), lr=1.0)


def test_plain_sgd_moves_by_rate_times_gradient() -> None:
    moved = Replay(sgd, WEIGHTS, torch.float64, math.inf).step(GRADIENTS, learning_rate=0.1)
    assert moved["matrix"].dtype == torch.float64
    torch.testing.assert_close(moved["matrix"], torch.full((2, 2), 0.7, dtype=torch.float64))


def test_gradients_are_clipped_by_their_total_norm() -> None:
    norm = total_norm(GRADIENTS)
    moved = Replay(sgd, WEIGHTS, torch.float64, clip_norm=norm / 2).step(GRADIENTS, 0.1)
    assert moved["vector"][0].item() == pytest.approx(1 - 0.1 * 2, rel=1e-5)


def test_groups_keep_the_ratio_of_their_rates() -> None:
    def two_rates(parameters: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
        matrix, vector = parameters.values()
        return torch.optim.SGD([{"params": [matrix], "lr": 1.0}, {"params": [vector], "lr": 0.5}])

    moved = Replay(two_rates, WEIGHTS, torch.float64, math.inf).step(GRADIENTS, 0.1)
    assert moved["matrix"][0, 0].item() == pytest.approx(1 - 0.1 * 3)
    assert moved["vector"][0].item() == pytest.approx(1 - 0.05 * 4)


def test_the_replay_leaves_the_weights_it_was_given() -> None:
    Replay(sgd, WEIGHTS, None, math.inf).step(GRADIENTS, 0.1)
    assert WEIGHTS["matrix"].eq(1).all()
