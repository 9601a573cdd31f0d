"""One pytest session of the kit: collects a test item for each clause, and tells the verdict."""

from __future__ import annotations

import inspect
import os
import random
import shlex
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import PurePosixPath
from typing import Any

import pytest

from forge_conformance.contract import Clause, Need, UnknownClause, select
from forge_conformance.engine import PROFILES, lost_rank
from forge_conformance.items import ClauseArea, ClauseItem, FailureRepr
from forge_conformance.lab import Lab
from forge_conformance.outcome import Finding, Outcome, Verdict
from forge_conformance.plugin import DEFAULT_TIMEOUT
from forge_conformance.report.summary import Status, Summary
from forge_conformance.report.text import (
    failure_line,
    failure_text,
    sentence_lines,
    verdict_lines,
)
from forge_conformance.subject import RankLost, Ranks
from forge_conformance.target import Target, TargetError, resolve


def new_session(config: pytest.Config, name: str) -> Session:
    """The session for the trainer `name`, by the options of `config`."""
    try:
        target = resolve(name)
        second = config.getoption("trainer_against")
        against = None if second is None else resolve(second)
        clauses = select(config.getoption("clause") or ())
    except (TargetError, UnknownClause) as error:
        raise pytest.UsageError(str(error.args[0])) from error
    runnable = [clause for clause in clauses if not clause.pending]
    if not runnable:
        raise pytest.UsageError(f"{clauses[0].id} can't be judged: {clauses[0].pending}")
    lab = _new_lab(config, target, against)
    # A disagreement of ranks is the cause of much else; in one process none can be.
    between_ranks = [clause for clause in runnable if Need.RANKS in clause.needs]
    others = [clause for clause in runnable if clause not in between_ranks]
    if lab.ranks.several or not others:
        others = [*between_ranks, *others]
    return Session(config, target, lab, others)


_MARGIN_OF_RANKS = 60.0
"""Seconds that one rank may be ahead of another, beside the time limit of a call."""


def _new_lab(config: pytest.Config, target: Target, against: Target | None) -> Lab:
    timeout = config.getoption("trainer_timeout")
    try:
        ranks = Ranks.of_this_process(timeout + _MARGIN_OF_RANKS)
        if ranks.several and config.getoption("numprocesses", None):
            raise pytest.UsageError("pytest-xdist (-n) can't share out a run of several ranks")
        return Lab(target, timeout, against, ranks)
    except (RuntimeError, RankLost) as error:
        raise pytest.UsageError(
            f"the environment tells of {os.environ.get('WORLD_SIZE')} ranks, which don't meet "
            f"({error}): start all by a launcher such as torchrun, or unset WORLD_SIZE"
        ) from error


class Session:
    """The hooks of a run with `--trainer`, and what they share."""

    def __init__(
        self,
        config: pytest.Config,
        target: Target,
        lab: Lab,
        clauses: list[Clause],
    ) -> None:
        self.config = config
        self.target = target
        self.lab = lab
        self.clauses = clauses
        self.profile = PROFILES[config.getoption("conformance_profile")]
        self.strict: bool = config.getoption("conformance_strict")
        self.seed = lab.ranks.from_first("the seed", lambda: _seed(config))
        self.in_worker = hasattr(config, "workerinput")
        self.alone = config.args_source is not pytest.Config.ArgsSource.ARGS
        self.judges = self.alone or config.getoption("conformance")
        self._outcomes: dict[str, Outcome] = {}
        self._areas = _node_ids_of_areas(config, clauses)
        self._selected: list[str] = []
        self._has_trainer = False
        self._interrupted = False
        self._exit_status = 0
        self._driven: set[pytest.Item] = set()
        if not lab.ranks.first:
            # One rank tells what all have found.
            config.pluginmanager.set_blocked("terminalreporter")
            config.option.xmlpath = None
        if lab.ranks.several and getattr(config.option, "randomly_seed", None) == "default":
            config.option.randomly_seed = lab.ranks.from_first("an order", lambda: self.seed or 1)
        if self.alone:
            config.args = []
            config.args_source = pytest.Config.ArgsSource.ARGS
            if config.getoption("reportchars", None) == "fE":
                config.option.reportchars = "E"  # the verdict lists what failed

    @property
    def again(self) -> str:
        """The command that repeats this run, as far as a clause."""
        ranks = self.lab.ranks
        launcher = ["torchrun", f"--nproc-per-node={ranks.size}", "-m"] if ranks.several else []
        parts = [*launcher, "pytest", f"--trainer={self.config.getoption('trainer')}"]
        second = self.config.getoption("trainer_against")
        if second is not None:
            parts.append(f"--trainer-against={second}")
        profile = self.config.getoption("conformance_profile")
        if profile != "default":
            parts.append(f"--conformance-profile={profile}")
        timeout = self.config.getoption("trainer_timeout")
        if timeout != DEFAULT_TIMEOUT:
            parts.append(f"--trainer-timeout={timeout:g}")
        if self.strict:
            parts.append("--conformance-strict")
        if self.seed:
            parts.append(f"--hypothesis-seed={self.seed}")
        return shlex.join(parts)

    # An author's own tests

    @contextmanager
    def guest(self, test: pytest.Item) -> Iterator[Any]:
        """A new trainer for one test, closed at its end."""
        self._driven.add(test)
        trainer = self.lab.fresh().trainer
        self._has_trainer = True
        yield trainer
        self.lab.retire_others()

    @contextmanager
    def maker(self, test: pytest.Item) -> Iterator[Callable[[], Awaitable[Any]]]:
        """A maker of trainers for one test, closed at its end."""
        self._driven.add(test)
        with self.lab.guests() as make:
            yield make

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Run a coroutine test that takes a trainer on the loop that the trainer was made in.

        pytest-asyncio has wrapped the coroutine function by now, to run it on a loop of its own.
        """
        function = pyfuncitem.obj
        if pyfuncitem.get_closest_marker("asyncio") is not None:
            function = inspect.unwrap(function, stop=inspect.iscoroutinefunction)
        if pyfuncitem not in self._driven or not inspect.iscoroutinefunction(function):
            return None
        names = pyfuncitem._fixtureinfo.argnames
        arguments = {name: pyfuncitem.funcargs[name] for name in names}
        self.lab.loop.run_unlimited(function(**arguments))
        return True

    # Several ranks

    def pytest_sessionstart(self) -> None:
        ranks = self.lab.ranks
        if ranks.several and ranks.first:
            signal.signal(signal.SIGTERM, self._another_rank_has_ended)

    def _another_rank_has_ended(self, _signal: int, _frame: Any) -> None:
        """Launchers terminate all ranks when one has failed; the verdict is still to be told."""
        ranks = self.lab.ranks
        ranks.lost = ranks.lost or "the launcher ends the run, as it does when a rank has ended"

    # Collecting and running

    def pytest_report_header(self) -> str:
        return (
            f"conformance: {self.target.name}, {_count(len(self.clauses), 'clause')}, "
            f"profile {self.config.getoption('conformance_profile')}, seed {self.seed}"
            + (f", {self.lab.ranks.size} ranks" if self.lab.ranks.several else "")
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> None:
        if not self.judges:
            return
        for name, node_id in self._areas.items():
            area = ClauseArea.from_parent(
                session,
                name=name,
                nodeid=node_id,
                clauses=[clause for clause in self.clauses if clause.area == name],
                run=self,
            )
            items.extend(session.genitems(area))

    @pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")
    def keep_the_order_of_the_contract(self, items: list[pytest.Item]) -> None:
        """Judge causes before what follows from them, whatever else shuffles tests."""
        order = {clause.id: position for position, clause in enumerate(self.clauses)}
        places = [place for place, item in enumerate(items) if isinstance(item, ClauseItem)]
        in_order = sorted((items[place] for place in places), key=lambda item: order[item.name])
        for place, item in zip(places, in_order, strict=True):
            items[place] = item

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._selected = [item.name for item in session.items if isinstance(item, ClauseItem)]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Learn what the workers of pytest-xdist have collected; all have the same."""
        self._selected = [each for each in map(self._clause_id, ids) if each is not None]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of pytest-xdist which inputs this run draws."""
        node.workerinput["conformance_seed"] = self.seed

    def require_trainer(self) -> None:
        """Build the first trainer.

        Raises:
            TargetError: It can't be built; that ends the run.
        """
        if not self._has_trainer:
            try:
                self.lab.build_first()
            except RankLost as lost:
                raise TargetError(str(lost)) from lost
            self._has_trainer = True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, Any]:
        report = yield
        if call.excinfo is not None and isinstance(call.excinfo.value, TargetError):
            self._note_unbuildable(item, report, call.excinfo.value)
        if isinstance(item, ClauseItem) and call.when == "call" and item.outcome is not None:
            report.conformance = item.outcome.to_dict()
        return report

    def _note_unbuildable(self, item: pytest.Item, report: Any, error: TargetError) -> None:
        if not self._has_trainer:
            report.conformance_unbuildable = str(error)
            if self.in_worker:
                item.session.shouldfail = "no trainer can be built"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = self._outcome_of(report)
        if outcome is not None:
            self._note(outcome)
            if report.failed and outcome.verdict is not Verdict.EXPECTED:
                report.longrepr = self._failure(outcome)  # type: ignore[assignment]
        elif report.failed and not self.lab.ranks.first:
            self._tell_aside(report)
        unbuildable = getattr(report, "conformance_unbuildable", None)
        if unbuildable is not None and not self.in_worker:
            raise pytest.UsageError(f"{self.target.name}: {unbuildable}")

    def _tell_aside(self, report: pytest.TestReport) -> None:
        """Show an author's own test that fails on a rank without a reporter."""
        text = f"\nrank {self.lab.ranks.rank}: {report.nodeid}\n{report.longreprtext}"
        capture = self.config.pluginmanager.get_plugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            print(text, file=sys.stderr, flush=True)

    def _note(self, outcome: Outcome) -> None:
        """Of a clause that is judged again (by each worker, or by a rerun) a failure counts."""
        earlier = self._outcomes.get(outcome.clause_id)
        if earlier is None or earlier.verdict in (Verdict.HELD, Verdict.NOT_CHECKED):
            self._outcomes[outcome.clause_id] = outcome

    def _failure(self, outcome: Outcome) -> FailureRepr:
        cause = self.summary.cause_of(outcome.clause_id)
        again = f"{self.again} --clause={outcome.clause_id}"
        return FailureRepr(failure_text(outcome, again, cause), failure_line(outcome))

    def _outcome_of(self, report: pytest.TestReport) -> Outcome | None:
        data = getattr(report, "conformance", None)
        if data is not None:
            return Outcome.from_dict(data)
        clause_id = self._clause_id(report.nodeid)
        if clause_id is None or report.when in ("setup", "call", "teardown"):
            return None
        # How pytest-xdist tells that a worker has died.
        crash = Finding("a process that outlives the check", str(report.longrepr))
        return Outcome(clause_id, Verdict.BROKE, finding=crash)

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
        outcomes = list(self._outcomes.values())
        return Summary(self.target.name, outcomes, self._selected, self.strict)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        # pytest-xdist stops at the first failure by an exception derived from this one.
        self._interrupted = excinfo.type is KeyboardInterrupt

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        lost_before = self.lab.ranks.lost
        self.lab.close()
        if self.lab.ranks.lost != lost_before and self._outcomes:
            last = [*self._outcomes][-1]
            self._note(Outcome(last, Verdict.BROKE, finding=lost_rank(self.lab.ranks.lost)))
        if self._tells_a_verdict(exitstatus):
            session.exitstatus = self._status(exitstatus)
        self._exit_status = int(session.exitstatus)

    def _status(self, exitstatus: int) -> int:
        status = self.summary.status
        if exitstatus == pytest.ExitCode.INTERRUPTED and self._interrupted:
            return exitstatus
        if status in (Status.NOT_CONFORMANT, Status.KIT_FAILED, Status.USAGE):
            return status
        # The kit has found nothing against the trainer: what remains is for pytest to say.
        return exitstatus or status

    def _tells_a_verdict(self, exitstatus: int) -> bool:
        own = (
            pytest.ExitCode.OK,
            pytest.ExitCode.TESTS_FAILED,
            pytest.ExitCode.INTERRUPTED,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        )
        collects_only = self.config.option.collectonly
        return self.judges and not self.in_worker and not collects_only and exitstatus in own

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> Iterator[None]:
        yield
        if not self._tells_a_verdict(exitstatus):
            return
        summary = self.summary
        terminalreporter.ensure_newline()
        terminalreporter.section(f"conformance of {summary.trainer}", "=")
        for line in verdict_lines(summary, timing=self.config.getoption("conformance_timing")):
            terminalreporter.write_line(line)
        colour = {"green": True} if summary.status is Status.CONFORMANT else {"red": True}
        for line in sentence_lines(summary):
            terminalreporter.write_line(line, bold=True, **colour)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self.lab.close()
        self.lab.ranks.leave()
        if not self.in_worker and self._would_never_exit():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._exit_status)

    def _would_never_exit(self) -> bool:
        """Whether Python would wait for a task that can't be cancelled, or for the thread of a
        call that was given up."""
        loop = self.lab.loop
        return bool(loop.stubborn) or (loop.timed_out and _other_threads_run())

    def _clause_id(self, node_id: str) -> str | None:
        area, _, clause_id = node_id.rpartition("::")
        known = any(clause.id == clause_id for clause in self.clauses)
        return clause_id if known and area in self._areas.values() else None


def _node_ids_of_areas(config: pytest.Config, clauses: list[Clause]) -> dict[str, str]:
    """Node ids are paths from pytest's root, shown as paths from the folder it was started in."""
    here = config.invocation_params.dir
    below_root = here.relative_to(config.rootpath) if here.is_relative_to(config.rootpath) else ""
    return {clause.area: (PurePosixPath(below_root) / clause.area).as_posix() for clause in clauses}


def _other_threads_run() -> bool:
    main = threading.main_thread()
    return any(thread is not main and not thread.daemon for thread in threading.enumerate())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _seed(config: pytest.Config) -> int:
    if hasattr(config, "workerinput"):
        return int(config.workerinput["conformance_seed"])
    given = config.getoption("--hypothesis-seed", None)
    if given is not None and str(given).lstrip("-").isdigit():
        return int(given)
    explores = PROFILES[config.getoption("conformance_profile")].explores
    return random.SystemRandom().randrange(1, 2**32) if explores or given == "random" else 0
