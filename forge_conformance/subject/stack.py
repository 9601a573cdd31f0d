"""Where a call of the trainer is, told from the trainer's own frames on."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_DRIVERS = (str(Path(__file__).parent), str(Path(__file__).parents[1] / "lab.py"))
_MOST_FRAMES = 8


def where_it_waits(task: asyncio.Task[Any]) -> str:
    """The chain of awaits that a suspended task is in, outermost first."""
    return trainer_frames((frame, frame.f_lineno) for frame in _awaiting_frames(task.get_coro()))


def where_it_runs(frame: FrameType | None) -> str:
    """The stack of a running thread, outermost first."""
    return trainer_frames(traceback.walk_stack(frame), innermost_first=True)


def trainer_frames(
    frames: Iterable[tuple[FrameType, int]], *, innermost_first: bool = False
) -> str:
    """Frames as text: those below the last one that drives the trainer, the innermost few."""
    summary = list(traceback.StackSummary.extract(iter(frames)))
    if innermost_first:
        summary.reverse()
    drivers = [i for i, each in enumerate(summary) if each.filename.startswith(_DRIVERS)]
    below = summary[drivers[-1] + 1 :] if drivers else summary
    return "".join(traceback.format_list(below[-_MOST_FRAMES:])).rstrip()


def _awaiting_frames(awaiting: Any) -> Iterator[FrameType]:
    """Down a chain of coroutines and generators; anything else ends it."""
    while awaiting is not None:
        for prefix, inner in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            frame = getattr(awaiting, f"{prefix}_frame", None)
            if frame is not None:
                yield frame
                awaiting = getattr(awaiting, inner, None)
                break
        else:
            return
