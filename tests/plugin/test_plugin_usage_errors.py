"""What can't be run says so in one message, and the run is never green."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

USAGE_ERROR = 4


@pytest.fixture(autouse=True)
def _targets(pytester):
    shutil.copy(Path(__file__).with_name("broken.py"), pytester.path)
    pytester.makepyfile(
        fails="import os\n\nvalue = 1 / 0\n",
        lacks="import not_there_at_all\n",
        leaves="import sys\n\nsys.exit(2)\n",
        misspells="""
        from forge_conformance import Target
        from tiny import Trainer

        target = Target(Trainer, expected_failures={"forward.casual": "known"})
        """,
        gives_no_reason="""
        from forge_conformance import Target
        from tiny import Trainer

        target = Target(Trainer, expected_failures={"forward.causal": " "})
        """,
    )


def errors(result):
    """The lines of the message; fails where pytest shows a page about itself."""
    everything = result.outlines + result.errlines
    assert not [line for line in everything if line.startswith("INTERNALERROR")]
    first = next(n for n, line in enumerate(result.errlines) if line.startswith("ERROR: "))
    return "\n".join(result.errlines[first:]).removeprefix("ERROR: ").strip()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny", "'tiny' is not of the form module:Name, for example mypkg:MyTrainer"),
        ("tiny:", "'tiny:' is not of the form module:Name"),
        ("nowhere:Trainer", "no module 'nowhere' in "),
        ("tiny/trainer.py:Trainer", "name the module with dots, mypkg.trainer:Name, not the file"),
        ("fails:X", "module 'fails' can't be imported: ZeroDivisionError: division by zero"),
        ("lacks:X", "module 'lacks' can't be imported: ModuleNotFoundError: No module named 'not_"),
        ("leaves:X", "module 'leaves' can't be imported: SystemExit: 2"),
        ("tiny:Trainr", "module 'tiny' has no 'Trainr'; it has "),
        ("broken:number", "broken:number is int 3, which can't be called to make a trainer"),
        ("broken:needs", "broken:needs(path) can't be called without arguments"),
        ("broken:raises", "broken:raises: the factory raised ValueError: no weights found\n  File"),
        ("broken:gives_none", "broken:gives_none: the factory returned None instead of a trainer"),
        ("broken:hangs", "broken:hangs: the factory gave no trainer: no answer within 0.2 s"),
        (
            "misspells:target",
            "misspells: Target.expected_failures: no clause 'forward.casual'; did",
        ),
        ("gives_no_reason:target", "Target.expected_failures['forward.causal'] gives no reason"),
    ],
)
def test_a_target_that_cannot_be_used(run, name, message):
    result = run(f"--trainer={name}", "--trainer-timeout=0.2")
    assert result.ret == USAGE_ERROR
    assert message in errors(result)
    assert len(errors(result).splitlines()) < 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--clause=forward.casual"], "no area or clause 'forward.casual'; did you mean 'forward."),
        (["--clause=resources"], "resources.bounded can't be judged: no check yet"),
        (["--trainer-timeout=soon"], "'soon' is not a number of seconds above 0"),
        (["--trainer-timeout=0"], "'0' is not a number of seconds above 0"),
        (["--conformance-profile=slow"], "invalid choice: 'slow'"),
        (["--trainer-against=nowhere:X"], "no module 'nowhere' in "),
    ],
)
def test_an_option_that_says_nothing(run, options, message):
    result = run("--trainer=tiny:Trainer", *options)
    assert result.ret == USAGE_ERROR
    assert message in errors(result)


@pytest.mark.parametrize(
    "option", ["--clause=forward", "--conformance", "--conformance-strict", "--trainer-against=x:Y"]
)
def test_an_option_without_a_trainer(run, option):
    result = run(option)
    assert result.ret == USAGE_ERROR
    assert "needs --trainer=module:Name" in errors(result)


def test_a_factory_that_fails_ends_the_authors_own_tests_too(run, pytester):
    pytester.makepyfile(test_own="def test_it(trainer): pass")
    result = run("--trainer=broken:raises", "test_own.py")
    assert result.ret == USAGE_ERROR
    assert errors(result).startswith("broken:raises: the factory raised ValueError: no weights")


def test_a_factory_that_fails_later_is_no_verdict(run, pytester):
    pytester.makepyfile(
        later="""
        from tiny import Trainer

        made = 0

        def make():
            global made
            made += 1
            if made > 2:
                raise OSError("the port is taken")
            return Trainer()
        """
    )
    result = run("--trainer=later:make", "--clause=forward.shape", "--clause=optim_step.clears")
    assert result.ret == USAGE_ERROR
    result.stdout.fnmatch_lines(
        [
            "the target can't be used:",
            "  optim_step.clears: the factory raised OSError: the port is taken",
            "",
            "NO VERDICT, the target can't be used: 1 of 2 MUST held, 1 with a target error",
        ]
    )


def test_a_second_trainer_that_cannot_be_built_is_no_verdict(run):
    arguments = ["--trainer-against=broken:raises", "--clause=numerics.parity"]
    result = run("--trainer=tiny:Trainer", *arguments)
    assert result.ret == USAGE_ERROR
    result.stdout.fnmatch_lines(
        [
            "the factory of broken:raises raised ValueError: no weights found",
            "  again           pytest --trainer=tiny:Trainer --trainer-against=broken:raises *",
            "NO VERDICT, the target can't be used: 0 of 1 MUST held, 1 with a target error",
        ]
    )


def test_without_a_second_trainer_parity_says_what_it_needs(run):
    result = run("--trainer=tiny:Trainer", "--clause=numerics.parity")
    assert result.ret == 5
    told = " ".join(line.strip() for line in result.outlines)
    assert "numerics.parity: no second trainer is named: name one that can load" in told
    assert "--trainer-against=module:Name" in told


def test_it_is_the_same_under_xdist(run_apart):
    result = run_apart("--trainer=broken:raises", "-n1", "--clause=forward")
    assert result.ret == USAGE_ERROR
    assert errors(result).startswith("broken:raises: the factory raised ValueError: no weights")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"forge/__init__.py": ""}, "can't be imported from forge.api: ModuleNotFoundError"),
        ({"forge.py": ""}, "can't be imported from forge.api: ModuleNotFoundError"),
        (
            {"forge/__init__.py": "", "forge/api.py": "class Trainer: pass"},
            "is not the Trainer protocol of this kit: it lacks ForwardBackwardResult",
        ),
    ],
)
def test_another_package_of_the_name_forge(run_apart, pytester, monkeypatch, files, message):
    folder = pytester.mkdir("elsewhere")
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    result = run_apart("--trainer=tiny:Trainer")
    assert result.ret == USAGE_ERROR
    assert message in errors(result)
    assert f"The name 'forge' leads to {folder}" in errors(result)


@pytest.mark.usefixtures("run")
def test_a_folder_of_that_name_where_pytest_starts_is_not_in_the_way(pytester):
    pytester.mkpydir("forge")
    # Unlike python -m pytest, and pytester, the script has that folder not on its path.
    script = Path(sys.executable).with_name("pytest")
    command = [script, "--trainer=tiny:Trainer", "--clause=forward.no_grad"]
    assert subprocess.run(command, capture_output=True).returncode == 0
