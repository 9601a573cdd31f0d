"""Calls of `forward_backward` that must fail: bad batches, and losses that go wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forge.api import TextTrainBatch
from forge_conformance.observe.graph import walk
from forge_conformance.observe.witness import Witness
from forge_conformance.scenarios.batches import make_batch
from forge_conformance.scenarios.domain import Domain
from forge_conformance.scenarios.losses import Loss, mean_nll


class DeliberateError(Exception):
    """Raised by the kit's own losses, to see what becomes of a caller's exception."""

    def __init__(self, message: str = "raised on purpose by the loss function") -> None:
        super().__init__(message)


def raising_loss(outputs: dict[str, Any], batch: TextTrainBatch) -> Tensor:
    """A loss that raises."""
    raise DeliberateError


def vector_loss(outputs: dict[str, Any], batch: TextTrainBatch) -> Tensor:
    """A loss for each position instead of one for the batch."""
    mean: Tensor = outputs["logits"].float().mean(dim=-1)
    return mean


def breaking_backward(outputs: dict[str, Any], batch: TextTrainBatch) -> Tensor:
    """A sound loss whose backward pass raises at its first operation."""
    broken: Tensor = _RaisesInBackward.apply(outputs["logits"])  # type: ignore[no-untyped-call]
    return mean_nll({"logits": broken}, batch)


def out_of_memory(outputs: dict[str, Any], batch: TextTrainBatch) -> Tensor:
    """A loss for which the device of the logits has not memory enough."""
    logits: Tensor = outputs["logits"]
    return logits.mean() + _too_much(logits).sum()


def out_of_memory_in_backward(outputs: dict[str, Any], batch: TextTrainBatch) -> Tensor:
    """A sound loss for whose backward pass the device of the logits has not memory enough."""
    hungry: Tensor = _NeedsTooMuchInBackward.apply(outputs["logits"])  # type: ignore[no-untyped-call]
    return mean_nll({"logits": hungry}, batch)


def _too_much(like: Tensor) -> Tensor:
    """More memory than any device has: its allocator raises its own error at once."""
    return like.new_empty(2**52)


def breaking_backward_late() -> Loss:
    """A sound loss whose backward pass raises when half of the gradients have been computed.

    It needs the parameters in this process; elsewhere it breaks as early as the other.
    """

    def break_at_a_parameter(logits: Tensor) -> None:
        leaves = walk(logits).leaves
        leaf = leaves[len(leaves) // 2]

        def fail(_gradient: Tensor) -> None:
            handle.remove()
            raise DeliberateError("raised on purpose inside backward")

        handle = leaf.register_hook(fail)

    return Witness(mean_nll, on_call=break_at_a_parameter)


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise DeliberateError("raised on purpose inside backward")


class _NeedsTooMuchInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + _too_much(gradients[0])[: gradients[0].numel()]


def names_the_cause(error: BaseException) -> bool:
    """Whether a caller who sees `error` learns of the `DeliberateError` behind it."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, DeliberateError) or "DeliberateError" in str(current):
            return True
        if "raised on purpose" in str(current):
            return True
        waiting += [current.__cause__, getattr(current, "exception", None)]
        if not current.__suppress_context__:
            waiting.append(current.__context__)
    return False


def bad_batches(domain: Domain) -> dict[str, TextTrainBatch]:
    """Batches that must be refused, by what is wrong with each."""
    good = make_batch(domain, domain.usual_shape, mask="all", weights="ones")
    rows, columns = domain.usual_shape

    def with_id(name: str, value: int) -> TextTrainBatch:
        changed = getattr(good, name).clone()
        changed[-1, -1] = value
        return replace(good, **{name: changed})

    def every(change: Callable[[Tensor], Tensor]) -> TextTrainBatch:
        return TextTrainBatch(*(change(getattr(good, name)) for name in _FIELDS))

    too_large = domain.vocab_size
    broadcast = {}
    if rows > 1:
        broadcast["a mask of one row for all"] = replace(good, target_mask=torch.ones(1, columns))
        broadcast["weights of one row for all"] = replace(
            good, target_weights=torch.ones(1, columns)
        )
    if columns > 1:
        broadcast["a mask of one column"] = replace(good, target_mask=torch.ones(rows, 1))
        broadcast["weights of one column"] = replace(good, target_weights=torch.ones(rows, 1))
        broadcast["targets shorter than inputs"] = replace(
            good, target_ids=good.target_ids[:, :-1], target_mask=None, target_weights=None
        )
    return broadcast | {
        "an input id equal to vocab_size": with_id("input_ids", too_large),
        "a negative input id": with_id("input_ids", -1),
        "a kept target id equal to vocab_size": with_id("target_ids", too_large),
        "a kept target id of -1": with_id("target_ids", -1),
        "a kept target id of -100": with_id("target_ids", -100),
        "input ids of a float dtype": replace(good, input_ids=good.input_ids.float()),
        "target ids of a float dtype": replace(good, target_ids=good.target_ids.float()),
        "tensors of rank 1": every(lambda tensor: tensor[0]),
        "tensors of rank 3": every(lambda tensor: tensor[None]),
        "more target rows than input rows": replace(
            good, target_ids=torch.cat([good.target_ids, good.target_ids[:1]])
        ),
        "targets longer than inputs": replace(
            good, target_ids=torch.cat([good.target_ids, good.target_ids[:, :1]], dim=1)
        ),
        "a mask of another shape": replace(good, target_mask=torch.ones(rows, columns + 1)),
        "weights of another shape": replace(good, target_weights=torch.ones(rows, columns + 1)),
        "a mask of rank 1": replace(good, target_mask=torch.ones(columns)),
        "weights of rank 1": replace(good, target_weights=torch.ones(columns)),
        "no rows": every(lambda tensor: tensor[:0]),
        "no positions": every(lambda tensor: tensor[:, :0]),
    }


_FIELDS = ("input_ids", "target_ids", "target_mask", "target_weights")
