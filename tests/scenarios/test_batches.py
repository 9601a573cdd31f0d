"""Batches that the kit draws: within what the trainer takes, and ragged enough to show faults."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from forge.api import TextTrainBatch
from forge_conformance.scenarios.batches import LaterChange, batches, later_change, make_batch
from forge_conformance.scenarios.domain import Domain
from forge_conformance.scenarios.failures import bad_batches
from forge_conformance.scenarios.losses import every_logit, mean_nll, summed_nll, times

SMALL = Domain(vocab_size=37, max_seq_len=8)
COMPILED = Domain(vocab_size=37, max_seq_len=8, declared_shapes=[(2, 8), (4, 4)])


@pytest.mark.parametrize("domain", [SMALL, COMPILED])
def test_drawn_batches_are_ones_that_the_trainer_takes(domain: Domain) -> None:
    @hypothesis.given(batches()(domain))
    def check(batch: TextTrainBatch) -> None:
        assert domain.takes(tuple(batch.input_ids.shape))
        for ids in (batch.input_ids, batch.target_ids):
            assert ids.dtype == torch.int64
            assert 0 <= int(ids.min()) <= int(ids.max()) < domain.vocab_size
        if batch.target_mask is not None:
            assert batch.target_mask.any()

    check()


def test_a_ragged_mask_keeps_none_one_and_many_targets() -> None:
    batch = make_batch(SMALL, (4, 8), mask="ragged")
    assert batch.target_mask is not None
    kept = batch.target_mask.sum(1)
    assert kept[0] == 0
    assert kept[1] == 1
    assert kept[2:].max() > 1


def test_fractional_weights_leave_the_loss_something() -> None:
    for seed in range(50):
        batch = make_batch(SMALL, (2, 2), seed, mask="one", weights="fractional")
        logits = torch.randn(2, 2, 37)
        assert summed_nll({"logits": logits}, batch) > 0


def test_a_later_change_leaves_what_comes_before() -> None:
    @hypothesis.given(later_change()(SMALL))
    def check(change: LaterChange) -> None:
        before, after = change.ids[:, : change.position], change.changed_ids[:, : change.position]
        assert torch.equal(before, after)
        assert not torch.equal(change.ids, change.changed_ids)

    check()


def test_shapes_too_small_for_a_check_can_not_be_drawn() -> None:
    only_one_position = Domain(vocab_size=37, declared_shapes=[(4, 1)])
    assert only_one_position.shapes(min_seq=2).is_empty
    assert not only_one_position.shapes(min_batch=2).is_empty


def test_every_bad_batch_differs_from_the_good_one() -> None:
    good = make_batch(SMALL, SMALL.usual_shape, mask="all", weights="ones")
    for what, bad in bad_batches(SMALL).items():
        fields = ("input_ids", "target_ids", "target_mask", "target_weights")
        pairs = [(getattr(good, name), getattr(bad, name)) for name in fields]
        changed = [
            left is None
            or right is None
            or left.dtype != right.dtype
            or left.shape != right.shape
            or not torch.equal(left, right)
            for left, right in pairs
        ]
        assert any(changed), what


def test_custom_losses_are_scalars_of_every_batch() -> None:
    @hypothesis.given(batches()(SMALL), st.sampled_from([mean_nll, summed_nll, every_logit]))
    def check(batch: TextTrainBatch, loss: object) -> None:
        logits = torch.randn(*batch.input_ids.shape, 37, requires_grad=True)
        value = times(2.0, loss)({"logits": logits}, batch)  # type: ignore[arg-type]
        assert value.shape == ()
        assert value.requires_grad

    check()
