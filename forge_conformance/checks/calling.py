"""Sequences of `forward_backward` that several checks make."""

from __future__ import annotations

from forge.api import TextTrainBatch
from forge_conformance.scenarios.losses import Loss
from forge_conformance.subject import CallFailed, Program, Subject


def calls(
    *batches_or_clear: TextTrainBatch | None,
    loss_fn: Loss | None = None,
    failing_first: Loss | None = None,
) -> Program[None]:
    """A call of `forward_backward` for each batch; None stands for `clear_gradients`."""

    def program(subject: Subject) -> None:
        for index, batch in enumerate(batches_or_clear):
            if batch is None:
                subject.clear_gradients()
            elif index == 0 and failing_first is not None:
                attempt(subject, batch, failing_first)
            else:
                subject.forward_backward(batch, loss_fn)

    return program


def attempt(
    subject: Subject, batch: TextTrainBatch, loss_fn: Loss | None = None
) -> BaseException | None:
    """The error that a call ends in, if it does."""
    try:
        subject.forward_backward(batch, loss_fn)
    except CallFailed as failure:
        return failure.error
    return None
