"""A trainer as the checks drive it: synchronous, within time limits, every call recorded."""

from __future__ import annotations

import inspect
import numbers
import os
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from forge_conformance.observe.witness import Witness
from forge_conformance.subject.faults import (
    CallFailed,
    Malformed,
    NotAwaitable,
    TimedOut,
    TrainerFault,
    brief,
)
from forge_conformance.subject.loop import CallTimedOut, Loop
from forge_conformance.subject.ranks import Ranks

T = TypeVar("T")


class Losses(NamedTuple):
    """What `forward_backward` returned: the loss as a number, the metrics, the result itself."""

    loss: float
    metrics: Mapping[str, Any]
    result: Any


class Update(NamedTuple):
    """What `optim_step` returned, as numbers, and the result itself."""

    step: int
    learning_rate: float
    accumulated_microbatches: int
    result: Any


class Status(NamedTuple):
    """What `get_status` returned, as numbers."""

    step: int
    accumulated_microbatches: int


_MOST_HANGS = 5
"""So often may a method give no answer before it is taken to never give one."""


@dataclass
class Journal:
    """All calls of a run: how many, how long, and the last few by name."""

    calls: int = 0
    seconds: float = 0.0
    last: deque[str] = field(default_factory=lambda: deque(maxlen=12))
    hung: Counter[str] = field(default_factory=Counter)


class Subject:
    """One trainer, called as an application would, with plain return values.

    Every method calls the trainer's method of the same name and awaits it. It raises a
    `TrainerFault` where the trainer raises, hangs, or returns something unusable; it never raises
    the trainer's own exception. `loss`, `step` and so on are numbers whatever their class was:
    `structure.result_types` alone judges the types.

    Where the run has several ranks, each calls its own trainer at the same point, and a call that
    doesn't come out the same on all of them is a fault on all of them.
    """

    def __init__(
        self, trainer: Any, loop: Loop, journal: Journal, ranks: Ranks | None = None
    ) -> None:
        self.trainer = trainer
        self.loop = loop
        self.journal = journal
        self.ranks = ranks or Ranks()

    def forward_backward(
        self, batch: Any, loss_fn: Callable[[dict[str, Any], Any], Tensor] | None = None
    ) -> Losses:
        arguments = (batch,) if loss_fn is None else (batch, loss_fn)
        result = self.call("forward_backward", *arguments)
        if self.ranks.several and isinstance(loss_fn, Witness):
            saw = self.ranks.exchange("forward_backward", loss_fn.calls, at="the witness of ")
            if not all(saw):
                loss_fn.forget()
        metrics = self._field("forward_backward", result, "metrics")
        if not isinstance(metrics, Mapping):
            raise Malformed(
                "forward_backward", f"returned metrics as {type(metrics).__name__}, not a mapping"
            )
        return Losses(self._number("forward_backward", result, "loss"), metrics, result)

    def optim_step(self) -> Update:
        result = self.call("optim_step")
        return Update(
            self._count("optim_step", result, "step"),
            self._number("optim_step", result, "learning_rate"),
            self._count("optim_step", result, "accumulated_microbatches"),
            result,
        )

    def clear_gradients(self) -> None:
        self.call("clear_gradients")

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.call("forward", {"input_ids": input_ids})
        if not isinstance(logits, Tensor):
            raise _bad_logits(f"{type(logits).__name__}, not a tensor")
        if hasattr(logits, "to_local"):
            raise _bad_logits(f"a sharded {type(logits).__name__}, not a plain tensor")
        if not logits.is_floating_point():
            raise _bad_logits(f"a tensor of {logits.dtype}, not a floating one")
        if logits.shape[:-1] != input_ids.shape:
            raise _bad_logits(
                f"logits of shape {list(logits.shape)} for ids of shape {list(input_ids.shape)}"
            )
        try:
            return logits.detach().to("cpu", copy=True)
        except Exception as error:
            raise _bad_logits(f"logits that can't be read: {type(error).__name__}") from error

    def save(self, name: str | None = None, path: Any = None, weights_only: bool = False) -> str:
        return self._path("save", self.call("save", name, path, weights_only))

    def load(self, path: str | None = None) -> str:
        return self._path("load", self.call("load", path))

    def get_config(self) -> Any:
        return self.call("get_config")

    def get_status(self) -> Status:
        result = self.call("get_status")
        return Status(
            self._count("get_status", result, "step"),
            self._count("get_status", result, "accumulated_microbatches"),
        )

    def get_tokenizer(self) -> Any:
        return self.call("get_tokenizer")

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """What the trainer's method `method` returns, awaited and otherwise as it is."""
        try:
            function = getattr(self.trainer, method)
        except Exception as error:
            raise CallFailed(method, error, root="structure.methods") from error
        return self.run(method, lambda: function(*args, **kwargs))

    def run(self, name: str, make_awaitable: Callable[[], Awaitable[Any]]) -> Any:
        """Await what `make_awaitable` returns, on the loop; `name` names it in the journal."""
        answer: Any = None
        fault: TrainerFault | None = None
        if self.ranks.several:
            self.ranks.call(name)
        try:
            answer = self._run_here(name, make_awaitable)
        except TrainerFault as error:
            fault = error
        if self.ranks.several:
            self.ranks.agree(name, answer, fault)
        if fault is not None:
            raise fault
        return answer

    def _run_here(self, name: str, make_awaitable: Callable[[], Awaitable[Any]]) -> Any:
        if self.journal.hung[name] >= _MOST_HANGS:
            raise TimedOut(name, self.loop.timeout, times=_MOST_HANGS)
        self.journal.calls += 1
        self.journal.last.append(name)
        try:
            return self.loop.run(self._timed(name, make_awaitable))
        except CallTimedOut as error:
            self.journal.hung[name] += 1
            raise TimedOut(name, error.seconds, error.stack) from None
        except (NotAwaitable, KeyboardInterrupt):
            raise
        except BaseException as error:  # some backends' errors are no `Exception`s
            raise CallFailed(name, error) from error

    async def _timed(self, name: str, make_awaitable: Callable[[], Awaitable[Any]]) -> Any:
        started = time.perf_counter()
        try:
            value: Any = make_awaitable()
            if not inspect.isawaitable(value):
                raise NotAwaitable(name, value)
            return await value
        finally:
            self.journal.seconds += time.perf_counter() - started

    def _field(self, method: str, result: Any, name: str) -> Any:
        try:
            return getattr(result, name)
        except Exception:
            raise Malformed(
                method, f"returned {brief(result)} ({type(result).__name__}), without .{name}"
            ) from None

    def _number(self, method: str, result: Any, name: str) -> float:
        value = self._field(method, result, name)
        try:
            if isinstance(value, Tensor) and value.numel() == 1:
                return float(value.detach())
            if isinstance(value, numbers.Real):
                return float(value)
        except Exception as error:
            fault = Malformed(method, f"returned a .{name} that can't be read: {brief(error)}")
            raise fault from error
        raise Malformed(method, f"returned .{name} = {brief(value)}, which isn't a number")

    def _count(self, method: str, result: Any, name: str) -> int:
        value = self._number(method, result, name)
        if not value.is_integer():
            raise Malformed(method, f"returned .{name} = {value!r}, which isn't a count")
        return int(value)

    def _path(self, method: str, value: Any) -> str:
        try:
            return str(os.fspath(value) if isinstance(value, os.PathLike) else _text(value))
        except TypeError:
            raise Malformed(method, f"returned {brief(value)}, which isn't a path") from None


def _bad_logits(what: str) -> TrainerFault:
    return Malformed("forward", f"returned {what}", root="forward.shape")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


Program: TypeAlias = Callable[[Subject], T]
"""A sequence of calls on one trainer, and what it shows."""
