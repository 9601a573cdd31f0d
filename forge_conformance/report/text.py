"""Outcomes as text for a terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from forge_conformance.contract import AREAS, CATALOGUE, Level
from forge_conformance.outcome import Finding, Outcome, Verdict
from forge_conformance.report.summary import Summary, clause_of, runnable

_LABEL = 16
_NO_BREAK = "\N{NO-BREAK SPACE}"


def width() -> int:
    """Columns to fill: those of the terminal, within what reads well."""
    return min(max(shutil.get_terminal_size((80, 24)).columns, 72), 100)


def failure_text(outcome: Outcome, again: str, cause: str | None = None) -> str:
    """Why a clause fails the run, in full: the clause in words first, then what happened.

    Args:
        again: The command that judges this one clause again.
        cause: The clause that has told the same fault already, if one has.
    """
    clause = clause_of(outcome)
    if cause not in (None, clause.id):
        fault = _wrapped(outcome.finding.seen if outcome.finding else "")
        return "\n".join([*fault, "", *_labelled("cause", f"that of {cause}, which see")])
    lines = [*_wrapped(clause.sentence), ""]
    match outcome.verdict:
        case Verdict.BROKE:
            lines += _finding_lines(outcome.finding or Finding("", ""))
        case Verdict.UNEXPECTEDLY_HELD:
            lines += _labelled("expected", f"to break: {outcome.reason}")
            lines += _labelled("seen", "it holds")
            lines += _labelled("to do", f"take {clause.id} out of Target.expected_failures")
        case Verdict.KIT_ERROR:
            lines += _wrapped(
                "The check itself failed, which says nothing about the trainer. Please report it:"
            )
            lines += ["", textwrap.indent(outcome.reason.rstrip(), "  "), ""]
        case _:
            lines += [*outcome.reason.splitlines(), ""]
    lines += _labelled("again", again, wrap=False)
    return "\n".join(lines)


def failure_line(outcome: Outcome) -> str:
    """Why a clause fails the run, in one line."""
    match outcome.verdict:
        case Verdict.UNEXPECTEDLY_HELD:
            return "expected to break, but held: take it out of Target.expected_failures"
        case Verdict.KIT_ERROR:
            error = outcome.reason.rstrip().rpartition("\n")[2]
            return f"the kit's own error, please report it: {error}"
        case _ if outcome.finding is None:
            return outcome.reason
        case _:
            finding = outcome.finding
            expected, seen = (" ".join(text.split()) for text in (finding.expected, finding.seen))
            a_fault_says_it_all = bool(finding.trainer_traceback or finding.follows)
            return seen if a_fault_says_it_all else f"expected {expected}; seen {seen}"


def verdict_lines(summary: Summary, timing: bool = False) -> Iterator[str]:
    """The verdict but for its last sentence: a table by area, then what is to be known of each."""
    yield from _table(summary)
    yield from _section("broke", _broken_lines(summary, summary.broke))
    yield from _section(
        "held against expectation",
        [
            f"{o.clause_id}: take it out of Target.expected_failures ({o.reason})"
            for o in summary.of(Verdict.UNEXPECTEDLY_HELD)
        ],
    )
    yield from _section("the kit's own errors", _lines(summary.of(Verdict.KIT_ERROR)))
    yield from _section("the target can't be used", _by_reason(summary.of(Verdict.TARGET_ERROR)))
    yield from _section(
        "broke as expected",
        [f"{o.clause_id}: {o.reason}" for o in summary.of(Verdict.EXPECTED)],
    )
    yield from _section("advice", _advice_lines(summary))
    yield from _section("not checked", _by_reason(summary.of(Verdict.NOT_CHECKED)))
    yield from _section("computed in reduced precision", summary.reduced_precision)
    if timing:
        yield from _section("time", _timing_lines(summary))
    yield ""


def sentence_lines(summary: Summary) -> list[str]:
    """The verdict's last sentence, wrapped."""
    return _wrapped(summary.sentence(), indent="  ")


def _finding_lines(finding: Finding) -> list[str]:
    lines = _labelled("expected", finding.expected)
    lines += _labelled("seen", finding.seen)
    lines += _labelled("apart", finding.apart)
    for number, line in enumerate(finding.example):
        lines += _labelled("smallest input" if number == 0 else "", line)
    if finding.follows:
        lines += _labelled("cause", f"what {finding.follows} judges; look there first")
    lines += _labelled("where to look", " ".join(finding.where_to_look.split()))
    if finding.trainer_traceback:
        lines += ["", "  in the trainer", textwrap.indent(finding.trainer_traceback, "  "), ""]
    return lines


_COLUMNS: Sequence[tuple[str, Verdict | None]] = [
    ("held", Verdict.HELD),
    ("broke", Verdict.BROKE),
    ("not checked", Verdict.NOT_CHECKED),
    ("as expected", Verdict.EXPECTED),
    ("unexpected", Verdict.UNEXPECTEDLY_HELD),
    ("kit error", Verdict.KIT_ERROR),
    ("target error", Verdict.TARGET_ERROR),
    ("unfinished", None),
]


def _table(summary: Summary) -> Iterator[str]:
    """One row for each area: how its MUST clauses came out, and how many SHOULD clauses held."""
    if not summary.selected:
        return
    verdicts: dict[str, Verdict | None] = dict.fromkeys(summary.selected)
    verdicts.update({outcome.clause_id: outcome.verdict for outcome in summary.outcomes})

    def must(verdict: Verdict | None, clause_ids: Iterable[str]) -> int:
        return sum(
            verdicts[each] is verdict for each in clause_ids if CATALOGUE[each].level is Level.MUST
        )

    columns = [
        (title, verdict)
        for number, (title, verdict) in enumerate(_COLUMNS)
        if number < 3 or must(verdict, verdicts)
    ]

    def row(name: str, clause_ids: list[str]) -> str:
        counts = [(title, must(verdict, clause_ids)) for title, verdict in columns]
        should = [verdicts[each] for each in clause_ids if CATALOGUE[each].level is Level.SHOULD]
        kept = f"{should.count(Verdict.HELD)} of {len(should)}" if should else ""
        cells = "".join(f"{count or '-':>{len(title) + 2}}" for title, count in counts)
        return f"  {name:18}{cells}{kept:>13}".rstrip()

    heads = "".join(f"{title:>{len(title) + 2}}" for title, _ in columns)
    yield f"  {'MUST':18}{heads}{'SHOULD held':>13}"
    by_area: dict[str, list[str]] = defaultdict(list)
    for clause_id in CATALOGUE:
        if clause_id in verdicts:
            by_area[CATALOGUE[clause_id].area].append(clause_id)
    for area, clause_ids in by_area.items():
        yield row(area, clause_ids)
    if len(by_area) > 1:
        yield row("all", list(verdicts))
    pending = [clause.area for clause in CATALOGUE.values() if clause.pending]
    if pending and len(verdicts) == len(runnable()):
        unchecked = ", ".join(
            f"{area}{_NO_BREAK}{pending.count(area)}" for area in AREAS if area in pending
        )
        yield ""
        yield from _wrapped(f"no check yet, by clauses: {unchecked}", "  ", "    ")


def _broken_lines(summary: Summary, outcomes: Sequence[Outcome]) -> list[str]:
    """Those of `outcomes` that are a cause, each with what followed from it."""
    by_id = {outcome.clause_id: outcome for outcome in outcomes}
    lines = []
    for cause in summary.causes:
        if cause.clause_id in by_id:
            lines.append(f"{cause.clause_id}: {_cut(failure_line(by_id[cause.clause_id]))}")
            if cause.followed:
                count = f" ({len(cause.followed)})" if len(cause.followed) > 2 else ""
                lines.append(f"    and with it{count} {', '.join(cause.followed)}")
    return lines


def _advice_lines(summary: Summary) -> list[str]:
    lines = _broken_lines(summary, summary.advised)
    for outcome in summary.outcomes:
        lines += [f"{outcome.clause_id}: {advice}" for advice in outcome.advice]
    return lines


def _timing_lines(summary: Summary) -> list[str]:
    calls = sum(outcome.calls for outcome in summary.outcomes)
    inside = sum(outcome.call_seconds for outcome in summary.outcomes)
    total = sum(outcome.seconds for outcome in summary.outcomes)
    slowest = sorted(summary.outcomes, key=lambda outcome: -outcome.seconds)[:5]
    return [
        f"checks {total:.2f} s, of which {inside:.2f} s inside {calls} calls of the trainer",
        f"overhead ×{summary.overhead:.2f}, the one over the other",
        "slowest "
        + ", ".join(f"{o.clause_id}{_NO_BREAK}{o.seconds:.2f}{_NO_BREAK}s" for o in slowest),
        "calls " + ", ".join(f"{o.clause_id}{_NO_BREAK}{o.calls}" for o in summary.outcomes),
    ]


def _lines(outcomes: Iterable[Outcome]) -> list[str]:
    return [f"{outcome.clause_id}: {_cut(failure_line(outcome))}" for outcome in outcomes]


def _by_reason(outcomes: Iterable[Outcome]) -> list[str]:
    ids: dict[str, list[str]] = defaultdict(list)
    for outcome in outcomes:
        said = [line for line in outcome.reason.splitlines() if not line.startswith("  ")]
        ids[" ".join(said)].append(outcome.clause_id)
    return [f"{', '.join(clause_ids)}: {reason}" for reason, clause_ids in ids.items()]


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield f"{title}:"
    for line in lines:
        yield from _wrapped(line, "  ", "      ")


def _cut(text: str, most: int = 240) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _wrapped(text: str, first: str = "", indent: str = "") -> list[str]:
    """Lines of `text`; a no-break space holds words together."""
    lines = textwrap.wrap(
        text,
        width(),
        initial_indent=first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [line.replace(_NO_BREAK, " ") for line in lines]


def _labelled(label: str, text: str, wrap: bool = True) -> list[str]:
    lines = [
        piece
        for line in text.splitlines()
        for piece in (
            textwrap.wrap(line, width() - _LABEL - 2, break_on_hyphens=False) if wrap else [line]
        )
    ]
    return [f"  {label if number == 0 else '':{_LABEL}}{line}" for number, line in enumerate(lines)]
