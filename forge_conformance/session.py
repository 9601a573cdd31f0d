"""One pytest session of the kit: collects a test item for each clause, and tells the verdict."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from forge_conformance.checks import CHECKS, Check
from forge_conformance.contract import Clause, Level, UnknownClause, select
from forge_conformance.engine import PROFILES, judge
from forge_conformance.lab import Lab
from forge_conformance.outcome import Finding, Outcome, Verdict
from forge_conformance.report.summary import Summary
from forge_conformance.report.text import finding_text, verdict_lines
from forge_conformance.target import Target, TargetError, resolve


def new_session(config: pytest.Config, name: str) -> Session:
    """The session for the trainer `name`, by the options of `config`."""
    try:
        target = resolve(name)
        clauses = select(config.getoption("clause") or ())
    except (TargetError, UnknownClause) as error:
        raise pytest.UsageError(str(error.args[0])) from error
    pending = [clause for clause in clauses if clause.pending]
    if len(pending) == len(clauses):
        raise pytest.UsageError(f"{pending[0].id}: {pending[0].pending}")
    session = Session(config, target, [clause for clause in clauses if not clause.pending])
    if session.alone:
        config.args = []
        config.args_source = pytest.Config.ArgsSource.ARGS
    return session


class Session:
    """The hooks of a run with `--trainer`, and what they share."""

    def __init__(self, config: pytest.Config, target: Target, clauses: list[Clause]) -> None:
        self.config = config
        self.target = target
        self.clauses = clauses
        self.profile = PROFILES[config.getoption("conformance_profile")]
        self.strict: bool = config.getoption("conformance_strict")
        self.seed = _seed(config)
        self.alone = config.args_source is not pytest.Config.ArgsSource.ARGS
        self.judges = self.alone or config.getoption("conformance")
        self.outcomes: list[Outcome] = []
        self._selected: list[str] = []
        self._lab: Lab | None = None

    @property
    def lab(self) -> Lab:
        if self._lab is None:
            self._lab = Lab(self.target, self.config.getoption("trainer_timeout"))
        return self._lab

    @property
    def again(self) -> str:
        """The command that repeats this run, as far as a clause."""
        parts = ["pytest", f"--trainer={self.config.getoption('trainer')}"]
        profile = self.config.getoption("conformance_profile")
        if profile != "default":
            parts.append(f"--conformance-profile={profile}")
        if self.seed:
            parts.append(f"--hypothesis-seed={self.seed}")
        return " ".join(parts)

    # An author's own tests

    def run_test(self, awaitable: Awaitable[Any]) -> Any:
        """Run part of an author's own test on the loop of the run."""
        return self.lab.loop.run_unlimited(awaitable)

    @contextmanager
    def trainers(self) -> Iterator[Callable[[], Awaitable[Any]]]:
        """A maker of trainers, which are closed when the test has ended."""
        with self.lab.guests() as make:
            yield make

    # Collecting and running

    def pytest_report_header(self) -> str:
        return (
            f"conformance: {self.target.name}, {len(self.clauses)} clauses, "
            f"profile {self.config.getoption('conformance_profile')}, seed {self.seed}"
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> None:
        if not self.judges:
            return
        areas: dict[str, ClauseArea] = {}
        for clause in self.clauses:
            area = areas.setdefault(
                clause.area, ClauseArea.from_parent(session, name=clause.area, nodeid=clause.area)
            )
            items.append(
                ClauseItem.from_parent(
                    area, name=clause.id, clause=clause, check=CHECKS[clause.id], run=self
                )
            )

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._selected = [item.clause.id for item in session.items if isinstance(item, ClauseItem)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Build the first trainer before any test: one that can't be built is a usage error."""
        in_worker = hasattr(self.config, "workerinput")
        if self._selected and not in_worker and not self.config.option.collectonly:
            try:
                self.lab.build_first()
            except TargetError as error:
                raise pytest.UsageError(f"{self.target.name}: {error}") from error

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        report: Any = yield
        if isinstance(item, ClauseItem) and call.when == "call" and item.outcome is not None:
            report.conformance = item.outcome.to_dict()
        return report

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of pytest-xdist which inputs this run draws."""
        node.workerinput["conformance_seed"] = self.seed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = getattr(report, "conformance", None)
        if data is not None:
            self.outcomes.append(Outcome.from_dict(data))

    def pytest_report_teststatus(self, report: pytest.TestReport) -> Any:
        data = getattr(report, "conformance", None)
        if data is None or not report.skipped:
            return None
        if data["verdict"] == Verdict.NOT_CHECKED.value:
            return "not checked", "n", ("NOT CHECKED", {"yellow": True})
        if data["verdict"] == Verdict.BROKE.value:
            return "advice", "a", ("ADVICE", {"yellow": True})
        return None

    # The verdict

    @property
    def summary(self) -> Summary:
        selected = self._selected or [clause.id for clause in self.clauses]
        return Summary(self.target.name, self.outcomes, selected, self.strict)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._lab is not None:
            self._lab.close()
        if not self.judges or hasattr(self.config, "workerinput"):
            return
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and self.outcomes:
            own_tests_failed = session.testsfailed > _failed_clauses(self.summary)
            status = self.summary.exit_status
            session.exitstatus = max(status, 1) if own_tests_failed and status != 5 else status

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.judges or not self.outcomes:
            return
        summary = self.summary
        terminalreporter.section(f"conformance of {summary.trainer}", "=")
        for line in verdict_lines(summary, timing=self.config.getoption("conformance_timing")):
            terminalreporter.write_line(line)
        colour = {"green": True} if summary.exit_status == 0 else {"red": True}
        terminalreporter.write_line(summary.sentence(), bold=True, **colour)


class ClauseArea(pytest.Collector):
    """An area of the contract, for reports that group by it."""

    def collect(self) -> list[pytest.Item]:
        return []


class ClauseItem(pytest.Item):
    """The check of one clause as a test item."""

    def __init__(self, *, clause: Clause, check: Check, run: Session, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.clause = clause
        self.check = check
        self.run = run
        self.outcome: Outcome | None = None

    def runtest(self) -> None:
        run = self.run
        expected = run.target.expected_failures.get(self.clause.id)
        profile = run.profile if expected is None else run.profile.without_shrinking()
        self.outcome = judge(self.check, run.lab, profile, run.seed)
        if expected is not None:
            self.outcome = _against_expectation(self.outcome, expected)
        match self.outcome.verdict:
            case Verdict.HELD:
                return
            case Verdict.NOT_CHECKED:
                raise pytest.skip.Exception(self.outcome.reason, _use_item_location=True)
            case Verdict.EXPECTED:
                raise pytest.xfail.Exception(self.outcome.reason)
            case Verdict.BROKE if self.clause.level is Level.SHOULD and not run.strict:
                finding = self.outcome.finding or Finding("", "")
                raise pytest.skip.Exception(f"advice: {finding.seen}", _use_item_location=True)
            case _:
                raise ClauseFailed

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if not isinstance(excinfo.value, ClauseFailed) or self.outcome is None:
            return super().repr_failure(excinfo, style)
        match self.outcome.verdict:
            case Verdict.BROKE:
                return finding_text(self.outcome, f"{self.run.again} --clause={self.clause.id}")
            case Verdict.UNEXPECTEDLY_HELD:
                return (
                    f"{self.clause.id} is expected to break ({self.outcome.reason}), but held: "
                    "take it out of Target.expected_failures"
                )
            case Verdict.KIT_ERROR:
                return (
                    f"The check of {self.clause.id} itself failed; this says nothing about the "
                    f"trainer. Please report it:\n\n{self.outcome.reason}"
                )
            case _:
                return self.outcome.reason

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"clause {self.clause.id}"


class ClauseFailed(Exception):
    """Fails a test item; its outcome says why."""


def _against_expectation(outcome: Outcome, reason: str) -> Outcome:
    if outcome.verdict is Verdict.BROKE:
        outcome.verdict, outcome.reason = Verdict.EXPECTED, reason
    elif outcome.verdict is Verdict.HELD:
        outcome.verdict, outcome.reason = Verdict.UNEXPECTEDLY_HELD, reason
    return outcome


def _failed_clauses(summary: Summary) -> int:
    return len(summary.failing) + len(summary.of(Verdict.KIT_ERROR, Verdict.UNBUILDABLE))


def _seed(config: pytest.Config) -> int:
    given = config.getoption("--hypothesis-seed", None)
    if given is not None and str(given).lstrip("-").isdigit():
        return int(given)
    if hasattr(config, "workerinput"):
        return int(config.workerinput["conformance_seed"])
    explores = PROFILES[config.getoption("conformance_profile")].explores
    return random.SystemRandom().randrange(1, 2**32) if explores or given == "random" else 0
