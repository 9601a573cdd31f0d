"""Histories of a training with saves and loads in it, as Hypothesis draws them."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from forge_conformance.scenarios.domain import Domain


@dataclass(frozen=True)
class Act:
    """One thing that happens to a trainer.

    Args:
        kind: "update" (a microbatch and optim_step), "microbatch" (left pending), "clear",
            "forward", "save", "save weights", or "load" (of an earlier save, full or weights).
        number: Which batch, of two; or which of the saves, modulo how many there are.
    """

    kind: str
    number: int = 0

    def __repr__(self) -> str:
        return f"{self.kind} {self.number}"


_KINDS = (
    "update",
    "update",
    "save",
    "microbatch",
    "load",
    "save weights",
    "forward",
    "clear",
)


def histories(domain: Domain) -> st.SearchStrategy[list[Act]]:
    """Histories of a few acts; the simplest are updates."""
    acts = st.builds(Act, st.sampled_from(_KINDS), st.integers(0, 1))
    return st.lists(acts, min_size=1, max_size=8)
