"""Runs of several ranks, started by torchrun: one verdict, and no rank that waits for ever."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.faults import FAULTS
from tests.faults.corpus import Fault
from tests.kit import judged_on_ranks

TRAINERS = "tests.faults.distributed"
OF_RANKS = [fault for fault in FAULTS if fault.factory.__module__ == TRAINERS]
CLAUSES = ("agree", "same_as_one", "checkpoint", "failure")
UNUSUAL = [
    (name, f"distributed.{clause}")
    for name in ("DataParallel", "AddsUpInDouble", "TellsItsOwnTime")
    for clause in CLAUSES
]
UNUSUAL += [("DropsOut", "distributed.agree"), ("DropsOut", "distributed.failure")]
UNUSUAL += [
    ("ComputesTheLossOnTheLastRank", clause_id)
    for clause_id in (
        *(
            "distributed.failure",
            "forward_backward.loss_value",
            "forward_backward.custom_loss_once",
        ),
        *("forward_backward.failure_in_backward", "forward_backward.nonfinite_visible"),
    )
]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def launch(*command: str, limit: float = 200.0) -> subprocess.CompletedProcess[str]:
    """Run a module on two ranks; a launch that takes longer than `limit` seconds fails."""
    return subprocess.run(
        [*TORCHRUN, "-m", *command], capture_output=True, text=True, check=False, timeout=limit
    )


def judge_with_pytest(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    quick = ("--conformance-profile=quick", "-p", "no:cacheprovider")
    return launch("pytest", f"--trainer={TRAINERS}:{name}", *quick, *arguments)


@pytest.fixture(scope="module")
def judged() -> dict[tuple[str, str], dict[str, object]]:
    """How the trainers come out, by name and clause: all judged by the same two processes."""
    pairs = [(fault.name, fault.clause_id) for fault in OF_RANKS]
    pairs += UNUSUAL
    arguments = [word for name, clause_id in pairs for word in (f"{TRAINERS}:{name}", clause_id)]
    run = launch(judged_on_ranks.__name__, *arguments)
    assert run.returncode == 0, run.stderr[-3000:]
    outcomes = [json.loads(line) for line in run.stdout.splitlines()]
    return {(each["name"].partition(":")[2], each["clause_id"]): each for each in outcomes}


@pytest.mark.parametrize("fault", OF_RANKS, ids=lambda fault: f"{fault.clause_id}-{fault.name}")
def test_a_fault_of_ranks_is_caught_by_its_clause(fault: Fault, judged) -> None:
    outcome = judged[fault.name, fault.clause_id]
    assert outcome["verdict"] == "broke", outcome
    assert outcome["finding"]["seen"]


@pytest.mark.parametrize(("name", "clause_id"), UNUSUAL)
def test_an_honest_trainer_of_ranks_passes(name: str, clause_id: str, judged) -> None:
    outcome = judged[name, clause_id]
    assert outcome["verdict"] == "held", outcome


def test_two_ranks_tell_one_verdict() -> None:
    run = judge_with_pytest("DataParallel", "--clause=forward", "--clause=distributed.agree")
    assert run.returncode == 0, run.stdout
    assert run.stdout.count("test session starts") == 1
    assert "profile quick, seed 0, 2 ranks" in run.stdout
    assert run.stdout.count("CONFORMANT in what was selected: 9 of 9 MUST held") == 1


def test_a_broken_clause_is_told_once_for_all_ranks() -> None:
    run = judge_with_pytest("ReportsItsOwnLoss", "--clause=forward_backward.loss_value")
    assert run.returncode == 1
    assert run.stdout.count("NOT CONFORMANT") == 1
    assert "returned loss = " in run.stdout
    assert "on rank 0 and" in run.stdout


def test_a_rank_that_dies_ends_the_run_with_a_verdict() -> None:
    run = judge_with_pytest("Dies", "--clause=distributed")
    assert run.returncode == 1
    assert "NOT CONFORMANT: 0 of 4 MUST held, 1 broke, 3 not checked" in run.stdout


def test_a_rank_that_waits_for_one_that_failed_is_told_with_where_it_waits() -> None:
    run = judge_with_pytest(
        "WaitsForAFailedRank", "--clause=distributed.failure", "--trainer-timeout=4"
    )
    assert run.returncode == 1
    assert "all_reduce" in run.stdout + run.stderr
    assert "a loss_fn that raises on rank" in run.stdout + run.stderr


def test_in_one_process_the_area_is_left_out_unless_it_is_asked_for(pytester) -> None:
    asked = pytester.runpytest_subprocess(
        "--trainer=reference_impls.plain:PlainTrainer", "--clause=distributed"
    )
    assert asked.ret == 5
    asked.stdout.fnmatch_lines(["*only rank*", "*torchrun*"])
