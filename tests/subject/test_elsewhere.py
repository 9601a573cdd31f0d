"""Programs in processes of their own: what they return, send, and end in."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from forge_conformance.finding import NotChecked
from forge_conformance.lab import Lab
from forge_conformance.observe.crash import Killer, kill
from forge_conformance.observe.small_disk import SmallDisk
from forge_conformance.subject.elsewhere import Elsewhere, send


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    scratch = tmp_path_factory.mktemp("scratch")
    return Elsewhere("reference_impls.plain:PlainTrainer", timeout=20, scratch=scratch)


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


@pytest.mark.parametrize("source", ["", "__main__:Trainer"])
def test_a_trainer_without_a_name_has_no_other_process(source, tmp_path):
    with pytest.raises(NotChecked, match="name it module:Name"):
        Elsewhere(source, timeout=1, scratch=tmp_path)


def crashes(lab: Lab) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def starts_another(lab: Lab) -> int:
    return subprocess.Popen(["sleep", "60"]).pid


def needs_more(lab: Lab) -> None:
    raise NotChecked("there is no default folder")


def test_a_crash_is_a_failure(elsewhere):
    assert elsewhere.run(crashes).failure == "the process was ended by SIGSEGV"


def test_nothing_that_a_trainer_starts_outlives_its_process(elsewhere):
    pid = elsewhere.run(starts_another).value
    for _ in range(50):
        command = Path(f"/proc/{pid}/cmdline")
        if not command.exists() or not command.read_bytes():
            return
        time.sleep(0.1)
    pytest.fail("it still runs")


def test_what_cannot_be_checked_there_isnt_checked_here(elsewhere):
    with pytest.raises(NotChecked, match="no default folder"):
        elsewhere.run(needs_more)


def test_killed_processes_leave_no_temporary_files(elsewhere):
    before = set(Path(tempfile.gettempdir()).glob("forge-conformance-*"))
    assert elsewhere.run(send_and_die).killed
    assert set(Path(tempfile.gettempdir()).glob("forge-conformance-*")) <= before


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


def fill(lab: Lab, disk: SmallDisk | None) -> tuple[list[str], int]:
    """Write a megabyte with room for a quarter of one, and again where nothing may be written."""
    assert disk is not None
    errors = []
    with disk.with_room_for(2**18):
        try:
            Path("large").write_bytes(bytes(2**20))
        except OSError as error:
            errors.append(errno.errorcode[error.errno])
    with disk.read_only():
        try:
            Path("any").touch()
        except OSError as error:
            errors.append(errno.errorcode[error.errno])
    return errors, Path("large").write_bytes(bytes(2**20))


def test_a_small_disk_of_its_own_gets_full(elsewhere, tmp_path):
    try:
        subprocess.run(["unshare", "--map-root-user", "--mount", "true"], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the system allows no file system of one's own")
    ended = elsewhere.run(fill, folder=tmp_path, on_small_disk=True)
    assert ended.value == (["ENOSPC", "EROFS"], 2**20), ended.failure
    assert not list(tmp_path.iterdir())  # only that process saw it
