"""Area structure: nine awaitable methods, with the protocol's parameters and results."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import typeguard

from forge.api import Trainer
from forge_conformance.checks.registry import check
from forge_conformance.checks.static_types import objections
from forge_conformance.finding import broken, expect
from forge_conformance.lab import Lab
from forge_conformance.scenarios.batches import make_batch, make_ids
from forge_conformance.scenarios.losses import mean_nll, times
from forge_conformance.subject import CallFailed, NotAwaitable, Subject

METHODS = (
    "forward_backward",
    "optim_step",
    "clear_gradients",
    "forward",
    "save",
    "load",
    "get_config",
    "get_status",
    "get_tokenizer",
)


@check("structure.methods")
def trainer_has_the_nine_methods(lab: Lab) -> None:
    """Is a method missing, spelt otherwise, or a plain attribute? Methods that `__getattr__` makes
    up are methods, but `isinstance` with a protocol looks for them in the class."""
    trainer = lab.fresh().trainer
    missing = [name for name in METHODS if _attribute(trainer, name) is None]
    wrong = [
        f"{name} is {type(_attribute(trainer, name)).__name__}, which can't be called"
        for name in METHODS
        if name not in missing and not callable(_attribute(trainer, name))
    ]
    wrong += [f"no {name}" for name in missing]
    expect(
        not wrong,
        expected=f"the methods {', '.join(METHODS)}",
        seen=f"{type(trainer).__name__}: {'; '.join(wrong)}",
    )
    try:
        holds = isinstance(trainer, Trainer)
    except Exception as error:
        broken(
            expected="isinstance(trainer, forge.api.Trainer)",
            seen=f"it raises {type(error).__name__}: {error}",
        )
    expect(
        holds,
        expected="isinstance(trainer, forge.api.Trainer)",
        seen=f"all nine methods, but {type(trainer).__name__} doesn't define them in its class",
    )


@check("structure.awaitable")
def methods_are_awaited_and_nothing_more(lab: Lab) -> None:
    """Is a method a plain function, an endpoint of a remote handle that wants `.call()` or
    `.route()`, or one that hands out a future to be resolved later? Wrap each in an `async def`
    that awaits what is inside."""
    subject = lab.fresh()
    wrong: list[str] = []

    def attempt(method: str, *arguments: Any) -> Any:
        answer = _answer(subject, method, *arguments)
        if answer.complaint:
            wrong.append(answer.complaint)
        return answer.value

    for method in ("get_config", "get_status", "get_tokenizer", "clear_gradients"):
        attempt(method)
    if not wrong:
        batch = make_batch(lab.domain, lab.domain.usual_shape)
        attempt("forward", {"input_ids": batch.input_ids})
        attempt("forward_backward", batch)
        attempt("optim_step")
        location = attempt("save", None, str(lab.new_folder()))
        if isinstance(location, str):
            attempt("load", location)
    expect(
        not wrong,
        expected="every method to return an awaitable, and the awaited result to be the answer",
        seen="; ".join(wrong),
    )


@check("structure.signatures")
def methods_take_the_protocols_parameters(lab: Lab) -> None:
    """Compare the `def` line with the protocol's: names, order and defaults of the parameters, and
    none beside them that must be given. A wrapper must hand on keywords as well as positions."""
    subject = lab.fresh()
    for method in METHODS:
        actual = _signature(_attribute(subject.trainer, method))
        if actual is not None:
            complaint = _signature_complaint(_protocol_signature(method), actual)
            expect(
                not complaint,
                expected=f"{method}{_protocol_signature(method)}",
                seen=f"{method}{actual}: {complaint}",
            )
    _try_keywords(lab, subject)


@check("structure.result_types")
def results_have_the_declared_types(lab: Lab) -> None:
    """A loss that is still a tensor wants `.item()`; a step that is a float or a tensor comes from
    a checkpoint or a schedule; a path that is a `Path` wants `str()`."""
    subject = lab.fresh()
    batch = make_batch(lab.domain, lab.domain.usual_shape)
    location = ""
    for occasion in ("in a new trainer", "after an update", "after a load"):
        if location:
            _expect_type("load", occasion, subject.call("load", location), "what is returned", str)
        _expect_status(subject, occasion)
        for microbatches in ((None,), (None, mean_nll)):
            for loss_fn in microbatches:
                result = subject.call("forward_backward", batch, loss_fn)
                loss, metrics = (_field("forward_backward", result, n) for n in ("loss", "metrics"))
                _expect_type("forward_backward", occasion, loss, ".loss", float)
                _expect_type("forward_backward", occasion, metrics, ".metrics", Mapping[Any, Any])
                _expect_status(subject, occasion)
            result = subject.call("optim_step")
            for name, kind in _UPDATE_FIELDS.items():
                value = _field("optim_step", result, name)
                _expect_type("optim_step", occasion, value, f".{name}", kind)
        if occasion == "after an update":
            location = subject.call("save", "types", str(lab.new_folder()))
            _expect_type("save", occasion, location, "what is returned", str)


@check("structure.annotations")
def methods_are_annotated_as_the_protocol_is(lab: Lab) -> None:
    """Write the protocol's annotations, or wider ones for parameters and narrower ones for
    results. Result classes are nominal to a static checker: return those of `forge.api`, or
    subclasses, however well a class of your own serves at run time."""
    trainer = lab.trainer.trainer
    found: dict[str, list[str]] = {}
    for method in METHODS:
        for objection in objections(_attribute(trainer, method), getattr(Trainer, method)):
            found.setdefault(objection, []).append(method)
    expect(
        not found,
        expected="annotations with which a static checker takes the trainer for a Trainer",
        seen="; ".join(f"{', '.join(where)}: {what}" for what, where in found.items()),
    )


_UPDATE_FIELDS = {"step": int, "learning_rate": float, "accumulated_microbatches": int}


class _Answer(NamedTuple):
    value: Any
    complaint: str


def _answer(subject: Subject, method: str, *arguments: Any) -> _Answer:
    """What one call gives, and what is wrong with the way it is given.

    A missing method is no matter of this clause.
    """
    function = _attribute(subject.trainer, method)
    if not callable(function) and not _ways_round(function):
        return _Answer(None, "")
    returned: list[Any] = []

    def make() -> Any:
        returned.append(function(*arguments))
        return returned[-1]

    try:
        value = subject.run(method, make)
    except NotAwaitable:
        kind = type(returned[-1]).__name__
        return _Answer(None, f"{method}() returned {kind}{_ways_round(returned[-1], function)}")
    except CallFailed as failure:
        hint = _ways_round(function)
        if returned or not hint:
            raise
        error = f"{type(failure.error).__name__}: {failure.error}"
        return _Answer(None, f"{method}() raised {error:.120}{hint}")
    if inspect.isawaitable(value) or isinstance(value, asyncio.Future | concurrent.futures.Future):
        kind = type(value).__name__
        return _Answer(value, f"await {method}() gave {kind}, which has to be awaited in turn")
    return _Answer(value, "")


def _ways_round(*handles: Any) -> str:
    """The hint that an object must be called in another way, if it shows one."""
    names = ("call", "call_one", "route", "fanout", "choose", "remote", "result", "get")
    for handle in handles:
        ways = [f".{n}()" for n in names if callable(_attribute(handle, n))]
        if ways and not isinstance(handle, Mapping):
            return f" (with {', '.join(ways)}: await that inside the method)"
    return ""


def _protocol_signature(method: str) -> inspect.Signature:
    signature = inspect.signature(getattr(Trainer, method))
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return inspect.Signature(parameters[1:])


def _signature(function: Any) -> inspect.Signature | None:
    """The parameters of a method, if they can be told."""
    try:
        signature = inspect.signature(function)
    except Exception:
        return None
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return inspect.Signature(parameters)


def _signature_complaint(wanted: inspect.Signature, actual: inspect.Signature) -> str:
    """Why calls by the protocol don't fit `actual`; empty if they all do."""
    names = list(wanted.parameters)
    required = [n for n, p in wanted.parameters.items() if p.default is p.empty]
    values = {name: object() for name in names}
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in actual.parameters.values())
    for given in (names, required):
        for by_position in range(len(given) + 1):
            front = [values[name] for name in given[:by_position]]
            rest = {name: values[name] for name in given[by_position:]}
            try:
                bound = actual.bind(*front, **rest)
            except TypeError as error:
                how = f"{', '.join(given[:by_position]) or 'nothing'} by position"
                how += f", {', '.join(rest)} by keyword" if rest else ""
                return f"given {how}: {error}"
            for name in given[:by_position] if not takes_any else ():
                if name in actual.parameters and bound.arguments.get(name) is not values[name]:
                    return f"{name} is not in the protocol's position"
    for name, parameter in wanted.parameters.items():
        its = actual.parameters.get(name)
        if its is None or its.kind in (its.VAR_KEYWORD, its.VAR_POSITIONAL):
            continue
        if not _same_default(its.default, parameter.default):
            return f"the default of {name} is {its.default!r:.60}, not {parameter.default!r}"
    return ""


def _same_default(default: Any, wanted: Any) -> bool:
    try:
        return default is wanted or bool(default == wanted)
    except Exception:
        return False


def _try_keywords(lab: Lab, subject: Subject) -> None:
    """Call by keyword what a wrapper may take by position only, and see that it is heeded."""
    batch = make_batch(lab.domain, lab.domain.usual_shape)
    by_default = _loss(subject, batch=batch, loss_fn=None)
    custom = times(0.001, mean_nll)  # far from the default, dropout or not
    by_position = subject.forward_backward(batch, custom).loss
    subject.clear_gradients()
    by_keyword = _loss(subject, batch=batch, loss_fn=custom)
    expect(
        abs(by_keyword - by_position) <= abs(by_keyword - by_default),
        expected=f"forward_backward(batch=…, loss_fn=f).loss as by position: {by_position:g}",
        seen=f"{by_keyword:g}; without loss_fn it is {by_default:g}",
    )
    subject.call("forward", inputs={"input_ids": make_ids(lab.domain, lab.domain.usual_shape)})
    folder = str(lab.new_folder())
    positioned = subject.save("by-position", folder, False)
    save = partial(subject.trainer.save, name="by-keyword", path=folder, weights_only=False)
    named = str(subject.run("save", save))
    expect(
        named == positioned.replace("by-position", "by-keyword"),
        expected=f"save(name=…, path=…, weights_only=…) to save as by position: {positioned}",
        seen=named,
    )
    loaded = subject.load(positioned)
    subject.call("load", path=named)
    again = str(subject.call("load", path=positioned))
    expect(
        again == loaded,
        expected=f"load(path=…) to load as by position: {loaded}",
        seen=again,
    )


def _loss(subject: Subject, **arguments: Any) -> float:
    loss = _field("forward_backward", subject.call("forward_backward", **arguments), "loss")
    subject.clear_gradients()
    try:
        return float(loss)
    except Exception:
        broken(expected="forward_backward() to return a number as .loss", seen=f"{loss!r:.80}")


def _expect_status(subject: Subject, occasion: str) -> None:
    status = subject.call("get_status")
    for name in ("step", "accumulated_microbatches"):
        _expect_type("get_status", occasion, _field("get_status", status, name), f".{name}", int)


def _expect_type(method: str, occasion: str, value: Any, what: str, wanted: Any) -> None:
    """Break the clause unless typeguard takes `value` for `wanted`, and it is no bool for a number.

    Typing counts ints and NumPy's floats as floats, and NumPy's ints not as ints.
    """
    fits = not isinstance(value, bool)
    checked = float(value) if wanted is float and _is_numpy_float(value) else value
    try:
        typeguard.check_type(
            checked, wanted, collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS
        )
    except typeguard.TypeCheckError:
        fits = False
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    expect(
        fits,
        expected=f"{method}(): {what} of type {getattr(wanted, '__name__', wanted)}, {occasion}",
        seen=f"{value!r:.80} of type {kind}",
    )


def _is_numpy_float(value: Any) -> bool:
    return any(f"{k.__module__}.{k.__name__}" == "numpy.floating" for k in type(value).__mro__)


def _field(method: str, result: Any, name: str) -> Any:
    value = _attribute(result, name)
    if value is None:
        broken(
            expected=f"{method}() to return an object with .{name}",
            seen=f"{type(result).__name__} {result!r:.80}",
        )
    return value


def _attribute(owner: Any, name: str) -> Any:
    """An attribute, or None where there is none or asking for it raises."""
    with suppress(Exception):
        return getattr(owner, name, None)
    return None
