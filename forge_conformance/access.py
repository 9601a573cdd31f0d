"""What can be reached of a trainer in this process: its parameters, its graph, its loss scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from forge_conformance.contract import Need
from forge_conformance.finding import NotChecked
from forge_conformance.observe.graph import Graph, walk
from forge_conformance.observe.parameters import Parameters
from forge_conformance.observe.witness import Witness
from forge_conformance.scenarios.batches import make_batch
from forge_conformance.scenarios.losses import mean_nll
from forge_conformance.subject import Subject
from forge_conformance.target import TargetError

if TYPE_CHECKING:
    from forge_conformance.lab import Lab

T = TypeVar("T")


def probe(lab: Lab, subject: Subject) -> Graph | None:
    """Walk the graph behind the logits of one `forward_backward`; its gradients are cleared.

    None where the loss runs elsewhere.
    """
    graph = _graph_of_a_call(lab, subject)
    subject.clear_gradients()
    return graph


def parameters_of(lab: Lab, subject: Subject) -> Parameters:
    """The parameters of `subject`: as declared, or the leaves of the graph that get a gradient.

    Finding them takes one `forward_backward`, whose gradients are cleared.

    Raises:
        NotChecked: They can't be read in this process, or are spread over several.
    """
    if lab.ranks.several:
        raise NotChecked(
            "what a rank holds of parameters and gradients is known to the trainer alone: "
            "judge this clause in one process"
        )
    declared = lab.target.parameters
    tensors: Mapping[str, Tensor]
    if declared is not None:
        tensors = _ask_author("parameters", declared, subject)
    else:
        tensors = _leaves(lab, subject)
    read_gradients = lab.target.gradients
    if read_gradients is None:
        return Parameters.with_grad_attribute(tensors)
    reader = read_gradients
    return Parameters(tensors, lambda: _ask_author("gradients", reader, subject))


def loss_scale_of(lab: Lab, subject: Subject) -> float:
    """By how much gradients are scaled, as declared; 1 where nothing is."""
    declared = lab.target.loss_scale
    return 1.0 if declared is None else float(_ask_author("loss_scale", declared, subject))


def _ask_author(what: str, function: Callable[[Any], T], subject: Subject) -> T:
    """What a declared access function gives for the trainer of `subject`."""
    try:
        return function(subject.trainer)
    except Exception as error:
        raise TargetError(
            f"Target.{what} raised {type(error).__name__}: {error} for the trainer"
        ) from error


def _graph_of_a_call(lab: Lab, subject: Subject) -> Graph | None:
    found: list[Graph] = []
    witness = Witness(mean_nll, on_call=lambda logits: found.append(walk(logits)))
    subject.forward_backward(make_batch(lab.domain, lab.domain.usual_shape), witness)
    return found[-1] if witness.logits is not None else None


def _leaves(lab: Lab, subject: Subject) -> dict[str, Tensor]:
    graph = _graph_of_a_call(lab, subject)
    if graph is None or not graph.leaves:
        subject.clear_gradients()
        raise NotChecked("the trainer's parameters are not in this process", Need.IN_PROCESS)
    reached = {f"leaf {i}": leaf for i, leaf in enumerate(graph.leaves) if leaf.grad is not None}
    subject.clear_gradients()
    if not graph.readable or not reached:
        raise NotChecked(
            "the tensors that the autograd graph shows are not where gradients accumulate",
            Need.IN_PROCESS,
        )
    if not all(isinstance(leaf, torch.nn.Parameter) for leaf in reached.values()):
        again = probe(lab, subject)
        if again is None or {*map(id, again.leaves)} != {*map(id, graph.leaves)}:
            raise NotChecked(
                "the autograd graph ends at tensors that are new in each call",
                Need.IN_PROCESS,
            )
    return reached
