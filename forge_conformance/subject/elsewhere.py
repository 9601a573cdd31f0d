"""Programs in processes of their own: a trainer made anew there, and one that gets killed.

A server process imports the target once and forks for each program, so that a process costs
little; it has made no trainer itself when it does.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from forge_conformance.finding import NotChecked
from forge_conformance.observe.processes import kill_others_of_session
from forge_conformance.observe.small_disk import SmallDisk
from forge_conformance.subject.ranks import without_launcher

_STARTING = 60.0
"""Seconds that a process may take beside the program's own calls: imports, the first trainer."""


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Attributes:
        value: What it returned; None if it didn't.
        sent: What it sent before its end, in order.
        failure: Why it didn't return, in words; empty if it did, or was killed.
        killed: Whether a signal ended it.
    """

    value: Any
    sent: list[Any]
    failure: str
    killed: bool


class Elsewhere:
    """Runs programs in processes of their own.

    Args:
        source: The target as `module:Name`, which the other process resolves again.
        timeout: Seconds that one call of the trainer may take there.
        scratch: A folder for the processes' own temporary files, which killed ones leave behind.

    Raises:
        NotChecked: The target has no such name.
    """

    def __init__(self, source: str, timeout: float, scratch: Path) -> None:
        if not source or source.startswith("__main__:"):
            raise NotChecked("another process can't make this trainer: name it module:Name")
        self.source = source
        self.timeout = timeout
        self.limit = _STARTING + 5 * timeout
        """Seconds that a program may take between two things that it tells."""
        self.scratch = scratch
        self._can_start = True
        self._context = multiprocessing.get_context("forkserver")
        module = source.partition(":")[0]
        self._context.set_forkserver_preload([module, _CHECKS, *_SLOW_IMPORTS, _THREADS])

    def run(
        self,
        program: Callable[..., Any],
        *arguments: Any,
        folder: Path | None = None,
        on_small_disk: bool = False,
    ) -> Ended:
        """Run `program(lab, *arguments)` to its end.

        Args:
            program: A function of a module. Its lab is of the same target, in that process.
            arguments: What it takes beside; they are pickled.
            folder: The working folder of the process.
            on_small_disk: Whether the folder is to be a disk of the process's own. The program
                takes it after the lab: a `SmallDisk`, or None where the system allows none.

        Raises:
            NotChecked: No process can be made, it makes no trainer, or gives no answer in time.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        # Another number of threads may add in another order.
        job = pickle.dumps((torch.get_num_threads(), program, arguments, on_small_disk))
        process = self._context.Process(
            target=_work,
            args=(self, str(folder or Path.cwd()), job, sender),
        )
        if self._can_start:
            try:
                with _as_no_script():
                    process.start()
            except (EOFError, OSError):
                self._can_start = False
        if not self._can_start:
            raise NotChecked(
                f"no process can be made that imports {self.source}: does the import need a port "
                "or a lock, or start a run of pytest?"
            )
        sender.close()
        received: list[tuple[str, Any]] = []
        try:
            while receiver.poll(self.limit):
                received.append(pickle.loads(receiver.recv_bytes()))
            raise NotChecked(f"a process of its own gave no answer within {self.limit:g} s")
        except EOFError:
            process.join(self.timeout)
        finally:
            receiver.close()
            _end(process)
        return _ended(received, process.exitcode or 0)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_context"}


_CHECKS = "forge_conformance.checks"
_THREADS = "forge_conformance.subject.threads_of_imports"
_SLOW_IMPORTS = ("torch._dynamo",)
"""What the first optimizer or trainer of a process imports otherwise."""


IN_ANOTHER_PROCESS = "FORGE_CONFORMANCE_ELSEWHERE"
"""Set in the environment of these processes, where no run may start."""


@contextmanager
def _as_no_script() -> Iterator[None]:
    """Keep a new process from running the script that this one was started by: it may be one
    that starts a run like this when it is imported. Of a launcher it knows nothing."""
    no_script = mock.patch.dict(sys.modules, {"__main__": ModuleType("__main__")})
    with no_script, without_launcher(), mock.patch.dict(os.environ, {IN_ANOTHER_PROCESS: "1"}):
        yield


def _end(process: Any) -> None:
    """End a process, and those that it has started, which are of its session."""
    # Its group at least is told by every system; it has none before it has begun.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    kill_others_of_session(process.pid)


def _ended(received: list[tuple[str, Any]], exit_code: int) -> Ended:
    kind, value = received[-1] if received else ("", None)
    sent = [content for each, content in received if each == "sent"]
    if kind == "returned":
        return Ended(value, sent, "", killed=False)
    if kind == "not checked":
        raise NotChecked(f"in a process of its own: {value}")
    if kind == "failed":
        return Ended(None, sent, str(value), killed=False)
    if exit_code < 0 and -exit_code != signal.SIGKILL:
        name = signal.Signals(-exit_code).name
        return Ended(None, sent, f"the process was ended by {name}", killed=False)
    if exit_code < 0:
        return Ended(None, sent, "", killed=True)
    return Ended(None, sent, f"the process ended with status {exit_code}", killed=False)


_outlet: Connection | None = None


def send(value: Any) -> None:
    """In a program: hand a value to the process that runs it, whatever happens next."""
    assert _outlet is not None
    _outlet.send_bytes(pickle.dumps(("sent", value)))


def _work(whose: Elsewhere, folder: str, job: bytes, outlet: Connection) -> None:
    global _outlet
    _outlet = outlet
    os.setsid()  # what the trainer starts is ended with it
    tempfile.tempdir = str(whose.scratch)
    os.chdir(folder)
    from forge_conformance.lab import Lab
    from forge_conformance.subject import threads_of_imports
    from forge_conformance.subject.faults import TrainerFault, brief_error
    from forge_conformance.target import TargetError, resolve

    lab = None
    try:
        if threads_of_imports.STARTED:
            raise NotChecked(f"importing {whose.source} starts threads, which a fork lacks")
        threads, program, arguments, on_small_disk = pickle.loads(job)
        if on_small_disk:  # which needs a process that has started no thread yet
            arguments = (_small_disk(Path(folder)), *arguments)
        lab = Lab(resolve(whose.source), whose.timeout)
        torch.set_num_threads(threads)
        answer = ("returned", program(lab, *arguments))
    except (NotChecked, TargetError) as error:
        answer = ("not checked", str(error))
    except TrainerFault as fault:
        answer = ("failed", str(fault))
    except BaseException as error:
        answer = ("failed", f"it ended in {brief_error(error)}")
    outlet.send_bytes(pickle.dumps(answer))
    if lab is not None:
        lab.close()
    outlet.close()
    # Threads that a trainer leaves behind are not for this process to wait for.
    os._exit(0)


def _small_disk(folder: Path) -> SmallDisk | None:
    try:
        return SmallDisk(folder)
    except OSError:
        return None
