"""The processes of a `MonarchTrainer`: each runs one rank of a `TitanTrainer` in an actor.

Importing this starts threads of Monarch's, which a forked process would lack: import it late.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import cloudpickle
import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import (
    Actor,
    ActorError,
    Endpoint,
    MeshFailure,
    Point,
    current_rank,
    default_bootstrap_cmd,
    endpoint,
    this_host,
)

from reference_impls.monarch import TrainerClosedError, TrainerLostError

_NAME = "titan_trainer"
"""Of the processes, their dimension and the actors, so that what Monarch reports of them has it."""

_LOOK_FOR_DEATHS = 0.2
"""Seconds. Monarch notices a death as well, but after three to thirty."""

_other_failures = monarch.actor.unhandled_fault_hook


def _pass_over_lost_trainers(failure: MeshFailure) -> None:
    """Leave a lost trainer to its callers, whom each call tells; by default this process ends."""
    if _NAME not in str(failure):
        _other_failures(failure)


monarch.actor.unhandled_fault_hook = _pass_over_lost_trainers


class TitanTrainerActor(Actor):  # type: ignore[misc]  # monarch has no types
    """One rank of a `TitanTrainer`. Monarch runs the calls of an actor one by one, in order."""

    @endpoint  # type: ignore[untyped-decorator]
    async def pid(self) -> int:
        """The number of this process."""
        return os.getpid()

    @endpoint  # type: ignore[untyped-decorator]
    async def start(self, options: dict[str, Any]) -> None:
        """Make the trainer."""
        with _errors_that_arrive():
            # Here, so that the caller's process does without torchtitan.
            from reference_impls.titan import TitanTrainer

            self.trainer = TitanTrainer(**options)

    @endpoint  # type: ignore[untyped-decorator]
    async def call(self, method: str, *arguments: Any) -> Any:
        """What the trainer's method returns; on ranks other than the first, None."""
        with _errors_that_arrive():
            result = await getattr(self.trainer, method)(*arguments)
        return result if current_rank().rank == 0 else None

    async def __cleanup__(self, _error: Exception | None) -> None:
        """End the process; taking down its interpreter would need a second for nothing."""
        os._exit(0)


@contextmanager
def _errors_that_arrive() -> Iterator[None]:
    """Raise what pickle can rebuild: the exception itself, or else a stand-in that names it.

    What is no `Exception`, `SystemExit` say, would end the actor, and the trainer with it.
    """
    try:
        yield
    except BaseException as error:
        arriving = error if _arrives(error) else RuntimeError(f"{type(error).__name__}: {error}")
        arriving.add_note(f"In the trainer's process:\n{traceback.format_exc()}")
        raise arriving from None


def _arrives(error: BaseException) -> bool:
    try:
        again = pickle.loads(cloudpickle.dumps(error))
        return isinstance(error, Exception) and repr(again) == repr(error)
    except Exception:
        return False


class TrainerProcesses:
    """Processes of this machine that run one trainer together: each of them gets every call.

    Args:
        count: How many, one for each rank.

    Attributes:
        pids: Their numbers, by rank; empty before `start`.
    """

    def __init__(self, count: int) -> None:
        environment = {
            # What can be imported here can be there: functions of modules travel by name.
            "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(count),
        }

        def command(place: Point) -> BootstrapCommand:
            rank = str(place.rank)
            return default_bootstrap_cmd().with_env(
                environment | {"RANK": rank, "LOCAL_RANK": rank}
            )

        self._mesh = this_host().spawn_procs({_NAME: count}, name=_NAME, bootstrap_command=command)
        self._actors = self._mesh.spawn(_NAME, TitanTrainerActor)
        self._handles: list[int] = []
        self._deaths = select.poll()
        self._stopped = False
        self.pids: list[int] = []

    async def start(self, options: dict[str, Any]) -> None:
        """Make the trainer, on every rank with these options of `TitanTrainer`.

        Raises:
            Exception: As `call` does.
        """
        self.pids = await self._replies(self._actors.pid)
        for pid in self.pids:
            try:
                # Unlike a number, a handle never comes to mean another process.
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                raise self._ended() from None
            self._handles.append(handle)
            self._deaths.register(handle, select.POLLIN)
        await self._replies(self._actors.start, options)

    async def call(self, method: str, *arguments: Any) -> Any:
        """What the trainer's method returns on the first rank.

        Raises:
            TypeError: An argument can't be pickled.
            TrainerLostError: A process has died.
            TrainerClosedError: They were stopped before the call returned.
            Exception: What the method raises on any rank.
        """
        return (await self._replies(self._actors.call, method, *arguments))[0]

    async def stop(self) -> None:
        """End the processes; a call that is under way gets a few seconds to return."""
        if self._stopped:
            return
        self._stopped = True
        if self._deaths.poll(0):
            self._kill()  # the others may wait for the one that has died
        try:
            await self._mesh.stop()
        finally:
            self._kill()  # if this was cancelled

    async def _replies(self, method: Endpoint[..., Any], *arguments: Any) -> list[Any]:
        """What each rank returns, by rank."""
        if self._stopped or self._deaths.poll(0):
            raise self._ended()
        try:
            sent = method.call(*arguments)
        except Exception as error:
            raise TypeError(
                f"what the trainer is given can't travel to its process: {error}; let functions "
                "capture tensors, numbers and text, and make everything else inside them"
            ) from error
        replies = sent.as_asyncio()
        try:
            while not replies.done():
                await asyncio.wait({replies}, timeout=_LOOK_FOR_DEATHS)
                if not replies.done() and self._deaths.poll(0):
                    raise self._ended()
            return list(replies.result().values())
        except ActorError as error:
            raise error.exception from None
        except SupervisionError as error:
            raise self._ended() from error
        finally:
            replies.cancel()

    def _ended(self) -> Exception:
        if self._stopped:
            return TrainerClosedError(
                "the trainer is closed; spawn a new one, and load a checkpoint to go on from it"
            )
        where = f" in process {', '.join(map(str, self.pids))}" if self.pids else ""
        return TrainerLostError(
            f"the trainer{where} has died, and its state with it; close it, spawn a new one and "
            "load the last checkpoint"
        )

    def _kill(self) -> None:
        while self._handles:
            handle = self._handles.pop()
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            self._deaths.unregister(handle)
            os.close(handle)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
