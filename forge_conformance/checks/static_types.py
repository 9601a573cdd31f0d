"""Whether a method is annotated so that a static checker takes it for the protocol's.

A small part of a type checker's work: parameters at least as wide as the protocol's, results at
least as narrow. What can't be resolved or isn't understood counts as fitting.
"""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, get_args, get_origin

import torch

import forge.api

_UNKNOWN: Any = Any
_CALLABLE: Any = collections.abc.Callable
_UNIONS = (typing.Union, types.UnionType)
_COMMON_NAMES = {
    **vars(typing),
    **{name: getattr(forge.api, name) for name in forge.api.__all__},
    "Tensor": torch.Tensor,
    "torch": torch,
    "typing": typing,
}


def objections(method: Any, protocol_method: Callable[..., Any]) -> list[str]:
    """What a static checker would object to in `method`; empty if nothing."""
    try:
        actual = inspect.signature(method)
        function = inspect.unwrap(getattr(method, "__func__", method))
    except Exception:
        return []
    wanted = typing.get_type_hints(protocol_method)
    result = wanted.pop("return")
    bare = [name for name in wanted if _annotation(actual, name) is inspect.Parameter.empty]
    if actual.return_annotation is inspect.Signature.empty:
        bare.append("the result")
    if len(bare) == len(wanted) + 1:
        return ["not annotated"]
    if bare:
        return [f"no annotation of {', '.join(bare)}"]
    found = []
    for name, kind in wanted.items():
        annotated = _resolved(_annotation(actual, name), function)
        if not _fits(kind, annotated):
            found.append(f"{name} is {_name(annotated)}, which is narrower than {_name(kind)}")
    returned = _resolved(actual.return_annotation, function)
    if not inspect.iscoroutinefunction(function):
        found += _complaints_of_plain_function(returned, result)
    elif not _fits(returned, result):
        found.append(f"returns {_name(returned)}, which is no {_name(result)}")
    return found


def _complaints_of_plain_function(returned: Any, result: Any) -> list[str]:
    if returned is _UNKNOWN:
        return []
    origin = get_origin(returned) or returned
    if not (isinstance(origin, type) and issubclass(origin, collections.abc.Coroutine)):
        return [f"returns {_name(returned)}, which is no coroutine as that of an async def is"]
    arguments = get_args(returned)
    if arguments and not _fits(arguments[-1], result):
        return [f"returns {_name(returned)}, which gives no {_name(result)}"]
    return []


def _annotation(signature: inspect.Signature, name: str) -> Any:
    """The annotation of a parameter; that of *args or **kwargs where they take it."""
    parameters = signature.parameters
    if name in parameters:
        return parameters[name].annotation
    variadic = [p for p in parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    # A parameter that isn't there at all is a matter of structure.signatures.
    return variadic[-1].annotation if variadic else _UNKNOWN


def _resolved(annotation: Any, function: Any) -> Any:
    """An annotation as a type. Names imported for the type checker alone are looked up."""
    if annotation is None:
        return type(None)
    if not isinstance(annotation, str):
        return annotation
    try:
        named = eval(annotation, {**_COMMON_NAMES, **getattr(function, "__globals__", {})})
    except Exception:
        return _UNKNOWN
    return type(None) if named is None else named


def _fits(given: Any, wanted: Any) -> bool:
    """Whether a value of type `given` may stand where `wanted` is asked for."""
    given, wanted = _stripped(given), _stripped(wanted)
    if given == wanted or _UNKNOWN in (given, wanted) or wanted is object:
        return True
    if get_origin(given) in _UNIONS:
        return all(_fits(member, wanted) for member in get_args(given))
    if get_origin(wanted) in _UNIONS:
        return any(_fits(given, member) for member in get_args(wanted))
    given_class, wanted_class = get_origin(given) or given, get_origin(wanted) or wanted
    if not (isinstance(given_class, type) and isinstance(wanted_class, type)):
        return True
    if wanted_class is _CALLABLE and issubclass(given_class, _CALLABLE):
        return _callable_fits(given, wanted)
    if getattr(wanted_class, "_is_protocol", False):
        return True
    if (given_class, wanted_class) in ((int, float), (bool, float)):
        return True
    try:
        if not issubclass(given_class, wanted_class):
            return False
    except TypeError:
        return True
    pairs = zip(get_args(given), get_args(wanted), strict=False)
    return len(get_args(given)) != len(get_args(wanted)) or all(_fits(g, w) for g, w in pairs)


def _callable_fits(given: Any, wanted: Any) -> bool:
    given_arguments, wanted_arguments = get_args(given), get_args(wanted)
    if not (given_arguments and wanted_arguments):
        return True
    (takes, gives), (given_to, wants) = given_arguments, wanted_arguments
    if not _fits(gives, wants):
        return False
    if not (isinstance(takes, list) and isinstance(given_to, list)):
        return True
    return len(takes) == len(given_to) and all(
        _fits(handed, taken) for handed, taken in zip(given_to, takes, strict=True)
    )


def _stripped(annotation: Any) -> Any:
    if annotation is None:
        return type(None)
    if get_origin(annotation) is typing.Annotated:
        return get_args(annotation)[0]
    if isinstance(annotation, str | typing.ForwardRef | typing.TypeVar):
        return _UNKNOWN
    return annotation


def _name(annotation: Any) -> str:
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__qualname__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")
