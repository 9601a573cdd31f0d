"""The verdict on a trainer: what all outcomes together say, and the exit status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge_conformance.contract import CATALOGUE, Clause, Level
from forge_conformance.outcome import Outcome, Verdict

CONFORMANT, NOT_CONFORMANT, KIT_FAILED, USAGE, NOTHING_CHECKED = 0, 1, 3, 4, 5


@dataclass(frozen=True)
class Summary:
    """All outcomes of one run.

    Args:
        trainer: The name that was given to `--trainer`.
        outcomes: One for each clause that ran.
        selected: The ids of all clauses that were to run.
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
            if outcome.verdict in verdicts and (level is None or _clause(outcome).level is level)
        ]
        return sorted(found, key=lambda outcome: order.index(outcome.clause_id))

    @property
    def failing(self) -> list[Outcome]:
        """The outcomes for which the trainer doesn't conform."""
        levels = (Level.MUST, Level.SHOULD) if self.strict else (Level.MUST,)
        broke = [o for o in self.of(Verdict.BROKE) if _clause(o).level in levels]
        return broke + self.of(Verdict.UNEXPECTEDLY_HELD)

    @property
    def not_run(self) -> list[str]:
        """Clauses that were to run and didn't: the run was stopped before them."""
        ran = {outcome.clause_id for outcome in self.outcomes}
        return [clause_id for clause_id in self.selected if clause_id not in ran]

    @property
    def judged(self) -> list[Outcome]:
        """The outcomes that say something about the trainer."""
        return self.of(Verdict.HELD, Verdict.BROKE, Verdict.EXPECTED, Verdict.UNEXPECTEDLY_HELD)

    @property
    def exit_status(self) -> int:
        """0 conformant, 1 not, 3 the kit failed, 4 the trainer can't be built, 5 nothing checked."""
        if self.of(Verdict.UNBUILDABLE) and not self.judged:
            return USAGE
        if self.of(Verdict.KIT_ERROR):
            return KIT_FAILED
        if self.failing or self.of(Verdict.UNBUILDABLE):
            return NOT_CONFORMANT
        return CONFORMANT if self.judged else NOTHING_CHECKED

    @property
    def overhead(self) -> float:
        """Time of the checks over the time inside the trainer's calls."""
        inside = sum(outcome.call_seconds for outcome in self.outcomes)
        return sum(outcome.seconds for outcome in self.outcomes) / inside if inside else 0.0

    def sentence(self) -> str:
        """The verdict in one line."""
        held = len(self.of(Verdict.HELD, level=Level.MUST))
        not_checked = len(self.of(Verdict.NOT_CHECKED, level=Level.MUST))
        expected = len(self.of(Verdict.EXPECTED))
        counts = f"{held} MUST clauses held"
        if expected:
            counts += f", {expected} broke as expected"
        if not_checked:
            counts += f", {not_checked} not checked"
        if self.not_run:
            counts += f", {len(self.not_run)} not run"
        whole = len(self.selected) == len(runnable())
        scope = "" if whole and not self.not_run else " in what was run"
        match self.exit_status:
            case 0:
                return f"CONFORMANT{scope}: {counts}"
            case 1:
                return f"NOT CONFORMANT: {len(self.failing)} broke, {counts}"
            case 3:
                broken = len(self.of(Verdict.KIT_ERROR))
                return f"NO VERDICT: the kit itself failed in {broken} checks; {counts}"
            case 4:
                return "NO VERDICT: the trainer can't be built"
            case _:
                return f"NO VERDICT: nothing was checked; {counts}"


def runnable() -> list[Clause]:
    """The clauses that have a check."""
    return [clause for clause in CATALOGUE.values() if clause.pending is None]


def _clause(outcome: Outcome) -> Clause:
    return CATALOGUE[outcome.clause_id]
