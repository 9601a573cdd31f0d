"""Area config: what the trainer says it is, always the same, and the caller's own copy."""

from __future__ import annotations

import json
import numbers
from collections.abc import Mapping
from typing import Any

import torch

from forge_conformance.checks.registry import check
from forge_conformance.finding import broken, expect, expect_same
from forge_conformance.lab import Lab
from forge_conformance.observe.values import Leaves, changed, difference, leaves
from forge_conformance.scenarios.batches import make_batch, make_ids
from forge_conformance.subject import Subject

DEGREES = ("dp_degree", "tp_degree", "pp_degree", "cp_degree", "ep_degree")
PARALLELISM = (*DEGREES, "world_size", "dp_rank", "tp_rank", "device")
COMMON_KEYS = ("hidden_size", "num_layers", "num_attention_heads", "max_seq_len")


@check("config.fields")
def configuration_has_its_fields(lab: Lab) -> None:
    """Look at what `get_config` builds. `world_size` leaves out `ep_degree`, whose ranks are
    counted in the other degrees; `device` is one that `torch.device` accepts."""
    config = lab.fresh().get_config()
    model_name = _field(config, "config", "model_name")
    expect(
        isinstance(model_name, str) and bool(model_name.strip()),
        expected="model_name, a non-empty str",
        seen=f"{model_name!r:.80}",
    )
    model_config = _field(config, "config", "model_config")
    expect(
        isinstance(model_config, Mapping),
        expected="model_config, a mapping",
        seen=f"{type(model_config).__name__} {model_config!r:.80}",
    )
    vocab_size = model_config.get("vocab_size")
    expect(
        isinstance(vocab_size, int) and not isinstance(vocab_size, bool) and vocab_size > 0,
        expected='model_config["vocab_size"], an int > 0',
        seen=f"{vocab_size!r:.80}"
        if "vocab_size" in model_config
        else f"keys {list(model_config)}",
    )
    _expect_parallelism(_field(config, "config", "parallelism"))


@check("config.common_keys")
def configuration_tells_the_common_facts(lab: Lab) -> None:
    """Give the model's facts under these names, translated from those of the backend, and as
    numbers, strings, lists and dicts: a dtype or a class as its name."""
    model_config = _field(lab.trainer.get_config(), "config", "model_config")
    expect(
        isinstance(model_config, Mapping),
        expected="model_config, a mapping",
        seen=type(model_config).__name__,
    )
    wrong = [f"no {key}" for key in COMMON_KEYS if key not in model_config]
    wrong += [
        f"{key} = {model_config[key]!r:.40}"
        for key in COMMON_KEYS
        if key in model_config and not _is_count(model_config[key], at_least=1)
    ]
    expect(not wrong, expected=f"{', '.join(COMMON_KEYS)}, each an int ≥ 1", seen="; ".join(wrong))
    try:
        json.dumps(dict(model_config), allow_nan=False, default=_as_dict)
    except Exception as error:
        broken(
            expected="a model_config that JSON can hold", seen=f"{type(error).__name__}: {error}"
        )


@check("config.static")
def configuration_stays_the_same(lab: Lab) -> None:
    """Is the configuration made from what training changes (the longest batch so far, the current
    step), or taken over from a checkpoint? It tells what the trainer is, not how far it is."""
    subject = lab.fresh()
    before = _contents(subject)
    ids = make_ids(lab.domain, lab.domain.usual_shape)

    def expect_unchanged(since: str) -> None:
        found = difference(_contents(subject), before)
        if found is not None:
            broken(expected=f"after {since} still {found[0]}", seen=found[1])

    subject.forward(ids)
    expect_unchanged("forward")
    for seed in range(2):
        subject.forward_backward(make_batch(lab.domain, lab.domain.usual_shape, seed))
        expect_unchanged("forward_backward")
        subject.optim_step()
        expect_unchanged("optim_step")
    for weights_only in (False, True):
        location = subject.save("kept", str(lab.new_folder()), weights_only)
        kind = " of weights alone" if weights_only else ""
        expect_unchanged(f"save{kind}")
        subject.load(location)
        expect_unchanged(f"load{kind}")


@check("config.not_aliased")
def configuration_is_the_callers_own(lab: Lab) -> None:
    """Does `get_config` hand out an object that the trainer keeps, or one that holds its dicts?
    A shallow copy shares what is nested: `copy.deepcopy`, or build it anew."""
    subject = lab.fresh()
    before = _contents(subject)
    ids = make_ids(lab.domain, lab.domain.usual_shape)
    logits, status = subject.forward(ids), subject.get_status()
    with changed(subject.get_config()):
        found = difference(_contents(subject), before)
        if found is not None:
            broken(
                expected=f"{found[0]}, whatever the caller did to the configuration it was given",
                seen=f"what the caller wrote: {found[1]}",
            )
        expect_same(subject.forward(ids), logits, "the logits, after the caller changed its copy")
        expect(
            subject.get_status() == status,
            expected=f"{status} as before",
            seen=f"{subject.get_status()}",
        )


def _contents(subject: Subject) -> Leaves:
    """The contract's fields of the configuration; what a trainer adds beside them is its own."""
    config = subject.get_config()
    parallelism = _field(config, "config", "parallelism")
    return leaves(
        {
            "model_name": _field(config, "config", "model_name"),
            "model_config": _field(config, "config", "model_config"),
            "parallelism": {name: _field(parallelism, "parallelism", name) for name in PARALLELISM},
        }
    )


def _expect_parallelism(parallelism: Any) -> None:
    values = {name: _field(parallelism, "parallelism", name) for name in PARALLELISM}
    for name in DEGREES:
        expect(
            _is_count(values[name], at_least=1),
            expected=f"parallelism.{name}, an int ≥ 1",
            seen=f"{values[name]!r:.80}",
        )
    dp, tp, pp, cp = (values[f"{axis}_degree"] for axis in ("dp", "tp", "pp", "cp"))
    expect(
        not isinstance(values["world_size"], bool) and values["world_size"] == dp * tp * pp * cp,
        expected=f"parallelism.world_size = dp·tp·pp·cp = {dp * tp * pp * cp}",
        seen=f"{values['world_size']!r:.80}",
    )
    for name in DEGREES:
        rank_name = name.replace("degree", "rank")
        # The contract has dp_rank and tp_rank; a trainer may tell the others as well.
        rank = values.get(rank_name, getattr(parallelism, rank_name, 0))
        expect(
            _is_count(rank, at_least=0) and rank < values[name],
            expected=f"parallelism.{rank_name} in [0, {values[name]})",
            seen=f"{rank!r:.80}",
        )
    try:
        torch.device(values["device"])
    except Exception as error:
        broken(
            expected="parallelism.device that torch.device accepts",
            seen=f"{values['device']!r:.80} ({type(error).__name__}: {error!s:.120})",
        )


def _is_count(value: Any, at_least: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return False
    return int(value) >= at_least


def _as_dict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is nothing that JSON can hold")


def _field(owner: Any, what: str, name: str) -> Any:
    try:
        return getattr(owner, name)
    except Exception:
        broken(expected=f"the {what} to have .{name}", seen=f"{type(owner).__name__} {owner!r:.80}")
