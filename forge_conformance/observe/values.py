"""What a trainer has returned, as plain data: to remember, to compare, to change and put back."""

from __future__ import annotations

import copy
import dataclasses
import numbers
import sys
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, MutableSet
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor

from forge_conformance.finding import identical

Path: TypeAlias = tuple[str, ...]
Leaves: TypeAlias = dict[Path, Any]

DEEPEST = 16
"""How deep values are followed; what lies deeper is taken for a cycle."""

ADDED = "added by the caller"
"""What `changed` adds to containers, to be recognised by."""


def is_metric(value: Any) -> bool:
    """Whether `value` has the fields of a `Metric`; its class is the author's own."""
    try:
        return all(hasattr(value, name) for name in ("key", "value", "reduction"))
    except Exception:
        return False


def leaves(value: Any, path: Path = ()) -> Leaves:
    """The innermost values by their paths; tensors are copied, so that nothing follows the trainer.

    An empty container is a leaf, as is what can't be looked into.
    """
    if len(path) > DEEPEST:
        return {path: "…"}
    parts = _parts(value)
    if parts is None:
        return {path: _kept(value)}
    if not parts:
        return {path: f"empty {type(value).__name__}"}
    found: Leaves = {}
    for name, part in parts:
        found |= leaves(part, (*path, name))
    return found


def difference(seen: Leaves, reference: Leaves) -> tuple[str, str] | None:
    """The first leaf that differs: where and what it was, and what it is; None if none does."""
    for path in {**reference, **seen}:
        name = ".".join(path)
        if path not in seen:
            return f"{name} = {reference[path]!r:.80}", "gone"
        if path not in reference:
            return f"no {name}", f"{name} = {seen[path]!r:.80}"
        if not same(seen[path], reference[path]):
            return f"{name} = {reference[path]!r:.80}", f"{seen[path]!r:.80}"
    return None


def same(left: Any, right: Any) -> bool:
    """Whether two leaves are equal, NaN equal to NaN."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return identical(left, right)
    try:
        return bool(left == right) or bool(left != left and right != right)
    except Exception:
        return False


def numbers_of(leaf: Any) -> list[float]:
    """The numbers in a leaf, as floats; none for booleans and all that isn't a number."""
    if isinstance(leaf, Tensor):
        if leaf.dtype == torch.bool or leaf.is_complex():
            return []
        flat: list[float] = leaf.double().flatten().tolist()
        return flat
    if isinstance(leaf, numbers.Real) and not isinstance(leaf, bool):
        try:
            return [float(leaf)]
        except OverflowError:  # an int beyond the largest float, and finite
            return [sys.float_info.max]
    return []


@contextmanager
def changed(value: Any) -> Iterator[None]:
    """Within the context all that the caller can change in `value` is changed, in depth.

    It is put back afterwards: what the value shares with its maker may be shared by others too.
    Tensors are left alone.
    """
    with ExitStack() as undo:
        _change(value, undo, set())
        yield


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """The named parts of a container or object; None for what is taken as it is."""
    try:
        if isinstance(value, Mapping):
            return [(str(name), part) for name, part in value.items()]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return list(zip(value._fields, value, strict=True))
        if isinstance(value, list | tuple):
            return [(f"[{index}]", part) for index, part in enumerate(value)]
        if is_metric(value) or _is_record(value):
            return [(name, getattr(value, name)) for name in _field_names(value)]
    except Exception:
        return None
    return None


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if value is None or isinstance(value, str | bytes | numbers.Number):
        return value
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} {sorted(map(repr, value))}"
    try:
        text = repr(value)
    except Exception:
        text = ""
    return type(value).__qualname__ if not text or " at 0x" in text else text


def _is_record(value: Any) -> bool:
    """Whether an object is one of fields, and not a type, a function, a module or torch's own."""
    if isinstance(value, type | types.ModuleType | Enum | torch.nn.Module | Tensor):
        return False
    if dataclasses.is_dataclass(value):
        return True
    is_plain = type(value).__module__.partition(".")[0] not in ("torch", "builtins", "numpy")
    return is_plain and hasattr(value, "__dict__") and not callable(value)


def _field_names(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    if is_metric(value):
        return [n for n in ("key", "value", "reduction", "timestamp") if hasattr(value, n)]
    return [name for name in vars(value) if not name.startswith("_")]


def _change(value: Any, undo: ExitStack, seen: set[int]) -> None:
    if id(value) in seen or len(seen) > 10_000:
        return
    seen.add(id(value))
    for _, part in _parts(value) or []:
        _change(part, undo, seen)
    if isinstance(value, MutableMapping | MutableSequence | MutableSet):
        with suppress(Exception):
            _change_container(value, undo)
    elif not isinstance(value, Mapping | tuple) and _is_record(value):
        for name in _field_names(value):
            with suppress(Exception):
                before = getattr(value, name)
                setattr(value, name, _another(before))
                undo.callback(_quietly, setattr, value, name, before)


def _change_container(value: Any, undo: ExitStack) -> None:
    before = copy.copy(value)
    if isinstance(value, MutableMapping):
        undo.callback(_quietly, _refill, value.clear, value.update, before)
        for name in list(value):
            value[name] = _another(value[name])
        value[ADDED] = ADDED
    elif isinstance(value, MutableSequence):
        undo.callback(_quietly, _refill, value.clear, value.extend, before)
        value[:] = [_another(part) for part in value]
        value.append(ADDED)
    else:
        undo.callback(_quietly, value.discard, ADDED)
        value.add(ADDED)


def _another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value}!"
    return value if _parts(value) is not None else ADDED


def _refill(clear: Callable[[], Any], fill: Callable[[Any], Any], before: Any) -> None:
    clear()
    fill(before)


def _quietly(action: Callable[..., Any], *arguments: Any) -> None:
    with suppress(Exception):
        action(*arguments)
