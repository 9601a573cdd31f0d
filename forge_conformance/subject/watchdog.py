"""Ends a call that blocks the main thread: by a signal first, with the process at the last."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

GRACE = 5.0
"""Seconds that a call gets to end after it has been told to."""

_HEARTBEAT = 0.5


class CallBlocked(BaseException):
    """Raised inside the blocking call; not an `Exception`, so that a trainer's own error handling
    lets it pass. `stack` says where the call was."""

    def __init__(self, stack: str) -> None:
        super().__init__("the call blocked the event loop")
        self.stack = stack


class Watchdog:
    """A thread that watches deadlines of the main thread.

    At a deadline it raises `CallBlocked` in the main thread through a signal, which interrupts
    Python code, sleeps and waits for locks. Native code that doesn't return is given `GRACE`
    seconds more; then all stacks are written to the real standard error and the process ends. A
    call that also holds the interpreter lock stops this thread as well: `faulthandler`, which
    needs no lock, ends the process when the heartbeat stays away.
    """

    def __init__(self, timeout: float) -> None:
        self._silence = timeout + 3 * GRACE
        self._deadline: float | None = None
        self._told = False
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
        previous = signal.signal(signal.SIGURG, _raise_blocked)
        self._told = False
        self._deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = None
            signal.signal(signal.SIGURG, previous)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        while not self._closed.wait(_HEARTBEAT):
            deadline = self._deadline
            if deadline is None:
                faulthandler.cancel_dump_traceback_later()
                continue
            faulthandler.dump_traceback_later(self._silence, exit=True, file=sys.__stderr__)
            overdue = time.monotonic() - deadline
            if overdue > GRACE:
                _end_the_process()
            elif overdue > 0 and not self._told:
                self._told = True
                signal.pthread_kill(main_thread, signal.SIGURG)
        faulthandler.cancel_dump_traceback_later()


def _raise_blocked(_signal: int, frame: FrameType | None) -> None:
    raise CallBlocked("".join(traceback.format_stack(frame)[-2:]))


def _end_the_process() -> None:
    print(
        "\nA call of the trainer blocks in native code past its time limit and can't be "
        "interrupted; the run ends here. Where it hangs:",
        file=sys.__stderr__,
        flush=True,
    )
    faulthandler.dump_traceback(file=sys.__stderr__)
    os._exit(1)
