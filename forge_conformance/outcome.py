"""The outcome of one clause's check on one trainer, as every report reads it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """How one clause came out."""

    HELD = "held"
    BROKE = "broke"
    NOT_CHECKED = "not checked"
    EXPECTED = "broke as expected"
    UNEXPECTEDLY_HELD = "held against expectation"
    KIT_ERROR = "kit error"
    TARGET_ERROR = "target error"


@dataclass
class Finding:
    """Why a clause broke, in words and numbers.

    Attributes:
        expected, seen, apart: The comparison that failed; `apart` may be empty.
        example: The smallest input found, one line for each thing drawn.
        where_to_look: Where in a trainer the cause of this kind of break usually sits.
        trainer_traceback: The trainer's own traceback, where a call raised.
        follows: The clause that judges the cause, where this break is a consequence of it.
    """

    expected: str
    seen: str
    apart: str = ""
    example: list[str] = field(default_factory=list)
    where_to_look: str = ""
    trainer_traceback: str = ""
    follows: str | None = None


@dataclass
class Outcome:
    """How one clause came out, and what it took.

    Attributes:
        reason: Why it was not checked, why the break was expected, or the kit's own traceback.
        advice: What a SHOULD inside a MUST clause would have one do.
        reduced_precision: The flags under which torch computed less precisely than in its dtypes.
        examples: How many inputs were tried.
        seconds, calls, call_seconds: Time for the whole check; calls of the trainer in it, and
            the time inside them.
    """

    clause_id: str
    verdict: Verdict
    finding: Finding | None = None
    reason: str = ""
    advice: list[str] = field(default_factory=list)
    reduced_precision: list[str] = field(default_factory=list)
    examples: int = 0
    seconds: float = 0.0
    calls: int = 0
    call_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "verdict": self.verdict.value}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Outcome:
        finding = data["finding"]
        return cls(
            **{
                **data,
                "verdict": Verdict(data["verdict"]),
                "finding": Finding(**finding) if finding else None,
            }
        )
