"""The kit beside pytest's own options and the plugins that people have."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

FORWARD = "--clause=forward"


@pytest.fixture(autouse=True)
def _broken(pytester):
    shutil.copy(Path(__file__).with_name("broken.py"), pytester.path)


def table_and_sentence(result):
    first = next(n for n, line in enumerate(result.outlines) if " conformance of " in line)
    return [*result.outlines[first : result.outlines.index("broke:")], result.outlines[-2]]


def test_xdist_comes_to_the_same_verdict(run_apart, run):
    chosen = ["--clause=forward", "--clause=tokenizer", "-k", "not output_owned"]
    alone = run("--trainer=broken:SeesLater", *chosen)
    spread = run_apart("--trainer=broken:SeesLater", *chosen, "-n2")
    assert alone.ret == spread.ret == 1
    assert table_and_sentence(spread) == table_and_sentence(alone)
    in_both = ("passed", "failed")
    counts, spread_counts = alone.parseoutcomes(), spread.parseoutcomes()
    assert [spread_counts[each] for each in in_both] == [counts[each] for each in in_both]


def test_xdist_stops_with_the_status_of_the_verdict(run_apart):
    result = run_apart("--trainer=broken:Refuses", "-n1", "-x", "--clause=forward_backward")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["NOT CONFORMANT: * unfinished*"])


def test_a_trainer_that_ends_its_process_is_found_under_xdist(run_apart):
    clauses = ["--clause=forward.no_grad", "--clause=config.fields"]
    result = run_apart("--trainer=broken:Dies", "-n1", *clauses)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "  forward.no_grad: expected a process that outlives the check; seen worker*",
            "NOT CONFORMANT: 1 of 2 MUST held, 1 broke",
        ]
    )


def test_junit_has_the_area_the_clause_and_the_finding(run, pytester):
    run(
        "--trainer=broken:SeesLater", FORWARD, "--clause=optim_step.clip_once", "--junitxml=out.xml"
    )
    cases = ElementTree.parse(pytester.path / "out.xml").getroot().iter("testcase")
    by_name = {case.get("name"): case for case in cases}
    causal = by_name["forward.causal"]
    assert causal.get("classname") == "forward"
    failure = causal.find("failure")
    assert failure.get("message").startswith("expected logits before position 1 don't change")
    assert "smallest input" in failure.text
    skipped = by_name["optim_step.clip_once"].find("skipped")
    assert skipped.get("message").startswith("whether and how it clips isn't declared")
    assert list(by_name["forward.no_grad"]) == []


def test_failed_clauses_can_be_run_again(run):
    run("--trainer=broken:SeesLater", FORWARD)
    again = run("--trainer=broken:SeesLater", FORWARD, "--lf", "--co", "-q")
    assert [line for line in again.outlines if "::" in line] == ["forward::forward.causal"]


def test_quiet_still_tells_the_verdict(run):
    result = run("--trainer=tiny:Trainer", "--clause=forward.no_grad", "-qq")
    result.stdout.fnmatch_lines(["CONFORMANT in what was selected: 1 of 1 MUST held"])


def test_no_terminal_still_gives_the_status(run):
    assert run("--trainer=broken:SeesLater", FORWARD, "-p", "no:terminal").ret == 1


def test_randomly_keeps_the_order_of_the_contract(pytester, run):
    arguments = ["--trainer=tiny:Trainer", FORWARD, "--co", "-q", "-p", "no:asyncio"]
    in_order = [line for line in run(*arguments).outlines if "::" in line]
    shuffled = pytester.runpytest_inprocess(*arguments, "--randomly-seed=3")
    assert [line for line in shuffled.outlines if "::" in line] == in_order


def test_timeouts_of_pytest_timeout_are_left_alone(run):
    result = run("--trainer=broken:Sleeps", "--clause=forward.no_grad", "--timeout=1")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*Timeout (>1.0s) from pytest-timeout*", "NOT CONFORMANT: *"])


def test_strict_markers_and_warnings_as_errors(run):
    result = run("--trainer=tiny:Trainer", "--strict-markers", "--strict-config", "-W", "error")
    assert result.ret == 0
    result.stdout.no_fnmatch_line("*warnings summary*")


def test_a_seed_is_told_and_repeated(run):
    result = run("--trainer=broken:SeesLater", "--clause=forward.causal", "--hypothesis-seed=7")
    result.stdout.fnmatch_lines(
        [
            "conformance: *, profile default, seed 7",
            "  again           pytest --trainer=broken:SeesLater --hypothesis-seed=7 --clause=*",
        ]
    )
    explored = run(
        "--trainer=tiny:Trainer", "--clause=forward.causal", "--conformance-profile=thorough"
    )
    header = next(line for line in explored.outlines if line.startswith("conformance:"))
    assert re.search(r"profile thorough, seed [1-9]\d*$", header)


def test_timing_tells_the_overhead(run):
    result = run("--trainer=tiny:Trainer", "--clause=status", "--conformance-timing")
    result.stdout.re_match_lines(
        [
            r"time:",
            r"  checks \d+\.\d\d s, of which \d+\.\d\d s inside \d+ calls of the trainer$",
            r"  overhead ×\d+\.\d\d, the one over the other$",
            r"  slowest status\.",
            r"  calls status\.counts \d+, status\.step \d+,",
        ]
    )


def test_the_users_torch_and_random_state_survive(run, pytester):
    pytester.makeconftest(
        """
        import random, torch

        def pytest_sessionstart():
            random.seed(3), torch.manual_seed(3)

        def pytest_sessionfinish():
            print("drew", random.random() == random.Random(3).random(), torch.initial_seed())
        """
    )
    result = run("--trainer=tiny:Trainer", FORWARD)
    result.stdout.fnmatch_lines(["*drew True 3"])
