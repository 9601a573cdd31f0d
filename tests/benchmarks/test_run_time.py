"""How long a run of the kit takes, and what of it is the kit's own; `make bench` prints a table.

Nothing here fails for being slow: machines differ. The goals, on two cores: in the areas other
than *numerics* and *checkpoint*, `PlainTrainer` ≤ 30 s by default and ≤ 8 s quick, `HFTrainer`
≤ 60 s by default; *numerics* of `PlainTrainer` ≤ 20 s, its *checkpoint* ≤ 30 s; and an overhead
(run time over the time inside the trainer's calls) of ≤ 2 for a trainer whose calls take 5 ms.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

CORE = (
    *("structure", "config", "status", "tokenizer", "forward", "forward_backward"),
    *("optim_step", "clear_gradients", "metrics"),
)
PLAIN, HF = "reference_impls.plain:PlainTrainer", "reference_impls.hf:HFTrainer"
DECLARED = "reference_impls.targets:plain"
RUNS = [
    (PLAIN, "quick", CORE, 8),
    (PLAIN, "default", CORE, 30),
    (HF, "default", CORE, 60),
    (DECLARED, "default", ("numerics",), 20),
    (PLAIN, "default", ("checkpoint",), 30),
    ("tests.benchmarks.five_ms:FiveMillisecondTrainer", "default", CORE, None),
]


@pytest.mark.parametrize(("trainer", "profile", "areas", "goal"), RUNS)
def test_run_time(
    trainer: str,
    profile: str,
    areas: tuple[str, ...],
    goal: int | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [sys.executable, "-m", "pytest", f"--trainer={trainer}", "--conformance-timing"]
    started = time.perf_counter()
    run = subprocess.run(
        [*command, f"--conformance-profile={profile}", *(f"--clause={area}" for area in areas)],
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - started
    timing = re.search(r"checks .*\n.*overhead [^,\s]+", run.stdout)
    assert run.returncode == 0, run.stdout[-2000:]
    assert timing is not None
    wanted = f" (goal {goal} s)" if goal else ""
    with capsys.disabled():
        what = "core" if areas == CORE else ", ".join(areas)
        inside = " ".join(timing[0].split())
        print(f"\n{trainer} {what} {profile}: {seconds:.1f} s in all{wanted}; {inside}")
