"""The verdict on a trainer: what all outcomes together say, and the exit status."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from forge_conformance.contract import CATALOGUE, Clause, Level
from forge_conformance.outcome import Finding, Outcome, Verdict


class Status(IntEnum):
    """What a run has come to; the value is its exit status."""

    CONFORMANT = 0
    NOT_CONFORMANT = 1
    UNFINISHED = 2
    """The run was stopped before its end and nothing had broken until then."""
    KIT_FAILED = 3
    USAGE = 4
    """The target can't be used: no trainer can be built, or what it declares fails."""
    NOTHING_CHECKED = 5


@dataclass(frozen=True)
class Cause:
    """A clause that broke, and the clauses that broke for the same reason, by their ids."""

    clause_id: str
    followed: list[str]


@dataclass(frozen=True)
class Summary:
    """All outcomes of one run.

    Args:
        trainer: The name that was given to `--trainer`.
        outcomes: One for each clause that was judged.
        selected: The ids of all clauses that were to be judged.
        strict: Whether a broken SHOULD fails the run.
    """

    trainer: str
    outcomes: Sequence[Outcome]
    selected: Sequence[str]
    strict: bool = False

    def of(self, *verdicts: Verdict, level: Level | None = None) -> list[Outcome]:
        """The outcomes with one of these verdicts, in the order of the contract."""
        order = list(CATALOGUE)
        found = [
            outcome
            for outcome in self.outcomes
            if outcome.verdict in verdicts and (level is None or clause_of(outcome).level is level)
        ]
        return sorted(found, key=lambda outcome: order.index(outcome.clause_id))

    @property
    def broke(self) -> list[Outcome]:
        """The broken clauses that make the trainer fail."""
        return self.of(Verdict.BROKE, level=None if self.strict else Level.MUST)

    @property
    def advised(self) -> list[Outcome]:
        """The broken clauses that are only advice."""
        return [] if self.strict else self.of(Verdict.BROKE, level=Level.SHOULD)

    @property
    def unfinished(self) -> list[str]:
        """The clauses that were to be judged and have no outcome."""
        judged = {outcome.clause_id for outcome in self.outcomes}
        return [clause_id for clause_id in self.selected if clause_id not in judged]

    @property
    def causes(self) -> list[Cause]:
        """The broken clauses by what made them break: what fails the run first, then advice.

        A clause follows from another where its finding says so and that one broke too, or where
        an earlier one was broken by the same fault of the trainer, word for word.
        """
        broken = {outcome.clause_id: outcome for outcome in [*self.broke, *self.advised]}
        first_with: dict[str, str] = {}
        parents: dict[str, str] = {}
        for clause_id, outcome in broken.items():
            finding = outcome.finding or Finding("", "")
            fault = "" if finding.apart else _ADDRESS.sub("", finding.seen)
            if fault in first_with:
                parents[clause_id] = first_with[fault]
            elif finding.follows in broken:
                parents[clause_id] = finding.follows
            if fault:
                first_with.setdefault(fault, clause_id)
        followed: dict[str, list[str]] = {}
        for clause_id in broken:
            root = _root(clause_id, parents)
            followed.setdefault(root, [])
            if root != clause_id:
                followed[root].append(clause_id)
        in_order = [clause_id for clause_id in broken if clause_id in followed]
        return [Cause(clause_id, followed[clause_id]) for clause_id in in_order]

    def cause_of(self, clause_id: str) -> str:
        """The clause that a broken one follows from: itself, where nothing else is known."""
        for cause in self.causes:
            if clause_id in cause.followed:
                return cause.clause_id
        return clause_id

    @property
    def reduced_precision(self) -> list[str]:
        """The flags under which torch computed less precisely than in its dtypes, each once."""
        return list(
            dict.fromkeys(f for outcome in self.outcomes for f in outcome.reduced_precision)
        )

    @property
    def status(self) -> Status:
        says_something = self.of(
            Verdict.HELD, Verdict.BROKE, Verdict.EXPECTED, Verdict.UNEXPECTEDLY_HELD
        )
        if self.of(Verdict.KIT_ERROR):
            return Status.KIT_FAILED
        if self.broke or self.of(Verdict.UNEXPECTEDLY_HELD):
            return Status.NOT_CONFORMANT
        if self.of(Verdict.TARGET_ERROR):
            return Status.USAGE
        if self.unfinished:
            return Status.UNFINISHED
        return Status.CONFORMANT if says_something else Status.NOTHING_CHECKED

    @property
    def overhead(self) -> float:
        """Time of the checks over the time inside the trainer's calls."""
        inside = sum(outcome.call_seconds for outcome in self.outcomes)
        return sum(outcome.seconds for outcome in self.outcomes) / inside if inside else 0.0

    def sentence(self) -> str:
        """The verdict in one line."""
        return f"{self._headline()}: {self._counts()}" if self.selected else self._headline()

    def _headline(self) -> str:
        match self.status:
            case Status.CONFORMANT:
                expected = len(self.of(Verdict.EXPECTED, level=Level.MUST))
                whole = set(self.selected) >= {clause.id for clause in runnable()}
                but = f" BUT FOR {expected} EXPECTED" if expected else ""
                return f"CONFORMANT{but}" if whole else f"CONFORMANT{but} in what was selected"
            case Status.NOT_CONFORMANT:
                return "NOT CONFORMANT"
            case Status.UNFINISHED:
                return "NO VERDICT, the run stopped early"
            case Status.KIT_FAILED:
                return "NO VERDICT, the kit itself failed"
            case Status.USAGE:
                return "NO VERDICT, the target can't be used"
            case Status.NOTHING_CHECKED:
                return "NO VERDICT, nothing was checked"

    def _counts(self) -> str:
        parts = []
        for level in Level:
            selected = [each for each in self.selected if CATALOGUE[each].level is level]
            if not selected:
                continue
            held = len(self.of(Verdict.HELD, level=level))
            unfinished = sum(CATALOGUE[each].level is level for each in self.unfinished)
            others = [
                f"{len(found)} {_IN_COUNTS.get(verdict, verdict.value)}"
                for verdict in Verdict
                if verdict is not Verdict.HELD and (found := self.of(verdict, level=level))
            ]
            others += [f"{unfinished} unfinished"] if unfinished else []
            parts.append(", ".join([f"{held} of {len(selected)} {level} held", *others]))
        return "; ".join(parts)


def runnable() -> list[Clause]:
    """The clauses that have a check."""
    return [clause for clause in CATALOGUE.values() if clause.pending is None]


def clause_of(outcome: Outcome) -> Clause:
    """The clause that an outcome is of."""
    return CATALOGUE[outcome.clause_id]


def _root(clause_id: str, parents: Mapping[str, str]) -> str:
    """Where a chain of parents ends; two that follow from each other are both an end."""
    seen = {clause_id}
    while clause_id in parents and parents[clause_id] not in seen:
        clause_id = parents[clause_id]
        seen.add(clause_id)
    return clause_id


_IN_COUNTS = {
    Verdict.KIT_ERROR: "with a kit error",
    Verdict.TARGET_ERROR: "with a target error",
}
_ADDRESS = re.compile(r"0x[0-9a-f]+")
