"""Ways for a process to fail while it saves: killed at a chosen moment, or out of disk space."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from forge_conformance.observe.processes import kill_others_of_session

_CHANGES_FILES = {
    *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"),
    *("os.utime", "os.chmod", "shutil.rmtree", "shutil.move", "shutil.copyfile"),
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass
class Moments:
    """What happened to files while it was watched: how often, and for how long."""

    events: int = 0
    seconds: float = 0.0


class Killer:
    """Watches what a process does to files, and kills it at the event or the time it is told.

    Every such event that Python makes is a moment; what native code writes lies between two, and
    is met by time. Python's audit hooks stay for good, so that a process has one killer.
    """

    def __init__(self) -> None:
        self._moments: Moments | None = None
        self._deadly: int | None = None
        sys.addaudithook(self._on_event)

    @contextmanager
    def watching(self) -> Iterator[Moments]:
        """Count what happens inside."""
        moments, started = Moments(), time.perf_counter()
        self._moments, self._deadly = moments, None
        yield moments
        self._moments = None
        moments.seconds = time.perf_counter() - started

    @contextmanager
    def killing_at_event(self, number: int) -> Iterator[None]:
        """Kill the process before its event of this number (from 0) inside."""
        with self.watching():
            self._deadly = number
            yield

    @contextmanager
    def killing_after(self, seconds: float) -> Iterator[None]:
        """Kill the process so many seconds after the start of what is inside."""
        timer = threading.Timer(seconds, kill)
        timer.start()
        yield
        timer.cancel()

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        moments = self._moments
        if moments is None or not _changes_files(event, arguments):
            return
        if moments.events == self._deadly:
            kill()
        moments.events += 1
        if event == "open" and arguments[2] & os.O_TRUNC and isinstance(arguments[0], str):
            # A moment of its own: the old content is gone, the new one not there yet.
            if moments.events == self._deadly:
                self._moments = None
                open(arguments[0], "wb").close()
                kill()
            moments.events += 1


def kill() -> None:
    """End this process and what it has started at once, as a crash of the machine does."""
    if os.getsid(0) == os.getpid():  # else others' processes, a user's shell say, are of it too
        kill_others_of_session(os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file that this process writes grow beyond so many bytes; writing on raises."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _changes_files(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "open":
        return isinstance(arguments[2], int) and bool(arguments[2] & _WRITES)
    return event in _CHANGES_FILES
