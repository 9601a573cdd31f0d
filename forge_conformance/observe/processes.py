"""The processes of a session: those that its leader and its children have started, and no other."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def others_of_session(session: int) -> list[int]:
    """The living processes of a session but for this one, as far as the system tells them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):  # it has ended meanwhile
            # The name, in parentheses, may hold anything.
            state, _, _, its = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            pid = int(folder.name)
            if int(its) == session and state != "Z" and pid != os.getpid():
                found.append(pid)
    return found


def kill_others_of_session(session: int) -> None:
    """End them at once, as a crash of the machine does."""
    for pid in others_of_session(session):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
