"""Area metrics: what `forward_backward` reports beside the loss, of the call at hand."""

from __future__ import annotations

import inspect
import json
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forge.api import TextTrainBatch
from forge_conformance.checks.registry import check
from forge_conformance.contract import Need
from forge_conformance.finding import NotChecked, Undecided, broken, expect, expect_near
from forge_conformance.lab import Lab
from forge_conformance.observe.values import (
    ADDED,
    DEEPEST,
    Leaves,
    Path,
    changed,
    difference,
    is_metric,
    leaves,
    numbers_of,
    same,
)
from forge_conformance.oracle.metric_names import varies
from forge_conformance.oracle.tolerance import ULPS, Allowed
from forge_conformance.scenarios.batches import batches, kept_mask, make_batch
from forge_conformance.scenarios.losses import Loss, every_logit, mean_nll
from forge_conformance.subject import CallFailed, Losses, Subject

_CAPPED_ABOVE = 20.0
"""A loss above which trainers cap its exponential."""


@check("metrics.shape", batch=batches())
def metrics_are_plain_values(lab: Lab, batch: TextTrainBatch) -> None:
    """Detach what is reported (`.item()`, `.detach()`): a graph in a metric keeps the whole step's
    activations alive. Give `{}` where there is nothing to report, and leave out what is None."""
    for kind, losses in _both_kinds(lab.trainer, batch):
        metrics: Mapping[Any, Any] = losses.metrics
        for name, value in metrics.items():
            expect(
                isinstance(name, str) and bool(name),
                expected=f"non-empty str as the names of metrics ({kind})",
                seen=f"{name!r:.80}",
            )
            complaint = _shape_complaint(value, (name,))
            expect(
                not complaint,
                expected="numbers, strings, booleans, tensors without a graph, Metrics, or lists "
                f"and mappings of these ({kind})",
                seen=complaint,
            )


@check("metrics.owned", batch=batches())
def earlier_metrics_never_change(lab: Lab, batch: TextTrainBatch) -> None:
    """Does the trainer keep one dict, list, tensor or result object and fill it anew each time? Or
    hand out a dict that it reads again, so that the caller's changes come back?"""
    subject = lab.trainer
    other = make_batch(lab.domain, lab.domain.usual_shape, seed=11)
    first = subject.forward_backward(batch)
    before = leaves({"loss": first.loss, "metrics": first.metrics})
    subject.forward_backward(other)
    subject.forward(other.input_ids)
    subject.optim_step()
    subject.forward_backward(other, mean_nll)
    subject.clear_gradients()
    after = leaves({"loss": first.result.loss, "metrics": first.result.metrics})
    found = difference(after, before)
    if found is not None:
        broken(
            expected=f"an earlier result still with {found[0]}, after later calls", seen=found[1]
        )
    second = subject.forward_backward(batch)
    with changed(second.metrics):
        third = subject.forward_backward(batch)
        returned = [path for path, leaf in leaves(third.metrics).items() if same(leaf, ADDED)]
        expect(
            not returned and third.metrics is not second.metrics,
            expected="a new mapping, without what the caller wrote into an earlier one",
            seen=".".join(returned[0]) if returned else "the same object again",
        )


@check("metrics.per_call")
def metrics_are_of_this_call(lab: Lab) -> None:
    """Is a value a running mean, a total since the start, the highest so far, or the last call's?
    Metrics of time, speed and memory are known by such words in their names; declare others that
    may vary in Target.varying_metrics."""
    if lab.stochastic:
        raise NotChecked("the trainer is stochastic: equal calls needn't report equal metrics")
    subject = lab.fresh()
    shape = lab.domain.usual_shape

    def report(batch: TextTrainBatch, loss_fn: Loss | None) -> Leaves:
        found = leaves(subject.forward_backward(batch, loss_fn).metrics)
        subject.clear_gradients()
        return {p: v for p, v in found.items() if not varies(p, lab.target.varying_metrics)}

    batch = make_batch(lab.domain, shape, weights="fractional")
    few, many = (
        make_batch(lab.domain, shape, seed, mask) for seed, mask in ((1, "one"), (2, "all"))
    )
    for loss_fn in (None, mean_nll):
        first = report(batch, loss_fn)
        if not first:
            raise Undecided("no metric but of time, speed and memory is reported")
        for between in ((), (few,), (many,), (few, many, few)):
            for other in between:
                report(other, loss_fn)
                report(other, mean_nll)
            seen = report(batch, loss_fn)
            found = difference(_rounded(lab, seen, first), first)
            if found is not None:
                when = "after calls on other batches" if between else "at the second time"
                broken(
                    expected=f"{found[0]}, as the same call reported first",
                    seen=f"{found[1]}, {when}",
                )


@check("metrics.stable_keys")
def the_same_kind_of_call_has_the_same_keys(lab: Lab) -> None:
    """Is a metric reported now and then (every n-th step, at the first call, when it is not zero)?
    Report it each time; a caller that collects columns can't guess."""
    subject = lab.fresh()
    keys: dict[str, set[Any]] = {}
    for step in range(12):
        batch = make_batch(lab.domain, lab.domain.usual_shape, seed=step)
        for kind, losses in _both_kinds(subject, batch, clear=False):
            first = keys.setdefault(kind, set(losses.metrics))
            missing, new = first - set(losses.metrics), set(losses.metrics) - first
            expect(
                not missing and not new,
                expected=f"the metrics {sorted(map(str, first))} again ({kind}, update {step + 1})",
                seen="; ".join(
                    f"{what} {sorted(map(str, names))}"
                    for what, names in (("without", missing), ("also", new))
                    if names
                ),
            )
        subject.optim_step()


@check("metrics.finite", batch=batches())
def numbers_are_finite(lab: Lab, batch: TextTrainBatch) -> None:
    """Look for a division by the number of kept tokens, rows or elapsed seconds that may be 0, a
    minimum over nothing, the spread of one value, a logarithm of 0."""
    subject = lab.trainer
    masked = replace(batch, target_mask=torch.zeros(batch.target_ids.shape))
    judged = 0
    for kind, losses in _both_kinds(subject, batch):
        judged += _expect_finite(losses, kind)
    with suppress(CallFailed):  # a batch without a kept target may be refused
        judged += _expect_finite(subject.forward_backward(masked), "all targets masked")
    subject.clear_gradients()
    if not judged:
        raise Undecided("no number is reported where the loss is finite")


@check("metrics.consistent", batch=batches())
def well_known_names_mean_what_they_say(lab: Lab, batch: TextTrainBatch) -> None:
    """Is `loss` averaged over other calls, shifted otherwise or rescaled? Does `tokens` count
    masked targets, the padding, or the calls before? Is `learning_rate` the base rate or one of
    another step?"""
    known = 0
    for kind, (loss, metrics, _) in _both_kinds(lab.trainer, batch, clear=False):
        if "loss" in metrics:
            known += 1
            value, eps = _scalar(metrics, "loss")
            allowed = Allowed(ULPS * eps * abs(loss), f"{ULPS:g} units in the last place")
            _expect_equal(value, loss, f"metrics['loss'], the loss ({kind})", allowed)
        if "perplexity" in metrics and loss <= _CAPPED_ABOVE:
            known += 1
            value, eps = _scalar(metrics, "perplexity")
            error = ULPS * eps * (1 + abs(loss)) * math.exp(loss)
            allowed = Allowed(error, f"{ULPS:g} units in the last place of the loss")
            what = f"metrics['perplexity'], exp(loss) for the loss {loss:.9g} ({kind})"
            _expect_equal(value, math.exp(loss), what, allowed)
        for name in sorted({"tokens", "num_tokens"} & set(metrics)):
            known += 1
            kept = int(kept_mask(batch).sum())
            what = f"metrics[{name!r}], the kept tokens of this batch ({kind})"
            _expect_equal(_scalar(metrics, name)[0], kept, what, Allowed(0.0, "a count"))
        if {"lr", "learning_rate"} & set(metrics):
            known += 1
            _expect_rates(lab, batch)
    if not known:
        raise NotChecked("none of the well-known metrics is reported")


@check("metrics.schema", batch=batches())
def metrics_follow_their_schema(lab: Lab, batch: TextTrainBatch) -> None:
    """Bring the declaration (Target.metrics, or the trainer's metric_schema()) and what is
    reported together: names, types, ranges, reductions. `required=False` is for a metric that some
    calls leave out."""
    subject = lab.trainer
    schema = _schema(lab, subject)
    for kind, losses in _both_kinds(subject, batch):
        undeclared = [name for name in losses.metrics if name not in schema]
        missing = [
            name
            for name, spec in schema.items()
            if getattr(spec, "required", True) and name not in losses.metrics
        ]
        expect(
            not undeclared and not missing,
            expected=f"the declared metrics {sorted(map(str, schema))} ({kind})",
            seen=f"undeclared: {undeclared}; missing: {missing}",
        )
        for name, value in losses.metrics.items():
            wanted, complaint = _spec_complaint(schema[name], value, math.isfinite(losses.loss))
            expect(not complaint, expected=f"{name}: {wanted} ({kind})", seen=complaint)


@check("metrics.serialisable", batch=batches())
def metrics_can_be_written_as_json(lab: Lab, batch: TextTrainBatch) -> None:
    """NumPy scalars want `.item()`, complex numbers two entries, keys of inner mappings `str`."""
    for kind, losses in _both_kinds(lab.trainer, batch):
        if not math.isfinite(losses.loss):
            raise Undecided("the loss isn't finite")
        for name, value in losses.metrics.items():
            try:
                json.dumps({name: _jsonable(value)}, allow_nan=False)
            except Exception as error:
                broken(
                    expected=f"metrics[{name!r}] that JSON can hold ({kind})",
                    seen=f"{value!r:.80} ({type(error).__name__}: {error!s:.120})",
                )


def _both_kinds(
    subject: Subject, batch: TextTrainBatch, clear: bool = True
) -> Iterator[tuple[str, Losses]]:
    """One call with the default loss and one with a custom loss, each with its name."""
    yield "default loss", subject.forward_backward(batch)
    if clear:
        subject.clear_gradients()
    yield "custom loss", subject.forward_backward(batch, every_logit)
    if clear:
        subject.clear_gradients()


def _shape_complaint(value: Any, path: Path) -> str:
    """Which part of a metric is nothing that a metric may be; empty if none is."""
    name = ".".join(path)
    if len(path) > DEEPEST:
        return f"{name} is nested without end"
    if isinstance(value, Tensor):
        has_graph = value.grad_fn is not None or value.requires_grad
        return f"{name} is a tensor with an autograd graph" if has_graph else ""
    if isinstance(value, str | bool | numbers.Number) or _is_numpy_bool(value):
        return ""
    if is_metric(value):
        if not isinstance(value.key, str) or not value.key:
            return f"{name} is a Metric with the key {value.key!r:.40}"
        if isinstance(value.value, Mapping | list | tuple) or is_metric(value.value):
            return f"{name} is a Metric whose value is {type(value.value).__name__}"
        return _shape_complaint(value.value, (*path, "value"))
    if isinstance(value, Mapping):
        parts = [(str(inner), part) for inner, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"[{index}]", part) for index, part in enumerate(value)]
    else:
        return f"{name} is {type(value).__name__} {value!r:.60}"
    complaints = (_shape_complaint(part, (*path, inner)) for inner, part in parts)
    return next((complaint for complaint in complaints if complaint), "")


def _is_numpy_bool(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")


def _rounded(lab: Lab, seen: Leaves, reference: Leaves) -> Leaves:
    """`seen`, with the reference's numbers where they are as near as rounding lets them be."""
    repeats = False
    with suppress(NotChecked):
        repeats = lab.repeats
    # A run that repeats bitwise may still place its memory, and so its sums, otherwise.
    error = ULPS * torch.finfo(torch.float32).eps if repeats else lab.logits_allowed.error
    rounded = dict(seen)
    for path in seen.keys() & reference.keys():
        mine, theirs = numbers_of(seen[path]), numbers_of(reference[path])
        counts = isinstance(seen[path], numbers.Integral)
        if mine and len(mine) == len(theirs) and not counts:
            size = max(map(abs, theirs))
            near = all(abs(m - t) <= error * size for m, t in zip(mine, theirs, strict=True))
            rounded[path] = reference[path] if near else seen[path]
    return rounded


def _expect_finite(losses: Losses, kind: str) -> int:
    """How many numbers were judged; none where the loss isn't finite."""
    if not math.isfinite(losses.loss):
        return 0
    count = 0
    for path, leaf in leaves(losses.metrics).items():
        values = numbers_of(leaf)
        count += len(values)
        expect(
            all(math.isfinite(value) for value in values),
            expected=f"finite {'.'.join(path)} as the loss {losses.loss:.6g} is ({kind})",
            seen=f"{leaf!r:.80}",
        )
    return count


def _scalar(metrics: Mapping[str, Any], name: str) -> tuple[float, float]:
    """The number that a metric reports, and the relative precision of its type."""
    value = metrics[name]
    value = value.value if is_metric(value) else value
    found = numbers_of(value)
    if len(found) != 1:
        broken(expected=f"metrics[{name!r}], one number", seen=f"{value!r:.80}")
    single = torch.finfo(torch.float32).eps
    if isinstance(value, Tensor) and value.is_floating_point():
        return found[0], max(single, torch.finfo(value.dtype).eps)
    return found[0], single


def _expect_equal(seen: float, reference: float, what: str, allowed: Allowed) -> None:
    if not (math.isnan(seen) and math.isnan(reference)):
        expect_near(seen, reference, what, allowed)


def _expect_rates(lab: Lab, batch: TextTrainBatch) -> None:
    """Follow a new trainer's schedule: the reported rate is that of the update before or after."""
    subject = lab.fresh()
    last: list[float] = []
    for update in range(1, 5):
        metrics = subject.forward_backward(batch).metrics
        rate = subject.optim_step().learning_rate
        for name in {"lr", "learning_rate"} & set(metrics):
            value, eps = _scalar(metrics, name)
            allowed = [*last, rate]
            expect(
                any(abs(value - each) <= ULPS * eps * abs(each) for each in allowed),
                expected=f"metrics[{name!r}] before update {update}, a rate of this step: "
                + " or ".join(f"{each:.9g}" for each in allowed),
                seen=f"{value:.9g}",
            )
        last = [rate]


def _schema(lab: Lab, subject: Subject) -> Mapping[str, Any]:
    if lab.target.metrics is not None:
        return lab.target.metrics
    declare: Callable[[], Any] | None = getattr(subject.trainer, "metric_schema", None)
    if not callable(declare):
        raise NotChecked("the trainer declares no metrics", Need.DECLARED_METRIC_SCHEMA)

    async def declared() -> Any:
        schema = declare()
        return await schema if inspect.isawaitable(schema) else schema

    schema = subject.run("metric_schema", declared)
    if not isinstance(schema, Mapping):
        broken(
            expected="metric_schema() to return a mapping from names to MetricSpec",
            seen=f"{type(schema).__name__} {schema!r:.80}",
        )
    return schema


def _spec_complaint(spec: Any, value: Any, finite: bool) -> tuple[str, str]:
    """What one metric's declaration asks, and how the value misses it; empty if it doesn't."""
    kind = getattr(spec, "kind", object)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    measured = value.value if is_metric(value) else value
    if not _is_of_kind(measured, kinds):
        names = " or ".join(getattr(each, "__name__", str(each)) for each in kinds)
        return f"of kind {names}", f"{type(measured).__name__} {measured!r:.60}"
    for name, misses in (("minimum", float.__lt__), ("maximum", float.__gt__)):
        bound = getattr(spec, name, None)
        outside = [v for v in numbers_of(measured) if bound is not None and misses(v, float(bound))]
        if outside and finite:
            return f"{name} {bound}", f"{outside[0]:.9g}"
    reduction = getattr(spec, "reduction", None)
    if reduction is not None and is_metric(value):
        wanted, seen = _reduction_name(reduction), _reduction_name(value.reduction)
        if wanted != seen:
            return f"reduction {wanted}", f"{seen}"
    return "", ""


def _is_of_kind(value: Any, kinds: tuple[Any, ...]) -> bool:
    if isinstance(value, bool) and float in kinds and not {bool, int, object} & set(kinds):
        return False
    with suppress(TypeError):
        if isinstance(value, kinds):
            return True
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and float in kinds


def _reduction_name(reduction: Any) -> str:
    return str(getattr(reduction, "value", reduction)).lower()


def _jsonable(value: Any, depth: int = 0) -> Any:
    """`value` with tensors as numbers or lists, and Metrics and mappings as dicts."""
    if depth > DEEPEST:
        raise ValueError("nested without end")
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if is_metric(value):
        return {"value": _jsonable(value.value), "reduction": _reduction_name(value.reduction)}
    if isinstance(value, Mapping):
        return {name: _jsonable(part, depth + 1) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(part, depth + 1) for part in value]
    return value
