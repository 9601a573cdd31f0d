"""The trainers of a run and the facts about them that the checks share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from forge_conformance.access import parameters_of
from forge_conformance.effects import effects
from forge_conformance.finding import NotChecked, identical
from forge_conformance.lab import Lab
from forge_conformance.scenarios.batches import make_batch
from forge_conformance.subject import Subject
from forge_conformance.target import Target, TargetError
from reference_impls.plain import PlainTrainer


@pytest.fixture
def lab_of() -> Iterator[Callable[..., Lab]]:
    labs = []

    def make(factory: Callable[[], Any] = PlainTrainer, **declared: Any) -> Lab:
        labs.append(Lab(Target(factory=factory, **declared), timeout=20))
        return labs[-1]

    yield make
    for lab in labs:
        lab.close()


def unseeded() -> Callable[[], PlainTrainer]:
    """A factory whose trainers differ."""
    seeds = itertools.count()
    return lambda: PlainTrainer(seed=next(seeds))


def train(lab: Lab) -> Callable[[Subject], torch.Tensor]:
    batch = make_batch(lab.domain, lab.domain.usual_shape)

    def program(subject: Subject) -> torch.Tensor:
        subject.forward_backward(batch)
        subject.optim_step()
        return subject.forward(batch.input_ids)

    return program


def test_the_shared_trainer_has_nothing_accumulated(lab_of: Callable[..., Lab]) -> None:
    lab = lab_of()
    lab.trainer.forward_backward(make_batch(lab.domain, (2, 3)))
    assert lab.trainer.get_status().accumulated_microbatches == 0


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_twins_agree(lab_of: Callable[..., Lab], dropout: float) -> None:
    lab = lab_of(lambda: PlainTrainer(dropout=dropout))
    assert identical(*lab.twin_results(train(lab), train(lab)))
    assert lab.repeats


def test_twins_of_a_factory_that_does_not_seed_come_from_a_checkpoint(
    lab_of: Callable[..., Lab],
) -> None:
    lab = lab_of(unseeded())
    assert not identical(train(lab)(lab.fresh()), train(lab)(lab.fresh()))
    assert identical(*lab.twin_results(train(lab), train(lab)))


def test_without_twins_the_reason_is_said(lab_of: Callable[..., Lab]) -> None:
    class LoadsNothing(PlainTrainer):
        async def load(self, path: str | None = None) -> str:
            return str(path)

    seeds = itertools.count()
    lab = lab_of(lambda: LoadsNothing(seed=next(seeds)))
    with pytest.raises(NotChecked, match="neither the factory nor load"):
        lab.twins()


@pytest.mark.parametrize(
    ("options", "stochastic"),
    [({}, False), ({"dropout": 0.3}, True), ({"tie_weights": True}, False)],
)
def test_dropout_is_noticed(
    lab_of: Callable[..., Lab], options: dict[str, Any], stochastic: bool
) -> None:
    assert lab_of(lambda: PlainTrainer(**options)).stochastic is stochastic


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compute_dtype_is_read_from_the_graph(
    lab_of: Callable[..., Lab], dtype: torch.dtype
) -> None:
    assert lab_of(lambda: PlainTrainer(compute_dtype=dtype)).dtype == dtype


def test_parameters_are_found_without_a_declaration(lab_of: Callable[..., Lab]) -> None:
    lab = lab_of()
    own = lab.trainer.trainer.model.parameters()
    found = parameters_of(lab, lab.trainer).tensors.values()
    assert {id(tensor) for tensor in found} == {id(tensor) for tensor in own}


def test_parameters_whose_gradients_are_elsewhere_are_not_trusted(
    lab_of: Callable[..., Lab],
) -> None:
    class KeepsGradientsElsewhere(PlainTrainer):
        def _backward(self, loss: torch.Tensor) -> None:
            super()._backward(loss)
            for parameter in self.model.parameters():
                parameter.main_grad, parameter.grad = parameter.grad, None  # type: ignore[attr-defined]

    lab = lab_of(KeepsGradientsElsewhere)
    assert not lab.sees_gradients
    with pytest.raises(NotChecked, match="not where gradients accumulate"):
        parameters_of(lab, lab.trainer)


def test_declared_gradients_need_declared_parameters() -> None:
    with pytest.raises(TargetError, match="without Target"):
        Target(factory=PlainTrainer, gradients=lambda trainer: {})


def test_effects_are_gradients_where_they_can_be_seen_else_updates(
    lab_of: Callable[..., Lab],
) -> None:
    def effect(lab: Lab) -> Any:
        batch = make_batch(lab.domain, (2, 3), mask="all")
        return effects(lab, lambda subject: subject.forward_backward(batch))[0]

    class Elsewhere(PlainTrainer):
        """Computes as if in another process: its logits have a graph of their own."""

        def _loss(self, logits: Any, batch: Any, loss_fn: Any) -> Any:
            if loss_fn is None:
                return super()._loss(logits, batch, loss_fn)
            apart = logits.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(loss_fn({"logits": apart}, batch), apart)
            return (logits * gradient).sum()

    assert effect(lab_of()).from_gradients
    seen_by_update = effect(lab_of(Elsewhere))
    assert not seen_by_update.from_gradients
    assert not seen_by_update.empty


def test_a_factory_that_fails_says_so(lab_of: Callable[..., Lab]) -> None:
    def fails() -> None:
        raise OSError("no such device")

    with pytest.raises(TargetError, match="raised OSError: no such device"):
        lab_of(fails).fresh()
    with pytest.raises(TargetError, match="returned None"):
        lab_of(lambda: None).fresh()


def test_trainers_are_closed_when_they_are_left_behind(lab_of: Callable[..., Lab]) -> None:
    closed = []

    class Closes(PlainTrainer):
        async def close(self) -> None:
            closed.append(self)

    lab = lab_of(Closes)
    first = lab.trainer.trainer
    lab.discard()
    assert closed == [first]
