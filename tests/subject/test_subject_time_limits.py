"""A call that never returns: told with the place where it was, and the run goes on."""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path

import pytest

from forge_conformance.subject import (
    CallFailed,
    CallTimedOut,
    Journal,
    Loop,
    Malformed,
    NotAwaitable,
    Subject,
    TimedOut,
)

BROKEN = Path(__file__).parents[1] / "plugin" / "broken.py"


@pytest.fixture
def loop():
    loop = Loop(timeout=0.2)
    yield loop
    loop.close()


@pytest.fixture
def broken(monkeypatch):
    monkeypatch.syspath_prepend(BROKEN.parent)
    import broken

    yield broken
    for name in ("broken", "tiny"):
        sys.modules.pop(name)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("Awaits", "await asyncio.Event().wait()"),
        ("Sleeps", "time.sleep(1000)"),
        ("Deadlocks", "lock.acquire()"),
        ("LeavesThread", "await asyncio.to_thread"),
    ],
)
def test_a_call_that_never_returns(loop, broken, name, where):
    if name == "LeavesThread":
        broken.time.sleep(0)  # the thread itself is the next test's matter
        pytest.skip("leaves a thread for good: run in a process of its own, below")
    subject = Subject(getattr(broken, name)(), loop, Journal())
    with pytest.raises(TimedOut, match=r"^forward\(\) gave no answer within 0.2 s") as raised:
        subject.call("forward", None)
    stack = raised.value.stack
    assert "in forward" in stack.splitlines()[0]
    assert where in stack
    assert "forge_conformance" not in stack
    assert subject.get_status().step == 0  # the loop goes on
