"""What every rank runs for `test_titan_ranks.py`: a trainer of all ranks beside one of this rank.

    torchrun --nproc-per-node=2 -m tests.reference_impls.titan_on_ranks FOLDER …

Each folder has torchtitan's degrees in it, and what is exchanged with the test. The two trainers
get the same calls, and must give the same results.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor
from torchtitan.config import ParallelismConfig

from forge.api import TextTrainBatch
from reference_impls.checkpoints import CheckpointError
from reference_impls.losses import token_mean_loss
from reference_impls.optimization import NonFiniteGradientError
from reference_impls.titan import TitanTrainer
from reference_impls.titan_components import sgd, small_spec

SHAPES = [(3, 7), (1, 5), (2, 12), (5, 1), (1, 1), (4, 64)]
PLAIN_SGD = {"schedule": lambda _: 0.1, "clip_norm": math.inf}


def make_batch(seed, rows, seq):
    """Random tokens of which from none to all are kept, row by row, with uneven weights."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (rows, seq + 1), generator=generator)
    kept = torch.rand(rows, seq, generator=generator) < torch.linspace(0, 1, rows + 1)[1:, None]
    weights = torch.rand(rows, seq, generator=generator) + 0.5
    return TextTrainBatch(tokens[:, :-1], tokens[:, 1:], kept, weights)


BATCHES = [make_batch(seed, *shape) for seed, shape in enumerate(SHAPES)]


# What is compared


def full(tensors):
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in tensors.items()
    }


def weights(trainer):
    return full({name: p.detach().clone() for name, p in trainer.model.named_parameters()})


def gradients(trainer):
    return full({n: p.grad.clone() for n, p in trainer.model.named_parameters()})


def logits(trainer, batch=BATCHES[0]):
    return asyncio.run(trainer.forward({"input_ids": batch.input_ids}))


def assert_equal(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def assert_near(left, right):
    """Each tensor within 1e-5 of its norm."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert (tensor - right[name]).norm() <= 1e-5 * right[name].norm(), name


def assert_same_on_all_ranks(mine):
    everybodys = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, mine)
    for other in everybodys:
        if isinstance(mine, (torch.Tensor, dict)):
            assert_equal(other, mine)
        else:
            assert other == mine


def train(trainer, batches, loss_fn=None):
    """A step for every two microbatches; all that is returned."""

    async def steps():
        results = []
        for number, batch in enumerate(batches):
            result = await trainer.forward_backward(batch, loss_fn)
            results.append((result.loss, result.metrics["num_tokens"]))
            if number % 2:
                step = await trainer.optim_step()
                results.append((step.learning_rate, step.step, step.accumulated_microbatches))
        return results

    return asyncio.run(steps())


# What must hold


def starts_with_the_weights_of_one_rank(make, alone):
    for options in ({}, {"seed": 3}, {"model": small_spec("qwen3", tie_weights=True)}):
        trainer = make(**options)
        assert_equal(weights(trainer), weights(alone(**options)))
        assert_same_on_all_ranks(logits(trainer))


def trains_as_one_rank_does(make, alone):
    for options in (
        {},
        {"model": "qwen3", "clip_norm": 0.1},
        {"model": small_spec("llama3", tie_weights=True), "optimizer": sgd(), **PLAIN_SGD},
    ):
        trainer, other = make(**options), alone(**options)
        results, expected = train(trainer, BATCHES), train(other, BATCHES)
        assert_same_on_all_ranks(results)
        for ours, theirs in zip(results, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        assert_near(weights(trainer), weights(other))
        assert_same_on_all_ranks(logits(trainer))
        assert_same_on_all_ranks(weights(trainer))


def mean_over_rows_then_sum(outputs, batch):
    """Another weight for every row, and logits that are changed in place."""
    cooled = outputs["logits"].div_(0.7)
    nll = torch.nn.functional.cross_entropy(cooled.transpose(1, 2), batch.target_ids)
    return nll * len(batch.target_ids) + (cooled[0] ** 2).sum() + cooled.logsumexp(-1).max()


def differentiates_any_loss_of_the_whole_batch(make, alone):
    trainer, other = make(), alone()
    seen = []

    def spied(outputs, batch):
        seen.append((outputs["logits"].shape, batch.target_ids))
        return mean_over_rows_then_sum(outputs, batch)

    for batch in BATCHES:
        ours = asyncio.run(trainer.forward_backward(batch, spied)).loss
        theirs = asyncio.run(other.forward_backward(batch, mean_over_rows_then_sum)).loss
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert seen[-1][0] == (*batch.input_ids.shape, 256)
        assert_equal(seen[-1][1], batch.target_ids)
    assert_near(gradients(trainer), gradients(other))


def is_last():
    return dist.get_rank() == dist.get_world_size() - 1


def raises(*_):
    raise ArithmeticError("on purpose")


class CannotBeMadeAgain(Exception):
    def __init__(self, what, why):
        super().__init__(f"{what}, {why}")


def raises_what_cannot_travel(*_):
    raise CannotBeMadeAgain("on purpose", "too")


class BreaksBackward(torch.autograd.Function):
    forward = staticmethod(lambda _ctx, value: value.clone())
    backward = staticmethod(raises)


def fails_everywhere_if_it_fails_on_one_rank(make, alone):
    trainer, other = make(), alone()

    def breaks_backward(outputs, batch):
        return BreaksBackward.apply(token_mean_loss(outputs, batch))

    def returns_a_number(outputs, batch):
        return token_mean_loss(outputs, batch).item()

    def decays_weights(outputs, batch):
        weight = trainer.model.norm.weight.full_tensor()
        return token_mean_loss(outputs, batch) + weight.norm()

    def on_last(loss_fn):
        return loss_fn if is_last() else token_mean_loss

    def fails(expected, call, *arguments):
        before = gradients(trainer)
        with pytest.raises(expected):
            asyncio.run(call(*arguments))
        assert_equal(gradients(trainer), before)
        assert asyncio.run(trainer.get_status()).accumulated_microbatches == 1

    for each in (trainer, other):
        asyncio.run(each.forward_backward(BATCHES[0]))
    outside = make_batch(0, 2, 4)
    if is_last():
        outside.input_ids[0, 0] = 256
    fails(ArithmeticError, trainer.forward_backward, BATCHES[1], on_last(raises))
    fails(ArithmeticError, trainer.forward_backward, BATCHES[1], on_last(breaks_backward))
    fails(TypeError, trainer.forward_backward, BATCHES[1], on_last(returns_a_number))
    fails(ValueError, trainer.forward_backward, BATCHES[1], decays_weights)
    stand_in = CannotBeMadeAgain if is_last() else RuntimeError
    fails(stand_in, trainer.forward_backward, BATCHES[1], on_last(raises_what_cannot_travel))
    fails(ValueError, trainer.forward_backward, outside)
    fails(ValueError, trainer.forward, {"input_ids": outside.input_ids})
    # A rank's own part instead of the whole batch, as other trainers take it.
    fails(ValueError, trainer.forward_backward, make_batch(dist.get_rank(), 2, 4))
    for each in (trainer, other):
        asyncio.run(each.optim_step())
    # Weights that a failed call has left gathered would be those of before the step.
    torch.testing.assert_close(logits(trainer), logits(other), rtol=1e-5, atol=1e-4)
    for each in (trainer, other):
        train(each, BATCHES)
        asyncio.run(each.forward_backward(BATCHES[0], lambda *a: token_mean_loss(*a) * math.nan))
        with pytest.raises(NonFiniteGradientError):
            asyncio.run(each.optim_step())
    assert_near(weights(trainer), weights(other))


def cannot_be_used_after_half_a_backward(make):
    trainer = make()
    asyncio.run(trainer.forward_backward(BATCHES[0]))
    hook = next(iter(trainer.model.layers.values())).register_full_backward_hook(raises)
    with pytest.raises(ArithmeticError, match="on purpose"):
        asyncio.run(trainer.forward_backward(BATCHES[0]))
    hook.remove()
    for call in (trainer.optim_step(), trainer.forward_backward(BATCHES[0]), trainer.save()):
        with pytest.raises(RuntimeError, match="make a new one on every rank"):
            asyncio.run(call)


def forwards_with_the_weights_of_the_last_step(make, alone):
    trainer, other = make(**PLAIN_SGD, optimizer=sgd()), alone(**PLAIN_SGD, optimizer=sgd())
    for each in (trainer, other):
        train(each, BATCHES[:2])
        logits(each)
        train(each, BATCHES[2:4])
    torch.testing.assert_close(logits(trainer), logits(other), rtol=1e-5, atol=1e-4)


def saves_and_loads_as_one(make, alone, folder):
    trainer = make(seed=5)
    # Of one process, made by the test: it is resumed here, and what is saved here there.
    assert asyncio.run(trainer.load(str(folder / "of one"))) == str(folder / "of one")
    one = alone(seed=6)
    asyncio.run(one.load(str(folder / "of one")))
    assert_equal(weights(trainer), weights(one))
    assert_equal(full(trainer.optimizers.state_dict()), full(one.optimizers.state_dict()))
    train(trainer, BATCHES)
    asyncio.run(trainer.forward_backward(BATCHES[0]))
    before = gradients(trainer)
    path = asyncio.run(trainer.save("of many", path=str(folder)))
    asyncio.run(trainer.save("weights of many", path=str(folder), weights_only=True))
    assert_same_on_all_ranks(path)
    assert_equal(gradients(trainer), before)
    shards = [each.stat().st_size for each in sorted(Path(path, "optimizers").iterdir())]
    if trainer.parallel.dims.dp_replicate == 1:
        assert len(shards) == dist.get_world_size()
        assert max(shards) < 2 * min(shards)
    named = asyncio.run(trainer.save())
    assert Path(named).name == "step-6"
    again = make(seed=7)
    assert asyncio.run(again.load()) == named
    assert_equal(weights(again), weights(trainer))
    one = alone(seed=8)
    asyncio.run(one.load(path))
    assert_equal(weights(one), weights(trainer))
    assert_equal(full(one.optimizers.state_dict()), full(trainer.optimizers.state_dict()))
    asyncio.run(trainer.clear_gradients())
    results = train(trainer, BATCHES)
    assert train(again, BATCHES) == results
    if dist.get_rank() == 0:
        (folder / "afterwards.json").write_text(json.dumps(results))


def names_in(folder):
    """What is there while no rank writes."""
    dist.barrier()
    names = sorted(each.name for each in folder.iterdir())
    dist.barrier()
    return names


def fails_to_save_or_load_everywhere(make, folder):
    trainer = make()
    train(trainer, BATCHES[:2])
    asyncio.run(trainer.forward_backward(BATCHES[0]))
    before = weights(trainer), gradients(trainer), full(trainer.optimizers.state_dict())
    (folder / "no folder").touch()
    for expected, call in (
        (CheckpointError, trainer.save("a", path=str(folder / "no folder"))),
        (ValueError, trainer.save("a/b")),
        (FileNotFoundError, trainer.load(str(folder / "nowhere"))),
        (CheckpointError, trainer.load(str(folder / "damaged"))),
    ):
        with pytest.raises(expected):
            asyncio.run(call)
    saved = names_in(folder)
    with pytest.MonkeyPatch.context() as patch:
        if is_last():
            patch.setattr(HuggingFaceStorageWriter, "write_data", raises)
        with pytest.raises(CheckpointError, match="on rank 1: on purpose"):
            asyncio.run(trainer.save("of many", path=str(folder)))
    with pytest.MonkeyPatch.context() as patch:
        if is_last():
            told = trainer.ranks.from_first
            patch.setattr(trainer.ranks, "from_first", lambda value: told(value) / "not here")
        with pytest.raises(CheckpointError, match=r"rank 1 doesn't see .*not here"):
            asyncio.run(trainer.save("of many", path=str(folder)))
    with pytest.MonkeyPatch.context() as patch:
        if is_last():
            patch.setattr(trainer.store, "read", raises)
        with pytest.raises(ArithmeticError, match="on purpose"):
            asyncio.run(trainer.load(str(folder / "of one")))
    assert names_in(folder) == saved
    after = weights(trainer), gradients(trainer), full(trainer.optimizers.state_dict())
    assert_equal(after, before)


def tells_its_degrees(make, alone):
    trainer = make()
    told = asyncio.run(trainer.get_config()).parallelism
    degrees = trainer.parallel.dims
    assert told.world_size == dist.get_world_size() == told.dp_degree * told.tp_degree
    assert (told.dp_degree, told.tp_degree) == (
        degrees.dp_replicate * degrees.dp_shard,
        degrees.tp,
    )
    assert told.dp_rank * told.tp_degree + told.tp_rank == dist.get_rank()
    assert asyncio.run(alone().get_config()).parallelism.world_size == 1


def makes_no_groups_for_every_trainer(make):
    make()
    before = dist.get_pg_count()
    for _ in range(5):
        asyncio.run(make().close())
    assert dist.get_pg_count() == before
    assert torch.autograd.is_multithreading_enabled()


def keeps_the_contract(folder, degrees):
    make = partial(
        TitanTrainer,
        parallelism=ParallelismConfig(**degrees) if degrees else None,
        checkpoint_dir=folder / "default",
    )
    alone = partial(TitanTrainer, parallelism=ParallelismConfig(data_parallel_shard_degree=1))
    starts_with_the_weights_of_one_rank(make, alone)
    trains_as_one_rank_does(make, alone)
    saves_and_loads_as_one(make, alone, folder)
    tells_its_degrees(make, alone)
    if dist.get_world_size() == 2:  # More ranks than that differ in the above only.
        differentiates_any_loss_of_the_whole_batch(make, alone)
        fails_everywhere_if_it_fails_on_one_rank(make, alone)
        fails_to_save_or_load_everywhere(make, folder)
        cannot_be_used_after_half_a_backward(make)
        forwards_with_the_weights_of_the_last_step(make, alone)
        makes_no_groups_for_every_trainer(make)


if __name__ == "__main__":
    for each in map(Path, sys.argv[1:]):
        print(f"In {each.name}:", flush=True)
        keeps_the_contract(each, json.loads((each / "degrees.json").read_text()))
