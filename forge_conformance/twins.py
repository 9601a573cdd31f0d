"""Finding out how two trainers in equal states can be had: from the factory, or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_conformance.contract import Need
from forge_conformance.finding import NotChecked, identical
from forge_conformance.oracle import tolerance
from forge_conformance.scenarios.batches import make_batch
from forge_conformance.scenarios.domain import Domain
from forge_conformance.subject import Subject

if TYPE_CHECKING:
    from forge_conformance.lab import Lab


@dataclass(frozen=True)
class TwinSource:
    """How equal trainers are made, and whether equal programs leave them bitwise equal."""

    make: Callable[[int], list[Subject]]
    bitwise: bool


def find_twin_source(lab: Lab) -> TwinSource | NotChecked:
    """The first source whose trainers agree bitwise, else the first within the tolerance.

    What a source is judged by is a short training: some factories make equal weights and unequal
    random streams.
    """
    saved: list[str] = []

    def from_factory(count: int) -> list[Subject]:
        return [lab.fresh() for _ in range(count)]

    def from_checkpoint(count: int) -> list[Subject]:
        if not saved:
            saved.append(lab.fresh().save(path=str(lab.new_folder())))
        twins = from_factory(count)
        for twin in twins:
            twin.load(saved[0])
        return twins

    def training(subject: Subject) -> Tensor:
        return _short_training(subject, lab.domain)

    agreeing = []
    for make in (from_factory, from_checkpoint):
        left, right = lab.run_each(make(2), [training] * 2)
        if identical(left, right):
            return TwinSource(make, bitwise=True)
        if tolerance.apart(left, right) <= lab.logits_allowed.error:
            agreeing.append(make)
    if agreeing:
        return TwinSource(agreeing[0], bitwise=False)
    return NotChecked(
        "neither the factory nor load of a saved state makes two trainers that agree", Need.TWIN
    )


def _short_training(subject: Subject, domain: Domain) -> Tensor:
    """The losses and the logits of two updates, as one vector."""
    batch = make_batch(domain, domain.usual_shape)
    losses = []
    for _ in range(2):
        losses.append(subject.forward_backward(batch).loss)
        subject.optim_step()
    logits = subject.forward(batch.input_ids).flatten().double()
    return torch.cat([logits, torch.tensor(losses, dtype=torch.float64)])
