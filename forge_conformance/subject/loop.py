"""The one event loop of a run, and the time limit of what runs on it.

A trainer may hold locks, tasks and actors of the loop that it was made in, so that a run has one
loop, in the main thread, as an application would. Two things can keep a call from returning: it
awaits for ever (the loop still turns: the call is cancelled), or it blocks the loop (the watchdog
raises in it).
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from forge_conformance.subject.watchdog import GRACE, CallBlocked, Watchdog

T = TypeVar("T")


class CallTimedOut(Exception):
    """A call didn't end within the time limit; `stack` says where it was."""

    def __init__(self, seconds: float, stack: str) -> None:
        super().__init__(f"no answer within {seconds:g} s")
        self.seconds = seconds
        self.stack = stack


class Loop:
    """Runs awaitables to their end, each within a time limit.

    Args:
        timeout: Seconds that one call may take.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._loop = asyncio.new_event_loop()
        self._watchdog = Watchdog(timeout)

    def run(self, awaitable: Awaitable[T]) -> T:
        """The result of `awaitable`.

        Raises:
            CallTimedOut: It took longer than the limit. What it was doing is cancelled.
        """
        return self._unblocked(
            lambda: self._loop.run_until_complete(_within(self.timeout, awaitable))
        )

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The result of a plain function, called inside the running loop.

        Raises:
            CallTimedOut: It took longer than the limit.
        """

        async def inside() -> T:
            return function(*args, **kwargs)

        return self.run(inside())

    def run_unlimited(self, awaitable: Awaitable[T]) -> T:
        """The result of `awaitable`, however long it takes: an author's own test."""
        return self._loop.run_until_complete(awaitable)

    def close(self) -> None:
        """Cancel what is left on the loop and close it."""
        if self._loop.is_closed():
            return
        with suppress(CallTimedOut):
            self._unblocked(lambda: self._loop.run_until_complete(_cancel_the_others()))
        self._watchdog.close()
        self._loop.close()

    def _unblocked(self, action: Callable[[], T]) -> T:
        with self._watchdog.limit(self.timeout + GRACE):
            try:
                return action()
            except CallBlocked as blocked:
                raise CallTimedOut(self.timeout, blocked.stack) from None


async def _within(seconds: float, awaitable: Awaitable[T]) -> T:
    task = asyncio.ensure_future(awaitable)
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if done:
        return task.result()
    stack = "".join(
        "".join(traceback.format_stack(frame)[-1:])
        for frame in (task.get_stack() if isinstance(task, asyncio.Task) else [])
    )
    task.cancel()
    await asyncio.wait({task}, timeout=GRACE / 2)
    raise CallTimedOut(seconds, stack)


async def _cancel_the_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=GRACE)
    await asyncio.get_running_loop().shutdown_asyncgens()
