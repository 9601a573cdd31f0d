"""What the parts of a report say; `test_plugin_first_screen` shows the whole."""

from __future__ import annotations

import pytest

from forge_conformance.outcome import Finding, Outcome, Verdict
from forge_conformance.report.summary import Summary
from forge_conformance.report.text import failure_line, failure_text, verdict_lines

AGAIN = "pytest --trainer=a:T --clause=forward.shape"


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_a_finding_says_what_was_expected_seen_and_done():
    finding = Finding(
        expected="floating logits of shape [1, 1, 16]",
        seen="torch.float32 of shape [1, 16]",
        apart="a dimension",
        example=["ids = [[0]]", "position = 1"],
        where_to_look="Look at what `forward`\n    returns last.",
        follows="structure.result_types",
    )
    assert failure_text(Outcome("forward.no_grad", Verdict.BROKE, finding), AGAIN).splitlines() == [
        "A conforming trainer returns logits with no autograd graph.",
        "",
        "  expected        floating logits of shape [1, 1, 16]",
        "  seen            torch.float32 of shape [1, 16]",
        "  apart           a dimension",
        "  smallest input  ids = [[0]]",
        "                  position = 1",
        "  cause           what structure.result_types judges; look there first",
        "  where to look   Look at what `forward` returns last.",
        "  again           pytest --trainer=a:T --clause=forward.shape",
    ]


def test_a_fault_shows_the_trainers_own_traceback():
    finding = Finding(
        "an answer", "forward() raised OSError", trainer_traceback="  File ...\nOSError"
    )
    lines = failure_text(Outcome("forward.no_grad", Verdict.BROKE, finding), AGAIN).splitlines()
    start = lines.index("  in the trainer")
    assert lines[start : start + 3] == ["  in the trainer", "    File ...", "  OSError"]


def test_a_fault_that_was_told_is_not_told_again():
    outcome = Outcome(
        "forward.pure", Verdict.BROKE, Finding("an answer", "forward() raised OSError")
    )
    assert failure_text(outcome, AGAIN, cause="forward.shape") == (
        "forward() raised OSError\n\n  cause           that of forward.shape, which see"
    )
    assert failure_text(outcome, AGAIN, cause="forward.pure") == failure_text(outcome, AGAIN)


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        (
            Outcome("forward.pure", Verdict.BROKE, Finding("the same\nlogits", "others")),
            "expected the same logits; seen others",
        ),
        (
            Outcome(
                "forward.pure",
                Verdict.BROKE,
                Finding("an answer", "forward() raised X", trainer_traceback="File ..."),
            ),
            "forward() raised X",
        ),
        (
            Outcome("forward.pure", Verdict.KIT_ERROR, reason="Traceback ...\nKeyError: 'x'\n"),
            "the kit's own error, please report it: KeyError: 'x'",
        ),
        (
            Outcome("forward.pure", Verdict.UNEXPECTEDLY_HELD, reason="known"),
            "expected to break, but held: take it out of Target.expected_failures",
        ),
    ],
)
def test_a_failure_in_one_line(outcome, line):
    assert failure_line(outcome) == line


def lines_of(*outcomes, selected=None):
    selected = selected or [outcome.clause_id for outcome in outcomes]
    return list(verdict_lines(Summary("a:T", outcomes, selected)))


def test_the_table_counts_must_clauses_and_has_no_empty_columns():
    assert lines_of(
        Outcome("config.fields", Verdict.HELD),
        Outcome("config.common_keys", Verdict.BROKE),
        Outcome("forward.shape", Verdict.EXPECTED, reason="known"),
        Outcome("forward.pure", Verdict.KIT_ERROR, reason="KeyError: 'x'"),
        selected=["config.fields", "config.common_keys", "forward.shape", "forward.pure"],
    )[:4] == [
        "  MUST                held  broke  not checked  as expected  kit error  SHOULD held",
        "  config                 1      -            -            -          -       0 of 1",
        "  forward                -      -            -            1          1",
        "  all                    1      -            -            1          1       0 of 1",
    ]


def test_a_clause_without_an_outcome_counts_as_unfinished():
    lines = lines_of(
        Outcome("config.fields", Verdict.HELD), selected=["config.fields", "config.static"]
    )
    assert lines[:2] == [
        "  MUST                held  broke  not checked  unfinished  SHOULD held",
        "  config                 1      -            -           1",
    ]


def test_clauses_with_one_reason_share_it():
    lines = lines_of(
        Outcome("forward.pure", Verdict.NOT_CHECKED, reason="no twins: seed the factory"),
        Outcome("optim_step.clears", Verdict.NOT_CHECKED, reason="no twins: seed the factory"),
    )
    assert lines[-3:] == [
        "not checked:",
        "  forward.pure, optim_step.clears: no twins: seed the factory",
        "",
    ]


def test_advice_inside_a_must_clause_is_told():
    outcome = Outcome("optim_step.empty", Verdict.HELD, advice=["raise where there is nothing"])
    assert "  optim_step.empty: raise where there is nothing" in lines_of(outcome)


def test_causes_come_with_what_followed():
    fault = Finding("an answer", "forward() raised OSError", trainer_traceback="File ...")
    lines = lines_of(
        *(Outcome(f"forward.{name}", Verdict.BROKE, fault) for name in ("shape", "pure", "causal"))
    )
    start = lines.index("broke:")
    assert lines[start : start + 3] == [
        "broke:",
        "  forward.shape: forward() raised OSError",
        "      and with it forward.pure, forward.causal",
    ]
