"""Faulty trainers of the area checkpoint: what a load brings back, and what a save leaves."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forge.api import LossFn, OptimStepResult, TextTrainBatch
from reference_impls.checkpoints import TRAINING, Checkpoint, CheckpointStore, named_tensors
from reference_impls.llama import Block, Llama
from reference_impls.plain import PlainTrainer
from tests.faults.corpus import faulty
from tests.faults.honest_checkpoints import (
    Contents,
    KeepsMasters,
    Stores,
    WritesInTheBackground,
    altered,
)
from tests.faults.optim_step import MainGradients

SLOW_DISK = 0.2
"""How many seconds a thread that writes takes before it looks at what it is to write."""


class Drops(PlainTrainer):
    """Has dropout, which shows faults of random streams and of train and eval mode."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)


class Ties(PlainTrainer):
    """Has one weight as embedding and as output layer."""

    def __init__(self) -> None:
        super().__init__(tie_weights=True)


class Loads(PlainTrainer):
    """Isn't done with a load where `PlainTrainer` is."""

    async def load(self, path: str | None = None) -> str:
        path = await super().load(path)
        self._loaded(path)
        return path

    def _loaded(self, path: str) -> None:
        raise NotImplementedError


class Saves(PlainTrainer):
    """Isn't done with a save where `PlainTrainer` is."""

    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        saved = await super().save(name, path, weights_only)
        self._saved(saved)
        return saved

    def _saved(self, path: str) -> None:
        raise NotImplementedError


class AlteringStore(CheckpointStore):
    """Writes other weights than it is given."""

    def save(self, name: str | None, path: str | None, **contents: Any) -> str:
        contents["weights"] = {
            each: self._altered(tensor) for each, tensor in contents["weights"].items()
        }
        return super().save(name, path, **contents)

    def _altered(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError


def holds_weights_alone(path: str) -> bool:
    return not Path(path, TRAINING).exists()


# Round trip


@faulty("checkpoint.round_trip", "the step saved is the one that comes next (B104)")
class SavesTheStepAhead(PlainTrainer):
    def _training_state(self) -> dict[str, Any]:
        return {**super()._training_state(), "step": self.step + 1}


@faulty("checkpoint.round_trip", "the step saved is that of microbatches (B105)")
class SavesTheMicrostep(PlainTrainer):
    microsteps = 0

    async def optim_step(self) -> OptimStepResult:
        result = await super().optim_step()
        self.microsteps += result.accumulated_microbatches
        return result

    def _training_state(self) -> dict[str, Any]:
        return {**super()._training_state(), "step": self.microsteps}


@faulty("checkpoint.round_trip", "the count of microbatches outlives a load, their gradients don't")
class KeepsTheCountInALoad(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        count = self.accumulated_microbatches
        path = await super().load(path)
        self.accumulated_microbatches = count
        return path


@faulty("checkpoint.round_trip", "a wrapper changes the head's name, and a lenient load (B115)")
class LeavesTheHead(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        head = self.model.lm_head.weight.detach().clone()
        path = await super().load(path)
        self.model.lm_head.weight.detach().copy_(head)
        return path


@faulty("checkpoint.round_trip", "each save writes the weights gathered for the first one (B122)")
class SavesItsFirstWeights(Stores):
    class Store(CheckpointStore):
        first: dict[str, Tensor] | None = None

        def save(self, name: str | None, path: str | None, **contents: Any) -> str:
            if self.first is None:
                self.first = copy.deepcopy(contents["weights"])
            return super().save(name, path, **{**contents, "weights": self.first})


@faulty("checkpoint.round_trip", "the table of positions isn't saved, and is left empty (B117)")
class EmptiesItsPositions(Loads):
    def _loaded(self, path: str) -> None:
        self.model.model.get_buffer("rotation").zero_()


@faulty("checkpoint.round_trip", "a running average of the weights is saved in their place")
class SavesTheAverage(PlainTrainer):
    average: dict[str, Tensor] | None = None

    def _apply_update(self, learning_rate: float) -> None:
        super()._apply_update(learning_rate)
        weights = named_tensors(self.model)
        if self.average is None:
            self.average = copy.deepcopy(weights)
        for name, tensor in self.average.items():
            tensor.lerp_(weights[name], 0.1)

    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        weights = named_tensors(self.model)
        own = copy.deepcopy(weights)
        for each, tensor in (self.average or {}).items():
            weights[each].copy_(tensor)
        saved = await super().save(name, path, weights_only)
        for each, tensor in own.items():
            weights[each].copy_(tensor)
        return saved


@faulty("checkpoint.round_trip", "the checkpoint saved last is taken for what is in memory")
class SkipsWhatItSavedLast(Saves):
    last = ""

    def _saved(self, path: str) -> None:
        self.last = path

    async def load(self, path: str | None = None) -> str:
        if path is not None and path == self.last:
            self._clear()
            return path
        return await super().load(path)


# Resuming: the optimizer


@faulty("checkpoint.resumes", "the optimizer starts cold: nothing installs the state read (B84)")
class StartsItsOptimizerCold(Loads):
    def _loaded(self, path: str) -> None:
        self.optimizer = self._make_optimizer()


@faulty("checkpoint.resumes", "the state of the first parameter group alone is restored")
class RestoresOneGroup(Loads):
    def _loaded(self, path: str) -> None:
        for group in self.optimizer.param_groups[1:]:
            for p in group["params"]:
                self.optimizer.state.pop(p, None)


@faulty("checkpoint.resumes", "after a failed call a load brings the weights back alone")
class LoadsHalfAfterAFailure(PlainTrainer):
    failed = False

    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        self.failed = True
        loss = super()._loss(logits, batch, loss_fn)
        self.failed = False
        return loss

    async def load(self, path: str | None = None) -> str:
        state = copy.deepcopy(self.optimizer.state_dict())
        path = await super().load(path)
        if self.failed and self.optimizer.state:
            self.optimizer.load_state_dict(state)
        self.failed = False
        return path


@faulty("checkpoint.resumes", "moments pass through bfloat16 (B89)")
class RoundsMoments(PlainTrainer):
    def _training_state(self) -> dict[str, Any]:
        state = super()._training_state()
        rounded = altered(
            state["optimizer"], lambda key, t: t if key == "step" else t.bfloat16().float()
        )
        return {**state, "optimizer": rounded}


@faulty("checkpoint.resumes", "Adam's own count of steps starts again (B87)")
class RestartsAdamsCount(PlainTrainer):
    def _training_state(self) -> dict[str, Any]:
        state = super()._training_state()
        restarted = altered(
            state["optimizer"], lambda key, t: torch.zeros_like(t) if key == "step" else t
        )
        return {**state, "optimizer": restarted}


@faulty("checkpoint.resumes", "squared gradients are restored, their means aren't")
class ForgetsTheFirstMoment(PlainTrainer):
    def _training_state(self) -> dict[str, Any]:
        state = super()._training_state()
        forgotten = altered(
            state["optimizer"], lambda key, t: torch.zeros_like(t) if key == "exp_avg" else t
        )
        return {**state, "optimizer": forgotten}


@faulty("checkpoint.resumes", "states are saved by sorted names and restored by position")
class MixesUpStates(PlainTrainer):
    def _training_state(self) -> dict[str, Any]:
        state = super()._training_state()
        of_each = state["optimizer"]["state"]
        # Of the matrices: embedding, queries, keys. The latter two have one shape.
        swapped = {{1: 2, 2: 1}.get(index, index): each for index, each in of_each.items()}
        return {**state, "optimizer": {**state["optimizer"], "state": swapped}}


@faulty("checkpoint.resumes", "the optimizer's settings are the library's after a load (B87)")
class DefaultsItsSettings(Loads):
    def _loaded(self, path: str) -> None:
        for group in self.optimizer.param_groups:
            group["betas"] = (0.9, 0.999)


@faulty("checkpoint.resumes", "with gradients pending the optimizer's state is saved empty (B92)")
class SavesNoStateInMidAccumulation(PlainTrainer):
    def _training_state(self) -> dict[str, Any]:
        state = super()._training_state()
        if self.accumulated_microbatches == 0:
            return state
        return {**state, "optimizer": {**state["optimizer"], "state": {}}}


@faulty("checkpoint.resumes", "the optimizer's state is gathered before the last update (B139)")
class SavesTheMomentsBefore(PlainTrainer):
    before: dict[str, Any] | None = None

    def _apply_update(self, learning_rate: float) -> None:
        self.before = copy.deepcopy(self.optimizer.state_dict())
        super()._apply_update(learning_rate)

    def _training_state(self) -> dict[str, Any]:
        state = super()._training_state()
        return {**state, "optimizer": self.before or state["optimizer"]}


@faulty("checkpoint.resumes", "a trainer that has made steps keeps its moments in a load")
class KeepsItsMoments(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        used = self.optimizer if self.step > 0 else None
        path = await super().load(path)
        if used is not None and not holds_weights_alone(path):
            self.optimizer = used
        return path


@faulty("checkpoint.resumes", "moments are kept in memory, so that a fresh trainer has none")
class RemembersItsMoments(Saves, Loads):
    saved: frozenset[str] = frozenset()

    def _saved(self, path: str) -> None:
        self.saved |= {path}

    def _loaded(self, path: str) -> None:
        if path not in self.saved:
            self.optimizer = self._make_optimizer()


@faulty("checkpoint.resumes", "float32 masters are rebuilt from bfloat16 weights (B97)")
class RebuildsItsMasters(KeepsMasters):
    def _restore_masters(self, saved: dict[str, Tensor]) -> None:
        super()._restore_masters(self._rebuilt_masters())


# Resuming: the schedule


class Reschedules(Loads):
    """Is elsewhere in its schedule after a load than its step says."""

    offset = 0

    def _learning_rate(self) -> float:
        return self.schedule(self.step + 1 + self.offset)

    def _loaded(self, path: str) -> None:
        self.offset = self._offset()

    def _offset(self) -> int:
        raise NotImplementedError


@faulty("checkpoint.resumes", "the schedule isn't in the checkpoint, and warms up again (B60)")
class WarmsUpAgain(Reschedules):
    def _offset(self) -> int:
        return -self.step


@faulty("checkpoint.resumes", "the schedule is saved before it moves on, and lags by one (B62)")
class LagsByOne(Reschedules):
    def _offset(self) -> int:
        return -1 if self.step > 0 else 0


@faulty("checkpoint.resumes", "only the first rate after a load is the schedule's first")
class WarmsUpForOneUpdate(WarmsUpAgain):
    def _apply_update(self, learning_rate: float) -> None:
        super()._apply_update(learning_rate)
        self.offset = 0


@faulty("checkpoint.resumes", "the rate that was reached becomes the schedule's peak (B64)")
class RescalesItsSchedule(Loads):
    scale = 1.0

    def _learning_rate(self) -> float:
        return self.scale * super()._learning_rate()

    def _loaded(self, path: str) -> None:
        self.scale = self.schedule(self.step) / 0.01 if self.step > 0 else 1.0


@faulty("checkpoint.resumes", "the rate after a load is the constructor's, for good (B65)")
class KeepsTheConstructorsRate(Loads):
    loaded = False

    def _learning_rate(self) -> float:
        return 0.01 if self.loaded else super()._learning_rate()

    def _loaded(self, path: str) -> None:
        self.loaded = True


# Resuming: dropout


@faulty("checkpoint.resumes", "dropout's stream isn't restored (B110)")
class LosesItsStream(Drops):
    async def load(self, path: str | None = None) -> str:
        stream = self.random.state_dict()
        path = await super().load(path)
        self.random.load_state_dict(stream)
        return path


@faulty("checkpoint.resumes", "a warm-up after the load draws from the restored stream (B109)")
class DrawsAfterALoad(Drops, Loads):
    def _loaded(self, path: str) -> None:
        with self.random.active():
            torch.rand(1)


@faulty("checkpoint.resumes", "the model comes back without its dropout")
class ComesBackWithoutDropout(Drops, Loads):
    def _loaded(self, path: str) -> None:
        for layer in self.model.model.layers:
            assert isinstance(layer, Block)
            layer.dropout = layer.self_attn.dropout = 0.0


# Gradients and a load


class Carries(PlainTrainer):
    """Has the gradients after a load that were pending before it."""

    async def load(self, path: str | None = None) -> str:
        pending = {p: p.grad for p in self._trainable().values()}
        path = await super().load(path)
        if self._is_careless(path):
            for p, grad in pending.items():
                p.grad = grad
        return path

    def _is_careless(self, path: str) -> bool:
        return True


@faulty("checkpoint.drops_gradients", "a load leaves pending gradients, and a count of 0")
class CarriesGradients(Carries):
    pass


@faulty("checkpoint.drops_gradients", "a load of weights alone leaves pending gradients")
class CarriesGradientsIntoWeights(Carries):
    def _is_careless(self, path: str) -> bool:
        return holds_weights_alone(path)


@faulty("checkpoint.drops_gradients", "a load leaves the accumulator beside .grad as it is (B40)")
class CarriesTheAccumulator(MainGradients):
    async def load(self, path: str | None = None) -> str:
        pending = self.main
        path = await super().load(path)
        self.main = pending
        return path


@faulty("checkpoint.drops_gradients", "pending gradients are saved, and come back with a load")
class BringsGradientsBack(Loads):
    def _training_state(self) -> dict[str, Any]:
        pending = {
            name: p.grad.clone() for name, p in self._trainable().items() if p.grad is not None
        }
        return {**super()._training_state(), "gradients": pending}

    def _loaded(self, path: str) -> None:
        training = self.store.read(path).training
        for name, grad in (training or {"gradients": {}})["gradients"].items():
            self._trainable()[name].grad = grad


# Purity of a save


@faulty("checkpoint.save_pure", "a save clears pending gradients (B45)")
class ClearsAtASave(Saves):
    def _saved(self, path: str) -> None:
        self._clear()


@faulty("checkpoint.save_pure", "a save zeroes pending gradients, and leaves their count")
class ZeroesAtASave(Saves):
    def _saved(self, path: str) -> None:
        self.model.zero_grad()


@faulty("checkpoint.save_pure", "a save applies what is pending first")
class FinishesTheStepAtASave(PlainTrainer):
    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        if self.accumulated_microbatches > 0:
            await self.optim_step()
        return await super().save(name, path, weights_only)


@faulty("checkpoint.save_pure", "a save rounds the weights in place")
class RoundsAtASave(Saves):
    def _saved(self, path: str) -> None:
        for tensor in named_tensors(self.model).values():
            tensor.copy_(tensor.bfloat16())


@faulty("checkpoint.save_pure", "a save leaves the model in eval mode, without dropout")
class LeavesEvalModeOn(Drops, Saves):
    def _saved(self, path: str) -> None:
        self.model.eval()


@faulty("checkpoint.save_pure", "the optimizer's state is made by an update at rate 0 (B94)")
class MakesStateByAnUpdate(PlainTrainer):
    def _training_state(self) -> dict[str, Any]:
        if not self.optimizer.state:
            pending = {p: p.grad for p in self._trainable().values()}
            for p in pending:
                p.grad = torch.zeros_like(p)
            self._apply_update(0.0)
            for p, grad in pending.items():
                p.grad = grad
        return super()._training_state()


@faulty("checkpoint.save_pure", "a save moves the schedule on")
class MovesItsScheduleAtASave(Saves):
    offset = 0

    def _learning_rate(self) -> float:
        return self.schedule(self.step + 1 + self.offset)

    def _saved(self, path: str) -> None:
        self.offset += 1


@faulty("checkpoint.save_pure", "the name of the unfinished folder is drawn from dropout's stream")
class DrawsAtASave(Drops, Saves):
    def _saved(self, path: str) -> None:
        with self.random.active():
            torch.rand(1)


@faulty("checkpoint.save_pure", "tied weights are cut apart so that they can be written")
class UntiesAtASave(Ties, Saves):
    def _saved(self, path: str) -> None:
        self.model.lm_head.weight = nn.Parameter(self.model.lm_head.weight.detach().clone())


@faulty("checkpoint.save_pure", "a save drops moments to make room, and they start again")
class DropsMomentsAtASave(Saves):
    def _saved(self, path: str) -> None:
        self.optimizer = self._make_optimizer()


# Weights only


@faulty("checkpoint.weights_only", "the flag is lost: a full checkpoint is written (B95)")
class SavesAllTheSame(PlainTrainer):
    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        return await super().save(name, path)


@faulty("checkpoint.weights_only", "the optimizer's state is written, though a load passes over it")
class WritesTheStateAsWell(PlainTrainer):
    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        saved = await super().save(name, path, weights_only)
        if weights_only:
            torch.save(self.optimizer.state_dict(), Path(saved, "optimizer.pt"))
        return saved


@faulty("checkpoint.weights_only", "masters aren't refreshed: an update undoes the load (B119)")
class KeepsMastersUnderWeights(KeepsMasters):
    masters: dict[str, Tensor] = {}  # noqa: RUF012

    def _rebuilt_masters(self) -> dict[str, Tensor]:
        return self.masters or super()._rebuilt_masters()


@faulty("checkpoint.weights_only", "which kind a checkpoint is, its name tells")
class TellsKindsByName(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        if path is not None and holds_weights_alone(path) and not path.endswith("-weights"):
            raise FileNotFoundError(f"{Path(path, TRAINING)} is missing")
        return await super().load(path)


@faulty("checkpoint.weights_only", "weights alone are exported in bfloat16")
class ExportsHalfTheBits(Stores):
    class Store(CheckpointStore):
        def save(self, name: str | None, path: str | None, **contents: Any) -> str:
            if contents["training"] is None:
                contents["weights"] = {
                    each: tensor.bfloat16().float() for each, tensor in contents["weights"].items()
                }
            return super().save(name, path, **contents)


@faulty("checkpoint.weights_only", "weights alone are those of matrices, and a load doesn't mind")
class ExportsMatrices(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        vectors = {
            name: tensor.clone()
            for name, tensor in named_tensors(self.model).items()
            if tensor.dim() == 1
        }
        path = await super().load(path)
        if holds_weights_alone(path):
            for name, tensor in vectors.items():
                named_tensors(self.model)[name].copy_(tensor)
        return path


# Precision


@faulty("checkpoint.precision", "weights are written in bfloat16, and read as float32")
class WritesBfloat16(Stores):
    class Store(AlteringStore):
        def _altered(self, tensor: Tensor) -> Tensor:
            return tensor.bfloat16().float()


@faulty("checkpoint.precision", "weights pass through float16")
class WritesFloat16(Stores):
    class Store(AlteringStore):
        def _altered(self, tensor: Tensor) -> Tensor:
            return tensor.half().float()


@faulty("checkpoint.precision", "norms are written in bfloat16, in which a new one is exact")
class RoundsNorms(Stores):
    class Store(AlteringStore):
        def _altered(self, tensor: Tensor) -> Tensor:
            return tensor.bfloat16().float() if tensor.dim() == 1 else tensor


@faulty("checkpoint.precision", "weights of float64 pass through float32")
class WritesHalfOfDouble(Stores):
    class Store(AlteringStore):
        def _altered(self, tensor: Tensor) -> Tensor:
            return tensor.float().double()

    def _make_model(self) -> Llama:
        return super()._make_model().double()

    def _logits(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids)
        return logits


@faulty("checkpoint.precision", "weights are written as text of eight digits, one too few")
class WritesEightDigits(Stores):
    class Store(AlteringStore):
        def _altered(self, tensor: Tensor) -> Tensor:
            rounded = [float(f"{value:.7e}") for value in tensor.flatten().tolist()]
            return torch.tensor(rounded).view_as(tensor)


# Ties


class Unties(Ties, Loads):
    """Has another parameter as output layer after a load."""

    def _loaded(self, path: str) -> None:
        tied = self.model.lm_head.weight
        self.model.lm_head.weight = nn.Parameter(self._untied(tied.detach()))
        self._unite(tied)

    def _untied(self, tied: Tensor) -> Tensor:
        return tied.clone()

    def _unite(self, tied: Tensor) -> None:
        """Make an optimizer that has both, with the state that the tied one had."""
        before = self.optimizer.state
        self.optimizer = self._make_optimizer()
        for p, state in before.items():
            self.optimizer.state[p] = state
        if tied in before:
            head = self.model.lm_head.weight
            self.optimizer.state[head] = copy.deepcopy(before[tied])


@faulty("checkpoint.ties", "the tied weight comes back as two, each trained by itself (B114)")
class LoadsTwoWeights(Unties):
    pass


@faulty("checkpoint.ties", "the output layer comes back as a copy that the optimizer doesn't have")
class LeavesTheCopyUntrained(Unties):
    def _unite(self, tied: Tensor) -> None:
        return


@faulty("checkpoint.ties", "the memory is shared after a load, the parameter isn't")
class SharesMemoryAlone(Unties):
    def _untied(self, tied: Tensor) -> Tensor:
        return tied


# Snapshot


class HoldsNothing(WritesInTheBackground):
    """Writes in the background what it has not copied."""

    def _write(self, *arguments: Any) -> str:
        time.sleep(SLOW_DISK)
        return super()._write(*arguments)

    def _held(self, weights: dict[str, Tensor], training: dict[str, Any] | None) -> Contents:
        return weights, training


@faulty("checkpoint.snapshot", "a thread writes the live weights and moments, a little later")
class WritesLiveTensors(HoldsNothing):
    pass


@faulty("checkpoint.snapshot", "weights are copied for the thread that writes, moments aren't")
class CopiesWeightsAlone(HoldsNothing):
    def _held(self, weights: dict[str, Tensor], training: dict[str, Any] | None) -> Contents:
        return copy.deepcopy(weights), training


@faulty("checkpoint.snapshot", "the thread that writes reads the live counter of steps (B139)")
class WritesTheLiveStep(WritesInTheBackground):
    def _write(self, name: str, path: str | None, step: int, contents: Contents) -> str:
        time.sleep(SLOW_DISK)
        weights, training = contents
        if training is not None:
            training["step"] = self.step
        return super()._write(name, path, self.step, (weights, training))


@faulty("checkpoint.snapshot", "what is saved is written by the next update, with what it changed")
class WritesWithTheNextUpdate(PlainTrainer):
    unwritten: tuple[str, str | None, bool] | None = None

    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        await self._write()
        if name is None:
            name = f"step-{self.step}-weights" if weights_only else f"step-{self.step}"
        self.unwritten = name, path, weights_only
        return await super().save(*self.unwritten)

    async def optim_step(self) -> OptimStepResult:
        result = await super().optim_step()
        await self._write()
        return result

    async def _write(self) -> None:
        unwritten, self.unwritten = self.unwritten, None
        if unwritten is not None:
            await super().save(*unwritten)


@faulty("checkpoint.snapshot", "what a trainer saved is kept for its loads, as live tensors")
class KeepsLiveTensors(Stores):
    class Store(CheckpointStore):
        def save(self, name: str | None, path: str | None, **contents: Any) -> str:
            saved = super().save(name, path, **contents)
            self.kept = Checkpoint(
                saved, contents["model_config"], contents["weights"], contents["training"]
            )
            return saved

        def read(self, path: str | None) -> Checkpoint:
            kept = getattr(self, "kept", None)
            return kept if kept is not None and kept.path == path else super().read(path)
