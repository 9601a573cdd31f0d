"""`MonarchTrainer`: as a trainer of this process, whatever becomes of its own processes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from forge.api import Closable, DeclaresMetrics, TextTrainBatch, Trainer

pytest.importorskip("torchtitan", reason="needs torchtitan: pip install -e '.[titan]'")
pytest.importorskip("monarch", reason="needs torchmonarch: pip install -e '.[monarch]'")

from reference_impls.monarch import TrainerClosedError, TrainerLostError, spawn_titan
from reference_impls.titan import TitanTrainer


def run(coroutine):
    """In a new event loop, as each test of an application may."""
    return asyncio.run(asyncio.wait_for(coroutine, 120))


@pytest.fixture(scope="module")
def spawned_in(tmp_path_factory):
    return tmp_path_factory.mktemp("spawned in")


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """A folder that this process imports from."""
    folder = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture(scope="module")
def shared(spawned_in, modules):
    """One for all tests that leave it alive, whatever they train."""
    with contextlib.chdir(spawned_in):
        trainer = run(spawn_titan())
    yield trainer
    run(trainer.close())


@pytest.fixture
def trainer(shared):
    run(shared.clear_gradients())
    return shared


@pytest.fixture
def batch(make_batch):
    return make_batch()


async def train(trainer, batches):
    """One step per batch; all that the calls return."""
    results = []
    for batch in batches:
        results.append(await trainer.forward_backward(batch))
        results.append(await trainer.optim_step())
    return results


def mean_logit(outputs, batch):
    return outputs["logits"].mean()


def slow_loss(outputs, batch):
    time.sleep(30)
    return outputs["logits"].mean()


def assert_gone(pids, within=0.0):
    end = time.monotonic() + within
    while any(map(is_there, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_there, pids))


def is_there(pid):
    return Path(f"/proc/{pid}").exists()


def pids_of(trainer):
    return list(trainer._processes.pids)


def children():
    """The processes that this one has started and not yet buried."""
    listed = subprocess.run(
        ["ps", "--no-headers", "-o", "pid,args", "--ppid", str(os.getpid())],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    return {int(line.split()[0]) for line in listed.splitlines() if "monarch" in line}


# A trainer like any other


def test_gives_bitwise_what_the_trainer_gives_in_this_process(make_batch, tmp_path):
    async def both():
        batches = [make_batch(seed) for seed in range(3)]
        here, there = TitanTrainer(seed=7), await spawn_titan(seed=7, checkpoint_dir=tmp_path)
        try:
            assert isinstance(there, Trainer)
            assert isinstance(there, Closable)
            assert isinstance(there, DeclaresMetrics)
            assert await train(there, batches) == await train(here, batches)
            for ask in ("get_config", "get_status", "metric_schema"):
                assert await getattr(there, ask)() == await getattr(here, ask)()
            assert (await there.get_tokenizer()).encode("é") == [0xC3, 0xA9]
            inputs = {"input_ids": batches[0].input_ids}
            torch.testing.assert_close(
                await there.forward(inputs), await here.forward(inputs), rtol=0, atol=0
            )
            saved = await there.save("three")
            assert saved == str(tmp_path / "three")
            assert await TitanTrainer().load(saved) == saved
        finally:
            await there.close()

    run(both())


def test_serves_one_event_loop_after_another_in_any_thread(trainer, batch):
    run(trainer.forward_backward(batch))
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        assert thread.submit(run, trainer.get_status()).result().accumulated_microbatches == 1
    assert run(trainer.optim_step()).accumulated_microbatches == 1


def test_overlapping_calls_run_in_the_order_they_were_issued(trainer, batch):
    async def overlapping():
        return await asyncio.gather(
            trainer.forward_backward(batch),
            trainer.forward_backward(batch),
            trainer.get_status(),
            trainer.optim_step(),
            trainer.forward_backward(batch),
            trainer.get_status(),
        )

    _, _, first, update, _, second = run(overlapping())
    assert (first.accumulated_microbatches, update.accumulated_microbatches) == (2, 2)
    assert (second.step, second.accumulated_microbatches) == (first.step + 1, 1)


def test_a_cancelled_call_is_completed_before_later_ones(trainer, batch):
    def half_a_second(outputs, batch):
        time.sleep(0.5)
        return outputs["logits"].mean()

    async def cancelled():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(trainer.forward_backward(batch, half_a_second), 0.1)
        return await trainer.get_status()

    assert run(cancelled()).accumulated_microbatches == 1


def test_a_call_that_is_cancelled_before_it_began_never_begins(trainer, batch):
    async def cancelled():
        task = asyncio.create_task(trainer.forward_backward(batch))
        task.cancel()
        return await trainer.get_status()

    assert run(cancelled()).accumulated_microbatches == 0


def test_relative_paths_are_of_the_callers_folder(trainer, spawned_in, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = run(trainer.save("one", path="in here"))
    assert saved == str(tmp_path / "in here" / "one")
    assert run(trainer.load("in here/one")) == saved
    assert run(trainer.save("two")) == str(spawned_in / "checkpoints" / "two")


# What travels


def test_a_loss_travels_with_the_tensors_it_captures(trainer, batch):
    factor, seen = torch.tensor(3.0), []

    def scaled(outputs, batch):
        seen.append(batch)
        return factor * mean_logit(outputs, batch)

    once = run(trainer.forward_backward(batch, mean_logit)).loss
    assert run(trainer.forward_backward(batch, scaled)).loss == pytest.approx(3 * once)
    assert seen == []


def test_a_loss_is_found_there_wherever_it_was_imported_from(trainer, batch, modules):
    text = 'def loss(outputs, batch):\n    return outputs["logits"].mean()\n'
    (modules / "losses_of_the_caller.py").write_text(text)
    loss_fn = importlib.import_module("losses_of_the_caller").loss
    expected = run(trainer.forward_backward(batch, mean_logit)).loss
    assert run(trainer.forward_backward(batch, loss_fn)).loss == expected


@pytest.mark.parametrize("what", [threading.Lock(), (number for number in range(3))])
def test_a_loss_that_cannot_travel_is_refused_before_it_does(trainer, batch, what):
    with pytest.raises(TypeError, match=r"can't travel .* let functions capture tensors"):
        run(trainer.forward_backward(batch, lambda outputs, _batch: what))
    assert run(trainer.get_status()).accumulated_microbatches == 0


def test_of_a_large_storage_only_the_batch_travels(trainer):
    tokens = torch.zeros(1000, 8, dtype=torch.int64)

    def sizes(outputs, batch):
        raise ValueError(batch.input_ids.untyped_storage().nbytes())

    with pytest.raises(ValueError, match=r"\d+") as told:
        run(trainer.forward_backward(TextTrainBatch(tokens[:3, :4], tokens[:3, 4:]), sizes))
    assert str(told.value) == "96"


def test_logits_are_the_callers_own(trainer, batch):
    inputs = {"input_ids": batch.input_ids}
    first = run(trainer.forward(inputs))
    again = run(trainer.forward(inputs))
    kept = first.clone()
    again.zero_()
    assert torch.equal(first, kept)
    assert first.device.type == "cpu"
    assert not first.requires_grad


# What fails there


class MineError(Exception):
    pass


class NeedsTwoError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class NoExceptionError(BaseException):
    pass


def raises_its_own(_outputs, _batch):
    raise MineError("of the caller")


def raises_what_pickle_cannot_rebuild(_outputs, _batch):
    raise NeedsTwoError(1, 2)


def raises_no_exception(_outputs, _batch):
    raise NoExceptionError("as of torch's checkpoints")


def exits(_outputs, _batch):
    sys.exit(3)


@pytest.mark.parametrize(
    ("loss_fn", "kind", "message"),
    [
        (raises_its_own, MineError, "of the caller"),
        (raises_what_pickle_cannot_rebuild, RuntimeError, "NeedsTwoError: 1 and 2"),
        (raises_no_exception, RuntimeError, "NoExceptionError: as of torch's checkpoints"),
        (exits, RuntimeError, "SystemExit: 3"),
    ],
)
def test_errors_come_with_class_message_and_traceback(trainer, batch, loss_fn, kind, message):
    run(trainer.forward_backward(batch))
    with pytest.raises(Exception, match=message) as raised:
        run(trainer.forward_backward(batch, loss_fn))
    assert (raised.type, str(raised.value)) == (kind, message)
    assert loss_fn.__name__ in raised.value.__notes__[0]
    assert run(trainer.optim_step()).accumulated_microbatches == 1


def test_the_class_of_an_error_may_be_a_functions_own(trainer, batch):
    class LocalError(Exception):
        pass

    def fails(outputs, batch):
        raise LocalError

    with pytest.raises(LocalError):
        run(trainer.forward_backward(batch, fails))


def test_the_trainers_own_errors_arrive(trainer, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        run(trainer.load(str(tmp_path / "none")))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        run(trainer.forward({"input_ids": torch.tensor([[256]])}))


def test_a_trainer_that_cannot_be_made_leaves_no_process():
    before = children()
    with pytest.raises(ValueError, match="no family of models"):
        run(spawn_titan("nonsense"))
    assert children() == before


def test_a_cancelled_spawn_leaves_no_process():
    async def cancelled():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(spawn_titan(), 1)

    before = children()
    run(cancelled())
    assert children() == before


# Its end


def test_closing_ends_its_process_and_whatever_is_called(batch):
    async def closing():
        trainer = await spawn_titan()
        pids = pids_of(trainer)
        under_way = asyncio.create_task(trainer.forward_backward(batch, slow_loss))
        await asyncio.sleep(0.2)
        await asyncio.gather(trainer.close(), trainer.close())
        await trainer.close()
        assert_gone(pids)
        for call in (under_way, trainer.forward_backward(batch), trainer.get_status()):
            with pytest.raises(TrainerClosedError, match="is closed; spawn a new one"):
                await call

    run(closing())


def test_a_killed_trainer_fails_its_calls_and_a_new_one_goes_on(shared, make_batch, tmp_path):
    async def killed():
        trainer = await spawn_titan(checkpoint_dir=tmp_path)
        await train(trainer, [make_batch(0)])
        saved = await trainer.save()
        uninterrupted = await train(trainer, [make_batch(1)])
        pending = [
            asyncio.create_task(trainer.forward_backward(make_batch(0), slow_loss)),
            asyncio.create_task(trainer.get_status()),
        ]
        await asyncio.sleep(0.2)
        (pid,) = pids_of(trainer)
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        for call in (*pending, asyncio.create_task(trainer.optim_step())):
            with pytest.raises(TrainerLostError, match=rf"process {pid} has died.* load the last"):
                await call
        assert time.monotonic() - killed_at < 1
        await shared.get_status()  # others live on
        await trainer.close()
        trainer = await spawn_titan(checkpoint_dir=tmp_path)
        try:
            assert await trainer.load() == saved
            assert await train(trainer, [make_batch(1)]) == uninterrupted
        finally:
            await trainer.close()

    run(killed())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moment_it_neither_hangs_nor_leaves_processes(make_batch, seed):
    chance = random.Random(seed)

    async def killed():
        trainer = await spawn_titan(procs=1 + seed % 2)
        pids = pids_of(trainer)
        training = asyncio.create_task(train(trainer, map(make_batch, range(10**6))))
        await asyncio.sleep(chance.random())
        os.kill(chance.choice(pids), signal.SIGKILL)
        killed_at = time.monotonic()
        with pytest.raises(TrainerLostError):
            await training
        assert time.monotonic() - killed_at < 1
        await trainer.close()
        assert_gone(pids)

    run(killed())


@pytest.mark.slow
def test_killed_while_it_is_made_it_neither_hangs_nor_leaves_processes():
    async def killed():
        before = children()
        making = asyncio.create_task(spawn_titan())
        while not (new := children() - before):
            await asyncio.sleep(0.05)
        await asyncio.sleep(1)
        os.kill(*new, signal.SIGKILL)
        with pytest.raises(TrainerLostError):
            await making
        assert_gone(new)

    run(killed())


APPLICATION = """
import asyncio, os, signal, sys
from reference_impls.monarch import spawn_titan

async def main():
    trainer = await spawn_titan(procs=1)
    print(*trainer._processes.pids, flush=True)
    exec(sys.argv[1])

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_process_outlives_the_application(end):
    application = subprocess.run(
        [sys.executable, "-c", APPLICATION, end],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    pids = application.stdout.split()
    assert len(pids) == 1, application.stderr
    assert_gone(pids, within=10)


# Several processes


@pytest.mark.slow
def test_two_processes_train_together(make_batch, tmp_path):
    def fails_on_the_second(outputs, batch):
        if os.environ["RANK"] == "1":
            raise MineError("of rank 1")
        return outputs["logits"].mean()

    async def two():
        trainer = await spawn_titan(procs=2, checkpoint_dir=tmp_path)
        pids = pids_of(trainer)
        try:
            assert (await trainer.get_config()).parallelism.world_size == 2
            weights = await trainer.save("weights", weights_only=True)
            alone = TitanTrainer()
            await alone.load(weights)
            batches = [make_batch(seed) for seed in range(3)]
            for batch in batches:
                here, there = await train(alone, [batch]), await train(trainer, [batch])
                assert there[0].loss == pytest.approx(here[0].loss, rel=1e-5)
                assert there[1] == here[1]
            with pytest.raises(MineError, match="of rank 1"):
                await trainer.forward_backward(batches[0], fails_on_the_second)
            assert (await trainer.get_status()).accumulated_microbatches == 0
        finally:
            await trainer.close()
        assert_gone(pids)

    run(two())
