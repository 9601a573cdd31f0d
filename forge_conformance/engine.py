"""Judging one clause: runs its check over drawn inputs and makes an outcome of what happens."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
import time
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, Verbosity
from torch import Tensor

from forge_conformance.checks.registry import Check
from forge_conformance.finding import Broken, NotChecked, Undecided
from forge_conformance.lab import Lab
from forge_conformance.observe.precision import reduced_precision
from forge_conformance.outcome import Finding, Outcome, Verdict
from forge_conformance.subject import CallFailed, TimedOut, TrainerFault
from forge_conformance.subject.ranks import OutOfStep, RankLost
from forge_conformance.subject.stack import trainer_frames
from forge_conformance.target import TargetError


@dataclass(frozen=True)
class Profile:
    """How much a run tries.

    Args:
        examples: Inputs for each check that varies them.
        shrinks: Further inputs that may be tried to make a failing one smaller.
        explores: Whether every run draws other inputs, unless it is given a seed.
    """

    examples: int
    shrinks: int
    explores: bool = False

    def without_shrinking(self) -> Profile:
        return dataclasses.replace(self, shrinks=0)


PROFILES = {
    "quick": Profile(examples=3, shrinks=40),
    "default": Profile(examples=12, shrinks=150),
    "thorough": Profile(examples=50, shrinks=500, explores=True),
}


def judge(check: Check, lab: Lab, profile: Profile, seed: int) -> Outcome:
    """How `check` comes out on the lab's trainer. Never raises but for an interruption."""
    started = time.perf_counter()
    calls, call_seconds = lab.journal.calls, lab.journal.seconds
    lab.advice = []
    trial = _Trial(check, lab, profile)
    lost_before = lab.ranks.lost
    with _caller_state_restored():
        outcome = _outcome(trial, seed)
        lab.retire_others()
    if lab.ranks.lost != lost_before and outcome.verdict is not Verdict.BROKE:
        outcome = Outcome(check.clause_id, Verdict.BROKE, finding=lost_rank(lab.ranks.lost))
    outcome.advice = list(lab.advice)
    outcome.reduced_precision = reduced_precision("cuda" if torch.cuda.is_initialized() else "cpu")
    outcome.examples = trial.examples
    outcome.seconds = time.perf_counter() - started
    outcome.calls = lab.journal.calls - calls
    outcome.call_seconds = lab.journal.seconds - call_seconds
    return outcome


def _outcome(trial: _Trial, seed: int) -> Outcome:
    try:
        trial.run(seed)
    except Settled as settled:
        return settled.outcome
    except Exception as error:
        return _outcome_of(error, trial)
    return Outcome(trial.check.clause_id, Verdict.HELD)


def _outcome_of(error: Exception, trial: _Trial) -> Outcome:
    """What an exception that ended a check makes of its clause."""
    clause_id = trial.check.clause_id
    if isinstance(error, TargetError):
        return Outcome(clause_id, Verdict.TARGET_ERROR, reason=str(error))
    if isinstance(error, NotChecked):
        hints = "; ".join(need.hint for need in error.needs)
        reason = f"{error.reason}: {hints}" if hints else error.reason
        return Outcome(clause_id, Verdict.NOT_CHECKED, reason=reason)
    if isinstance(error, Broken | TrainerFault):
        return Outcome(clause_id, Verdict.BROKE, finding=_finding(error, trial))
    if not _comes_from(error, trial.lab.builder.package):
        reason = "".join(traceback.format_exception(error))
        return Outcome(clause_id, Verdict.KIT_ERROR, reason=reason)
    trial.lab.discard()
    unusable = Broken(
        expected="objects whose attributes, repr and comparisons can be used",
        seen=f"{type(error).__name__} from the trainer's own code when they were",
    )
    finding = _finding(unusable, trial)
    finding.trainer_traceback = _trainer_traceback(error)
    return Outcome(clause_id, Verdict.BROKE, finding=finding)


def lost_rank(why: str) -> Finding:
    """The finding that a rank doesn't answer any more, told at whatever was being judged."""
    return Finding("all ranks to end their calls, close() among them", why, follows=RankLost.root)


class Settled(Exception):
    """What all ranks make of one input together.

    Args:
        hangs: A call never ended.
        barely: As of `Broken`.
    """

    def __init__(self, outcome: Outcome, hangs: bool, barely: bool = False) -> None:
        super().__init__(outcome.verdict.value)
        self.outcome = outcome
        self.hangs = hangs
        self.barely = barely


def _comes_from(error: BaseException, package: str) -> bool:
    """Whether an exception was raised by code of this top-level package."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    name = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    return bool(package) and name.partition(".")[0] == package


class _Trial:
    """One check over its inputs: counts them, remembers failures, bounds the shrinking."""

    def __init__(self, check: Check, lab: Lab, profile: Profile) -> None:
        self.check = check
        self.lab = lab
        self.profile = profile
        self.examples = 0
        self.smallest: dict[str, Any] = {}
        self._decided = 0
        self._undecided: str | None = None
        self._failures: dict[str, Exception] = {}
        self._smallest_failure: Exception | None = None
        self._tries_left = math.inf

    def run(self, seed: int) -> None:
        ranks = self.lab.ranks
        if ranks.lost:
            first_line = ranks.lost.splitlines()[0].rstrip(":")
            raise NotChecked(f"not all ranks answer any more: {first_line}")
        if ranks.several and self.check.alone:
            raise NotChecked("this changes files or starts processes: judge it in one process")
        if not self.check.varying:
            self._try({})
        else:
            domain = self.lab.domain
            strategies = {name: make(domain) for name, make in self.check.varying.items()}
            if any(strategy.is_empty for strategy in strategies.values()):
                raise NotChecked("no input of the shapes that the trainer takes can show it")
            self._explore(strategies, seed)
        if not self._decided:
            raise NotChecked(f"undecided: {self._undecided}")

    def _explore(self, strategies: dict[str, Any], seed: int) -> None:
        @hypothesis.seed(zlib.crc32(f"{seed} {self.check.clause_id}".encode()))
        @hypothesis.settings(
            max_examples=max(1, round(self.check.share * self.profile.examples)),
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            verbosity=Verbosity.quiet,
            print_blob=False,
        )
        @hypothesis.given(**strategies)
        def example(**drawn: Any) -> None:
            self._try(drawn)

        try:
            example()
        except hypothesis.errors.Unsatisfiable:
            pass  # nothing was decided, which `run` says
        except hypothesis.errors.Flaky:
            # The trainer's state decides: what has been seen once has been seen.
            if self._smallest_failure is None:
                raise
            raise self._smallest_failure from None

    def _try(self, drawn: dict[str, Any]) -> None:
        """One input. A failure is remembered: the state that it failed in may not come again."""
        key = repr(sorted((name, describe(value)) for name, value in drawn.items()))
        if key in self._failures:
            self.smallest, self._smallest_failure = drawn, self._failures[key]
            raise self._failures[key]
        if self._tries_left <= 0:
            return
        self._tries_left -= 1
        self.examples += 1
        try:
            self._judge_fairly(drawn)
            self._decided += 1
        except Undecided as error:
            self._undecided = str(error)
        except (Broken, TrainerFault, Settled) as error:
            if isinstance(error, Settled) and error.outcome.verdict is not Verdict.BROKE:
                self._tries_left = 0
                self._failures[key] = self._smallest_failure = error
                raise
            # Making a call that never returns smaller would take its time limit again and again.
            hangs = error.hangs if isinstance(error, Settled) else isinstance(error, TimedOut)
            shrinks = 0 if hangs else self.profile.shrinks
            self._tries_left = min(self._tries_left, shrinks)
            self._failures[key] = error
            self.smallest, self._smallest_failure = drawn, error
            self.lab.discard()
            raise

    def _judge_fairly(self, drawn: dict[str, Any]) -> None:
        """Judge one input; what is barely beyond the tolerance, again on new trainers.

        The shared trainer's training may have led to weights at which rounding is larger than
        anywhere else; a fault of the trainer's own is there at other weights too.
        """
        try:
            self._judge(drawn)
            return
        except (Broken, Settled) as error:
            if not error.barely:
                raise
        self.lab.discard()
        self._judge(drawn)

    def _judge(self, drawn: dict[str, Any]) -> None:
        """Judge one input, with the same end on every rank.

        Hypothesis stays in step over the ranks only where all raise the same class from the same
        line, or all raise nothing.
        """
        ranks = self.lab.ranks
        if not ranks.several:
            self.check.judge(self.lab, **drawn)
            return
        mine = _End()
        self.smallest = drawn
        try:
            self.check.judge(self.lab, **drawn)
        except Undecided as error:
            mine = _End(doubt=str(error))
        except Exception as error:
            outcome = _outcome_of(error, self)
            mine = _End(
                outcome,
                hangs=isinstance(error, TimedOut),
                stopped=isinstance(error, OutOfStep),
                barely=isinstance(error, Broken) and error.barely,
            )
        if ranks.lost and mine.outcome is not None:
            raise Settled(mine.outcome, hangs=True)
        ends = ranks.ends(self.check.clause_id, mine)
        worst = max(ends, key=lambda end: end.weight)
        if worst.outcome is not None:
            raise Settled(worst.outcome, any(end.hangs for end in ends), worst.barely)
        if worst.doubt:
            raise Undecided(worst.doubt)


@dataclass(frozen=True)
class _End:
    """What one rank makes of an input: an outcome, a mere doubt, or nothing against it.

    A rank that is only stopped as others have come to their end has nothing of its own to tell.
    """

    outcome: Outcome | None = None
    doubt: str = ""
    hangs: bool = False
    stopped: bool = False
    barely: bool = False

    @property
    def weight(self) -> tuple[int, bool]:
        """Of several ends the one of the greatest weight decides."""
        if self.outcome is None:
            return (1 if self.doubt else 0), True
        return 2 + _WORSE.index(self.outcome.verdict), not self.stopped


_WORSE = (Verdict.NOT_CHECKED, Verdict.BROKE, Verdict.TARGET_ERROR, Verdict.KIT_ERROR)


def _finding(error: Broken | TrainerFault, trial: _Trial) -> Finding:
    finding = Finding(
        expected="",
        seen="",
        example=[
            line for name, value in trial.smallest.items() for line in _example_lines(name, value)
        ],
        where_to_look=trial.check.where_to_look,
    )
    if isinstance(error, Broken):
        finding.expected, finding.seen, finding.apart = error.expected, error.seen, error.apart
        return finding
    finding.expected = f"{error.expected} from {error.method}()"
    finding.seen = str(error)
    finding.follows = error.root if error.root != trial.check.clause_id else None
    if isinstance(error, CallFailed):
        finding.trainer_traceback = _trainer_traceback(error.error)
    if isinstance(error, TimedOut):
        finding.trainer_traceback = error.stack
    return finding


def _trainer_traceback(error: BaseException) -> str:
    """The traceback from the trainer's method on, without what drives it."""
    lines = [trainer_frames(traceback.walk_tb(error.__traceback__))]
    lines += [line.rstrip() for line in traceback.format_exception_only(error)]
    return "\n".join(filter(None, lines))


def _example_lines(name: str, value: Any) -> list[str]:
    """A drawn value, one line for each part of it that is there."""
    if isinstance(value, Tensor) or not dataclasses.is_dataclass(value):
        return [f"{name} = {describe(value)}"]
    parts = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    return [
        line
        for part, inner in parts
        if inner is not None
        for line in _example_lines(f"{name}.{part}", inner)
    ]


def describe(value: Any) -> str:
    """A drawn value as a short line of text."""
    if isinstance(value, Tensor):
        return f"{value.tolist()}" if value.numel() <= 64 else f"{value.dtype} {list(value.shape)}"
    if hasattr(value, "input_ids"):
        names = ("input_ids", "target_ids", "target_mask", "target_weights")
        return f"batch({', '.join(f'{n}={describe(getattr(value, n))}' for n in names)})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return ", ".join(f"{f.name}={describe(getattr(value, f.name))}" for f in fields)
    return repr(value)


@contextmanager
def _caller_state_restored() -> Iterator[None]:
    """The process's random streams and torch settings are the user's; give them back."""
    numpy = sys.modules.get("numpy")
    python_state, torch_state = random.getstate(), torch.random.get_rng_state()
    numpy_state = numpy.random.get_state() if numpy else None
    grad_enabled = torch.is_grad_enabled()
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.random.set_rng_state(torch_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        torch.set_grad_enabled(grad_enabled)
