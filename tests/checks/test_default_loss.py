"""What of a default loss can be seen in the number that a trainer reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch import Tensor

from forge.api import TextTrainBatch
from forge_conformance.checks.default_loss import expect_kept_targets_counted
from forge_conformance.finding import Broken
from forge_conformance.lab import Lab
from forge_conformance.scenarios.batches import make_batch
from forge_conformance.target import Target
from reference_impls.plain import PlainTrainer
from tests.faults.honest_training import HoldsATransformersModelInBfloat16

MANY = (4, 64)


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    lab = Lab(Target(request.param), timeout=20)
    yield lab
    lab.close()


def judge_places(lab: Lab) -> None:
    batch = make_batch(lab.domain, MANY, seed=0, mask="all")
    logits = lab.trainer.forward(batch.input_ids)
    for place in range(8):
        expect_kept_targets_counted(lab, batch, logits, place)


@pytest.mark.parametrize("lab", [HoldsATransformersModelInBfloat16], indirect=True)
def test_a_loss_in_16_bits_need_not_tell_one_target_among_many(lab: Lab) -> None:
    judge_places(lab)


class CountsTheFirstRowOnly(PlainTrainer):
    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        targets = batch.target_ids.clone()
        targets[1:] = 0
        loss = super()._default_loss(logits, replace(batch, target_ids=targets))
        return loss + (loss.bfloat16().float() - loss).detach()


@pytest.mark.parametrize("lab", [CountsTheFirstRowOnly], indirect=True)
def test_a_target_alone_shows_in_a_coarse_loss_too(lab: Lab) -> None:
    with pytest.raises(Broken, match="another loss for another id at the kept target"):
        judge_places(lab)
