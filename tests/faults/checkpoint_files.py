"""Faulty trainers of the area checkpoint: where files go, what they hold, which one is read."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forge.api import ForwardBackwardResult, LossFn, TextTrainBatch
from reference_impls.checkpoints import (
    TRAINING,
    WEIGHTS,
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    _manifests,
    _read_manifest,
    _write_manifest,
    named_tensors,
)
from reference_impls.optimization import load_optimizer
from reference_impls.plain import PlainTrainer
from tests.faults.checkpoint_state import Loads, Saves, holds_weights_alone
from tests.faults.corpus import faulty
from tests.faults.honest_checkpoints import Contents, OneFile, OwnFiles, Stores


class TrustingFiles(OwnFiles):
    """Compares no file with the manifest, so that what is read is what is there."""

    def _verify(self, folder: Path, digests: dict[str, str]) -> None:
        return


# Where


class Returns(PlainTrainer):
    """Returns another path of a save than `PlainTrainer`."""

    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        return self._returned(await super().save(name, path, weights_only))

    def _returned(self, saved: str) -> str:
        raise NotImplementedError


@faulty("checkpoint.location", "the path returned is relative")
class ReturnsARelativePath(Returns):
    def _returned(self, saved: str) -> str:
        return os.path.relpath(saved)


@faulty("checkpoint.location", "the path returned is that of the folder that checkpoints are in")
class ReturnsTheFolder(Returns):
    def _returned(self, saved: str) -> str:
        return str(Path(saved).parent)


@faulty("checkpoint.location", "the path returned is that of one file, which load doesn't take")
class ReturnsAFileInside(Returns):
    def _returned(self, saved: str) -> str:
        return str(Path(saved, WEIGHTS))


@faulty("checkpoint.location", "the path returned is a place that nothing is at")
class ReturnsAnotherName(Returns):
    def _returned(self, saved: str) -> str:
        return f"{saved}.ckpt"


@faulty("checkpoint.location", "a load returns the name alone")
class LoadReturnsTheName(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        return Path(await super().load(path)).name


class Places(PlainTrainer):
    """Saves elsewhere than it is asked to."""

    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        return await super().save(*self._placed(name, path), weights_only)

    def _placed(self, name: str | None, path: str | None) -> tuple[str | None, str | None]:
        raise NotImplementedError


@faulty("checkpoint.location", "name is ignored where path is given")
class IgnoresTheName(Places):
    def _placed(self, name: str | None, path: str | None) -> tuple[str | None, str | None]:
        return (name, path) if path is None else (None, path)


@faulty("checkpoint.location", "path is ignored where name is given")
class IgnoresThePath(Places):
    def _placed(self, name: str | None, path: str | None) -> tuple[str | None, str | None]:
        return (name, path) if name is None else (name, None)


@faulty("checkpoint.location", "spaces and letters beyond ASCII are quoted, as in a URL")
class QuotesNames(Places):
    def _placed(self, name: str | None, path: str | None) -> tuple[str | None, str | None]:
        return name and quote(name), path and quote(path)


@faulty("checkpoint.location", "letters beyond ASCII are left out")
class LeavesLettersOut(Places):
    def _placed(self, name: str | None, path: str | None) -> tuple[str | None, str | None]:
        return name and (name.encode("ascii", "ignore").decode() or "unnamed"), path


@faulty("checkpoint.location", "names are cut after 16 letters")
class CutsNames(Places):
    def _placed(self, name: str | None, path: str | None) -> tuple[str | None, str | None]:
        return name and name[:16], path


@faulty("checkpoint.location", "a checkpoint without a name is called the same at each step")
class NamesNoStep(Places):
    def _placed(self, name: str | None, path: str | None) -> tuple[str | None, str | None]:
        return name or "checkpoint", path


@faulty("checkpoint.location", "a checkpoint without a name is named after the next step (B104)")
class NamesTheNextStep(Places):
    def _placed(self, name: str | None, path: str | None) -> tuple[str | None, str | None]:
        return name or f"step-{self.step + 1}", path


@faulty("checkpoint.location", "the folder must be there: only the last part of a path is made")
class NeedsItsFolder(Places):
    def _placed(self, name: str | None, path: str | None) -> tuple[str | None, str | None]:
        if path is not None and not Path(path).is_dir():
            raise FileNotFoundError(f"there is no folder {path}")
        return name, path


# Latest


@faulty("checkpoint.latest", "the latest is the last by name: step-9 comes after step-10 (B124)")
class SortsNames(Stores):
    class Store(CheckpointStore):
        def _latest(self) -> Path:
            return max(_full(self), key=lambda path: path.name)


@faulty("checkpoint.latest", "the latest is the one with the newest file times (B127)")
class TrustsFileTimes(Stores):
    class Store(CheckpointStore):
        def _latest(self) -> Path:
            return max(_full(self), key=lambda path: path.stat().st_mtime_ns)


@faulty("checkpoint.latest", "the latest is the one of the highest step, saved last or not")
class TakesTheHighestStep(Stores):
    class Store(CheckpointStore):
        def _latest(self) -> Path:
            manifests = _manifests(self.folder)
            return max(_full(self), key=lambda path: manifests[path]["step"])


@faulty("checkpoint.latest", "weights alone are taken for the latest as well")
class TakesWeightsAlone(Stores):
    class Store(CheckpointStore):
        def _latest(self) -> Path:
            manifests = _manifests(self.folder)
            if not manifests:
                raise FileNotFoundError(f"there is no checkpoint in {self.folder}")
            return max(manifests, key=lambda path: manifests[path]["sequence"])


@faulty("checkpoint.latest", "what is newest in the folder is taken for a checkpoint (B125)")
class TakesAnythingNewest(Stores):
    class Store(CheckpointStore):
        def _latest(self) -> Path:
            return max(self.folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)


@faulty("checkpoint.latest", "what isn't a checkpoint makes the search for the latest fail (B132)")
class StumblesOverOthers(Stores):
    class Store(CheckpointStore):
        def _latest(self) -> Path:
            for path in self.folder.iterdir():
                _read_manifest(path)
            return super()._latest()


@faulty("checkpoint.latest", "a trainer knows of its own saves only")
class RemembersItsLastSave(Saves):
    last: str | None = None

    def _saved(self, path: str) -> None:
        if not holds_weights_alone(path) and Path(path).parent == self.store.folder:
            self.last = path

    async def load(self, path: str | None = None) -> str:
        if path is None and self.last is None:
            raise FileNotFoundError("nothing has been saved")
        return await super().load(path or self.last)


@faulty("checkpoint.latest", "a process knows of its own saves only")
class RemembersInTheProcess(Saves):
    last: ClassVar[dict[Path, str]] = {}

    def _saved(self, path: str) -> None:
        if not holds_weights_alone(path):
            self.last[Path(path).parent] = path

    async def load(self, path: str | None = None) -> str:
        if path is None and self.store.folder not in self.last:
            raise FileNotFoundError("nothing has been saved")
        return await super().load(path or self.last[self.store.folder])


@faulty("checkpoint.latest", "checkpoints that the caller named are passed over")
class PassesOverNames(Stores):
    class Store(CheckpointStore):
        def _latest(self) -> Path:
            manifests = _manifests(self.folder)
            named_by_step = [path for path in _full(self) if re.fullmatch(r"step-\d+", path.name)]
            if not named_by_step:
                raise FileNotFoundError(f"there is no checkpoint in {self.folder}")
            return max(named_by_step, key=lambda path: manifests[path]["sequence"])


@faulty("checkpoint.latest", "the latest may have been saved to another folder")
class TakesOneFromElsewhere(Saves):
    def _saved(self, path: str) -> None:
        if not holds_weights_alone(path):
            self.store.folder.mkdir(parents=True, exist_ok=True)
            (self.store.folder / "latest").write_text(path)

    async def load(self, path: str | None = None) -> str:
        latest = self.store.folder / "latest"
        if path is None and latest.exists():
            path = latest.read_text()
        return await super().load(path)


@faulty("checkpoint.latest", "the latest is what was loaded last")
class TakesTheLastLoaded(Loads, Saves):
    def _saved(self, path: str) -> None:
        (Path(path).parent / "last").unlink(missing_ok=True)

    def _loaded(self, path: str) -> None:
        (Path(path).parent / "last").write_text(path)

    async def load(self, path: str | None = None) -> str:
        last = self.store.folder / "last"
        if path is None and last.exists():
            path = last.read_text()
        return await super().load(path)


@faulty("checkpoint.latest", "where there is no checkpoint, a load does nothing (B120)")
class StartsAfreshWithoutAWord(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        if path is None and not _full(self.store, allow_none=True):
            self._clear()
            return str(self.store.folder)
        return await super().load(path)


def _full(store: CheckpointStore, allow_none: bool = False) -> list[Path]:
    manifests = _manifests(store.folder)
    found = [path for path, manifest in manifests.items() if manifest["kind"] == "full"]
    if not found and not allow_none:
        raise FileNotFoundError(f"there is no full checkpoint in {store.folder}")
    return found


# Files for others


@faulty("checkpoint.portable_weights", "weights alone are a pickled file of torch")
class WritesPickledWeights(Stores):
    Store = OneFile


@faulty("checkpoint.portable_weights", "names of the weights have a wrapper's prefix (B112)")
class KeepsAPrefix(Stores):
    class Store(OwnFiles):
        def _write(
            self, folder: Path, weights: dict[str, Tensor], training: dict[str, Any] | None
        ) -> None:
            prefixed = {f"_orig_mod.{name}": tensor for name, tensor in weights.items()}
            super()._write(folder, prefixed, training)

        def _read(self, folder: Path, full: bool) -> Contents:
            weights, training = super()._read(folder, full)
            return {n.removeprefix("_orig_mod."): t for n, t in weights.items()}, training


@faulty("checkpoint.portable_weights", "weights are numbered; which is which this trainer knows")
class NumbersItsWeights(Stores):
    class Store(OwnFiles):
        def _write(
            self, folder: Path, weights: dict[str, Tensor], training: dict[str, Any] | None
        ) -> None:
            numbered = {f"w{i:03}": tensor for i, tensor in enumerate(weights.values())}
            super()._write(folder, numbered, training)

        def _read(self, folder: Path, full: bool) -> Contents:
            weights, training = super()._read(folder, full)
            names = named_tensors(PlainTrainer().model)
            return {name: weights[f"w{i:03}"] for i, name in enumerate(names)}, training


@faulty("checkpoint.portable_weights", "weights are one flat tensor, as sharded ones are in memory")
class FlattensItsWeights(Stores):
    class Store(OwnFiles):
        def _write(
            self, folder: Path, weights: dict[str, Tensor], training: dict[str, Any] | None
        ) -> None:
            flat = torch.cat([tensor.flatten() for tensor in weights.values()])
            super()._write(folder, {"flat_parameter": flat}, training)

        def _read(self, folder: Path, full: bool) -> Contents:
            weights, training = super()._read(folder, full)
            own = named_tensors(PlainTrainer().model)
            parts = weights["flat_parameter"].split([tensor.numel() for tensor in own.values()])
            named = zip(own.items(), parts, strict=True)
            return {name: part.view_as(tensor) for (name, tensor), part in named}, training


@faulty("checkpoint.safe_to_read", "the model's configuration is a pickled object")
class PicklesItsConfiguration(Stores):
    class Store(OwnFiles):
        def _write(
            self, folder: Path, weights: dict[str, Tensor], training: dict[str, Any] | None
        ) -> None:
            super()._write(folder, weights, training)
            facts = PlainTrainer().model_config
            (folder / "config.pkl").write_bytes(pickle.dumps(facts))

        def _read(self, folder: Path, full: bool) -> Contents:
            pickle.loads((folder / "config.pkl").read_bytes())
            return super()._read(folder, full)


@faulty("checkpoint.safe_to_read", "the state to go on from holds an object of a class of its own")
class SavesAnObject(Stores):
    class Store(OwnFiles):
        def _write(
            self, folder: Path, weights: dict[str, Tensor], training: dict[str, Any] | None
        ) -> None:
            super()._write(folder, weights, None)
            if training is not None:
                contents = Checkpoint(str(folder), {}, {}, training)
                torch.save(contents, folder / TRAINING)

        def _read(self, folder: Path, full: bool) -> Contents:
            weights, training = super()._read(folder, full=False)
            if full:
                training = torch.load(folder / TRAINING, weights_only=False).training
            return weights, training


@faulty("checkpoint.safe_to_read", "the model itself is pickled beside its weights")
class PicklesTheModel(Saves):
    def _saved(self, path: str) -> None:
        if holds_weights_alone(path):
            torch.save(self.model, Path(path, "model.pt"))


# What can't be loaded: nothing there


@faulty(
    "checkpoint.missing", "a checkpoint that isn't there is none to load: training starts (B120)"
)
class TakesMissingForNone(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        if path is not None and not Path(path).exists():
            return path
        return await super().load(path)


@faulty("checkpoint.missing", "where there is no such checkpoint, the latest one is taken")
class TakesTheLatestInstead(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        if path is not None and not Path(path).exists():
            path = str(Path(path).parent)
            others = _manifests(Path(path)) or _manifests(self.store.folder)
            path = str(max(others)) if others else None
        return await super().load(path)


@faulty("checkpoint.missing", "the folder that is looked into is made")
class MakesTheFolder(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        if path is not None:
            Path(path).mkdir(parents=True, exist_ok=True)
        return await super().load(path)


@faulty("checkpoint.missing", "the error doesn't say what is missing")
class NamesNoPath(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        if path is not None and not Path(path).exists():
            raise FileNotFoundError("checkpoint not found")
        return await super().load(path)


@faulty("checkpoint.missing", "pending gradients are dropped before the path is looked at")
class ClearsBeforeItLooks(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        self._clear()
        return await super().load(path)


@faulty("checkpoint.missing", "the optimizer is made anew before the path is looked at")
class DropsMomentsBeforeItLooks(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        self.optimizer = self._make_optimizer()
        return await super().load(path)


@faulty("checkpoint.missing", "the step is set back before the path is looked at")
class SetsBackTheStepBeforeItLooks(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        self.step = 0
        return await super().load(path)


# What can't be loaded: damaged


@faulty("checkpoint.damaged", "weights are applied before the rest is read")
class AppliesWeightsFirst(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        if path is not None and Path(path, WEIGHTS).exists():
            weights = load_file(Path(path, WEIGHTS))
            for name, tensor in named_tensors(self.model).items():
                tensor.copy_(weights[name])
        return await super().load(path)


@faulty("checkpoint.damaged", "optimizer and step are applied before the weights are read")
class AppliesMomentsFirst(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        if path is not None and Path(path, TRAINING).exists():
            training = torch.load(Path(path, TRAINING), weights_only=True)
            load_optimizer(self.optimizer, training["optimizer"])
            self.step = training["step"]
        return await super().load(path)


@faulty("checkpoint.damaged", "without its state of training it is taken for weights alone")
class TakesItForWeights(Stores):
    class Store(CheckpointStore):
        def read(self, path: str | None) -> Checkpoint:
            if path is not None and Path(path).exists() and holds_weights_alone(path):
                model_config = _read_manifest(Path(path))["model_config"]
                return Checkpoint(path, model_config, load_file(Path(path, WEIGHTS)), None)
            return super().read(path)


@faulty("checkpoint.damaged", "what can't be read of the state of training is as in a new trainer")
class FallsBackToDefaults(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        try:
            return await super().load(path)
        except CheckpointError:
            assert path is not None
            weights = load_file(Path(path, WEIGHTS))
            for name, tensor in named_tensors(self.model).items():
                tensor.copy_(weights[name])
            self.optimizer = self._make_optimizer()
            self.step = 0
            self._clear()
            return path


@faulty("checkpoint.damaged", "a damaged checkpoint makes training start from the beginning (B137)")
class StartsFromTheBeginning(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        try:
            return await super().load(path)
        except CheckpointError as error:
            with self.random.active():
                self.model = self._make_model()
            self.optimizer = self._make_optimizer()
            self.step = 0
            self._clear()
            return path or str(error)


@faulty("checkpoint.damaged", "a file cut short is read to its end; what is missing is 0")
class FillsUpWithZeros(Stores):
    class Store(TrustingFiles):
        def _write(
            self, folder: Path, weights: dict[str, Tensor], training: dict[str, Any] | None
        ) -> None:
            shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
            (folder / "shapes.json").write_text(json.dumps(shapes))
            content = b"".join(tensor.numpy().tobytes() for tensor in weights.values())
            (folder / "weights.bin").write_bytes(content)
            if training is not None:
                torch.save(training, folder / TRAINING)

        def _read(self, folder: Path, full: bool) -> Contents:
            shapes = json.loads((folder / "shapes.json").read_text())
            content = (folder / "weights.bin").read_bytes()
            size = 4 * sum(math.prod(shape) for shape in shapes.values())
            flat = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.float32)
            parts = flat.split([math.prod(shape) for shape in shapes.values()])
            weights = {
                name: part.view(shape)
                for (name, shape), part in zip(shapes.items(), parts, strict=True)
            }
            return weights, torch.load(folder / TRAINING, weights_only=True) if full else None


@faulty("checkpoint.damaged", "the step is in a file of its own, without which it is 0")
class KeepsItsStepApart(Saves, Loads):
    def _saved(self, path: str) -> None:
        Path(path, "step.txt").write_text(str(self.step))

    def _loaded(self, path: str) -> None:
        file = Path(path, "step.txt")
        self.step = int(file.read_text() or 0) if file.exists() else 0


@faulty("checkpoint.damaged", "pending gradients are dropped before files are checked")
class ClearsBeforeItChecks(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        if path is not None and Path(path).exists():
            self._clear()
        return await super().load(path)


# What can't be loaded: of another model


class Fits(PlainTrainer):
    """Makes weights fit before they are compared with the model's."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.store = FittingFiles(self)

    def _fitted(self, saved: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
        raise NotImplementedError


class FittingFiles(TrustingFiles):
    def __init__(self, owner: Fits) -> None:
        super().__init__(owner.store.folder, trainer="plain")
        self.owner = owner

    def read(self, path: str | None) -> Checkpoint:
        checkpoint = super().read(path)
        fitted = self.owner._fitted(checkpoint.weights, named_tensors(self.owner.model))
        return replace(checkpoint, weights=fitted, model_config={})


@faulty("checkpoint.foreign", "weights that fit are loaded, others left: strict=False (B112)")
class LoadsWhatFits(Fits):
    def _fitted(self, saved: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
        fitting = {
            name: tensor
            for name, tensor in saved.items()
            if name in own and own[name].shape == tensor.shape
        }
        return {**own, **fitting}


@faulty("checkpoint.foreign", "weights that are missing stay as they are")
class LeavesWhatIsMissing(Fits):
    def _fitted(self, saved: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**own, **saved}


@faulty("checkpoint.foreign", "weights that the model doesn't have are passed over")
class PassesOverWhatIsUnexpected(Fits):
    def _fitted(self, saved: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in saved.items() if name in own}


@faulty("checkpoint.foreign", "names are compared; tensors of other shapes are cut or filled up")
class CutsToShape(Fits):
    def _fitted(self, saved: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: _cut(tensor, own[name]) if name in own else tensor
            for name, tensor in saved.items()
        }


def _cut(tensor: Tensor, like: Tensor) -> Tensor:
    if tensor.dim() != like.dim():
        return tensor
    shared = tuple(slice(min(sizes)) for sizes in zip(tensor.shape, like.shape, strict=True))
    filled = like.clone()
    filled[shared] = tensor[shared]
    return filled


class Trusts(Stores):
    Store = TrustingFiles


@faulty("checkpoint.foreign", "weights are applied one by one until one doesn't fit")
class AppliesUntilOneDiffers(Trusts):
    async def load(self, path: str | None = None) -> str:
        weights = self.store.read(path).weights
        for name, tensor in named_tensors(self.model).items():
            tensor.copy_(weights[name])
        return await super().load(path)


@faulty("checkpoint.foreign", "step and optimizer are applied before weights are compared")
class AppliesTheRestFirst(Trusts):
    async def load(self, path: str | None = None) -> str:
        training = self.store.read(path).training
        self.step = 0 if training is None else training["step"]
        self.optimizer = self._make_optimizer()
        return await super().load(path)


@faulty("checkpoint.foreign", "pending gradients are dropped before weights are compared")
class ClearsBeforeItCompares(Trusts):
    async def load(self, path: str | None = None) -> str:
        self.store.read(path)
        self._clear()
        return await super().load(path)


# Overwriting


class InPlaceFiles(TrustingFiles):
    """Writes each file where it stays, the manifest last."""

    def save(
        self,
        name: str | None,
        path: str | None,
        *,
        step: int,
        model_config: dict[str, Any],
        hf_config: dict[str, Any],
        weights: dict[str, Tensor],
        training: dict[str, Any] | None,
    ) -> str:
        target = self._target(name, path, step, training)
        manifest = {**self._manifest(step, model_config, training), "files": {}}
        target.mkdir(parents=True, exist_ok=True)
        self._fill(target, manifest, weights, training)
        return str(target)

    def _fill(
        self,
        target: Path,
        manifest: dict[str, Any],
        weights: dict[str, Tensor],
        training: dict[str, Any] | None,
    ) -> None:
        self._write(target, weights, training)
        _write_manifest(target, manifest)


class TensorFiles(InPlaceFiles):
    """Each weight is in a file of its own, and on the disk before the next is written."""

    def _write(
        self, folder: Path, weights: dict[str, Tensor], training: dict[str, Any] | None
    ) -> None:
        if training is not None:
            torch.save(training, folder / TRAINING)
        for name, tensor in weights.items():
            with (folder / f"{name}.pt").open("wb") as file:
                torch.save(tensor.clone(), file)
                os.fsync(file.fileno())

    def _read(self, folder: Path, full: bool) -> Contents:
        names = named_tensors(PlainTrainer().model)
        weights = {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in names}
        return weights, torch.load(folder / TRAINING, weights_only=True) if full else None


@faulty("checkpoint.overwrite", "files are written over those that are there")
class WritesInPlace(Stores):
    Store = TensorFiles


@faulty("checkpoint.overwrite", "files that the new checkpoint doesn't have are left of the old")
class MixesOldAndNew(Stores):
    class Store(InPlaceFiles):
        def _read(self, folder: Path, full: bool) -> Contents:
            return super()._read(folder, full=(folder / TRAINING).exists())


@faulty("checkpoint.overwrite", "the old one is deleted before the new one is written")
class DeletesTheOldFirst(Stores):
    class Store(OwnFiles):
        def _target(self, *arguments: Any) -> Path:
            target = super()._target(*arguments)
            shutil.rmtree(target, ignore_errors=True)
            return target


@faulty("checkpoint.overwrite", "a name that exists is taken for saved")
class KeepsTheOld(Stores):
    class Store(OwnFiles):
        def save(self, name: str | None, path: str | None, **contents: Any) -> str:
            target = self._target(name, path, contents["step"], contents["training"])
            return str(target) if target.exists() else super().save(name, path, **contents)


@faulty("checkpoint.overwrite", "of a name that exists the weights are replaced, and not the rest")
class ReplacesTheWeights(Stores):
    class Store(TrustingFiles):
        def save(self, name: str | None, path: str | None, **contents: Any) -> str:
            target = self._target(name, path, contents["step"], contents["training"])
            if not target.exists():
                return super().save(name, path, **contents)
            save_file(contents["weights"], target / WEIGHTS)
            return str(target)


@faulty("checkpoint.overwrite", "what has been loaded of a name is given again")
class RemembersByName(Stores):
    class Store(CheckpointStore):
        def read(self, path: str | None) -> Checkpoint:
            if not hasattr(self, "known"):
                self.known: dict[str | None, Checkpoint] = {}
            if path is None or path not in self.known:
                self.known[path] = copy.deepcopy(super().read(path))
            return copy.deepcopy(self.known[path])


# Killed


class ManifestFirst(TensorFiles):
    """The manifest is there before what it tells of."""

    def _fill(
        self,
        target: Path,
        manifest: dict[str, Any],
        weights: dict[str, Tensor],
        training: dict[str, Any] | None,
    ) -> None:
        _write_manifest(target, manifest)
        self._write(target, weights, training)


@faulty("checkpoint.crash_safe", "what makes a folder a checkpoint is written first")
class WritesItsManifestFirst(Stores):
    Store = ManifestFirst


@faulty("checkpoint.crash_safe", "the latest checkpoint is named before it is written")
class NamesTheLatestFirst(Stores):
    class Store(TensorFiles):
        def _fill(self, target: Path, *contents: Any) -> None:
            if contents[-1] is not None:
                (target.parent / "latest").write_text(target.name)
            super()._fill(target, *contents)

        def _latest(self) -> Path:
            return self.folder / (self.folder / "latest").read_text()


@faulty("checkpoint.crash_safe", "the file that names the latest is open and empty during a save")
class EmptiesTheLatest(Stores):
    class Store(TensorFiles):
        def _fill(self, target: Path, *contents: Any) -> None:
            if contents[-1] is None:
                return super()._fill(target, *contents)
            with (target.parent / "latest").open("w") as latest:
                latest.write(target.name)
                super()._fill(target, *contents)

        def _latest(self) -> Path:
            return self.folder / (self.folder / "latest").read_text()


@faulty("checkpoint.crash_safe", "the checkpoint before is deleted to make room for the next")
class DeletesTheOneBefore(Stores):
    class Store(OwnFiles):
        def _write(
            self, folder: Path, weights: dict[str, Tensor], training: dict[str, Any] | None
        ) -> None:
            if training is not None:
                for path, manifest in _manifests(folder.parent).items():
                    if manifest["kind"] == "full":
                        shutil.rmtree(path)
            super()._write(folder, weights, training)


@faulty("checkpoint.crash_safe", "the index of all checkpoints is open and empty during a save")
class EmptiesTheIndex(Stores):
    class Store(TensorFiles):
        def _fill(self, target: Path, *contents: Any) -> None:
            index = target.parent / "index.json"
            names = json.loads(index.read_text()) if index.exists() else []
            with index.open("w") as file:
                json.dump([*names, target.name], file)
                super()._fill(target, *contents)

        def read(self, path: str | None) -> Checkpoint:
            folder = self._latest() if path is None else Path(path)
            if folder.name not in json.loads((folder.parent / "index.json").read_text()):
                raise CheckpointError(f"{folder} is not a checkpoint")
            return super().read(str(folder))


# Places that can't be written


class Survives(PlainTrainer):
    """Goes on without an error after a save that failed."""

    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        try:
            return await super().save(name, path, weights_only)
        except CheckpointError:
            return await self._save_instead(name, path, weights_only)

    async def _save_instead(self, name: str | None, path: str | None, weights_only: bool) -> str:
        raise NotImplementedError


@faulty("checkpoint.unwritable", "a save that failed returns the path all the same")
class SaysNothing(Survives):
    async def _save_instead(self, name: str | None, path: str | None, weights_only: bool) -> str:
        return str(Path(path or self.store.folder, name or f"step-{self.step}"))


@faulty("checkpoint.unwritable", "what can't be written where it should be goes elsewhere")
class SavesElsewhere(Survives):
    async def _save_instead(self, name: str | None, path: str | None, weights_only: bool) -> str:
        return await PlainTrainer.save(self, name, tempfile.mkdtemp(), weights_only)


@faulty("checkpoint.unwritable", "a save that failed leaves a part, which is the latest then")
class LeavesAPart(Stores):
    Store = ManifestFirst


@faulty("checkpoint.unwritable", "the place of a save that failed is the latest one then")
class TakesThePlaceThatFailed(PlainTrainer):
    last: str | None = None

    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        self.last = str(Path(path or self.store.folder, name or f"step-{self.step}"))
        saved = await super().save(name, path, weights_only)
        self.last = None
        return saved

    async def load(self, path: str | None = None) -> str:
        return await super().load(path or self.last)


@faulty("checkpoint.unwritable", "after a save that failed another one seems to be under way")
class StaysLocked(PlainTrainer):
    saving = False

    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        self._refuse_while_saving()
        self.saving = True
        saved = await super().save(name, path, weights_only)
        self.saving = False
        return saved

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        self._refuse_while_saving()
        return await super().forward_backward(batch, loss_fn)

    def _refuse_while_saving(self) -> None:
        if self.saving:
            raise RuntimeError("a save is under way")


@faulty("checkpoint.unwritable", "when the disk is full, what was saved before makes room")
class MakesRoom(Survives):
    async def _save_instead(self, name: str | None, path: str | None, weights_only: bool) -> str:
        if shutil.disk_usage(self.store.folder).free < 2**20:
            shutil.rmtree(self.store.folder)
        return await PlainTrainer.save(self, name, path, weights_only)


@faulty("checkpoint.unwritable", "gradients make room for a save, and come back if it succeeds")
class LosesGradientsInAFailedSave(PlainTrainer):
    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        pending = {p: p.grad for p in self._trainable().values()}
        self.model.zero_grad()
        saved = await super().save(name, path, weights_only)
        for p, grad in pending.items():
            p.grad = grad
        return saved


# Retention


class PruningStore(CheckpointStore):
    """Deletes older checkpoints once a new one is there."""

    def save(self, name: str | None, path: str | None, **contents: Any) -> str:
        saved = super().save(name, path, **contents)
        manifests = _manifests(Path(saved).parent)
        for old in self._expendable(manifests):
            shutil.rmtree(old)
        return saved

    def _expendable(self, manifests: dict[Path, dict[str, Any]]) -> list[Path]:
        raise NotImplementedError


@faulty("checkpoint.keeps_named", "the last two of all checkpoints are kept, whoever named them")
class KeepsTheLastTwo(Stores):
    class Store(PruningStore):
        def _expendable(self, manifests: dict[Path, dict[str, Any]]) -> list[Path]:
            return sorted(manifests, key=lambda path: manifests[path]["sequence"])[:-2]


@faulty("checkpoint.keeps_named", "of weights alone the last is kept, whoever named them")
class KeepsOneExport(Stores):
    class Store(PruningStore):
        def _expendable(self, manifests: dict[Path, dict[str, Any]]) -> list[Path]:
            exports = [path for path, each in manifests.items() if each["kind"] == "weights"]
            return sorted(exports, key=lambda path: manifests[path]["sequence"])[:-1]


@faulty("checkpoint.keeps_named", "those of earlier steps are deleted once a trainer goes on")
class DeletesEarlierSteps(Stores):
    class Store(PruningStore):
        def _expendable(self, manifests: dict[Path, dict[str, Any]]) -> list[Path]:
            last = max(manifest["step"] for manifest in manifests.values())
            return [path for path, manifest in manifests.items() if manifest["step"] < last - 2]


@faulty("checkpoint.keeps_named", "a new trainer empties the folder of the run before (B137)")
class EmptiesItsFolderAtFirst(PlainTrainer):
    def __init__(self) -> None:
        super().__init__()
        shutil.rmtree(self.store.folder, ignore_errors=True)
