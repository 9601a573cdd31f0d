"""How a trainer can fail to give a usable answer to one call."""

from __future__ import annotations

from typing import Any


class TrainerFault(Exception):
    """A call of the trainer gave nothing to go on with.

    A check that expects the call to succeed lets it pass: it then is the finding. `root` is the
    clause that judges just this, so that a report can tell the cause from what followed.
    """

    root: str | None = None

    def __init__(self, method: str, message: str) -> None:
        super().__init__(f"{method}() {message}")
        self.method = method


class CallFailed(TrainerFault):
    """The call raised; the trainer's exception is `error` and the cause of this one."""

    def __init__(self, method: str, error: BaseException) -> None:
        super().__init__(method, f"raised {type(error).__name__}: {_first_lines(str(error))}")
        self.error = error


class TimedOut(TrainerFault):
    """The call gave no answer within the time limit."""

    def __init__(self, method: str, seconds: float, stack: str) -> None:
        where = f"; it was at\n{stack.rstrip()}" if stack else ""
        super().__init__(method, f"gave no answer within {seconds:g} s (--trainer-timeout){where}")


class NotAwaitable(TrainerFault):
    """The call returned something that can't be awaited."""

    root = "structure.awaitable"

    def __init__(self, method: str, value: Any) -> None:
        super().__init__(method, f"returned {type(value).__name__}, which can't be awaited")


class Malformed(TrainerFault):
    """The call returned a result without a usable field."""

    root = "structure.result_types"

    def __init__(self, method: str, what: str) -> None:
        super().__init__(method, what)


def _first_lines(text: str, lines: int = 4, width: int = 400) -> str:
    return "\n".join(text.splitlines()[:lines])[:width]
