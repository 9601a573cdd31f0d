"""The ranks of one run: all make the same calls, and each learns what the others saw.

A launcher such as torchrun starts the same run in several processes. What a trainer answers on one
rank decides what the kit does next, so that the ranks compare every answer, and go on only with the
same one. They talk through the launcher's key-value store, never through the trainer's own group.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from forge_conformance.subject.faults import TrainerFault, brief

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_A_LAUNCHER = (
    *_LAUNCHED,
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
)
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1e-4, 0.01
_LONGEST_GREETING, _LONGEST_FAREWELL = 60.0, 15.0
_AT_THE_END = "the verdict is told"


class RanksDisagree(TrainerFault):
    """A call came out differently on two ranks."""

    root = "distributed.agree"
    expected = "the same on every rank"


class OutOfStep(TrainerFault):
    """The ranks aren't at the same point of the check any more."""

    root = "distributed.agree"
    expected = "ranks that all come to it"


class RankLost(TrainerFault):
    """A rank gives no answer any more; nothing can be called from here on."""

    root = "distributed.failure"
    expected = "an answer on every rank"


@dataclass(frozen=True)
class _Hangs:
    """The last that a rank tells: it blocks in a call, and ends."""

    where: str


class Ranks:
    """This process's place among those of the run, and the way to the others.

    Args:
        rank: From 0.
        size: How many there are.
        store: Reaches all of them; None where there is but one.
        patience: Seconds that one rank may be ahead of another.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, store: Store | None = None, patience: float = 0.0
    ) -> None:
        self.rank = rank
        self.size = size
        self.lost = ""
        """Why no answer of all ranks can be had any more; empty as long as it can."""
        self._store = store
        self._patience = patience
        self._number = 0

    @classmethod
    def of_this_process(cls, patience: float) -> Ranks:
        """As a launcher's environment tells; a single one where there is none."""
        if int(os.environ.get("WORLD_SIZE") or 1) < 2 or not all(map(os.environ.get, _LAUNCHED)):
            return cls()
        # Some builds of torch have no such module.
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.rendezvous import rendezvous

        store, rank, size = next(
            rendezvous("env://", timeout=timedelta(seconds=min(patience, _LONGEST_GREETING)))
        )
        return cls(rank, size, PrefixStore("conformance", store), patience)

    @property
    def several(self) -> bool:
        return self.size > 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that reports."""
        return self.rank == 0

    def exchange(self, what: str, told: T, longer: float = 0.0, at: str = "") -> list[T]:
        """What every rank tells at one point of the run, in the order of the ranks.

        Args:
            what: Names the point: a method of the trainer, say.
            told: Pickled for the others.
            at: Which of several points of that name it is.
            longer: Seconds to wait beyond the usual patience.

        Raises:
            OutOfStep: A rank is at another point.
            RankLost: One doesn't tell anything in time.
        """
        if self._store is None:
            return [told]
        if self.lost:
            raise RankLost(what, f"can't be called on all ranks: {self.lost}")
        self._number += 1
        point = at + what
        try:
            self._tell((point, told))
            answers = [
                (point, told)
                if rank == self.rank
                else self._answer_of(rank, what, self._patience + longer)
                for rank in range(self.size)
            ]
            if self._number > 1:  # all have read what they needed of the turn before
                self._store.delete_key(self._key(self._number - 1, self.rank))
        except RuntimeError as error:
            self.lost = f"the launcher's store can't be reached: {error}"
            raise RankLost(what, f"got no answer of all ranks: {self.lost}") from error
        for rank, (theirs, _) in enumerate(answers):
            if theirs != point:
                raise OutOfStep(what, f"is next on rank {self.rank}, and on rank {rank} {theirs}")
        return [each for _, each in answers]

    def ends(self, clause_id: str, told: T) -> list[T]:
        """What every rank tells at the end of an input's check; those that have come to it wait
        for those that haven't, which learn of it at their next call.

        Raises:
            RankLost: One doesn't come to its end.
        """
        while True:
            try:
                return self.exchange(clause_id, told, at="the end of ")
            except OutOfStep:
                continue

    def call(self, method: str) -> None:
        """Meet before a call of the trainer: it may wait for all ranks itself, for ever.

        Raises:
            OutOfStep: A rank makes another call, or has come to its end.
            RankLost: One doesn't come to this call.
        """
        self.exchange(method, None)

    def agree(self, method: str, answer: Any, fault: TrainerFault | None) -> None:
        """Compare what a call of the trainer's `method` came to on every rank.

        Raises:
            RanksDisagree: Not all failed, or not all returned the same.
            RankLost: One gives no answer.
        """
        told = self.exchange(method, (str(fault or ""), _view(answer)), at="the answer of ")
        failures = [failure for failure, _ in told]
        views = [view for _, view in told]
        if all(failures):
            return
        if any(failures):
            failed = next(rank for rank, failure in enumerate(failures) if failure)
            well = next(rank for rank, failure in enumerate(failures) if not failure)
            raise RanksDisagree(
                method,
                f"failed on rank {failed} only, and returned on rank {well}; there: "
                f"{failures[failed]}",
                root="distributed.failure",
            )
        for rank, view in enumerate(views):
            for name in views[0].keys() | view.keys():
                here, there = views[0].get(name), view.get(name)
                if here != there:
                    raise RanksDisagree(
                        method, f"returned {name} = {here} on rank 0 and {there} on rank {rank}"
                    )

    def from_first(self, what: str, make: Callable[[], T], longer: float = 0.0) -> T:
        """What `make` gives on the first rank, on all of them; or the exception that it raises."""
        made: T | None = None
        error: Exception | None = None
        if self.first:
            try:
                made = make()
            except Exception as raised:
                error = raised
        made, error = self.exchange(what, (made, error), longer)[0]
        if error is not None:
            raise error
        return made  # type: ignore[return-value]

    def last_words(self, where: str) -> str:
        """Tell the others that this rank blocks in a call and ends; what they have told, in words.

        Called from another thread. The first rank is given time to tell the verdict.
        """
        if self._store is None:
            return ""
        self._number += 1
        heard = []
        with suppress(RuntimeError):  # the store may be gone, as the rank that held it
            self._tell(_Hangs(where))
            heard = [
                f"On rank {rank} the same call {_in_words(self._read(rank))}.\n"
                for rank in range(self.size)
                if rank != self.rank and self._store.check([self._key(self._number, rank)])
            ]
            if not self.first:
                self._appears(_AT_THE_END, _LONGEST_FAREWELL)
        return "".join(heard)

    def leave(self) -> None:
        """Wait until the first rank has told the verdict: launchers end all when one has ended."""
        if self._store is None:
            return
        with suppress(RuntimeError):  # nobody waits any more where the store is gone
            if self.first:
                self._store.set(_AT_THE_END, "")
            else:
                self._appears(_AT_THE_END, _LONGEST_FAREWELL)
        self._store = None

    def _tell(self, told: Any) -> None:
        assert self._store is not None
        key = self._key(self._number, self.rank)
        self._store.set(key, pickle.dumps(told))  # type: ignore[arg-type]  # takes bytes too

    def _answer_of(self, rank: int, method: str, patience: float) -> Any:
        if not self._appears(self._key(self._number, rank), patience):
            self.lost = self.lost or f"rank {rank} gave none within {patience:g} s of the others"
        if not self.lost:
            answer = self._read(rank)
            if not isinstance(answer, _Hangs):
                return answer
            self.lost = f"rank {rank} blocks in it:\n{answer.where}"
        raise RankLost(method, f"got no answer of all ranks: {self.lost}")

    def _appears(self, key: str, patience: float) -> bool:
        """Whether the key is there within so many seconds.

        It is asked for again and again: waiting in the store can't be interrupted, and writes a
        warning where it takes long.
        """
        assert self._store is not None
        until, pause = time.monotonic() + patience, _SHORTEST_PAUSE
        while not self._store.check([key]):
            if self.lost or time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def _read(self, rank: int) -> Any:
        assert self._store is not None
        return pickle.loads(self._store.get(self._key(self._number, rank)))

    def _key(self, number: int, rank: int) -> str:
        return f"{number}/{rank}"


@contextmanager
def without_launcher() -> Iterator[None]:
    """Hide the launcher's environment: a process started meanwhile is a world of its own."""
    hidden = {
        name: os.environ.pop(name)
        for name in list(os.environ)
        if name in _OF_A_LAUNCHER or name.startswith("TORCHELASTIC_")
    }
    try:
        yield
    finally:
        os.environ.update(hidden)


def _view(answer: Any) -> dict[str, str]:
    """What ranks compare of an answer: numbers, paths and logits bit for bit.

    Applications decide by them what to call next, and must decide the same on every rank.
    """
    if isinstance(answer, str | os.PathLike):
        return {"the path": str(answer), "whether it is there": _is_there(answer)}
    if isinstance(answer, Tensor):
        return {"logits": _fingerprint(answer)}
    found = {}
    for name in ("loss", "learning_rate", "step", "accumulated_microbatches", "model_name"):
        with suppress(Exception):  # results are the trainer's own objects
            value = getattr(answer, name)
            found[name] = brief(value.item() if isinstance(value, Tensor) else value)
    with suppress(Exception):
        config = answer.model_config
        if isinstance(config, Mapping):
            found |= {f"model_config[{key!r}]": brief(config[key]) for key in config}
    return found


def _is_there(path: str | os.PathLike[str]) -> str:
    """Whether this rank finds the path; of ranks on several machines each may have its own disk."""
    world_size = os.environ.get("WORLD_SIZE")
    on_one_machine = os.environ.get("LOCAL_WORLD_SIZE", world_size) == world_size
    return str(os.path.exists(path)) if on_one_machine else "unknown"


def _fingerprint(tensor: Tensor) -> str:
    """A short text that differs where a bit does, with the sum for the reader."""
    with torch.no_grad():
        values = tensor.detach().cpu().contiguous()
        octets = values.reshape(-1).view(torch.uint8).to(torch.int64)
        places = torch.arange(octets.numel()) * 2_654_435_761 + 1
        total = float(values.double().sum())
        digest = int((octets * places).sum()) % 1_000_003
        return f"{list(values.shape)} {values.dtype} that add up to {total:.9g} (#{digest})"


def _in_words(answer: Any) -> str:
    if isinstance(answer, _Hangs):
        return "blocks as well"
    told = answer[1]
    failure = told[0] if isinstance(told, tuple) else ""
    return f"failed: {failure}" if failure else "has come to its end"
