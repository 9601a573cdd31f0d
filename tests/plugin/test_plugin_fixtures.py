"""An author's own tests: the fixtures `trainer` and `trainer_factory`, sync and async."""

from __future__ import annotations

import pytest

ASYNC_TESTS = """
import asyncio
import pytest

loops = set()

async def test_with_a_trainer(trainer):
    loops.add(asyncio.get_running_loop())
    assert (await trainer.get_status()).step == 0

async def test_with_a_factory(trainer_factory):
    loops.add(asyncio.get_running_loop())
    first, second = await trainer_factory(), await trainer_factory()
    assert first is not second

class TestInAClass:
    value = 1

    async def test_with_both(self, trainer, trainer_factory):
        loops.add(asyncio.get_running_loop())
        assert self.value == 1 and await trainer_factory() is not trainer

@pytest.mark.parametrize("step", [0])
async def test_parametrized(trainer, step):
    assert (await trainer.get_status()).step == step

def test_all_ran_on_one_loop():
    assert len(loops) == 1
"""


def test_sync_tests_get_trainers(run, pytester):
    pytester.makepyfile(
        """
        import asyncio

        def test_one(trainer):
            assert trainer.step == 0

        def test_another(trainer_factory):
            assert asyncio.run(trainer_factory()).step == 0
        """
    )
    result = run("--trainer=tiny:Trainer", "test_sync_tests_get_trainers.py")
    assert result.ret == 0
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("*CONFORMANT*")


@pytest.mark.parametrize(
    "plugins",
    [
        ["-p", "no:asyncio", "-p", "no:anyio"],
        ["-p", "no:anyio", "--asyncio-mode=strict"],
        ["-p", "no:anyio", "--asyncio-mode=auto"],
        ["-p", "no:asyncio", "-o", "anyio_mode=auto"],
    ],
    ids=["alone", "asyncio-strict", "asyncio-auto", "anyio-auto"],
)
def test_async_tests_run_on_the_loop_of_their_trainer(run, pytester, plugins):
    pytester.makepyfile(test_own=ASYNC_TESTS)
    result = run("--trainer=tiny:Trainer", *plugins, "test_own.py")
    assert result.ret == 0
    result.assert_outcomes(passed=5)


@pytest.mark.parametrize("mark", ["asyncio", "anyio"])
def test_a_mark_of_another_plugin_changes_nothing(run, pytester, mark):
    pytester.makepyfile(
        test_own=f"""
        import pytest

        @pytest.fixture
        def anyio_backend():
            return "asyncio"

        @pytest.mark.{mark}
        async def test_marked(trainer):
            assert (await trainer.get_status()).step == 0
        """
    )
    result = run("--trainer=tiny:Trainer", "test_own.py", "-W", "error")
    result.assert_outcomes(passed=1)


def test_trainers_are_closed_when_their_test_has_ended(run, pytester):
    pytester.makepyfile(
        closable="""
        from tiny import Trainer

        class Closable(Trainer):
            closed = []

            async def close(self):
                self.closed.append(self)
        """,
        test_own="""
        from closable import Closable

        async def test_two(trainer, trainer_factory):
            await trainer_factory()
            assert Closable.closed == []

        def test_later():
            assert len(Closable.closed) == 2
        """,
    )
    result = run("--trainer=closable:Closable", "test_own.py")
    result.assert_outcomes(passed=2)


def test_a_fixture_of_the_authors_own_may_have_the_name(run, pytester):
    pytester.makepyfile(
        test_own="""
        import pytest

        @pytest.fixture
        def trainer():
            return "theirs"

        @pytest.mark.asyncio
        async def test_theirs(trainer):
            assert trainer == "theirs"
        """
    )
    run("test_own.py").assert_outcomes(passed=1)
    run("--trainer=tiny:Trainer", "test_own.py").assert_outcomes(passed=1)


def test_a_failing_test_fails_the_run_with_its_own_traceback(run, pytester):
    pytester.makepyfile(
        test_own="""
        async def test_wrong(trainer):
            status = await trainer.get_status()
            assert status.step == 7
        """
    )
    result = run("--trainer=tiny:Trainer", "test_own.py", "--conformance", "--clause=forward.shape")
    assert result.ret == 1
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["E * assert 0 == 7", "CONFORMANT in what was selected: *"])


def test_without_a_trainer_such_a_test_says_what_it_lacks(run, pytester):
    pytester.makepyfile(test_own="def test_it(trainer): pass")
    result = run("test_own.py")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["this test takes a trainer: say which with --trainer=module:Name"])
