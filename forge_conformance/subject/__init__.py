"""Driving a trainer: one event loop, time limits, a journal of every call."""

from forge_conformance.subject.faults import (
    CallFailed,
    Malformed,
    NotAwaitable,
    TimedOut,
    TrainerFault,
)
from forge_conformance.subject.loop import CallTimedOut, Loop
from forge_conformance.subject.ranks import RankLost, Ranks
from forge_conformance.subject.subject import Journal, Losses, Program, Status, Subject, Update

__all__ = [
    "CallFailed",
    "CallTimedOut",
    "Journal",
    "Loop",
    "Losses",
    "Malformed",
    "NotAwaitable",
    "Program",
    "RankLost",
    "Ranks",
    "Status",
    "Subject",
    "TimedOut",
    "TrainerFault",
    "Update",
]
