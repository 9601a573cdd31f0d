"""What is under test: resolving `module:Name`, and what its author declares about it."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

import torch
from torch import Tensor

from forge.api import MetricSpec
from forge_conformance.contract import clause

Factory = Callable[[], Any | Awaitable[Any]]
"""Makes one trainer in its initial state; may be async."""


class TargetError(Exception):
    """The target can't be put under test; the message says why and what to do."""


@dataclass(frozen=True)
class Target:
    """A trainer under test and what its author says about it.

    Only `factory` is needed. Everything else unlocks clauses that can't be judged without it;
    a clause that stays locked is reported as *not checked*, with the field that unlocks it.

    Args:
        factory: Makes a trainer in its initial state; called for every trainer that the kit
            needs. A class, a function, or an async function.
        variants: Other factories of the same trainer by name. `"sgd"`: plain SGD without
            clipping and with a constant rate, which shows what Adam hides; of a trainer in
            another process, its exported weights show the gradients. `"other_model"`: the same
            trainer of a model with other parameters, whose checkpoints are to be refused.
        optimizer: Builds the trainer's optimizer over other parameters: takes the parameters by
            name (as `parameters` gives them, else numbered in the order of the autograd graph;
            float64) and returns a `torch.optim.Optimizer`.
        learning_rate: The learning rate of a fresh trainer's k-th update, k from 0.
        clip_norm: The total 2-norm that gradients are clipped to before each update;
            `math.inf` says that they are never clipped.
        default_loss: The loss that `forward_backward` uses without a `loss_fn`, as a function of
            `{"logits": Tensor[batch, seq, vocab]}` and the batch.
        deterministic: True if two trainers of the factory, fed the same, agree bitwise.
        compute_dtype: The lowest precision that takes part in the forward pass.
        shapes: The `(batch, seq)` pairs that the trainer takes, where it doesn't take any.
        metrics: The metrics it reports, by name: nothing else and nothing less.
        varying_metrics: Names of metrics that may differ between equal calls (beside those of
            time, speed and memory, known by their names).
        parameters: The trainable parameters of a trainer by name, where the autograd graph
            doesn't show them.
        gradients: The accumulated gradients of a trainer by the same names, where they are not
            in `.grad`.
        loss_scale: The factor by which the gradients are scaled, for trainers that scale.
        expected_failures: Clauses that the trainer knowingly breaks, each with the reason.
    """

    factory: Factory
    variants: Mapping[str, Factory] = field(default_factory=dict)
    optimizer: Callable[[dict[str, Tensor]], torch.optim.Optimizer] | None = None
    learning_rate: Callable[[int], float] | None = None
    clip_norm: float | None = None
    default_loss: Callable[[dict[str, Any], Any], Tensor] | None = None
    deterministic: bool | None = None
    compute_dtype: torch.dtype | None = None
    shapes: Sequence[tuple[int, int]] | None = None
    metrics: Mapping[str, MetricSpec] | None = None
    varying_metrics: Collection[str] = ()
    parameters: Callable[[Any], Mapping[str, Tensor]] | None = None
    gradients: Callable[[Any], Mapping[str, Tensor | None]] | None = None
    loss_scale: Callable[[Any], float] | None = None
    expected_failures: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    source: str = ""
    """The `module:Name` that it was found by, and by which another process finds it again."""

    def __post_init__(self) -> None:
        if not callable(self.factory):
            raise TargetError(
                f"Target.factory is {self.factory!r}, which can't be called to make a trainer; "
                "give a class or a function without required arguments"
            )
        if self.gradients is not None and self.parameters is None:
            raise TargetError(
                "Target.gradients is declared without Target.parameters; declare both, by the "
                "same names"
            )
        for clause_id, reason in self.expected_failures.items():
            try:
                clause(clause_id)
            except LookupError as error:
                raise TargetError(f"Target.expected_failures: {error.args[0]}") from None
            if not str(reason).strip():
                raise TargetError(f"Target.expected_failures[{clause_id!r}] gives no reason")


def resolve(name: str) -> Target:
    """The target that `module:Name` names.

    Raises:
        TargetError: The name has another form, can't be imported, or isn't something that makes
            a trainer. The cause is chained.
    """
    module_name, separator, attribute_path = name.partition(":")
    if not (separator and module_name and attribute_path):
        raise TargetError(f"{name!r} is not of the form module:Name, for example mypkg:MyTrainer")
    try:
        found: Any = importlib.import_module(module_name)
    except TargetError as error:
        raise TargetError(f"{module_name}: {error}") from error
    except (Exception, SystemExit) as error:
        raise TargetError(_import_failure(module_name, error)) from error
    for attribute in attribute_path.split("."):
        try:
            found = getattr(found, attribute)
        except AttributeError:
            public = sorted(
                name
                for name, value in vars(found).items()
                if not name.startswith("_") and not inspect.ismodule(value)
            )[:20]
            raise TargetError(
                f"module {module_name!r} has no {attribute_path!r}; it has {', '.join(public)}"
            ) from None
    if _makes_a_target(found):
        found = found()
    if isinstance(found, Target):
        return replace(found, name=found.name or name, source=name)
    if not callable(found):
        raise TargetError(
            f"{name} is {type(found).__name__} {found!r:.80}, which can't be called to make a "
            "trainer; name a class, a function that makes one, or a forge_conformance.Target"
        )
    _require_no_arguments(name, found)
    return Target(factory=found, name=name, source=name)


def _makes_a_target(found: Any) -> bool:
    """Whether it is a function that is annotated to return a `Target`."""
    with suppress(Exception):  # annotations may name anything
        return inspect.isfunction(found) and get_type_hints(found).get("return") is Target
    return False


def _import_failure(module_name: str, error: BaseException) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{module_name}.".startswith(f"{missing}."):
        if "/" in module_name or module_name.endswith(".py"):
            return f"name the module with dots, mypkg.trainer:Name, not the file {module_name!r}"
        return (
            f"no module {missing!r} in {sys.path[0] or os.getcwd()!r} or elsewhere on sys.path; "
            "run pytest from the folder that it is in, or install it"
        )
    message = f"module {module_name!r} can't be imported: {type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return message
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{message} ({place.filename}:{place.lineno})"


def _require_no_arguments(name: str, factory: Factory) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    try:
        signature.bind()
    except TypeError as error:
        raise TargetError(
            f"{name}{signature} can't be called without arguments ({error}); name a function "
            "that takes none and makes the trainer"
        ) from None
