"""Trainers by `module:Name`, as the applications' command lines name them."""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from forge.api import Closable, Trainer


@dataclass(frozen=True)
class TrainerFactory:
    """What makes a trainer, and the name that it was found by.

    Args:
        name: `module:Name`.
        make: A class, or a function that may be async; called without arguments.
    """

    name: str
    make: Callable[[], Any]

    @property
    def label(self) -> str:
        """The part after the colon, fit to be part of a file's name."""
        return self.name.rpartition(":")[2]


def trainer_factory(name: str) -> TrainerFactory:
    """The factory that `module:Name` names; goes with argparse as `type=trainer_factory`.

    Raises:
        argparse.ArgumentTypeError: It can't be found; the message says what to do.

    Example:
        >>> trainer_factory("reference_impls.plain:PlainTrainer").label
        'PlainTrainer'
    """
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise argparse.ArgumentTypeError(
            f"{name!r} isn't of the form module:Name; for example mypkg:MyTrainer"
        )
    try:
        make = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise argparse.ArgumentTypeError(
            f"{module_name} can't be imported ({error}); is what it needs installed, and is it "
            "on the path?"
        ) from error
    except AttributeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not callable(make):
        raise argparse.ArgumentTypeError(
            f"{name} is a {type(make).__name__}; name a class or a function that makes a trainer"
        )
    return TrainerFactory(name, make)


@asynccontextmanager
async def opened(factory: TrainerFactory) -> AsyncIterator[Trainer]:
    """A new trainer, closed at the end if it can be.

    Raises:
        TypeError: What the factory made lacks methods of the protocol.
    """
    made = factory.make()
    trainer = await made if inspect.isawaitable(made) else made
    try:
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"{factory.name} made a {type(trainer).__name__}, which lacks methods of "
                f"forge.api.Trainer; `pytest --trainer={factory.name}` says which"
            )
        yield trainer
    finally:
        if isinstance(trainer, Closable):
            await trainer.close()
