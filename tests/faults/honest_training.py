"""Trainers that train in unusual ways and keep the contract, none of which may be failed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from forge.api import TextTrainBatch
from forge_conformance import Target
from reference_impls.hf import HFTrainer
from reference_impls.llama import Llama
from reference_impls.optimization import adamw
from reference_impls.plain import PlainTrainer
from reference_impls.targets import named_parameters
from tests.faults.corpus import honest
from tests.faults.declared import constant_rate, declared
from tests.faults.honest import CallersStream

# Optimizers


def adam(parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(parameters.values()), weight_decay=0.01)


@honest("Adam, whose decay is part of the gradient, is declared")
def uses_adam() -> Target:
    return declared(PlainTrainer, optimizer=adam)


def amsgrad(parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters.values()), amsgrad=True)


@honest("AMSGrad is declared")
def uses_amsgrad() -> Target:
    return declared(PlainTrainer, optimizer=amsgrad)


def adafactor(parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(list(parameters.values()), weight_decay=0.1)


@honest("Adafactor is declared, whose moments are factored and whose steps are relative")
def uses_adafactor() -> Target:
    return declared(PlainTrainer, optimizer=adafactor)


def momentum(
    parameters: Mapping[str, Tensor], *, nesterov: bool = False, dampening: float = 0.0
) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        list(parameters.values()), momentum=0.9, nesterov=nesterov, dampening=dampening
    )


@honest("SGD with dampened momentum is declared")
def uses_momentum() -> Target:
    dampened = partial(momentum, dampening=0.1)
    return declared(PlainTrainer, optimizer=dampened, schedule=constant_rate)


@honest("SGD with Nesterov's momentum is declared, and never clipped")
def uses_nesterov() -> Target:
    ahead = partial(momentum, nesterov=True)
    return declared(PlainTrainer, optimizer=ahead, schedule=constant_rate, clip_norm=math.inf)


class Together(torch.optim.Optimizer):
    """Several optimizers as one, each over parameter groups of its own.

    Args:
        optimizers: They lend their settings and their step; groups and state are this one's, so
            that saving and loading them is what it is for any other.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self.sizes = [len(each.param_groups) for each in optimizers]
        super().__init__([group for each in optimizers for group in each.param_groups], {})

    def step(self, closure: Any = None) -> None:
        groups = iter(self.param_groups)
        for optimizer, size in zip(self.optimizers, self.sizes, strict=True):
            optimizer.param_groups = [next(groups) for _ in range(size)]
            optimizer.state = self.state
            optimizer.step()


def muon(parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    outer = {"model.embed_tokens.weight", "lm_head.weight"}
    hidden = [p for name, p in parameters.items() if p.dim() == 2 and name not in outer]
    others = [p for name, p in parameters.items() if p.dim() != 2 or name in outer]
    return Together(torch.optim.Muon(hidden), torch.optim.AdamW(others))


@honest("Muon for the layers' matrices and AdamW for the rest are declared as one optimizer")
def uses_muon() -> Target:
    made = declared(PlainTrainer, optimizer=muon)
    return replace(made, parameters=named_parameters)


def grouped(parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """AdamW with three groups: two that decay, the embedding at a quarter of the rate."""
    embedding = [p for name, p in parameters.items() if "embed" in name]
    matrices = [p for name, p in parameters.items() if p.dim() > 1 and "embed" not in name]
    vectors = [p for p in parameters.values() if p.dim() <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "lr": 1.0, "initial_lr": 1.0, "weight_decay": 0.1},
            {"params": embedding, "lr": 0.25, "initial_lr": 0.25, "weight_decay": 0.01},
            {"params": vectors, "lr": 1.0, "initial_lr": 1.0, "weight_decay": 0.0},
        ]
    )


class KeepsRatiosOfRates(PlainTrainer):
    def _apply_update(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group["initial_lr"]
        self.optimizer.step()


@honest("its optimizer steps at a rate of 1, and it scales the step itself by the schedule")
class ScalesTheStepItself(PlainTrainer):
    def _apply_update(self, learning_rate: float) -> None:
        before = {name: p.detach().clone() for name, p in self._trainable().items()}
        super()._apply_update(1.0)
        with torch.no_grad():
            for name, p in self._trainable().items():
                p.copy_(torch.lerp(before[name], p, learning_rate))


@honest("groups with and without decay, one of them at a quarter of the rate, are declared")
def has_groups_with_rates_of_their_own() -> Target:
    made = declared(KeepsRatiosOfRates, optimizer=grouped)
    plain = declared(PlainTrainer).variants
    return replace(made, parameters=named_parameters, variants=plain)


def implemented(parameters: Mapping[str, Tensor], **how: bool) -> torch.optim.Optimizer:
    optimizer = adamw(parameters)
    groups = [{**group, **how} for group in optimizer.param_groups]
    return torch.optim.AdamW(groups, **how)


@honest("AdamW is fused, and declared as what it computes")
def fuses_adamw() -> Target:
    return replace(
        declared(PlainTrainer, optimizer=partial(implemented, fused=True)), optimizer=adamw
    )


@honest("AdamW runs over all tensors at once, and is declared as what it computes")
def runs_adamw_foreach() -> Target:
    return replace(
        declared(PlainTrainer, optimizer=partial(implemented, foreach=True)), optimizer=adamw
    )


# Clipping


@honest("clipping always binds")
def always_clips() -> Target:
    return declared(PlainTrainer, clip_norm=1e-3)


@honest("clipping never binds, though there is a limit")
def never_has_to_clip() -> Target:
    return declared(PlainTrainer, clip_norm=1e6)


@honest("AdamW is never clipped")
def never_clips_adamw() -> Target:
    return declared(PlainTrainer, clip_norm=math.inf)


# Models


@honest("the model is compiled, for two shapes")
def compiles_its_model() -> Target:
    shapes = [(1, 8), (3, 8)]

    class CompilesItsModel(PlainTrainer):
        def _make_model(self) -> Llama:
            model = super()._make_model()
            # The default backend takes longer for its first graph than a call may take here.
            model.compile(backend="aot_eager", dynamic=False)
            return model

        def _check_batch(self, batch: TextTrainBatch) -> None:
            super()._check_batch(batch)
            self._check_inputs({"input_ids": batch.input_ids})

        def _check_inputs(self, inputs: dict[str, Tensor]) -> None:
            super()._check_inputs(inputs)
            if tuple(inputs["input_ids"].shape) not in shapes:
                raise ValueError(f"compiled for {shapes}")

    return replace(declared(CompilesItsModel), parameters=named_parameters, shapes=shapes)


@honest("activations are recomputed with the same dropout mask")
class RecomputesWithTheSameMask(PlainTrainer):
    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.random = CallersStream(0, self.device)

    def _make_model(self) -> Llama:
        model = super()._make_model()
        for layer in model.model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        return model


@honest("a model of transformers in bfloat16, whose activations are recomputed")
def recomputes_a_transformers_model_in_bfloat16() -> Target:
    class RecomputesInBfloat16(HFTrainer):
        def _make_model(self) -> PreTrainedModel:
            model = super()._make_model().bfloat16()
            model.activation_checkpointing_enable({"use_reentrant": False})
            return model

    return declared(RecomputesInBfloat16)


@honest("a model of transformers in bfloat16")
class HoldsATransformersModelInBfloat16(HFTrainer):
    def _make_model(self) -> PreTrainedModel:
        model: PreTrainedModel = super()._make_model().bfloat16()
        return model
