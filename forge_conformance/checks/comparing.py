"""Comparisons that several checks make."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forge.api import TextTrainBatch
from forge_conformance.finding import NotChecked, Undecided, broken
from forge_conformance.lab import Effect, Lab
from forge_conformance.observe.parameters import Tensors
from forge_conformance.oracle.tolerance import Allowed, tensors_apart
from forge_conformance.subject import Subject


def expect_same_effect(
    lab: Lab, seen: Effect, reference: Effect, what: str, exact: bool = False
) -> None:
    """Break the clause unless two sequences of calls have accumulated the same.

    Args:
        what: Names both, as in "the gradient of two calls is the sum of theirs".
        exact: The arithmetic is the same in both, so that a trainer which repeats itself bitwise
            does so here.

    Raises:
        Undecided: The reference is empty, so that being equal to it says nothing; or the two are
            seen by an update alone, which reordered arithmetic may change at will.
    """
    if reference.empty and seen.empty:
        raise Undecided("nothing was accumulated")
    if seen.from_gradients:
        expect_same_tensors(
            seen.tensors,
            reference.tensors,
            what,
            None if exact and lab.repeats else lab.gradients_allowed,
        )
        return
    if not exact:
        raise Undecided("only gradients could show it, and they can't be seen")
    expect_same_tensors(seen.tensors, reference.tensors, what, lab.run_allowed)


def expect_same_tensors(
    seen: Tensors, reference: Tensors, what: str, allowed: Allowed | None
) -> None:
    """Break the clause unless all tensors are equal: bitwise, or as near as `allowed` says.

    A tensor that is missing on one side counts as zero there.
    """
    name, distance = tensors_apart(seen, reference)
    if distance > (0.0 if allowed is None else allowed.error):
        ratio = scale_between(seen, reference)
        hint = f"; over all tensors the one is {ratio:.4g} times the other" if ratio else ""
        limit = f"allowed {allowed.error:.2g} ({allowed.why})" if allowed else "bitwise expected"
        broken(
            expected=what,
            seen=f"differs most in {name}{hint}",
            apart=f"relative distance {distance:.3g}; {limit}",
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


def added(one: Effect, other: Effect) -> Effect:
    """The sum of two effects that were read from gradients."""
    names = {**one.tensors, **other.tensors}
    total = {}
    for name in names:
        parts = [effect.tensors[name] for effect in (one, other) if name in effect.tensors]
        total[name] = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return Effect(total, from_gradients=True)


def without_loss_scale(
    lab: Lab, subject: Subject, accumulated: Tensors, reference: Tensors
) -> Tensors:
    """Accumulated gradients with the trainer's loss scale taken out.

    Raises:
        NotChecked: They are the reference times 2ⁿ, n ≥ 8, and no loss scale is declared.
    """
    if lab.target.loss_scale is not None:
        scale = lab.ask_author("loss_scale", lab.target.loss_scale, subject)
        return {name: gradient / scale for name, gradient in accumulated.items()}
    factor = scale_between(accumulated, reference)
    if factor is not None and factor > 200:
        exponent = round(math.log2(factor))
        if exponent >= 8 and abs(factor / 2**exponent - 1) < 0.01:
            raise NotChecked(
                f"all gradients are 2^{exponent} times as large, which looks like a loss scale: "
                "declare Target.loss_scale"
            )
    return accumulated


def stacked(*values: Tensor | float) -> Tensor:
    """Tensors and numbers as one float64 vector, to compare what two runs have shown."""
    return torch.cat([torch.as_tensor(value, dtype=torch.float64).flatten() for value in values])
