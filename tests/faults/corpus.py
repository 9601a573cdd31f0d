"""The corpus: trainers that break one clause each, and unusual ones that break none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from forge_conformance import Target
from forge_conformance.contract import clause
from forge_conformance.target import resolve

Factory = TypeVar("Factory", bound=Callable[[], Any])


@dataclass(frozen=True)
class Specimen:
    """A trainer of the corpus.

    Args:
        name: Of the class or function that makes it.
        story: What is special about it, in one line.
        factory: Makes the trainer; or makes a `Target`, where the trainer's author declares more.
    """

    name: str
    story: str
    factory: Callable[[], Any]

    @property
    def target(self) -> Target:
        """What the kit is given."""
        return resolve(f"{self.factory.__module__}:{self.name}")


@dataclass(frozen=True)
class Fault(Specimen):
    """A trainer with one fault, and the clause that must catch it."""

    clause_id: str


FAULTS: list[Fault] = []
HONEST: list[Specimen] = []


def faulty(clause_id: str, story: str) -> Callable[[Factory], Factory]:
    """Enter a class or function that makes a trainer which breaks `clause_id`.

    Example:
        @faulty("forward.causal", "the causal mask is missing")
        class LooksAhead(PlainTrainer): ...
    """
    clause(clause_id)

    def enter(factory: Factory) -> Factory:
        FAULTS.append(Fault(_new_name(factory, FAULTS), story, factory, clause_id))
        return factory

    return enter


def honest(story: str) -> Callable[[Factory], Factory]:
    """Enter a class or function that makes a trainer which conforms in an unusual way."""

    def enter(factory: Factory) -> Factory:
        HONEST.append(Specimen(_new_name(factory, HONEST), story, factory))
        return factory

    return enter


def _new_name(factory: Callable[[], Any], entered: list[Any]) -> str:
    name: str = factory.__name__
    if any(specimen.name == name for specimen in entered):
        raise ValueError(f"two trainers of the corpus are called {name}")
    return name
