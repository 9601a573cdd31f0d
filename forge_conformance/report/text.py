"""Outcomes as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from forge_conformance.contract import AREAS, CATALOGUE, Level
from forge_conformance.outcome import Finding, Outcome, Verdict
from forge_conformance.report.summary import Summary

WIDTH = 96


def finding_text(outcome: Outcome, again: str) -> str:
    """A broken clause: in words, expected against seen, the smallest input, where to look.

    Args:
        again: The command that runs this one clause again.
    """
    clause = CATALOGUE[outcome.clause_id]
    finding = outcome.finding or Finding(expected="", seen="")
    lines = [f"{clause.id} ({clause.level}): {clause.sentence}", ""]
    lines = textwrap.wrap(lines[0], WIDTH) + [""]
    lines += _labelled("expected", finding.expected)
    lines += _labelled("seen", finding.seen)
    lines += _labelled("apart", finding.apart)
    for number, line in enumerate(finding.example):
        lines += _labelled("smallest input" if number == 0 else "", line)
    lines += _labelled("where to look", finding.where_to_look)
    if finding.follows:
        lines += _labelled("cause", f"follows from {finding.follows}")
    lines += _labelled("again", again, wrap=False)
    if finding.trainer_traceback:
        lines += ["", "in the trainer:", textwrap.indent(finding.trainer_traceback, "  ")]
    return "\n".join(lines)


def verdict_lines(summary: Summary, timing: bool = False) -> Iterator[str]:
    """The verdict: a table by area, what broke, what was advised, what wasn't checked."""
    yield from _table(summary)
    yield from _section("broke", _broken_lines(summary))
    yield from _section(
        "expected failures",
        [f"{o.clause_id}: {o.reason}" for o in summary.of(Verdict.EXPECTED)],
    )
    yield from _section("advice", _advice_lines(summary))
    yield from _section(
        "not checked", [f"{o.clause_id}: {o.reason}" for o in summary.of(Verdict.NOT_CHECKED)]
    )
    if timing:
        calls = sum(outcome.calls for outcome in summary.outcomes)
        inside = sum(outcome.call_seconds for outcome in summary.outcomes)
        total = sum(outcome.seconds for outcome in summary.outcomes)
        yield ""
        yield (
            f"time: {total:.1f} s, {inside:.1f} s of it inside {calls} calls of the trainer; "
            f"overhead ×{summary.overhead:.2f}"
        )
        slowest = sorted(summary.outcomes, key=lambda outcome: -outcome.seconds)[:5]
        yield "slowest: " + ", ".join(f"{o.clause_id} {o.seconds:.2f} s" for o in slowest)
    yield ""


def _table(summary: Summary) -> Iterator[str]:
    yield f"{'':22}{'MUST held':>10}{'broke':>7}{'not checked':>13}{'SHOULD kept':>13}"
    for area in AREAS:
        clauses = [clause for clause in CATALOGUE.values() if clause.area == area]
        ran = {
            o.clause_id: o.verdict for o in summary.outcomes if o.clause_id.startswith(area + ".")
        }
        pending = [clause for clause in clauses if clause.pending]
        if pending and not ran:
            yield f"{area:22}   no check yet for {len(pending)} clauses"
            continue
        if not ran:
            continue
        must = [v for i, v in ran.items() if CATALOGUE[i].level is Level.MUST]
        should = [v for i, v in ran.items() if CATALOGUE[i].level is Level.SHOULD]
        failed = (Verdict.BROKE, Verdict.EXPECTED, Verdict.UNEXPECTEDLY_HELD)
        kept = f"{should.count(Verdict.HELD)} of {len(should)}" if should else "-"
        yield (
            f"{area:22}{must.count(Verdict.HELD) or '-':>10}"
            f"{sum(v in failed for v in must) or '-':>7}"
            f"{must.count(Verdict.NOT_CHECKED) or '-':>13}{kept:>13}"
        )


def _broken_lines(summary: Summary) -> list[str]:
    lines = []
    first_with: dict[str, str] = {}
    for outcome in summary.failing:
        if outcome.verdict is Verdict.UNEXPECTEDLY_HELD:
            lines.append(f"{outcome.clause_id}: expected to break, but held; take it off the list")
            continue
        finding = outcome.finding or Finding(expected="", seen="")
        cause = finding.follows or first_with.get(finding.seen)
        first_with.setdefault(finding.seen, outcome.clause_id)
        said = " ".join(finding.seen.split())
        lines.append(
            f"{outcome.clause_id}: follows from {cause}"
            if cause
            else f"{outcome.clause_id}: expected {finding.expected}; seen {said:.160}"
        )
    kit_errors = summary.of(Verdict.KIT_ERROR)
    lines += [f"{o.clause_id}: the kit's own error, see above" for o in kit_errors]
    unbuildable = {o.reason for o in summary.of(Verdict.UNBUILDABLE)}
    return lines + sorted(unbuildable)


def _advice_lines(summary: Summary) -> list[str]:
    lines = []
    if not summary.strict:
        for outcome in summary.of(Verdict.BROKE, level=Level.SHOULD):
            finding = outcome.finding or Finding(expected="", seen="")
            said = " ".join(finding.seen.split())
            lines.append(f"{outcome.clause_id}: expected {finding.expected}; seen {said:.200}")
    for outcome in summary.outcomes:
        lines += [f"{outcome.clause_id}: {advice}" for advice in outcome.advice]
    return lines


def _section(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield f"{title}:"
    for line in lines:
        yield from textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _labelled(label: str, text: str, wrap: bool = True) -> list[str]:
    if not text:
        return []
    lines = [
        piece
        for line in text.splitlines()
        for piece in (textwrap.wrap(line, WIDTH - 18) if wrap else [line])
    ]
    return [f"  {label if number == 0 else '':16}{line}" for number, line in enumerate(lines)]
