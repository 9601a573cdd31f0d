"""Trainers from a factory: built within the time limit, on every rank, and closed at the end."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from forge_conformance.subject.faults import TrainerFault, brief_error
from forge_conformance.subject.loop import CallTimedOut, Loop
from forge_conformance.subject.ranks import Ranks
from forge_conformance.subject.stack import trainer_frames
from forge_conformance.subject.subject import Journal, Subject
from forge_conformance.target import Factory, TargetError


class Builder:
    """Makes the trainers of one run.

    Attributes:
        alive: Those that aren't retired yet, in the order in which they were built.
        package: The top-level package that the last one's class comes from.
    """

    def __init__(self, loop: Loop, journal: Journal, ranks: Ranks) -> None:
        self.alive: list[Subject] = []
        self.package = ""
        self._loop = loop
        self._journal = journal
        self._ranks = ranks

    def build(self, what: str, factory: Factory) -> Subject:
        """A new trainer of `factory`, which an error calls `what`.

        Raises:
            TargetError: The factory raises, hangs, or gives None, on this rank or another.
        """
        subject: Subject | None = None
        error = ""
        try:
            subject = self._build_here(what, factory)
        except TargetError as raised:
            error = str(raised)
        for rank, told in enumerate(self._ranks.exchange(what, error)):
            if told:
                if subject is not None:  # the others have none to close in step with this one
                    self.alive.remove(subject)
                on_rank = f"on rank {rank}: " if self._ranks.several else ""
                raise TargetError(on_rank + told)
        assert subject is not None
        return subject

    async def build_inside(self, factory: Factory) -> Subject:
        """The same within a running event loop; whatever the factory raises is passed on."""
        return Subject(await _awaited(factory()), self._loop, self._journal, self._ranks)

    def retire(self, subject: Subject) -> None:
        """Close a trainer that can be closed; how well it does that is another clause's matter."""
        if subject in self.alive:
            self.alive.remove(subject)
        for name in ("close", "cleanup"):
            end = None
            with suppress(Exception):  # a trainer whose attributes raise can't be closed
                end = getattr(subject.trainer, name, None)
            if callable(end):
                ending = partial(_called, end)
                with suppress(TrainerFault):
                    subject.run(name, ending)
                return

    def _build_here(self, what: str, factory: Factory) -> Subject:
        try:
            trainer = self._loop.run(_called(factory))
        except CallTimedOut as error:
            raise TargetError(
                f"{what} gave no trainer: {error} (--trainer-timeout); it was at\n{error.stack}"
            ) from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # some backends' errors are no `Exception`s
            frames = trainer_frames(traceback.walk_tb(error.__traceback__))
            raise TargetError(f"{what} raised {brief_error(error)}\n{frames}".rstrip()) from error
        if trainer is None:
            raise TargetError(f"{what} returned None instead of a trainer")
        self.package = type(trainer).__module__.partition(".")[0]
        subject = Subject(trainer, self._loop, self._journal, self._ranks)
        self.alive.append(subject)
        return subject


async def _called(function: Callable[[], Any]) -> Any:
    return await _awaited(function())


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
