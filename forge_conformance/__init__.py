"""The conformance kit of the Trainer protocol: `pytest --trainer=module:Name`.

`Target` is what an author writes to say more about a trainer than its class does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_conformance.target import Target

__all__ = ["Target"]


def __getattr__(name: str) -> Any:
    """`Target` on demand: pytest loads this package in every run, and torch takes a second."""
    if name == "Target":
        from forge_conformance.target import Target

        return Target
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
