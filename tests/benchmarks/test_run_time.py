"""How long a run of the kit takes, and what of it is the kit's own; `make bench` prints a table.

Nothing here fails for being slow: machines differ. The goals, on two cores: `PlainTrainer` ≤ 30 s
by default and ≤ 8 s quick, `HFTrainer` ≤ 60 s by default, and an overhead (run time over the time
inside the trainer's calls) of ≤ 2 for a trainer whose calls take 5 ms.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

RUNS = [
    ("reference_impls.plain:PlainTrainer", "quick", 8),
    ("reference_impls.plain:PlainTrainer", "default", 30),
    ("reference_impls.hf:HFTrainer", "default", 60),
    ("tests.benchmarks.five_ms:FiveMillisecondTrainer", "default", None),
]


@pytest.mark.parametrize(("trainer", "profile", "goal"), RUNS)
def test_run_time(
    trainer: str, profile: str, goal: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "pytest", f"--trainer={trainer}", "--conformance-timing"]
    started = time.perf_counter()
    run = subprocess.run(
        [*command, f"--conformance-profile={profile}"], capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - started
    timing = re.search(r"^time:.*", run.stdout, re.MULTILINE)
    assert run.returncode == 0, run.stdout[-2000:]
    assert timing is not None
    wanted = f" (goal {goal} s)" if goal else ""
    with capsys.disabled():
        print(f"\n{trainer} {profile}: {seconds:.1f} s in all{wanted}; {timing[0]}")
