"""The pytest plugin: its options, and the fixtures for an author's own tests.

pytest loads this module in every run of the environment, so that it imports nothing heavy:
everything else waits for `--trainer`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from forge_conformance.session import Session

DEFAULT_TIMEOUT = 60.0
_SESSION = "conformance-session"


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
        "--trainer-against",
        metavar="MODULE:NAME",
        help="numerics.parity: compare with this trainer, from the same exported weights",
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
        default=DEFAULT_TIMEOUT,
        metavar="SECONDS",
        help="how long one call of the trainer may take (default: 60)",
    )
    group.addoption(
        "--conformance-timing",
        action="store_true",
        help="report how much of the time was spent inside the trainer's calls",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("trainer")
    if name is not None and os.environ.get("FORGE_CONFORMANCE_ELSEWHERE"):
        raise pytest.UsageError(
            f"importing {name} starts a run of pytest: guard it by `if __name__ == '__main__':`"
        )
    if name is not None:
        config.pluginmanager.register(_new_session(config, name), _SESSION)
        return
    for option in ("--conformance", "--clause", "--conformance-strict", "--trainer-against"):
        if config.getoption(option):
            raise pytest.UsageError(f"{option} needs --trainer=module:Name")


def _new_session(config: pytest.Config, name: str) -> Session:
    from forge_conformance.protocol import ProtocolMissing, require_protocol

    try:
        require_protocol()
    except ProtocolMissing as error:
        raise pytest.UsageError(str(error)) from error

    # After the protocol: a folder `forge` of the user's doesn't stand in its way then.
    folder = str(config.invocation_params.dir)
    if folder not in sys.path:
        sys.path.insert(0, folder)

    from forge_conformance.session import new_session

    return new_session(config, name)


@pytest.fixture
def trainer_factory(request: pytest.FixtureRequest) -> Iterator[Callable[[], Awaitable[Any]]]:
    """Makes new trainers of `--trainer`: `await trainer_factory()`. They are closed at the end."""
    with _session(request).maker(request.node) as make:
        yield make


@pytest.fixture
def trainer(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A new trainer of `--trainer`. Coroutine tests that take it need no other plugin."""
    with _session(request).guest(request.node) as made:
        yield made


def _session(request: pytest.FixtureRequest) -> Session:
    session: Session | None = request.config.pluginmanager.get_plugin(_SESSION)
    if session is None:
        pytest.fail(
            "this test takes a trainer: say which with --trainer=module:Name", pytrace=False
        )
    return session
