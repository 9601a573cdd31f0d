"""Curves of several trainers: as JSON, and in one picture. Of several ranks, one speaks."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Curve:
    """A number of one trainer, step by step.

    Args:
        trainer: The trainer's name.
        points: Pairs of a step, counted from 1, and the number there.
    """

    trainer: str
    points: list[tuple[int, float]]


def is_first_rank() -> bool:
    """Whether this process is the one that prints and writes; `torchrun` sets RANK."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Print a line, at once, on the first rank."""
    if is_first_rank():
        print(text, flush=True)


def write(
    curves: Sequence[Curve], json_path: Path | None, picture_path: Path | None, what: str
) -> None:
    """Write the curves to the files that were asked for, on the first rank.

    Args:
        curves: One for each trainer.
        json_path: Gets a list of `{"trainer": …, "points": [[step, number], …]}`.
        picture_path: Gets all curves in one picture, of the type that its suffix names.
        what: The number's name and unit, for the axis.
    """
    if not is_first_rank():
        return
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(curve) for curve in curves], indent=1) + "\n")
        say(f"wrote {json_path}")
    if picture_path is not None:
        _draw(curves, picture_path, what)
        say(f"drew {picture_path}")


def _draw(curves: Sequence[Curve], path: Path, what: str) -> None:
    # Here, so that the applications do without it where no picture is asked for.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for drawn, curve in enumerate(curves):
        steps, numbers = zip(*curve.points, strict=True) if curve.points else ((), ())
        # Curves that agree lie on one another: each is thinner than the one below it.
        width = 1.2 + 2.4 * (len(curves) - 1 - drawn)
        axes.plot(steps, numbers, label=curve.trainer, linewidth=width)
    axes.set_xlabel("step")
    axes.set_ylabel(what)
    axes.legend()
    figure.savefig(path, dpi=150)
