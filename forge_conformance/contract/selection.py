"""Finding clauses by what people type: an id, an area, or something close to one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

from forge_conformance.contract.catalogue import AREAS, CATALOGUE
from forge_conformance.contract.clause import Clause


class UnknownClause(LookupError):
    """No clause or area has this name; the message names the closest ones."""


def clause(clause_id: str) -> Clause:
    """The clause with this id.

    Raises:
        UnknownClause: There is none.

    Example:
        >>> clause("forward.causal").level.value
        'MUST'
        >>> try:
        ...     clause("forward.casual")
        ... except UnknownClause as error:
        ...     print(error)
        no clause 'forward.casual'; did you mean 'forward.causal'?
    """
    if clause_id in CATALOGUE:
        return CATALOGUE[clause_id]
    if clause_id in AREAS:
        raise UnknownClause(
            f"{clause_id!r} is an area, not a clause; its clauses are {_clauses_of(clause_id)}"
        )
    raise UnknownClause(f"no clause {clause_id!r}; {_advice(clause_id, CATALOGUE)}")


def select(selectors: Iterable[str]) -> tuple[Clause, ...]:
    """The clauses that the selectors name, each once, in the order of the contract.

    Args:
        selectors: Areas (`"forward"`) and clause ids (`"forward.causal"`), in any order. None at
            all selects every clause.

    Raises:
        UnknownClause: A selector is neither.

    Example:
        >>> [clause.id for clause in select(["tokenizer", "forward.causal"])]
        ['tokenizer.ids_fit', 'tokenizer.round_trip', 'forward.causal']
    """
    wanted = set(selectors)
    for selector in sorted(wanted):
        if selector not in AREAS and selector not in CATALOGUE:
            raise UnknownClause(
                f"no area or clause {selector!r}; {_advice(selector, [*AREAS, *CATALOGUE])}"
            )
    return tuple(
        clause
        for clause in CATALOGUE.values()
        if not wanted or clause.area in wanted or clause.id in wanted
    )


def _advice(name: str, known: Collection[str]) -> str:
    area, _, short_name = name.lower().rpartition(".")
    alike = [
        each
        for each in known
        if get_close_matches(short_name, [each.rpartition(".")[2]], cutoff=0.8)
    ]
    nearest_first = get_close_matches(name, alike, cutoff=0.0)
    if nearest_first:
        return f"did you mean {' or '.join(map(repr, nearest_first))}?"
    if area in AREAS:
        return f"the clauses of {area!r} are {_clauses_of(area)}"
    return f"the areas are {', '.join(AREAS)}"


def _clauses_of(area: str) -> str:
    return ", ".join(each.id for each in CATALOGUE.values() if each.area == area)
