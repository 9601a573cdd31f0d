"""Trainers whose checkpoints are unusual and right, and the parts that faulty ones are made of."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from forge.api import TrainerStatus
from reference_impls.checkpoints import (
    TRAINING,
    WEIGHTS,
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    _digest,
    _finish_replacing,
    _manifests,
    _move_into_place,
    _read_manifest,
    _sync,
    _write_manifest,
    named_tensors,
)
from reference_impls.llama import Llama
from reference_impls.plain import PlainTrainer
from tests.faults.corpus import honest

Contents = tuple[dict[str, Tensor], dict[str, Any] | None]
"""The weights, and what a full checkpoint holds beside them."""


class Stores(PlainTrainer):
    """Keeps its checkpoints in a `Store` of its own."""

    Store: type[CheckpointStore] = CheckpointStore

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.store = self.Store(self.store.folder, trainer="plain")


class OwnFiles(CheckpointStore):
    """As safe as its base; which files hold the contents is up to `_write` and `_read`.

    Saves are numbered by the time of day, inside the manifest.
    """

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
        unfinished = target.with_name(f".saving-{uuid.uuid4().hex}")
        try:
            unfinished.mkdir(parents=True)
            self._write(unfinished, weights, training)
            manifest = self._manifest(step, model_config, training)
            manifest["files"] = {file.name: _digest(file) for file in sorted(unfinished.iterdir())}
            _write_manifest(unfinished, manifest)
            for file in [*unfinished.iterdir(), unfinished]:
                _sync(file)
            _move_into_place(unfinished, target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return str(target)

    def read(self, path: str | None) -> Checkpoint:
        folder = self._latest() if path is None else Path(os.path.abspath(path))
        _finish_replacing(folder)
        if not folder.exists():
            raise FileNotFoundError(f"there is no checkpoint at {folder}")
        manifest = _read_manifest(folder)
        self._verify(folder, manifest["files"])
        weights, training = self._read(folder, full=manifest["kind"] == "full")
        return Checkpoint(str(folder), manifest["model_config"], weights, training)

    def _write(
        self, folder: Path, weights: dict[str, Tensor], training: dict[str, Any] | None
    ) -> None:
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        if training is not None:
            torch.save(training, folder / TRAINING)

    def _read(self, folder: Path, full: bool) -> Contents:
        training = torch.load(folder / TRAINING, weights_only=True) if full else None
        return load_file(folder / WEIGHTS), training

    def _verify(self, folder: Path, digests: dict[str, str]) -> None:
        for name, digest in digests.items():
            if not (folder / name).is_file() or _digest(folder / name) != digest:
                raise CheckpointError(f"the checkpoint {folder} is damaged: {name} was changed")

    def _target(
        self, name: str | None, path: str | None, step: int, training: dict[str, Any] | None
    ) -> Path:
        if name is None:
            name = f"step-{step}" if training is not None else f"step-{step}-weights"
        if not name or Path(name).name != name or name.startswith("."):
            raise ValueError(f"{name!r} can't name a checkpoint")
        return (self.folder if path is None else Path(os.path.abspath(path))) / name

    def _manifest(
        self, step: int, model_config: dict[str, Any], training: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "trainer": self.trainer,
            "kind": "weights" if training is None else "full",
            "sequence": time.time_ns(),
            "step": step,
            "model_config": model_config,
        }


# Where and when


@honest("a name that exists is refused")
class RefusesToOverwrite(PlainTrainer):
    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        folder = self.store.folder if path is None else Path(path)
        default = f"step-{self.step}-weights" if weights_only else f"step-{self.step}"
        if (folder / (name or default)).exists():
            raise FileExistsError(f"there is a checkpoint at {folder / (name or default)}")
        return await super().save(name, path, weights_only)


@honest("a path without a name is the checkpoint itself, not the folder that it goes to")
class SavesAtThePathItself(PlainTrainer):
    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        if path is not None and name is None:
            itself = Path(os.path.abspath(path))
            name, path = itself.name, str(itself.parent)
        return await super().save(name, path, weights_only)


class PointingStore(CheckpointStore):
    """Finds the latest checkpoint by a file that names it, written once the checkpoint is."""

    def save(self, name: str | None, path: str | None, **contents: Any) -> str:
        saved = super().save(name, path, **contents)
        if contents["training"] is not None and Path(saved).parent == self.folder:
            self._point(Path(saved).name)
        return saved

    def _latest(self) -> Path:
        try:
            latest = self.folder / (self.folder / "latest").read_text()
            _finish_replacing(latest)
            _read_manifest(latest)
        except (OSError, CheckpointError):
            return super()._latest()
        return latest

    def _point(self, name: str) -> None:
        unfinished = self.folder / f".latest-{uuid.uuid4().hex}"
        unfinished.write_text(name)
        _sync(unfinished)
        os.replace(unfinished, self.folder / "latest")


@honest("a file of its own names the latest checkpoint, and is replaced after it is complete")
class PointsAtItsLatest(Stores):
    Store = PointingStore


class PruningStore(CheckpointStore):
    """Deletes all but the last three of the checkpoints that no caller named."""

    def save(self, name: str | None, path: str | None, **contents: Any) -> str:
        saved = super().save(name, path, **contents)
        automatic = [line for line in self._automatic() if line != saved]
        if name is None and contents["training"] is not None:
            automatic.append(saved)
        self._remember(automatic[-3:])
        for old in automatic[:-3]:
            shutil.rmtree(old, ignore_errors=True)
        return saved

    def _automatic(self) -> list[str]:
        ledger = self.folder / ".automatic"
        return json.loads(ledger.read_text()) if ledger.exists() else []

    def _remember(self, automatic: list[str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / f".automatic-{uuid.uuid4().hex}"
        unfinished.write_text(json.dumps(automatic))
        os.replace(unfinished, self.folder / ".automatic")


@honest("of its own automatic checkpoints the last three are kept")
class KeepsItsLastThree(Stores):
    Store = PruningStore


# Threads


@honest("the writing is done in a thread that save waits for, other calls going on meanwhile")
class WritesInAThread(PlainTrainer):
    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        return await asyncio.to_thread(
            self.store.save,
            name,
            path,
            step=self.step,
            model_config=self._model_facts(),
            hf_config=self.model_config.to_hf(),
            weights=copy.deepcopy(named_tensors(self.model)),
            training=None if weights_only else copy.deepcopy(self._training_state()),
        )


@honest("the writing goes on after save has returned, from a copy; load and close wait for it")
class WritesInTheBackground(PlainTrainer):
    # Shared, for a load by one trainer must wait for what another one writes.
    all_writing: ClassVar[list[Future[str]]] = []
    writing: Future[str] | None = None

    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        self._finish()
        if name is None:
            name = f"step-{self.step}-weights" if weights_only else f"step-{self.step}"
        folder = self.store.folder if path is None else Path(os.path.abspath(path))
        # The path is there when save returns, as is an error about a place that can't be written.
        (folder / name).mkdir(parents=True, exist_ok=True)
        contents = self._held(
            named_tensors(self.model), None if weights_only else self._training_state()
        )
        writer = ThreadPoolExecutor(1)
        self.writing = writer.submit(self._write, name, path, self.step, contents)
        self.all_writing.append(self.writing)
        writer.shutdown(wait=False)
        return str(folder / name)

    async def get_status(self) -> TrainerStatus:
        if self.writing is not None and self.writing.done():
            self._finish()
        return await super().get_status()

    async def load(self, path: str | None = None) -> str:
        self._finish()
        wait(self.all_writing)
        return await super().load(path)

    async def close(self) -> None:
        self._finish()
        await super().close()

    def _held(self, weights: dict[str, Tensor], training: dict[str, Any] | None) -> Contents:
        return copy.deepcopy((weights, training))

    def _write(self, name: str, path: str | None, step: int, contents: Contents) -> str:
        weights, training = contents
        return self.store.save(
            name,
            path,
            step=step,
            model_config=self._model_facts(),
            hf_config=self.model_config.to_hf(),
            weights=weights,
            training=training,
        )

    def _finish(self) -> None:
        """Wait for this trainer's last save, and raise what it raised."""
        writing, self.writing = self.writing, None
        if writing is not None:
            wait([writing])
            self.all_writing.remove(writing)
            writing.result()


# Files


@honest("files have no config.json beside them, and saves are numbered by the time of day")
class WritesNoConfig(Stores):
    Store = OwnFiles


class ShardedFiles(OwnFiles):
    """Three files of weights and an index, as large models have."""

    index = "model.safetensors.index.json"

    def _write(
        self, folder: Path, weights: dict[str, Tensor], training: dict[str, Any] | None
    ) -> None:
        names = list(weights)
        shards = {f"model-{i + 1:05}-of-00003.safetensors": names[i::3] for i in range(3)}
        for file, held in shards.items():
            save_file({name: weights[name] for name in held}, folder / file, {"format": "pt"})
        weight_map = {name: file for file, held in shards.items() for name in held}
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in weights.values())},
            "weight_map": weight_map,
        }
        (folder / self.index).write_text(json.dumps(index))
        if training is not None:
            torch.save(training, folder / TRAINING)

    def _read(self, folder: Path, full: bool) -> Contents:
        files = set(json.loads((folder / self.index).read_text())["weight_map"].values())
        weights: dict[str, Tensor] = {}
        for file in sorted(files):
            weights |= load_file(folder / file)
        return weights, torch.load(folder / TRAINING, weights_only=True) if full else None


@honest("the weights are sharded into several files, found by an index")
class ShardsItsWeights(Stores):
    Store = ShardedFiles


class DistributedFiles(OwnFiles):
    """The tensors of full checkpoints are in files of torch.distributed.checkpoint."""

    def _write(
        self, folder: Path, weights: dict[str, Tensor], training: dict[str, Any] | None
    ) -> None:
        if training is None:
            super()._write(folder, weights, training)
            return
        optimizer = training["optimizer"]
        tensors = {f"weights/{name}": tensor for name, tensor in weights.items()}
        for index, of_one in optimizer["state"].items():
            tensors |= {f"moments/{index}/{key}": tensor for key, tensor in of_one.items()}
        with _ordinary_errors(folder):
            dcp.save(tensors, checkpoint_id=folder, no_dist=True)
        torch.save({**training, "optimizer": {**optimizer, "state": {}}}, folder / TRAINING)

    def _read(self, folder: Path, full: bool) -> Contents:
        if not full:
            return super()._read(folder, full)
        facts = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        # Loaded into the model, tensors would be overwritten one by one until a damaged one is met.
        tensors = {
            place: torch.empty(fact.size, dtype=fact.properties.dtype)
            for place, fact in facts.items()
            if isinstance(fact, TensorStorageMetadata)
        }
        with _ordinary_errors(folder):
            dcp.load(tensors, checkpoint_id=folder, no_dist=True)
        training = torch.load(folder / TRAINING, weights_only=True)
        weights = {}
        for place, tensor in tensors.items():
            kind, _, name = place.partition("/")
            if kind == "weights":
                weights[name] = tensor
            else:
                index, key = name.split("/")
                training["optimizer"]["state"].setdefault(int(index), {})[key] = tensor
        return weights, training


@contextmanager
def _ordinary_errors(folder: Path) -> Iterator[None]:
    """Turn errors that no handler of `Exception` would catch into ones that it does."""
    try:
        yield
    except CheckpointException as error:
        raise CheckpointError(f"{folder}: {error}") from error


@honest("full checkpoints are written by torch.distributed.checkpoint")
class WritesDistributedCheckpoints(Stores):
    Store = DistributedFiles


class OneFile(OwnFiles):
    """A checkpoint is one file that `torch.load(weights_only=True)` reads."""

    def save(self, name: str | None, path: str | None, **contents: Any) -> str:
        target = self._target(name, path, contents["step"], contents["training"])
        target.parent.mkdir(parents=True, exist_ok=True)
        contents["saved_at"] = time.time_ns()
        unfinished = target.with_name(f".saving-{uuid.uuid4().hex}")
        try:
            # By name, torch would refuse one that starts with a dot.
            with unfinished.open("wb") as file:
                torch.save(contents, file)
            _sync(unfinished)
            os.replace(unfinished, target)
            _sync(target.parent)
        finally:
            unfinished.unlink(missing_ok=True)
        return str(target)

    def read(self, path: str | None) -> Checkpoint:
        file = self._latest() if path is None else Path(os.path.abspath(path))
        if not file.exists():
            raise FileNotFoundError(f"there is no checkpoint at {file}")
        contents = self._contents(file)
        if contents is None:
            raise CheckpointError(f"{file} is not a checkpoint, or damaged")
        return Checkpoint(
            str(file), contents["model_config"], contents["weights"], contents["training"]
        )

    def _latest(self) -> Path:
        saved_at = {}
        for file in self.folder.glob("[!.]*"):
            contents = self._contents(file)
            if contents is not None and contents["training"] is not None:
                saved_at[file] = contents["saved_at"]
        if not saved_at:
            raise FileNotFoundError(f"there is no full checkpoint in {self.folder}")
        return max(saved_at, key=saved_at.__getitem__)

    def _contents(self, file: Path) -> dict[str, Any] | None:
        try:
            contents = torch.load(file, weights_only=True)
        except Exception:
            # Which exception a damaged file raises depends on where it is damaged.
            return None
        return contents if isinstance(contents, dict) and "saved_at" in contents else None


@honest("a checkpoint is a single file")
class WritesOneFile(Stores):
    Store = OneFile


# What a load does


@honest("weights alone leave step and schedule where they are")
class KeepsItsStepUnderWeights(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        step = self.step
        path = await super().load(path)
        if not Path(path, TRAINING).exists():
            self.step = step
        return path


@honest("weights alone bring the step along at which they were saved")
class BringsTheStepOfWeights(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        path = await super().load(path)
        self.step = _manifests(Path(path).parent)[Path(path)]["step"]
        return path


@honest("a load builds a new model and optimizer, so that all parameters are other objects")
class LoadsIntoANewModel(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        before = self.model, self.optimizer
        self.model = copy.deepcopy(self.model)
        try:
            return await super().load(path)
        except BaseException:
            self.model, self.optimizer = before
            raise


@honest("weights are bfloat16, and the optimizer moves float32 copies of them")
class KeepsMasters(PlainTrainer):
    masters: dict[str, Tensor]

    def _make_model(self) -> Llama:
        return super()._make_model().bfloat16()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        self.masters = self._rebuilt_masters()
        return self._optimizer_factory(self.masters)

    def _rebuilt_masters(self) -> dict[str, Tensor]:
        return {name: p.detach().float() for name, p in self._trainable().items()}

    def _apply_update(self, learning_rate: float) -> None:
        for name, p in self._trainable().items():
            self.masters[name].grad = None if p.grad is None else p.grad.float()
        super()._apply_update(learning_rate)
        with torch.no_grad():
            for name, p in self._trainable().items():
                p.copy_(self.masters[name])

    def _training_state(self) -> dict[str, Any]:
        return {**super()._training_state(), "masters": self.masters}

    async def load(self, path: str | None = None) -> str:
        path = await super().load(path)
        training = self.store.read(path).training
        self._restore_masters(self._rebuilt_masters() if training is None else training["masters"])
        return path

    def _restore_masters(self, saved: dict[str, Tensor]) -> None:
        for name, master in self.masters.items():
            master.copy_(saved[name])


def altered(
    optimizer_state: dict[str, Any], change: Callable[[str, Tensor], Tensor]
) -> dict[str, Any]:
    """The state of an optimizer, each tensor of it changed."""
    return {
        **optimizer_state,
        "state": {
            index: {key: change(key, tensor) for key, tensor in of_one.items()}
            for index, of_one in optimizer_state["state"].items()
        },
    }


@honest("loaded weights are moved on by the moments that are there (B95)")
class KeepsMomentsUnderWeights(PlainTrainer):
    async def load(self, path: str | None = None) -> str:
        used = self.optimizer
        path = await super().load(path)
        if not Path(path, TRAINING).exists():
            self.optimizer = used
        return path
