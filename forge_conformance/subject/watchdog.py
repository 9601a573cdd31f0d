"""Ends a call that blocks the main thread: by a signal first, with the process at the last."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from forge_conformance.subject.stack import where_it_runs

_HEARTBEAT = 0.5
_IDLE_BEATS = 4


class CallBlocked(BaseException):
    """Raised inside the blocking call; not an `Exception`, so that a trainer's own error handling
    lets it pass. `stack` says where the call was."""

    def __init__(self, stack: str) -> None:
        super().__init__("the call blocked the event loop")
        self.stack = stack


class Watchdog:
    """A thread that watches deadlines of the main thread.

    At a deadline it raises `CallBlocked` in the main thread through a signal, which interrupts
    Python code, sleeps and waits for locks. Native code that doesn't return is given `grace`
    seconds more; then all stacks are written to standard error and the process ends. A call that
    also holds the interpreter lock stops this thread as well: `faulthandler`, which needs no
    lock, ends the process when the heartbeat stays away.

    Standard error is the one of the moment when the watchdog is made: before pytest captures it.

    Args:
        silence: Seconds without a sign of this thread after which `faulthandler` ends the process.
        grace: Seconds between the signal and the end of the process.
        last_words: Called before that end with where the call is; what it returns is written.
    """

    def __init__(self, silence: float, grace: float, last_words: Callable[[str], str]) -> None:
        self._silence = silence
        self._grace = grace
        self._last_words = last_words
        self._heartbeat = min(_HEARTBEAT, grace / 2)
        self._stderr = os.dup(2)
        self._deadline: float | None = None
        self._armed = False
        self._arming = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Within the context, blocking for longer than `seconds` raises `CallBlocked`."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        previous = signal.signal(signal.SIGURG, self._raise_if_due)
        with self._arming:
            self._deadline = time.monotonic() + seconds
            if not self._armed:
                self._arm()
        try:
            yield
        finally:
            self._deadline = None
            signal.signal(signal.SIGURG, previous)

    def close(self) -> None:
        """Stop watching."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        os.close(self._stderr)

    def _watch(self) -> None:
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        told: float | None = None
        idle = 0
        while not self._closed.wait(self._heartbeat):
            with self._arming:
                deadline = self._deadline
                idle = 0 if deadline is not None else idle + 1
                # Arming starts a thread: too much for each of many short calls in a row.
                if idle < _IDLE_BEATS:
                    self._arm()
                elif self._armed:
                    self._disarm()
            if deadline is None:
                continue
            overdue = time.monotonic() - deadline
            if overdue > self._grace:
                self._end_the_process()
            elif overdue > 0 and told != deadline:
                told = deadline
                signal.pthread_kill(main_thread, signal.SIGURG)
        if self._armed:
            self._disarm()

    def _arm(self) -> None:
        faulthandler.dump_traceback_later(self._silence, exit=True, file=self._stderr)
        self._armed = True

    def _disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._armed = False

    def _raise_if_due(self, _signal: int, frame: FrameType | None) -> None:
        deadline = self._deadline
        if deadline is not None and time.monotonic() > deadline:
            raise CallBlocked(where_it_runs(frame))

    def _end_the_process(self) -> None:
        os.write(
            self._stderr,
            b"\n\nA call of the trainer blocks in native code past its time limit "
            b"(--trainer-timeout) and can't be interrupted; the run ends here, not conformant. "
            b"Where it hangs:\n",
        )
        faulthandler.dump_traceback(file=self._stderr)
        frames = sys._current_frames()
        more = self._last_words(where_it_runs(frames.get(threading.main_thread().ident or 0)))
        os.write(self._stderr, more.encode(errors="replace"))
        os._exit(1)
