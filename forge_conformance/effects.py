"""What calls of `forward_backward` accumulate: gradients, or the update that these lead to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from forge_conformance.lab import Lab
from forge_conformance.observe.parameters import Tensors
from forge_conformance.scenarios.batches import make_batch
from forge_conformance.subject import Program, Subject


@dataclass(frozen=True)
class Effect:
    """What calls of `forward_backward` have accumulated.

    Attributes:
        tensors: The gradients by parameter; or, where they can't be seen, by how much the next
            update moved the logits. Those without an entry are zero.
        from_gradients: Which of the two.
    """

    tensors: Tensors
    from_gradients: bool

    def times(self, factor: float) -> Effect:
        """The effect of `factor` times the loss."""
        scaled = {name: factor * tensor for name, tensor in self.tensors.items()}
        return Effect(scaled, self.from_gradients)

    @property
    def empty(self) -> bool:
        """Whether nothing was accumulated, or nothing that moves the logits."""
        return not any(tensor.any() for tensor in self.tensors.values())


def effects(lab: Lab, *programs: Program[Any]) -> list[Effect]:
    """What the calls of each program accumulate, each from an equal state with nothing pending.

    Read from the gradients where they can be seen; else from the logits after the update that
    follows.
    """
    if lab.sees_gradients and not lab.stochastic:
        return [_gradients_after(lab.trainer, lab, program) for program in programs]
    look = _gradients_after if lab.sees_gradients else _update_after
    looks = [partial(look, lab=lab, program=program) for program in programs]
    return lab.run_each(lab.twins(len(programs)), looks)


def _gradients_after(subject: Subject, lab: Lab, program: Program[Any]) -> Effect:
    parameters = lab.parameters(subject)
    program(subject)
    gradients = parameters.gradients()
    subject.clear_gradients()
    return Effect(gradients, from_gradients=True)


def _update_after(subject: Subject, lab: Lab, program: Program[Any]) -> Effect:
    batch = make_batch(lab.domain, lab.domain.usual_shape, seed=1)
    for _ in range(lab.idle_updates):
        subject.forward_backward(batch)
        subject.optim_step()
    before = subject.forward(batch.input_ids)
    program(subject)
    subject.optim_step()
    after = subject.forward(batch.input_ids)
    return Effect({"logits after the update": after - before}, from_gradients=False)
