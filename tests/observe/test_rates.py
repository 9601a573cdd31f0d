"""The rates that optimizers step with are seen wherever the optimizers are."""

from __future__ import annotations

import torch

from forge_conformance.observe.rates import rates_used


def test_the_rates_of_all_groups_are_seen():
    one, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": [one]}, {"params": [other], "lr": 0.25}], lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    with rates_used() as first:
        optimizer.step()
        schedule.step()
    with rates_used() as second:
        optimizer.step()
    optimizer.step()
    assert (first, second) == ({0.5, 0.25}, {0.25, 0.125})


def test_a_rate_that_is_set_within_the_step_is_seen():
    class Ramps(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["lr"] *= 2
            return super().step(closure)

    optimizer = Ramps([torch.ones(2, requires_grad=True)], lr=0.5)
    with rates_used() as rates:
        optimizer.step()
    assert 1.0 in rates


def test_what_steps_otherwise_is_not_seen():
    with rates_used() as rates:
        torch.ones(2).sub_(0.5)
    assert not rates
