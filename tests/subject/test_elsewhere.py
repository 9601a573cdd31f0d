"""Programs in processes of their own: what they return, send, and end in."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from forge_conformance.finding import NotChecked
from forge_conformance.lab import Lab
from forge_conformance.observe.crash import Killer, kill
from forge_conformance.subject.elsewhere import Elsewhere, send


@pytest.fixture(scope="module")
def elsewhere() -> Elsewhere:
    return Elsewhere("reference_impls.plain:PlainTrainer", timeout=20)


def step_and_folder(lab: Lab, added: int) -> tuple[int, str]:
    return lab.fresh().get_status().step + added, os.getcwd()


def send_and_die(lab: Lab) -> None:
    send("before the end")
    kill()


def raises(lab: Lab) -> None:
    lab.fresh().load("nowhere")


def exits(lab: Lab) -> None:
    os._exit(7)


def test_a_program_runs_in_its_own_folder(elsewhere, tmp_path):
    ended = elsewhere.run(step_and_folder, 3, folder=tmp_path)
    assert ended.value == (3, str(tmp_path))
    assert Path.cwd() != tmp_path


def test_what_was_sent_outlives_the_process(elsewhere):
    ended = elsewhere.run(send_and_die)
    assert ended.killed
    assert ended.sent == ["before the end"]


def test_a_failure_is_told_in_words(elsewhere):
    assert "load() raised FileNotFoundError" in elsewhere.run(raises).failure
    assert elsewhere.run(exits).failure == "the process ended with status 7"


def test_a_trainer_without_a_name_has_no_other_process():
    with pytest.raises(NotChecked, match="name it module:Name"):
        Elsewhere("", timeout=1)


def test_a_script_that_starts_a_run_isnt_run_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, pytest
            print("started")
            sys.exit(pytest.main([
                "--trainer=reference_impls.plain:PlainTrainer", "--conformance-profile=quick",
                "--clause=checkpoint.crash_safe", "-p", "no:cacheprovider",
            ]))
            """
        )
    )
    run = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout
    assert run.stdout.count("started") == 1


def save_under_watch(lab: Lab) -> tuple[int, float]:
    killer = Killer()
    with killer.watching() as moments:
        lab.fresh().save(path="here")
    return moments.events, moments.seconds


def die_before(lab: Lab, event: int) -> None:
    with Killer().killing_at_event(event):
        lab.fresh().save(path=f"killed-{event}")


def test_a_save_is_killed_at_each_of_its_changes_of_files(elsewhere, tmp_path):
    events, seconds = elsewhere.run(save_under_watch, folder=tmp_path).value
    assert events > 5
    assert seconds > 0
    assert elsewhere.run(die_before, events - 1, folder=tmp_path).killed
    assert not elsewhere.run(die_before, events + 9, folder=tmp_path).killed
