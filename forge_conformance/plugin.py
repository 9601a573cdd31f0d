"""The pytest plugin: its options, and the fixtures for an author's own tests.

pytest loads this module in every run of the environment, so that it imports nothing heavy:
everything else waits for `--trainer`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from forge_conformance.session import Session


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "conformance of a trainer")
    group.addoption(
        "--trainer",
        metavar="MODULE:NAME",
        help="judge this trainer: a class, a function that makes one, or a "
        "forge_conformance.Target. Without paths nothing else runs; with paths, those tests run "
        "and get it by the fixtures trainer and trainer_factory",
    )
    group.addoption(
        "--conformance",
        action="store_true",
        help="with paths: run the kit beside those tests",
    )
    group.addoption(
        "--clause",
        action="append",
        metavar="AREA[.CLAUSE]",
        help="judge this area or clause only (may be repeated), such as forward or forward.causal",
    )
    group.addoption(
        "--conformance-profile",
        choices=["quick", "default", "thorough"],
        default="default",
        help="how many inputs are tried; thorough draws other ones in every run, unless "
        "--hypothesis-seed is given",
    )
    group.addoption(
        "--conformance-strict", action="store_true", help="a broken SHOULD fails the run as well"
    )
    group.addoption(
        "--trainer-timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long one call of the trainer may take (default: 60)",
    )
    group.addoption(
        "--conformance-timing",
        action="store_true",
        help="report how much of the time was spent inside the trainer's calls",
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e6:
        raise ValueError(text)
    return seconds


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("trainer")
    if name is None:
        if config.getoption("clause") or config.getoption("conformance"):
            raise pytest.UsageError("--clause and --conformance need --trainer=module:Name")
        return
    invocation_folder = str(config.invocation_params.dir)
    if invocation_folder not in sys.path:
        sys.path.insert(0, invocation_folder)
    config.pluginmanager.register(_new_session(config, name), "conformance-session")


def _new_session(config: pytest.Config, name: str) -> Session:
    from forge_conformance.protocol import ProtocolMissing, require_protocol

    try:
        require_protocol()
    except ProtocolMissing as error:
        raise pytest.UsageError(str(error)) from error

    from forge_conformance.session import new_session

    return new_session(config, name)


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test that takes a trainer on the loop that the trainer was made in."""
    wanted = {"trainer", "trainer_factory"} & set(pyfuncitem.fixturenames)
    if not wanted or not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    _session(pyfuncitem.config).run_test(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture
def trainer_factory(request: pytest.FixtureRequest) -> Iterator[Callable[[], Awaitable[Any]]]:
    """Makes new trainers of `--trainer`: `await trainer_factory()`."""
    with _session(request.config).trainers() as make:
        yield make


@pytest.fixture
def trainer(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A new trainer of `--trainer`. Coroutine tests that take it need no other plugin."""
    session = _session(request.config)
    with session.trainers() as make:
        yield session.run_test(make())


def _session(config: pytest.Config) -> Session:
    session: Session | None = config.pluginmanager.get_plugin("conformance-session")
    if session is None:
        raise pytest.UsageError("this test takes a trainer: say which with --trainer=module:Name")
    return session
