"""What training with the reference trainers is like, and what failures leave behind."""

from __future__ import annotations

import asyncio
import math
import random
from types import SimpleNamespace

import pytest
import torch

from forge.api import Closable, DeclaresMetrics, TextTrainBatch, Trainer
from reference_impls.losses import token_mean_loss
from reference_impls.optimization import adamw, sgd
from reference_impls.plain import PlainTrainer


async def train(trainer, batches):
    """One step per batch; the losses."""
    losses = []
    for batch in batches:
        losses.append((await trainer.forward_backward(batch)).loss)
        await trainer.optim_step()
    return losses


def gradients(trainer):
    return [None if p.grad is None else p.grad.clone() for p in trainer.model.parameters()]


def assert_equal(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def logits(trainer, batch):
    return asyncio.run(trainer.forward({"input_ids": batch.input_ids}))


def test_is_a_trainer_with_a_schema(make):
    trainer = make()
    assert isinstance(trainer, Trainer)
    assert isinstance(trainer, Closable)
    assert isinstance(trainer, DeclaresMetrics)


def test_learns_a_batch(make, make_batch):
    losses = asyncio.run(train(make(), [make_batch()] * 30))
    assert losses[-1] < losses[0] / 3


def test_forward_disturbs_nothing_and_repeats_itself(make, make_batch):
    async def losses(trainer, look):
        seen = []
        for seed in range(4):
            if look:
                first = await trainer.forward({"input_ids": make_batch(seed).input_ids})
                again = await trainer.forward({"input_ids": make_batch(seed).input_ids})
                assert torch.equal(first, again)
                assert not first.requires_grad
            seen += await train(trainer, [make_batch(seed)])
        return seen

    assert asyncio.run(losses(make(), look=True)) == asyncio.run(losses(make(), look=False))


def test_equal_seeds_agree_bitwise_and_others_differ(make, make_batch):
    batches = [make_batch(seed) for seed in range(4)]
    first, second, other = (asyncio.run(train(make(seed=s), batches)) for s in (0, 0, 1))
    assert first == second != other


def test_steps_follow_the_schedule_whatever_the_number_of_microbatches(make_batch):
    async def steps():
        trainer = PlainTrainer(schedule=lambda position: 0.1 * position)
        results = []
        for microbatches in (1, 3):
            for _ in range(microbatches):
                await trainer.forward_backward(make_batch())
            results.append(await trainer.optim_step())
        return results

    first, second = asyncio.run(steps())
    assert (first.step, first.learning_rate, first.accumulated_microbatches) == (1, 0.1, 1)
    assert (second.step, second.learning_rate, second.accumulated_microbatches) == (2, 0.2, 3)


def test_a_step_moves_weights_by_the_clipped_gradient(make_batch):
    trainer = PlainTrainer(optimizer=sgd, schedule=lambda _: 0.5, clip_norm=0.25)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    asyncio.run(train(trainer, [make_batch()]))
    moves = [b - p.detach() for b, p in zip(before, trainer.model.parameters(), strict=True)]
    assert torch.nn.utils.get_total_norm(moves).item() == pytest.approx(0.5 * 0.25, rel=1e-4)


def test_matrices_decay_and_vectors_dont():
    matrix, vector = torch.ones(2, 2), torch.ones(2)
    optimizer = adamw({"matrix": matrix, "vector": vector})
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert (matrix < 1).all()
    assert (vector == 1).all()


def test_the_configuration_is_the_callers_own_copy(make):
    trainer = make()
    config = asyncio.run(trainer.get_config())
    config.model_config["vocab_size"] = config.parallelism.world_size = 7
    again = asyncio.run(trainer.get_config())
    assert (again.model_config["vocab_size"], again.parallelism.world_size) == (256, 1)


def test_gradients_of_microbatches_add_up(make_batch):
    first, second, both = PlainTrainer(), PlainTrainer(), PlainTrainer()
    for trainer, seeds in ((first, [0]), (second, [1]), (both, [0, 1])):
        for seed in seeds:
            asyncio.run(trainer.forward_backward(make_batch(seed)))
    pairs = zip(gradients(first), gradients(second), strict=True)
    assert_equal(gradients(both), [one + other for one, other in pairs])


def test_tied_weights_are_one_tensor():
    tied = PlainTrainer(tie_weights=True).model
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_a_masked_position_is_context_all_the_same(make, make_batch):
    """The mask is about targets: the logits don't depend on it."""

    def training_logits(batch):
        seen = []

        def loss_fn(outputs, batch):
            seen.append(outputs["logits"].detach())
            return outputs["logits"].sum()

        asyncio.run(make().forward_backward(batch, loss_fn))
        return seen[0]

    masked = make_batch(target_mask=torch.zeros(2, 12))
    assert_equal(training_logits(masked), training_logits(make_batch()))


def test_overlapping_calls_run_in_the_order_they_were_issued(make, make_batch):
    first, second = make_batch(0), make_batch(1)

    async def overlapping(trainer):
        *_, step = await asyncio.gather(
            trainer.forward_backward(first), trainer.forward_backward(second), trainer.optim_step()
        )
        return step

    async def sequential(trainer):
        await trainer.forward_backward(first)
        await trainer.forward_backward(second)
        return await trainer.optim_step()

    left, right = make(), make()
    assert asyncio.run(overlapping(left)) == asyncio.run(sequential(right))
    assert_equal(logits(left, first), logits(right, first))


def test_the_callers_random_streams_are_left_alone(make, make_batch):
    before = torch.get_rng_state(), random.getstate()
    asyncio.run(train(make(), [make_batch()] * 2))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_the_callers_random_streams_dont_matter(make, make_batch):
    def losses(seed):
        torch.manual_seed(seed)
        return asyncio.run(train(make(), [make_batch()] * 3))

    with torch.random.fork_rng():
        assert losses(1) == losses(2)


# Failures


def test_no_step_without_a_gradient(make):
    trainer = make()
    with pytest.raises(RuntimeError, match="call forward_backward first"):
        asyncio.run(trainer.optim_step())
    assert asyncio.run(trainer.get_status()).step == 0


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("in backward")


def raises(outputs, batch):
    raise LookupError("in the loss")


def fails_in_backward(outputs, batch):
    half = outputs["logits"].shape[1] // 2
    early, late = outputs["logits"][:, :half], outputs["logits"][:, half:]
    return early.sum() + FailsInBackward.apply(late).sum()


@pytest.mark.parametrize(
    ("loss_fn", "error"),
    [
        (raises, LookupError),
        (fails_in_backward, ArithmeticError),
        (lambda outputs, batch: outputs["logits"].sum(-1), ValueError),
        (lambda outputs, batch: outputs["logits"].detach().sum(), ValueError),
        (lambda outputs, batch: 1.0, TypeError),
    ],
)
def test_a_failed_call_changes_nothing(make, make_batch, loss_fn, error):
    trainer, batch = make(), make_batch()
    asyncio.run(trainer.forward_backward(batch))
    before = gradients(trainer), asyncio.run(trainer.get_status()), logits(trainer, batch)
    with pytest.raises(error):
        asyncio.run(trainer.forward_backward(batch, loss_fn))
    after = gradients(trainer), asyncio.run(trainer.get_status()), logits(trainer, batch)
    assert after[1] == before[1]
    assert_equal(after[0], before[0])
    assert_equal(after[2], before[2])


def test_a_non_finite_gradient_is_shown_and_not_applied(make, make_batch):
    trainer, batch = make(), make_batch()
    before = logits(trainer, batch)
    weights = batch.target_weights.clone()
    weights[batch.target_mask] = math.nan
    result = asyncio.run(trainer.forward_backward(make_batch(target_weights=weights)))
    assert math.isnan(result.loss)
    assert math.isnan(result.metrics["loss"])
    with pytest.raises(ArithmeticError, match="nothing was applied"):
        asyncio.run(trainer.optim_step())
    status = asyncio.run(trainer.get_status())
    assert (status.step, status.accumulated_microbatches) == (0, 0)
    assert_equal(logits(trainer, batch), before)
    assert all(p.grad is None for p in trainer.model.parameters())


def test_a_batch_that_keeps_nothing_has_no_effect(make, make_batch):
    trainer = make()
    nothing = make_batch(target_mask=torch.zeros(2, 12), target_ids=torch.full((2, 12), -100))
    result = asyncio.run(trainer.forward_backward(nothing))
    assert result.loss == 0.0
    assert result.metrics["num_tokens"] == 0
    assert not any(g is not None and g.any() for g in gradients(trainer))


def test_non_finite_numbers_at_positions_without_a_part_dont_leak():
    target_ids, mask = torch.tensor([[1, 1, 1]]), torch.tensor([[1, 0, 1]])
    batch = TextTrainBatch(target_ids, target_ids, mask, torch.tensor([[2.0, math.nan, 0.0]]))
    logits = torch.zeros(1, 3, 4)
    logits[0, 1:] = math.nan
    logits.requires_grad_()
    loss = token_mean_loss({"logits": logits}, batch)
    loss.backward()
    assert loss.item() == pytest.approx(2 * math.log(4) / 2)  # 2 kept targets, weights 2 and 0
    assert logits.grad.isfinite().all()
    assert not logits.grad[0, 1:].any()


def test_a_loss_of_ones_own(make, make_batch):
    seen = []

    def summed(outputs, batch):
        seen.append(SimpleNamespace(shape=outputs["logits"].shape, ids=batch.input_ids))
        return 2 * token_mean_loss(outputs, batch)

    trainer, batch = make(), make_batch()
    asyncio.run(trainer.forward_backward(batch, summed))
    doubled = gradients(trainer)
    assert seen[0].shape == (2, 12, 256)
    assert torch.equal(seen[0].ids, batch.input_ids)
    other = make()
    asyncio.run(other.forward_backward(batch))
    assert_equal(doubled, [2 * g for g in gradients(other)])
