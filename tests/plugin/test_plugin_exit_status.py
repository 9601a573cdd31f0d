"""The exit status: 0 conformant, 1 not, 3 the kit failed, 4 usage, 5 nothing was checked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

NO_GRAD, CAUSAL = "--clause=forward.no_grad", "--clause=forward.causal"


@pytest.fixture(autouse=True)
def _broken(pytester):
    shutil.copy(Path(__file__).with_name("broken.py"), pytester.path)


def verdict(result):
    """The last line of the verdict: the one before pytest's own."""
    lines = [line for line in result.outlines if "CONFORMANT" in line or "NO VERDICT" in line]
    assert len(lines) == 1
    return lines[0]


def with_expected_failures(pytester, trainer, failures):
    pytester.makepyfile(
        declared=f"""
        import broken
        from forge_conformance import Target

        target = Target(broken.{trainer}, expected_failures={failures!r})
        """
    )


def test_0_conformant(run):
    result = run("--trainer=tiny:Trainer", NO_GRAD, CAUSAL)
    assert verdict(result) == "CONFORMANT in what was selected: 2 of 2 MUST held"
    assert result.ret == 0


def test_1_a_must_broke(run):
    result = run("--trainer=broken:SeesLater", NO_GRAD, CAUSAL)
    assert verdict(result) == "NOT CONFORMANT: 1 of 2 MUST held, 1 broke"
    assert result.ret == 1


def test_a_broken_should_is_advice(run):
    result = run("--trainer=broken:Forgetful", "--clause=tokenizer")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "tokenizer .a *",
            "advice:",
            "  tokenizer.round_trip: expected *",
            "CONFORMANT in what was selected: 1 of 1 MUST held; 0 of 1 SHOULD held, 1 broke",
            "* 1 passed, 1 advice in *",
        ]
    )


def test_1_a_should_broke_when_strict(run):
    result = run("--trainer=broken:Forgetful", "--clause=tokenizer", "--conformance-strict")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["broke:", "  tokenizer.round_trip: expected *", "NOT CONFORMANT: *"]
    )
    result.stdout.no_fnmatch_line("advice:")


def test_an_expected_failure_does_not_fail_the_run(run, pytester):
    with_expected_failures(pytester, "KeepsGraph", {"forward.no_grad": "until the rewrite"})
    result = run("--trainer=declared:target", NO_GRAD, CAUSAL)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "broke as expected:",
            "  forward.no_grad: until the rewrite",
            "CONFORMANT BUT FOR 1 EXPECTED in what was selected: 1 of 2 MUST held, 1 broke as*",
        ]
    )


def test_1_an_expected_failure_holds(run, pytester):
    with_expected_failures(pytester, "Trainer", {"forward.causal": "it peeks"})
    result = run("--trainer=declared:target", NO_GRAD, CAUSAL)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "  expected        to break: it peeks",
            "  seen            it holds",
            "held against expectation:",
            "  forward.causal: take it out of Target.expected_failures (it peeks)",
            "NOT CONFORMANT: 1 of 2 MUST held, 1 held against expectation",
        ]
    )


@pytest.fixture
def _failing_check(pytester):
    pytester.makeconftest(
        """
        from forge_conformance.checks import CHECKS, registry

        def fails(lab):
            '''Nowhere.'''
            raise KeyError("a defect of the kit")

        registry._CHECKS["forward.no_grad"] = registry.Check("forward.no_grad", fails, {})
        """
    )


@pytest.fixture(autouse=True)
def _checks_restored():
    from forge_conformance.checks import registry

    checks = dict(registry._CHECKS)
    yield
    registry._CHECKS.update(checks)


@pytest.mark.usefixtures("_failing_check")
def test_3_the_kit_itself_failed(run):
    result = run("--trainer=broken:SeesLater", NO_GRAD, CAUSAL)
    assert result.ret == 3
    result.stdout.fnmatch_lines(
        [
            "The check itself failed, which says nothing about the trainer. Please report*",
            "  KeyError: 'a defect of the kit'",
            "the kit's own errors:",
            "  forward.no_grad: the kit's own error, please report it: KeyError: 'a defect*",
            "NO VERDICT, the kit itself failed: 0 of 2 MUST held, 1 broke, 1 with a kit error",
        ]
    )


def test_5_nothing_could_be_checked(run):
    result = run("--trainer=tiny:Trainer", "--clause=optim_step.clip_once", "-v")
    assert result.ret == 5
    result.stdout.fnmatch_lines(
        [
            "*optim_step.clip_once NOT CHECKED *",
            "not checked:",
            "  optim_step.clip_once: whether and how it clips isn't declared: declare*",
            "NO VERDICT, nothing was checked: 0 of 1 MUST held, 1 not checked",
            "* 1 not checked in *",
        ]
    )


def test_5_nothing_was_selected(run):
    result = run("--trainer=tiny:Trainer", "-k", "nothing_is_called_so")
    assert verdict(result) == "NO VERDICT, nothing was checked"
    assert result.ret == 5


def test_a_list_of_the_clauses_is_no_verdict(run):
    result = run("--trainer=tiny:Trainer", "--collect-only")
    assert result.ret == 0
    result.stdout.no_fnmatch_line("*VERDICT*")


@pytest.mark.parametrize("option", ["-x", "--maxfail=1"])
def test_a_run_that_stops_early_says_so(run, option):
    result = run("--trainer=broken:SeesLater", CAUSAL, "--clause=forward.pure", NO_GRAD, option)
    assert result.ret == 1
    # forward.no_grad and forward.pure come before forward.causal.
    assert verdict(result) == "NOT CONFORMANT: 2 of 3 MUST held, 1 broke"
    result = run("--trainer=broken:SeesLater", "--clause=forward", option)
    assert verdict(result).endswith(" unfinished")


def test_a_run_that_others_stop_is_no_verdict(run, pytester):
    pytester.makepyfile(test_own="def test_own(): assert False")
    result = run("--trainer=tiny:Trainer", "--conformance", NO_GRAD, "-x", "test_own.py")
    assert result.ret == 1
    assert verdict(result) == ("NO VERDICT, the run stopped early: 0 of 1 MUST held, 1 unfinished")


def test_own_tests_that_fail_fail_a_conformant_run(run, pytester):
    pytester.makepyfile(test_own="def test_own(): assert False")
    result = run("--trainer=tiny:Trainer", "--conformance", NO_GRAD, "test_own.py")
    assert verdict(result) == "CONFORMANT in what was selected: 1 of 1 MUST held"
    assert result.ret == 1


def test_a_clause_that_is_judged_twice_counts_once_and_as_broken(run, pytester):
    pytester.makepyfile(
        once="""
        from broken import KeepsGraph

        class Trainer(KeepsGraph):
            pass
        """
    )
    pytester.makeconftest(
        """
        from _pytest.runner import runtestprotocol

        def pytest_runtest_protocol(item, nextitem):
            import once, tiny

            runtestprotocol(item, nextitem=nextitem)
            once.Trainer.forward = tiny.Trainer.forward
            runtestprotocol(item, nextitem=nextitem)
            return True
        """
    )
    result = run("--trainer=once:Trainer", NO_GRAD, CAUSAL)
    assert verdict(result) == "NOT CONFORMANT: 1 of 2 MUST held, 1 broke"
    assert result.ret == 1
