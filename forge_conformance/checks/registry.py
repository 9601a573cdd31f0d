"""The checks by clause: `@check("area.clause")` enters a function here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from forge_conformance.contract import clause
from forge_conformance.scenarios.domain import Drawn


@dataclass(frozen=True)
class Check:
    """How one clause is judged.

    Args:
        clause_id: The clause.
        judge: Takes the lab and what Hypothesis has drawn; returns when the clause holds, raises
            otherwise (see `forge_conformance.finding`).
        varying: What Hypothesis draws, by parameter name: a strategy once the inputs that the
            trainer takes are known. Without any, the check runs once.
        share: The part of a profile's inputs that is tried, of checks that look long at each.
        alone: Whether it is for a run in one process, as it changes files or starts processes.
    """

    clause_id: str
    judge: Callable[..., None]
    varying: Mapping[str, Drawn]
    share: float = 1.0
    alone: bool = False

    @property
    def where_to_look(self) -> str:
        """The docstring: where in a trainer the cause of a break usually sits."""
        return inspect.cleandoc(self.judge.__doc__ or "")


_CHECKS: dict[str, Check] = {}
CHECKS: Mapping[str, Check] = MappingProxyType(_CHECKS)
"""Every check by the id of its clause."""


def check(
    clause_id: str, /, *, share: float = 1.0, alone: bool = False, **varying: Drawn
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function the check of a clause; its docstring says where to look after a break.

    Example:
        @check("forward.no_grad", ids=token_ids())
        def logits_carry_no_graph(lab: Lab, ids: Tensor) -> None:
            \"\"\"Is `forward` run under `torch.no_grad()`?\"\"\"
            ...
    """
    clause(clause_id)

    def register(judge: Callable[..., None]) -> Callable[..., None]:
        if clause_id in _CHECKS:
            raise ValueError(f"{clause_id} has two checks")
        if not judge.__doc__:
            raise ValueError(f"the check of {clause_id} has no docstring that says where to look")
        _CHECKS[clause_id] = Check(clause_id, judge, MappingProxyType(varying), share, alone)
        return judge

    return register
