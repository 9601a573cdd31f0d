"""Comparisons that several checks make."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from forge.api import TextTrainBatch
from forge_conformance.access import loss_scale_of
from forge_conformance.effects import Effect
from forge_conformance.finding import NotChecked, Undecided, broken, expect
from forge_conformance.lab import Lab
from forge_conformance.observe.parameters import Parameters, Tensors, copy_of
from forge_conformance.observe.witness import Witness
from forge_conformance.oracle.tolerance import (
    Allowed,
    apart,
    halving_error,
    same_graph_error,
    tensors_apart,
)
from forge_conformance.scenarios.batches import make_batch
from forge_conformance.scenarios.losses import mean_nll
from forge_conformance.subject import Program, Subject


def expect_same_effect(
    lab: Lab,
    seen: Effect,
    reference: Effect,
    what: str,
    exact: bool = False,
    halved: bool = False,
) -> None:
    """Break the clause unless two sequences of calls have accumulated the same.

    Args:
        what: Names both, as in "the gradient of two calls is the sum of theirs".
        exact: The arithmetic is the same in both, so that a trainer which repeats itself bitwise
            does so here.
        halved: It is so but for halves of the loss, whose smallest gradients underflow.

    Raises:
        Undecided: The reference is empty, so that being equal to it says nothing.
        NotChecked: The two are seen by an update alone, which reordered arithmetic may change at
            will.
    """
    if reference.empty and seen.empty:
        raise Undecided("nothing was accumulated")
    if seen.from_gradients:
        rounding = seen.rounding + reference.rounding
        allowed = lab.gradients_allowed
        if rounding:
            why = f"{allowed.why}, and the rounding of exported weights ({rounding:.2g})"
            allowed = replace(allowed, error=allowed.error + rounding, why=why)
        limit: Allowed | None = allowed
        if exact and lab.repeats and not rounding:
            limit = halving_error(lab.dtype) if halved else None
        expect_same_tensors(seen.tensors, reference.tensors, what, limit)
        return
    if not exact:
        raise NotChecked(
            'only gradients could show it: declare Target.variants["sgd"], whose exported weights '
            "show them, or Target.parameters"
        )
    expect_same_tensors(seen.tensors, reference.tensors, what, lab.run_allowed)


def expect_same_tensors(
    seen: Tensors, reference: Tensors, what: str, allowed: Allowed | None
) -> None:
    """Break the clause unless all tensors are equal: bitwise, or as near as `allowed` says.

    A tensor that is missing on one side counts as zero there.
    """
    limits = allowed or Allowed(0.0, "bitwise expected")
    name, distance = tensors_apart(seen, reference, limits.floor)
    if distance > limits.error:
        ratio = scale_between(seen, reference)
        hint = f"; over all tensors the one is {ratio:.4g} times the other" if ratio else ""
        limit = f"allowed {allowed.error:.2g} ({allowed.why})" if allowed else limits.why
        broken(
            expected=what,
            seen=f"differs most in {name}{hint}",
            apart=f"relative distance {distance:.3g}; {limit}",
            barely=allowed is not None and allowed.barely_exceeded(distance),
        )


def scale_between(seen: Tensors, reference: Tensors) -> float | None:
    """By which factor all of `seen` is `reference`, if it is so."""
    common = [name for name in reference if name in seen]
    if not common:
        return None
    left = torch.cat([seen[name].double().flatten() for name in common])
    right = torch.cat([reference[name].double().flatten() for name in common])
    square = right.dot(right).item()
    if not square:
        return None
    factor = left.dot(right).item() / square
    residue = torch.linalg.vector_norm(left - factor * right).item()
    return factor if residue < 0.01 * torch.linalg.vector_norm(left).item() else None


def losses_of(lab: Lab, *batches: TextTrainBatch) -> list[float]:
    """The default losses of the batches, each in the same state and with the same random streams.

    Raises:
        NotChecked: The trainer is stochastic, and has no twins.
    """
    if not lab.stochastic:
        trainer = lab.trainer
        losses = []
        for batch in batches:
            losses.append(trainer.forward_backward(batch).loss)
            trainer.clear_gradients()
        return losses
    programs = [lambda subject, b=batch: subject.forward_backward(b).loss for batch in batches]
    return lab.twin_results(*programs)


def expect_still_stochastic(lab: Lab, what: str, fail: Program[Any]) -> None:
    """Break the clause if no call that follows on `fail` sees dropout any more.

    Judged on a trainer that hasn't failed before, only where every call sees it otherwise, and
    where the logits can be seen.
    """
    trainer = lab.fresh()
    batch = make_batch(lab.domain, lab.domain.usual_shape)
    for _ in range(4):  # at first a branch with dropout may add nothing yet
        trainer.forward_backward(batch)
        trainer.optim_step()
    undropped = trainer.forward(batch.input_ids)

    def drops() -> bool:
        witness = Witness(mean_nll)
        trainer.forward_backward(batch, witness)
        if witness.logits is None:
            return False
        return apart(witness.logits, undropped) > lab.logits_allowed.error

    if not all(drops() for _ in range(4)):
        return
    after = []
    for _ in range(4):
        fail(trainer)
        after.append(drops())
    expect(
        any(after),
        expected=f"training logits with dropout after {what}, as before it",
        seen="those of forward, without dropout",
    )


def added(one: Effect, other: Effect) -> Effect:
    """The sum of two effects that were read from gradients."""
    names = {**one.tensors, **other.tensors}
    total = {}
    for name in names:
        parts = [effect.tensors[name] for effect in (one, other) if name in effect.tensors]
        total[name] = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return Effect(total, from_gradients=True, rounding=one.rounding + other.rounding)


@dataclass(frozen=True)
class OwnGradients:
    """A loss's gradient by the kit's own calls of autograd on the trainer's graph: two of them."""

    first: Tensors
    second: Tensors


def own_gradients(value: Tensor, parameters: Parameters) -> OwnGradients | None:
    """The gradient of `value` by the kit's own calls of autograd; of a large model in some
    parameters only.

    None where it can't be had: the graph forbids it, or has other leaves than the parameters.
    """
    names = parameters.some(seed=hash(value.item()))
    tensors = {name: parameters.tensors[name] for name in names}

    def differentiated() -> Tensors:
        found = torch.autograd.grad(
            value, list(tensors.values()), retain_graph=True, allow_unused=True
        )
        # An unused parameter has None, whatever the annotation says.
        gradients: dict[str, Tensor | None] = dict(zip(tensors, found, strict=True))
        return {name: copy_of(each) for name, each in gradients.items() if each is not None}

    try:
        first, second = differentiated(), differentiated()
    except RuntimeError:
        return None
    return OwnGradients(first, second) if first else None


def expect_own_gradients(
    lab: Lab, subject: Subject, accumulated: Tensors, own: OwnGradients | None
) -> None:
    """Break the clause unless what was accumulated is the gradient that autograd gives here.

    Parameters that autograd doesn't reach are passed over: their graph may be in pieces.
    """
    if own is None:
        return
    unscaled = without_loss_scale(lab, subject, accumulated, own.first)
    for name, reference in own.first.items():
        allowed = same_graph_error(reference.dtype, apart(own.second[name], reference))
        if lab.target.loss_scale is not None:  # a scaled loss rounds otherwise
            allowed = lab.gradients_allowed
        seen = {name: unscaled[name]} if name in unscaled else {}
        what = "the accumulated gradient is the loss's own, by autograd on the trainer's graph"
        expect_same_tensors(seen, {name: reference}, what, allowed)


def without_loss_scale(
    lab: Lab, subject: Subject, accumulated: Tensors, reference: Tensors
) -> Tensors:
    """Accumulated gradients with the trainer's loss scale taken out.

    Raises:
        NotChecked: They are the reference times 2ⁿ, n ≥ 8, and no loss scale is declared.
    """
    if lab.target.loss_scale is not None:
        scale = loss_scale_of(lab, subject)
        return {name: gradient / scale for name, gradient in accumulated.items()}
    factor = scale_between(accumulated, reference)
    if factor is not None:
        refuse_loss_scale(factor)
    return accumulated


def refuse_loss_scale(factor: float) -> None:
    """Raise `NotChecked` if gradients that are `factor` times too large look scaled on purpose."""
    if factor > 200 and abs(factor / 2 ** round(math.log2(factor)) - 1) < 0.01:
        raise NotChecked(
            f"all gradients are 2^{round(math.log2(factor))} times as large, which looks like a "
            "loss scale: declare Target.loss_scale"
        )


def stacked(*values: Tensor | float) -> Tensor:
    """Tensors and numbers as one float64 vector, to compare what two runs have shown."""
    return torch.cat([torch.as_tensor(value, dtype=torch.float64).flatten() for value in values])
