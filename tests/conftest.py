"""pytest's own tool for testing plugins, and runs of the kit in a folder of their own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

# More threads than cores make single calls of torch stall for half a second and more.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# pytester forgets the modules that were first imported in one of its runs. These here are to
# stay: imported again and again they cost time, and NumPy's don't survive it.
import numpy.random  # noqa: F401
import pytest

import forge_conformance.session  # noqa: F401

pytest_plugins = ["pytester"]

Run = Callable[..., pytest.RunResult]

_TINY = Path(__file__).parent / "plugin" / "tiny.py"
_NO_NOISE = ["-p", "no:randomly", "-o", "asyncio_default_fixture_loop_scope=function"]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest in a new folder which holds the trainer `tiny:Trainer`, in this process."""
    shutil.copy(_TINY, pytester.path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("CI", raising=False)

    def inside(*arguments: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess(*_NO_NOISE, *arguments)

    return inside


@pytest.fixture
def run_apart(run: Run, pytester: pytest.Pytester) -> Run:
    """The same in a process of its own, for what ends the process or starts others."""

    def apart(*arguments: str) -> pytest.RunResult:
        return pytester.runpytest_subprocess(*_NO_NOISE, *arguments, timeout=120)

    return apart
