"""What a run with `--trainer` collects, and how it is shown and chosen."""

from __future__ import annotations

import pytest

from forge_conformance.contract import CATALOGUE

RUNNABLE = [
    clause.id
    for clause in CATALOGUE.values()
    if clause.pending is None and clause.area != "distributed"
]
FORWARD = [clause_id for clause_id in RUNNABLE if clause_id.startswith("forward.")]


@pytest.fixture
def own_tests(pytester):
    """A folder with tests, testpaths and a conftest, none of which know the kit."""
    pytester.makeconftest("import pytest\n@pytest.fixture(autouse=True)\ndef noise(): yield\n")
    pytester.makeini("[pytest]\ntestpaths = tests\naddopts = --strict-markers --strict-config\n")
    pytester.mkdir("tests").joinpath("test_own.py").write_text("def test_own():\n    pass\n")


def collected(result):
    lines = [line for line in result.outlines if "::" in line]
    return [line.rpartition("::")[2] for line in lines]


@pytest.mark.usefixtures("own_tests")
def test_without_paths_the_kit_runs_alone(run):
    result = run("--trainer=tiny:Trainer", "--collect-only", "-q")
    assert collected(result) == RUNNABLE
    assert result.ret == 0


@pytest.mark.usefixtures("own_tests")
def test_with_paths_only_the_tests_there_run(run):
    result = run("--trainer=tiny:Trainer", "--collect-only", "-q", "tests")
    assert collected(result) == ["test_own"]


@pytest.mark.usefixtures("own_tests")
def test_both_run_when_asked(run):
    result = run("--trainer=tiny:Trainer", "--conformance", "--clause=forward.no_grad", "tests")
    assert result.ret == 0
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["tests?test_own.py .*", "forward .*"])


def test_without_a_trainer_nothing_is_there(run, pytester):
    pytester.makepyfile("def test_own(trainer_of_another_kind=None):\n    pass\n")
    result = run()
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*conformance:*")


def test_areas_and_clauses_can_be_chosen(run):
    result = run("--trainer=tiny:Trainer", "--co", "-q", "--clause=status", "--clause=forward.pure")
    assert collected(result) == [
        "status.counts",
        "status.step",
        "status.read_only",
        "forward.pure",
    ]


def test_k_chooses_by_parts_of_ids(run):
    result = run("--trainer=tiny:Trainer", "-k", "forward.no_grad or causal")
    result.assert_outcomes(passed=2, deselected=len(RUNNABLE) - 2)
    result.stdout.fnmatch_lines(["CONFORMANT in what was selected: 2 of 2 MUST held"])


def test_clauses_are_shown_by_area_and_by_id(run):
    short = run("--trainer=tiny:Trainer", "--clause=forward.no_grad", "--clause=status.step")
    short.stdout.fnmatch_lines(["status . *", "forward . *"])
    verbose = run("--trainer=tiny:Trainer", "--clause=forward.no_grad", "-v")
    verbose.stdout.fnmatch_lines(["forward::forward.no_grad PASSED *"])
    tree = run("--trainer=tiny:Trainer", "--clause=forward.no_grad", "--co")
    tree.stdout.fnmatch_lines(["<ClauseArea forward>", "  <ClauseItem forward.no_grad>"])


def test_the_folder_that_pytest_starts_in_decides_what_is_imported_and_shown(run, pytester):
    pytester.makeini("[pytest]\n")
    below = pytester.mkdir("below")
    below.joinpath("mine.py").write_text(pytester.path.joinpath("tiny.py").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(below)
        result = run("--trainer=mine:Trainer", "--clause=forward.no_grad", "-v")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["forward::forward.no_grad PASSED *"])


@pytest.mark.parametrize(
    "name",
    ["tiny:Trainer", "kinds:make", "kinds:make_async", "kinds:target", "kinds:Outer.make"],
)
def test_a_class_a_function_a_coroutine_function_or_a_target_makes_the_trainers(
    run, pytester, name
):
    pytester.makepyfile(
        kinds="""
        from forge_conformance import Target
        from tiny import Trainer

        def make():
            return Trainer()

        async def make_async():
            return Trainer()

        class Outer:
            make = staticmethod(make)

        target = Target(factory=make_async)
        """
    )
    result = run(f"--trainer={name}", "--clause=forward.no_grad")
    assert result.ret == 0
    result.assert_outcomes(passed=1)


def test_importing_the_plugin_imports_nothing_heavy(pytester):
    pytester.makeconftest(
        """
        import sys

        def pytest_unconfigure():
            heavy = {"torch", "typeguard", "forge", "forge_conformance.session"} & set(sys.modules)
            print("imported:", sorted(heavy))
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:typeguard", "--co")
    result.stdout.fnmatch_lines(["imported: [[][]]"])
