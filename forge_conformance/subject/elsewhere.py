"""Programs in processes of their own: a trainer made anew there, and one that gets killed.

A server process imports the target once and forks for each program, so that a process costs
little; it has made no trainer itself when it does.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from forge_conformance.finding import NotChecked

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

    Raises:
        NotChecked: The target has no such name.
    """

    def __init__(self, source: str, timeout: float) -> None:
        if not source:
            raise NotChecked("another process can't make this trainer: name it module:Name")
        self.source = source
        self.timeout = timeout
        self._context = multiprocessing.get_context("forkserver")
        module = source.partition(":")[0]
        self._context.set_forkserver_preload([module, _CHECKS, *_SLOW_IMPORTS])

    def run(
        self, program: Callable[..., Any], *arguments: Any, folder: Path | None = None
    ) -> Ended:
        """Run `program(lab, *arguments)` to its end.

        Args:
            program: A function of a module. Its lab is of the same target, in that process.
            arguments: What it takes beside; they are pickled.
            folder: The working folder of the process.

        Raises:
            NotChecked: The process didn't come to its end in time.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        # Another number of threads may add in another order.
        job = pickle.dumps((torch.get_num_threads(), program, arguments))
        process = self._context.Process(
            target=_work,
            args=(self.source, self.timeout, str(folder or Path.cwd()), job, sender),
            daemon=True,
        )
        with _without_main_module():
            process.start()
        sender.close()
        received: list[tuple[str, Any]] = []
        limit = _STARTING + 5 * self.timeout
        try:
            while receiver.poll(limit):
                received.append(pickle.loads(receiver.recv_bytes()))
        except EOFError:
            process.join(limit)
        finally:
            receiver.close()
        if process.is_alive():
            process.kill()
            process.join()
            raise NotChecked(f"a process of its own gave no answer within {limit:g} s")
        return _ended(received, process.exitcode or 0)


_CHECKS = "forge_conformance.checks"
_SLOW_IMPORTS = ("torch._dynamo",)
"""What the first optimizer or trainer of a process imports otherwise."""


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Keep a new process from running the script that this one was started by: it may be one
    that starts a run like this when it is imported."""
    with mock.patch.dict(sys.modules, {"__main__": ModuleType("__main__")}):
        yield


def _ended(received: list[tuple[str, Any]], exit_code: int) -> Ended:
    kind, value = received[-1] if received else ("", None)
    sent = [content for each, content in received if each == "sent"]
    if kind == "returned":
        return Ended(value, sent, "", killed=False)
    if kind == "failed":
        return Ended(None, sent, str(value), killed=False)
    if exit_code < 0:
        return Ended(None, sent, "", killed=True)
    return Ended(None, sent, f"the process ended with status {exit_code}", killed=False)


_outlet: Connection | None = None


def send(value: Any) -> None:
    """In a program: hand a value to the process that runs it, whatever happens next."""
    assert _outlet is not None
    _outlet.send_bytes(pickle.dumps(("sent", value)))


def _work(source: str, timeout: float, folder: str, job: bytes, outlet: Connection) -> None:
    global _outlet
    _outlet = outlet
    os.chdir(folder)
    from forge_conformance.lab import Lab
    from forge_conformance.subject.faults import TrainerFault, brief_error
    from forge_conformance.target import resolve

    lab = Lab(resolve(source), timeout)
    try:
        threads, program, arguments = pickle.loads(job)
        torch.set_num_threads(threads)
        answer = ("returned", program(lab, *arguments))
    except TrainerFault as fault:
        answer = ("failed", str(fault))
    except BaseException as error:
        answer = ("failed", f"it ended in {brief_error(error)}")
    outlet.send_bytes(pickle.dumps(answer))
    lab.close()
    outlet.close()
    # Threads that a trainer leaves behind are not for this process to wait for.
    os._exit(0)
