"""A call that never returns: told with the place where it was, and the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest

from forge_conformance.subject import CallFailed, CallTimedOut, Journal, Loop, Subject, TimedOut

BROKEN = Path(__file__).parents[1] / "plugin" / "broken.py"


@pytest.fixture
def loop():
    loop = Loop(timeout=0.2)
    yield loop
    loop.close()


class Hangs:
    setting = contextvars.ContextVar("setting", default="unset")

    async def awaits(self):
        await self.inner()

    async def inner(self):
        await asyncio.Event().wait()

    async def sleeps(self):
        time.sleep(1000)

    async def deadlocks(self):
        lock = threading.Lock()
        with lock:
            lock.acquire()

    async def computes(self):
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))

    async def refuses_to_be_cancelled(self):
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)

    async def answers(self):
        return "an answer"

    async def leaves(self):
        sys.exit(3)

    async def is_cancelled(self):
        raise asyncio.CancelledError

    async def sets(self):
        self.setting.set("set")

    async def gets(self):
        return self.setting.get()


@pytest.mark.parametrize(
    ("method", "place"),
    [
        ("awaits", "await asyncio.Event().wait()"),
        ("sleeps", "time.sleep(1000)"),
        ("deadlocks", "lock.acquire()"),
        ("computes", "in computes"),
        ("refuses_to_be_cancelled", "await asyncio.sleep(1000)"),
    ],
)
def test_a_call_that_never_returns(loop, method, place):
    subject = Subject(Hangs(), loop, Journal())
    with pytest.raises(TimedOut, match=rf"^{method}\(\) gave no answer within 0.2 s") as raised:
        subject.call(method)
    stack = raised.value.stack
    assert f"in {method}" in stack.splitlines()[0]
    assert place in stack
    assert subject.call("answers") == "an answer"


def test_a_method_that_hangs_again_and_again_is_not_called_any_more(loop):
    subject = Subject(Hangs(), loop, Journal())
    for _ in range(5):
        with pytest.raises(TimedOut, match=r"\(--trainer-timeout\)$"):
            subject.call("awaits")
    with pytest.raises(TimedOut, match="5 times: it is not called again"):
        subject.call("awaits")
    assert subject.journal.calls == 5


@pytest.mark.parametrize("method", ["leaves", "is_cancelled"])
def test_exceptions_that_asyncio_treats_apart_are_the_trainers_failure(loop, method):
    subject = Subject(Hangs(), loop, Journal())
    with pytest.raises(CallFailed, match=r"raised (SystemExit: 3|CancelledError)$"):
        subject.call(method)
    assert subject.call("answers") == "an answer"


def test_all_calls_share_one_context(loop):
    subject = Subject(Hangs(), loop, Journal())
    subject.call("sets")
    assert subject.call("gets") == "set"
    assert Hangs.setting.get() == "unset"


def test_plain_functions_have_the_same_limit(loop):
    assert loop.call(divmod, 7, 2) == (3, 1)
    with pytest.raises(CallTimedOut):
        loop.call(time.sleep, 1000)


def test_closing_leaves_nothing_behind(recwarn, caplog):
    before = threading.enumerate()
    loop = Loop(timeout=0.2)

    async def fails_when_cancelled():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("nobody asks for this one") from None

    async def starts_tasks():
        started = [
            asyncio.get_running_loop().create_task(task)
            for task in (
                fails_when_cancelled(),
                Hangs().awaits(),
                Hangs().refuses_to_be_cancelled(),
            )
        ]
        await asyncio.sleep(0)
        return len(started)

    loop.run(starts_tasks())
    loop.close()
    loop.close()
    gc.collect()
    assert threading.enumerate() == before
    assert not recwarn.list
    assert not caplog.records


@pytest.fixture
def run_broken(run_apart, pytester):
    """Judges a class of `broken` by forward.no_grad, in a process of its own."""
    shutil.copy(BROKEN, pytester.path)

    def judge(name):
        return run_apart(f"--trainer=broken:{name}", "--clause=forward", "--trainer-timeout=0.3")

    return judge


def test_the_finding_says_timeout_and_where_and_the_run_goes_on(run_broken):
    result = run_broken("LeavesThread")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "  seen            forward() gave no answer within 0.3 s (--trainer-timeout)",
            "  in the trainer",
            "*broken.py*, in forward",
            "*await asyncio.to_thread(time.sleep, 1000)",
            "  again           pytest --trainer=broken:LeavesThread --trainer-timeout=0.3 *",
            "NOT CONFORMANT: 0 of 8 MUST held, 8 broke",
        ]
    )


def test_a_task_that_cannot_be_cancelled_does_not_keep_the_process(run_broken):
    result = run_broken("LeavesStubbornTask")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["CONFORMANT in what was selected: 8 of 8 MUST held"])


@pytest.mark.parametrize("name", ["BlocksInNativeCode", "HoldsInterpreterLock"])
def test_a_call_that_cannot_be_interrupted_ends_the_process_with_its_stack(run_broken, name):
    result = run_broken(name)
    assert result.ret == 1
    result.stderr.fnmatch_lines(["*broken.py*, line * in forward"])
    assert name != "BlocksInNativeCode" or "can't be interrupted" in result.stderr.str()
