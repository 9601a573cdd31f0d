"""The clauses as pytest's test items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from forge_conformance.checks import CHECKS
from forge_conformance.contract import Clause, Level
from forge_conformance.engine import judge
from forge_conformance.outcome import Outcome, Verdict
from forge_conformance.report.text import failure_line

if TYPE_CHECKING:
    from forge_conformance.session import Session


class ClauseArea(pytest.Collector):
    """An area of the contract, for reports that group by it."""

    def __init__(self, *, clauses: list[Clause], run: Session, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.clauses = clauses
        self.run = run

    def collect(self) -> list[pytest.Item]:
        return [
            ClauseItem.from_parent(self, name=clause.id, clause=clause, run=self.run)
            for clause in self.clauses
        ]


class ClauseItem(pytest.Item):
    """The check of one clause as a test item."""

    def __init__(self, *, clause: Clause, run: Session, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.clause = clause
        self.check = CHECKS[clause.id]
        self.run = run
        self.outcome: Outcome | None = None

    def runtest(self) -> None:
        run = self.run
        run.require_trainer()
        expected = run.target.expected_failures.get(self.clause.id)
        profile = run.profile if expected is None else run.profile.without_shrinking()
        self.outcome = judge(self.check, run.lab, profile, run.seed)
        if expected is not None:
            _set_against_expectation(self.outcome, expected)
        match self.outcome.verdict:
            case Verdict.HELD:
                return
            case Verdict.NOT_CHECKED:
                raise pytest.skip.Exception(self.outcome.reason, _use_item_location=True)
            case Verdict.EXPECTED:
                raise pytest.xfail.Exception(self.outcome.reason)
            case Verdict.BROKE if self.clause.level is Level.SHOULD and not run.strict:
                advice = f"advice: {failure_line(self.outcome)}"
                raise pytest.skip.Exception(advice, _use_item_location=True)
            case _:
                raise ClauseFailed

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, ClauseFailed):
            return f"{self.clause.id} failed"  # the session tells it, knowing what failed before
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int, str]:
        code = self.check.judge.__code__
        return code.co_filename, code.co_firstlineno - 1, f"{self.clause.id} ({self.clause.level})"


class ClauseFailed(Exception):
    """Fails a test item; its outcome says why."""


class FailureRepr:
    """What pytest shows of a failed clause: the whole text, and the one line of a summary."""

    def __init__(self, text: str, line: str) -> None:
        self.text = text
        self.reprcrash = _Crash(line)

    def __str__(self) -> str:
        return self.text

    def toterminal(self, terminal: Any) -> None:
        """Write the text, with the clause's own words in colour."""
        sentence, blank, rest = self.text.partition("\n\n")
        terminal.line(sentence, red=True, bold=True)
        terminal.line((blank + rest).removeprefix("\n"))
        terminal.line()


class _Crash:
    def __init__(self, message: str) -> None:
        self.message = message


def _set_against_expectation(outcome: Outcome, reason: str) -> None:
    if outcome.verdict is Verdict.BROKE:
        outcome.verdict, outcome.reason = Verdict.EXPECTED, reason
    elif outcome.verdict is Verdict.HELD:
        outcome.verdict, outcome.reason = Verdict.UNEXPECTEDLY_HELD, reason
