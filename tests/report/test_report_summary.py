"""From outcomes to the verdict: its sentence, its exit status, and what broke because of what."""

from __future__ import annotations

import pytest

from forge_conformance.outcome import Finding, Outcome, Verdict
from forge_conformance.report.summary import Status, Summary, runnable

# Two MUST clauses and a SHOULD.
FIELDS, STATIC, COMMON_KEYS = "config.fields", "config.static", "config.common_keys"
HELD, BROKE, NOT_CHECKED = Verdict.HELD, Verdict.BROKE, Verdict.NOT_CHECKED
EXPECTED, KIT_ERROR, TARGET_ERROR = Verdict.EXPECTED, Verdict.KIT_ERROR, Verdict.TARGET_ERROR


def summary(*verdicts, strict=False, clauses=(FIELDS, STATIC, COMMON_KEYS)):
    """A summary of three clauses; those without a verdict had no outcome."""
    outcomes = [
        Outcome(clause_id, verdict) for clause_id, verdict in zip(clauses, verdicts, strict=False)
    ]
    return Summary("a:T", outcomes, clauses, strict)


def test_reduced_precision_is_told_once_however_many_checks_saw_it():
    flag = "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'"
    outcomes = [Outcome(each, HELD, reduced_precision=[flag]) for each in (FIELDS, STATIC)]
    assert Summary("a:T", outcomes, (FIELDS, STATIC)).reduced_precision == [flag]


@pytest.mark.parametrize(
    ("verdicts", "status", "sentence"),
    [
        (
            (HELD, HELD, HELD),
            Status.CONFORMANT,
            "CONFORMANT in what was selected: 2 of 2 MUST held; 1 of 1 SHOULD held",
        ),
        (
            (HELD, NOT_CHECKED, BROKE),
            Status.CONFORMANT,
            "CONFORMANT in what was selected: 1 of 2 MUST held, 1 not checked; "
            "0 of 1 SHOULD held, 1 broke",
        ),
        (
            (HELD, EXPECTED, HELD),
            Status.CONFORMANT,
            "CONFORMANT BUT FOR 1 EXPECTED in what was selected: 1 of 2 MUST held, "
            "1 broke as expected; 1 of 1 SHOULD held",
        ),
        (
            (BROKE, HELD),
            Status.NOT_CONFORMANT,
            "NOT CONFORMANT: 1 of 2 MUST held, 1 broke; 0 of 1 SHOULD held, 1 unfinished",
        ),
        (
            (HELD, Verdict.UNEXPECTEDLY_HELD, HELD),
            Status.NOT_CONFORMANT,
            "NOT CONFORMANT: 1 of 2 MUST held, 1 held against expectation; 1 of 1 SHOULD held",
        ),
        (
            (HELD,),
            Status.UNFINISHED,
            "NO VERDICT, the run stopped early: 1 of 2 MUST held, 1 unfinished; "
            "0 of 1 SHOULD held, 1 unfinished",
        ),
        (
            (BROKE, KIT_ERROR, HELD),
            Status.KIT_FAILED,
            "NO VERDICT, the kit itself failed: 0 of 2 MUST held, 1 broke, 1 with a kit error; "
            "1 of 1 SHOULD held",
        ),
        (
            (HELD, TARGET_ERROR, HELD),
            Status.USAGE,
            "NO VERDICT, the target can't be used: 1 of 2 MUST held, 1 with a target error; "
            "1 of 1 SHOULD held",
        ),
        (
            (NOT_CHECKED, NOT_CHECKED, NOT_CHECKED),
            Status.NOTHING_CHECKED,
            "NO VERDICT, nothing was checked: 0 of 2 MUST held, 2 not checked; "
            "0 of 1 SHOULD held, 1 not checked",
        ),
    ],
)
def test_the_verdict(verdicts, status, sentence):
    assert summary(*verdicts).status is status
    assert summary(*verdicts).sentence() == sentence


def test_the_exit_statuses_are_public():
    assert [(status.name, status.value) for status in Status] == [
        ("CONFORMANT", 0),
        ("NOT_CONFORMANT", 1),
        ("UNFINISHED", 2),
        ("KIT_FAILED", 3),
        ("USAGE", 4),
        ("NOTHING_CHECKED", 5),
    ]


def test_a_run_of_all_clauses_is_conformant_without_a_but():
    every = [clause.id for clause in runnable()]
    whole = summary(*[HELD] * len(every), clauses=every)
    assert whole.sentence().startswith(f"CONFORMANT: {len(whole.of(HELD)) - _shoulds()} of ")


def _shoulds():
    return sum(clause.level == "SHOULD" for clause in runnable())


def test_strict_makes_a_should_a_must():
    assert summary(HELD, HELD, BROKE).status is Status.CONFORMANT
    assert summary(HELD, HELD, BROKE, strict=True).status is Status.NOT_CONFORMANT


def test_nothing_selected_is_nothing_checked():
    assert summary(clauses=()).sentence() == "NO VERDICT, nothing was checked"


def broken(clause_id, seen, **finding):
    return Outcome(clause_id, BROKE, finding=Finding("something", seen, **finding))


def causes(*outcomes, strict=False):
    found = Summary("a:T", outcomes, [outcome.clause_id for outcome in outcomes], strict).causes
    return {cause.clause_id: cause.followed for cause in found}


def test_the_same_fault_in_many_clauses_is_one_cause():
    fault = "forward() raised OSError: <socket at 0x7f{}>"
    assert causes(
        broken("forward.pure", fault.format("aa")),
        broken("forward.shape", fault.format("bb")),
        broken("metrics.shape", "another"),
    ) == {"forward.shape": ["forward.pure"], "metrics.shape": []}


def test_a_clause_follows_from_the_one_that_judges_its_fault():
    outcomes = [
        broken("forward.causal", "no tensor", follows="forward.shape"),
        broken("forward.shape", "an output object"),
    ]
    assert causes(*outcomes) == {"forward.shape": ["forward.causal"]}
    assert causes(outcomes[0]) == {"forward.causal": []}


def test_what_follows_may_have_followers():
    assert causes(
        broken("structure.awaitable", "a future"),
        broken("forward.shape", "a future object", follows="structure.awaitable"),
        broken("forward.causal", "a future object"),
        broken("forward.pure", "no tensor", follows="forward.shape"),
    ) == {"structure.awaitable": ["forward.shape", "forward.pure", "forward.causal"]}


def test_two_measured_differences_are_two_causes():
    assert causes(
        broken("forward.shape", "1 where it is 2", apart="0.5"),
        broken("forward.pure", "1 where it is 2", apart="0.5"),
    ) == {"forward.shape": [], "forward.pure": []}


def test_advice_never_hides_what_fails_the_run():
    assert causes(
        broken("structure.annotations", "the same"),  # a SHOULD, and the first in the contract
        broken("forward.shape", "the same"),
    ) == {"forward.shape": ["structure.annotations"]}
