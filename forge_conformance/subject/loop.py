"""The one event loop of a run, and the time limit of what runs on it.

A trainer may hold locks, tasks and actors of the loop that it was made in, so that a run has one
loop, in the main thread, as an application would. Two things can keep a call from returning: it
awaits for ever (the loop still turns: the call is cancelled), or it blocks the loop (the watchdog
raises in it).
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from forge_conformance.subject.stack import where_it_waits
from forge_conformance.subject.watchdog import CallBlocked, Watchdog

T = TypeVar("T")

_SHORTEST_GRACE = 1.0
_LONGEST_GRACE = 5.0
"""Seconds that a call gets to end after it has been told to: the time limit, within these bounds.
On a busy machine less than the shortest passes before the watchdog itself gets to run."""


class CallTimedOut(Exception):
    """A call didn't end within the time limit; `stack` says where it was."""

    def __init__(self, seconds: float, stack: str) -> None:
        super().__init__(f"no answer within {seconds:g} s")
        self.seconds = seconds
        self.stack = stack


class Loop:
    """Runs awaitables to their end, each within a time limit.

    All run in one context, so that a context variable which one call sets is seen by the next,
    as in an application that awaits one call after the other.

    Args:
        timeout: Seconds that one call may take.
        last_words: Called when a call can't be ended and the process is, with where the call is;
            what it returns is written to standard error.

    Attributes:
        timed_out: Whether a call has been given up: it may have left a thread behind.
        stubborn: Tasks that went on when they were cancelled; destroying one may never end.
    """

    def __init__(self, timeout: float, last_words: Callable[[str], str] = lambda _: "") -> None:
        self.timeout = timeout
        self.timed_out = False
        self.stubborn: set[asyncio.Task[Any]] = set()
        self._grace = min(max(timeout, _SHORTEST_GRACE), _LONGEST_GRACE)
        self._loop = asyncio.new_event_loop()
        self._context = contextvars.copy_context()
        self._watchdog = Watchdog(timeout + 3 * self._grace, self._grace, last_words)

    def run(self, awaitable: Awaitable[T]) -> T:
        """The result of `awaitable`.

        Raises:
            CallTimedOut: It took longer than the limit. What it was doing is cancelled.
        """
        return self._watched(self._within_the_limit(awaitable))

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
        return self._loop.run_until_complete(self._task(_awaited(awaitable)))

    def close(self) -> None:
        """Cancel what is left on the loop and close it."""
        if self._loop.is_closed():
            return
        # What is still pending now has had its chance; asyncio needn't complain about it.
        self._loop.set_exception_handler(lambda _loop, _context: None)
        with suppress(CallTimedOut):
            self._watched(self._cancel_the_others())
        self._watchdog.close()
        self._loop.close()

    def _task(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self._loop.create_task(coroutine, context=self._context)

    def _watched(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = self._task(coroutine)
        try:
            with self._watchdog.limit(self.timeout + self._grace):
                return self._loop.run_until_complete(task)
        except CallBlocked as blocked:
            self.timed_out = True
            raise CallTimedOut(self.timeout, blocked.stack) from None
        finally:
            task.cancel()

    async def _within_the_limit(self, awaitable: Awaitable[T]) -> T:
        call = self._task(_answer(awaitable))
        try:
            done, _ = await asyncio.wait({call}, timeout=self.timeout)
            if done:
                value, error = call.result()
                if error is not None:
                    raise error
                return value  # type: ignore[return-value]
            self.timed_out = True
            stack = where_it_waits(call)
            call.cancel()
            done, _ = await asyncio.wait({call}, timeout=self._grace / 2)
            if done and not call.cancelled():
                call.exception()  # asyncio complains of one that nobody asks for
            raise CallTimedOut(self.timeout, stack)
        finally:
            call.cancel()

    async def _cancel_the_others(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            _, self.stubborn = await asyncio.wait(others, timeout=self._grace / 2)
        await self._loop.shutdown_asyncgens()


async def _answer(awaitable: Awaitable[T]) -> tuple[T | None, BaseException | None]:
    """What came of a call. Of all exceptions, asyncio lets these two tear down the whole loop."""
    try:
        return await awaitable, None
    except (SystemExit, KeyboardInterrupt) as error:
        return None, error


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable
