"""Trainers in an empty working folder, where their default folders of checkpoints usually lie."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forge_conformance.finding import NotChecked
from forge_conformance.lab import Lab
from forge_conformance.scenarios.batches import make_batch
from forge_conformance.subject import Subject, TrainerFault
from forge_conformance.target import TargetError


@contextmanager
def working_folder(lab: Lab) -> Iterator[Path]:
    """An empty working folder, in which the trainers' default folder of checkpoints lies; those
    that were made in it are closed with it.

    Raises:
        NotChecked: Their default folder lies elsewhere, or is another one for each.
    """
    require_default_folder(lab)
    try:
        with lab.working_folder() as folder:
            yield folder
    finally:
        lab.retire_others()


def require_default_folder(lab: Lab) -> None:
    """Raise `NotChecked` unless new trainers share a default folder below the working folder."""
    if reason := strange_default_folder(lab):
        raise NotChecked(reason)


def strange_default_folder(lab: Lab) -> str:
    """Why the default folder of checkpoints can't be judged; empty where it can.

    What lies outside the kit's own folders may be the user's: nothing is saved there but one
    probe under a name of its own, which is removed.
    """
    return lab.once(_look_at_the_default_folder)


def _look_at_the_default_folder(lab: Lab) -> str:
    with lab.working_folder() as folder:
        try:
            trainers = [lab.fresh() for _ in range(2)]
        except TargetError as error:
            return f"in an empty working folder {error}"
        parents = set()
        for number, trainer in enumerate(trainers):
            name = unique(folder, f"probe {number}")
            place = Path(os.path.abspath(trainer.save(name)))
            parent = Path(os.path.realpath(place.parent))
            parents.add(parent)
            if not parent.is_relative_to(folder):
                with suppress(TrainerFault):  # it may still be written in the background
                    trainer.load(str(place))
                if place.name == name:
                    _remove(place)
        if not all(parent.is_relative_to(folder) for parent in parents):
            return (
                f"the default folder {min(parents)} isn't below the working folder, and the kit "
                "touches no checkpoints there: let Target.factory make trainers whose default "
                "folder is relative"
            )
        return "each new trainer has a default folder of its own" if len(parents) > 1 else ""


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)


def made_here(lab: Lab) -> Subject:
    """A new trainer, made in the working folder of the moment.

    Raises:
        NotChecked: The factory needs another one.
    """
    try:
        return lab.fresh()
    except TargetError as error:
        raise NotChecked(f"in an empty working folder {error}") from error


def train(lab: Lab, trainer: Subject, updates: int = 1, seed: int = 0) -> None:
    """Make updates, by default one, each on a batch of its own."""
    for number in range(updates):
        lab.reseed(seed + number)
        trainer.forward_backward(make_batch(lab.domain, lab.domain.usual_shape, seed + number))
        trainer.optim_step()


def unique(folder: Path, name: str) -> str:
    """A checkpoint's name that no run before this one has used in the same default folder."""
    return f"{folder.parent.name}-{folder.name} {name}"


def with_number(name: str, number: int) -> str:
    """An automatic name with another step in it."""
    found = [*re.finditer(r"\d+", name)]
    if not found:
        return f"{name}-{number}"
    step = found[-1]
    return f"{name[: step.start()]}{number:0{len(step[0])}}{name[step.end() :]}"
