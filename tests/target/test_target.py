"""`module:Name`, and what a `Target` refuses; the plugin's tests show the messages to users."""

from __future__ import annotations

import pytest

from forge_conformance import Target
from forge_conformance.target import TargetError, resolve


class Trainer:
    pass


async def make():
    return Trainer()


class Outer:
    Inner = Trainer


declared = Target(factory=make, deterministic=True)


@pytest.mark.parametrize("name", ["Trainer", "make", "Outer.Inner"])
def test_a_class_or_a_function_becomes_a_target(name):
    target = resolve(f"{__name__}:{name}")
    assert target.name == f"{__name__}:{name}"
    assert target.factory in (Trainer, make)


def test_a_target_is_taken_as_it_is_and_named():
    target = resolve(f"{__name__}:declared")
    assert target.deterministic is True
    assert target.name == f"{__name__}:declared"


def makes_a_target() -> Target:
    return declared


def test_a_function_that_says_it_makes_a_target_is_asked_for_it():
    target = resolve(f"{__name__}:makes_a_target")
    assert target.deterministic is True
    assert target.source == f"{__name__}:makes_a_target"


def test_the_error_has_its_cause():
    with pytest.raises(TargetError, match="no module 'nowhere'") as raised:
        resolve("nowhere.at_all:Trainer")
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"factory": 3}, "Target.factory is 3, which can't be called to make a trainer"),
        ({"factory": make, "gradients": dict}, "declared without Target.parameters"),
        ({"factory": make, "expected_failures": {"forward": "why"}}, "is an area, not a clause"),
        ({"factory": make, "expected_failures": {"forward.pure": ""}}, "gives no reason"),
    ],
)
def test_a_declaration_that_says_nothing(fields, message):
    with pytest.raises(TargetError) as raised:
        Target(**fields)
    assert message in str(raised.value)
