"""The catalogue of clauses: what is in it, and how clauses are found by name."""

from __future__ import annotations

import doctest
import importlib
import re
from collections import Counter
from dataclasses import FrozenInstanceError

import pytest

from forge_conformance.contract import (
    AREAS,
    CATALOGUE,
    Level,
    Need,
    UnknownClause,
    clause,
    select,
)
from forge_conformance.target import Target

MUST_AND_SHOULD = {
    "structure": (4, 1),
    "config": (3, 1),
    "status": (3, 0),
    "tokenizer": (1, 1),
    "forward": (8, 0),
    "forward_backward": (15, 2),
    "optim_step": (8, 1),
    "clear_gradients": (3, 0),
    "checkpoint": (16, 3),
    "metrics": (7, 1),
    "numerics": (5, 0),
    "concurrency": (2, 1),
    "isolation": (2, 1),
    "resources": (1, 1),
    "distributed": (4, 0),
}


def ids(clauses):
    return [each.id for each in clauses]


def test_a_clause_says_what_it_is():
    causal = clause("forward.causal")
    assert (causal.id, causal.area, causal.level) == ("forward.causal", "forward", Level.MUST)
    assert causal.sentence == (
        "A conforming trainer gives logits at position t that don't depend on tokens after t."
    )
    with pytest.raises(FrozenInstanceError):
        causal.level = Level.SHOULD


def test_every_area_has_its_clauses_in_the_order_of_the_contract():
    counts = Counter((each.area, each.level) for each in CATALOGUE.values())
    assert {
        area: (counts[area, Level.MUST], counts[area, Level.SHOULD]) for area in AREAS
    } == MUST_AND_SHOULD
    assert list(dict.fromkeys(each.area for each in CATALOGUE.values())) == list(AREAS)
    assert list(AREAS) == list(MUST_AND_SHOULD)


@pytest.mark.parametrize("clause_id", CATALOGUE)
def test_clauses_are_well_formed(clause_id):
    entry = CATALOGUE[clause_id]
    assert entry.id == clause_id
    assert re.fullmatch(r"[a-z_]+\.[a-z_]+", clause_id)
    assert re.match(r"[a-z]", entry.text), "continues a sentence"
    assert entry.text[-1] not in ".,;", "the sentence's full stop is put after it"
    assert entry.needs or not entry.or_needs, "an alternative to nothing"


def test_areas_still_to_be_built_say_so():
    pending = {each.area for each in CATALOGUE.values() if each.pending}
    built = {each.area for each in CATALOGUE.values() if not each.pending}
    assert pending - built == {
        "concurrency",
        "isolation",
        "resources",
    }
    assert pending | built == set(AREAS)
    assert clause("isolation.globals").pending == "no check yet: isolation is still to be built"


def test_a_clause_may_need_several_things_or_others_instead():
    clip_once = clause("optim_step.clip_once")
    assert clip_once.needs == (Need.IN_PROCESS, Need.DECLARED_CLIPPING)
    assert clip_once.or_needs == (Need.IN_PROCESS, Need.DECLARED_OPTIMIZER)


@pytest.mark.parametrize("need", Need)
def test_every_need_has_a_one_line_hint_that_names_fields_a_target_has(need):
    assert need.hint
    assert "\n" not in need.hint
    for field in re.findall(r"Target\.(\w+)", need.hint):
        assert field in Target.__dataclass_fields__
    if need.value.startswith("declared "):
        assert "Target." in need.hint


def test_select_takes_areas_and_clauses_and_keeps_the_contract_s_order():
    assert ids(select(["tokenizer.ids_fit"])) == ["tokenizer.ids_fit"]
    assert ids(select(["forward.causal", "config", "config.static"])) == [
        "config.fields",
        "config.common_keys",
        "config.static",
        "config.not_aliased",
        "forward.causal",
    ]


def test_select_without_selectors_takes_every_clause():
    assert ids(select([])) == list(CATALOGUE)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("forward.casual", "no area or clause 'forward.casual'; did you mean 'forward.causal'?"),
        ("Forward.Causal", "no area or clause 'Forward.Causal'; did you mean 'forward.causal'?"),
        ("casual", "no area or clause 'casual'; did you mean 'forward.causal'?"),
        ("forwards", "no area or clause 'forwards'; did you mean 'forward'?"),
        (
            "forward.discards",
            "no area or clause 'forward.discards'; did you mean 'clear_gradients.discards'?",
        ),
        (
            "shape",
            "no area or clause 'shape'; did you mean 'metrics.shape' or 'forward.shape'?",
        ),
        (
            "tokenizer.speed",
            "no area or clause 'tokenizer.speed'; the clauses of 'tokenizer' are "
            "tokenizer.ids_fit, tokenizer.round_trip",
        ),
        ("xyz", f"no area or clause 'xyz'; the areas are {', '.join(AREAS)}"),
    ],
)
def test_an_unknown_selector_is_answered_with_the_closest_names(typed, message):
    with pytest.raises(UnknownClause) as caught:
        select(["structure", typed])
    assert str(caught.value) == message


def test_where_a_clause_is_wanted_an_area_is_answered_with_its_clauses():
    with pytest.raises(UnknownClause) as caught:
        clause("tokenizer")
    assert str(caught.value) == (
        "'tokenizer' is an area, not a clause; its clauses are "
        "tokenizer.ids_fit, tokenizer.round_trip"
    )


def test_where_a_clause_is_wanted_no_area_is_suggested():
    with pytest.raises(UnknownClause, match="no clause 'forwards'; the areas are"):
        clause("forwards")


@pytest.mark.parametrize("module", ["clause", "selection"])
def test_examples_in_docstrings_run(module):
    results = doctest.testmod(importlib.import_module(f"forge_conformance.contract.{module}"))
    assert results.attempted
    assert results.failed == 0
