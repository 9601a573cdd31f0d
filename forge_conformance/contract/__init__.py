"""The contract in code: every clause, and how to find one."""

from __future__ import annotations

from forge_conformance.contract.catalogue import AREAS, CATALOGUE
from forge_conformance.contract.clause import Clause, Level, Need
from forge_conformance.contract.selection import UnknownClause, clause, select

__all__ = [
    "AREAS",
    "CATALOGUE",
    "Clause",
    "Level",
    "Need",
    "UnknownClause",
    "clause",
    "select",
]
