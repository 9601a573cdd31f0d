"""How a trainer can fail to give a usable answer to one call."""

from __future__ import annotations

from typing import Any


class TrainerFault(Exception):
    """A call of the trainer gave nothing to go on with.

    A check that expects the call to succeed lets it pass: it then is the finding. `root` is the
    clause that judges just this, so that a report can tell the cause from what followed.
    """

    root: str | None = None
    expected = "a usable answer"

    def __init__(self, method: str, message: str, root: str | None = None) -> None:
        super().__init__(f"{method}() {message}")
        self.method = method
        if root is not None:
            self.root = root


class CallFailed(TrainerFault):
    """The call raised; the trainer's exception is `error` and the cause of this one."""

    def __init__(self, method: str, error: BaseException, root: str | None = None) -> None:
        super().__init__(method, f"raised {brief_error(error)}", root)
        self.error = error


class TimedOut(TrainerFault):
    """The call gave no answer within the time limit; `stack` says where it was.

    With `times` it wasn't made any more: so often has the method given no answer before.
    """

    def __init__(self, method: str, seconds: float, stack: str = "", times: int = 1) -> None:
        often = f", {times} times: it is not called again" if times > 1 else ""
        super().__init__(method, f"gave no answer within {seconds:g} s (--trainer-timeout){often}")
        self.stack = stack


class NotAwaitable(TrainerFault):
    """The call returned something that can't be awaited."""

    root = "structure.awaitable"

    def __init__(self, method: str, value: Any) -> None:
        super().__init__(method, f"returned {type(value).__name__}, which can't be awaited")


class Malformed(TrainerFault):
    """The call returned a result without a usable field."""

    root = "structure.result_types"


def brief_error(error: BaseException) -> str:
    """An exception as `Type: message`, cut to a few lines."""
    try:
        message = str(error)
    except Exception as unprintable:
        message = f"(its message can't be made: {type(unprintable).__name__})"
    first_lines = "\n".join(message.splitlines()[:4])[:400]
    return f"{type(error).__name__}: {first_lines}".removesuffix(": ")


def brief(value: Any) -> str:
    """A trainer's value as a short text, whatever its `__repr__` does."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"(which can't be printed: {type(value).__name__})"
