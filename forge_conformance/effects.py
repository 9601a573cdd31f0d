"""What calls of `forward_backward` accumulate: gradients, or the update that these lead to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from forge_conformance.access import parameters_of
from forge_conformance.finding import NotChecked, Undecided
from forge_conformance.lab import Lab
from forge_conformance.observe.exported import read_weights
from forge_conformance.observe.parameters import Tensors
from forge_conformance.oracle.optimizers import total_norm
from forge_conformance.oracle.tolerance import apart
from forge_conformance.scenarios.batches import make_batch
from forge_conformance.subject import Program, Subject


@dataclass(frozen=True)
class Effect:
    """What calls of `forward_backward` have accumulated.

    Attributes:
        tensors: The gradients by parameter; or, where they can't be seen, by how much the next
            update moved the logits. Those without an entry are zero.
        from_gradients: Which of the two.
        rounding: How far off the tensors may be by the rounding of weights that they were
            computed from, relative.
    """

    tensors: Tensors
    from_gradients: bool
    rounding: float = 0.0

    def times(self, factor: float) -> Effect:
        """The effect of `factor` times the loss."""
        scaled = {name: factor * tensor for name, tensor in self.tensors.items()}
        return Effect(scaled, self.from_gradients, self.rounding)

    @property
    def empty(self) -> bool:
        """Whether nothing was accumulated, or nothing that moves the logits."""
        return not any(tensor.any() for tensor in self.tensors.values())


def effects(lab: Lab, *programs: Program[Any]) -> list[Effect]:
    """What the calls of each program accumulate, each from an equal state with nothing pending.

    Read from the gradients where they can be seen; else from the weights that the declared
    variant with plain SGD exports before and after an update, if they can be read; else from the
    logits after the update that follows.
    """
    if lab.sees_gradients and not lab.stochastic:
        return [_gradients_after(lab.trainer, lab, program) for program in programs]
    if not lab.sees_gradients and not lab.stochastic and lab.once(_sgd_exports_what_can_be_read):
        variants = _equal_variants(lab, len(programs))
        pairs = zip(variants, programs, strict=True)
        return [_exported_after(subject, lab, program) for subject, program in pairs]
    look = _gradients_after if lab.sees_gradients else _update_after
    looks = [partial(look, lab=lab, program=program) for program in programs]
    return lab.run_each(lab.twins(len(programs)), looks)


def _sgd_exports_what_can_be_read(lab: Lab) -> bool:
    if "sgd" not in lab.target.variants:
        return False
    try:
        read_weights(lab.variant("sgd").save(path=str(lab.new_folder()), weights_only=True))
    except NotChecked:
        return False
    return True


def _gradients_after(subject: Subject, lab: Lab, program: Program[Any]) -> Effect:
    parameters = parameters_of(lab, subject)
    program(subject)
    gradients = parameters.gradients()
    subject.clear_gradients()
    return Effect(gradients, from_gradients=True)


def _equal_variants(lab: Lab, count: int) -> list[Subject]:
    """New trainers with plain SGD and equal weights; a factory may draw others for each."""
    subjects = [lab.variant("sgd") for _ in range(count)]
    ids = make_batch(lab.domain, lab.domain.usual_shape).input_ids
    logits = [subject.forward(ids) for subject in subjects]
    start: str | None = None
    for subject, its in zip(subjects[1:], logits[1:], strict=True):
        if apart(its, logits[0]) > lab.logits_allowed.error:
            start = start or subjects[0].save(path=str(lab.new_folder()), weights_only=True)
            subject.load(start)
    return subjects


def _exported_after(subject: Subject, lab: Lab, program: Program[Any]) -> Effect:
    """The gradients that moved the weights of a trainer with plain SGD."""

    def exported() -> Tensors:
        return read_weights(subject.save(path=str(lab.new_folder()), weights_only=True))

    before = exported()
    program(subject)
    rate = subject.optim_step().learning_rate
    after = exported()
    if rate == 0:
        raise Undecided("the learning rate of the variant with plain SGD is 0")
    gradients = {
        name: (weight.double() - after[name].double()) / rate
        for name, weight in before.items()
        if weight.is_floating_point() and name in after
    }
    total = total_norm(gradients)
    rounding = max(
        torch.finfo(before[name].dtype).eps / 2 * float(before[name].double().norm()) / rate
        / ((float(gradient.norm()) + 0.01 * total) or 1.0)
        for name, gradient in gradients.items()
    )  # fmt: skip
    if rounding > _MOST_ROUNDING:
        raise Undecided("the exported weights are too coarse to show a gradient")
    return Effect(gradients, from_gradients=True, rounding=rounding)


_MOST_ROUNDING = 0.05


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
