"""A folder of checkpoints: each is written whole or not at all, and read whole or not at all.

A checkpoint is a folder of

- `model.safetensors` and `config.json`, which `transformers` reads without this package;
- `training.pt`, in a full checkpoint: what else is needed to go on, as plain tensors and numbers;
- whatever files more the trainer writes;
- `manifest.json`: what kind it is, and the size and digest of every other file. It is what makes
  a folder a checkpoint.

A save writes into a temporary folder beside the place and renames it at the end, so a checkpoint
that is there is complete; a save that was killed leaves a folder `.saving-…`, which may be deleted.
A load checks every digest before it hands anything out.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
TRAINING = "training.pt"

_SAVING = ".saving-"
_REPLACED = ".replaced-"


class CheckpointError(Exception):
    """A checkpoint can't be written, is damaged, or is of another model; the message says which."""


@dataclass(frozen=True)
class Checkpoint:
    """What was read, complete and undamaged.

    Args:
        path: Its full path.
        model_config: The `model_config` of the trainer that saved it.
        weights: The weights by name, on the CPU; of shared ones the first name only.
        training: What a full checkpoint holds beside the weights; None if it is weights-only.
    """

    path: str
    model_config: dict[str, Any]
    weights: dict[str, Tensor]
    training: dict[str, Any] | None


class Saving:
    """A checkpoint that is being written; leaving the block unfinished leaves nothing of it.

    Args:
        target: Its full path.
        trainer: The kind of trainer.
        step: The optimizer steps it has taken.

    Attributes:
        folder: Where to write files of one's own, until `finish`.
    """

    def __init__(self, target: Path, trainer: str, step: int) -> None:
        self.target = target
        self.folder = target.parent / f"{_SAVING}{uuid.uuid4().hex}"
        self._trainer = trainer
        self._step = step
        with self._telling():
            self.folder.mkdir(parents=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def finish(
        self,
        model_config: dict[str, Any],
        hf_config: dict[str, Any],
        weights: dict[str, Tensor],
        training: dict[str, Any] | None,
    ) -> str:
        """Write what every checkpoint has, move it into its place, and return its full path.

        Raises:
            CheckpointError: It couldn't be written. What was there before still is.
        """
        with self._telling():
            save_file(weights, self.folder / WEIGHTS, metadata={"format": "pt"})
            (self.folder / CONFIG).write_text(json.dumps(hf_config, indent=2) + "\n")
            if training is not None:
                torch.save(training, self.folder / TRAINING)
            others = _manifests(self.target.parent).values()
            manifest = {
                "trainer": self._trainer,
                "kind": "weights" if training is None else "full",
                "sequence": 1 + max((other["sequence"] for other in others), default=0),
                "step": self._step,
                "model_config": model_config,
                "files": {
                    file.relative_to(self.folder).as_posix(): _digest(file)
                    for file in sorted(self.folder.rglob("*"))
                    if file.is_file()
                },
            }
            _write_manifest(self.folder, manifest)
            for file in [*self.folder.rglob("*"), self.folder]:
                _sync(file)
            _move_into_place(self.folder, self.target)
        return str(self.target)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise CheckpointError(
                f"could not save {self.target}: {error}; what was there before is unchanged, "
                "so free space or choose another folder, and save again"
            ) from error


class CheckpointStore:
    """Saves and reads the checkpoints of one kind of trainer.

    Args:
        folder: The default folder; made when it is first needed.
        trainer: The kind of trainer. Full checkpoints of other kinds are refused; weights-only
            ones are anybody's.
    """

    def __init__(self, folder: str | os.PathLike[str], trainer: str) -> None:
        self.folder = Path(os.path.abspath(folder))
        self.trainer = trainer

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
        """Write a checkpoint at `path/name` and return its full path.

        Without `path` it goes to the default folder; without `name` it is named after the step. A
        checkpoint of that name is replaced whole.

        Raises:
            ValueError: The name isn't that of a file.
            CheckpointError: It couldn't be written. What was there before still is.
        """
        with self.begin(name, path, step=step, weights_only=training is None) as saving:
            return saving.finish(model_config, hf_config, weights, training)

    def begin(self, name: str | None, path: str | None, *, step: int, weights_only: bool) -> Saving:
        """Begin to `save` a checkpoint of which the caller writes files of its own.

        Raises:
            ValueError: The name isn't that of a file.
            CheckpointError: There is no place for it.
        """
        if name is None:
            name = f"step-{step}-weights" if weights_only else f"step-{step}"
        if not name or Path(name).name != name or name.startswith("."):
            raise ValueError(
                f"{name!r} can't name a checkpoint: it must be one file name that doesn't start "
                "with a dot; give the folder as path="
            )
        folder = self.folder if path is None else Path(os.path.abspath(path))
        return Saving(folder / name, self.trainer, step)

    def read(self, path: str | None) -> Checkpoint:
        """Read the checkpoint at `path`, or the default folder's most recently saved full one.

        Raises:
            FileNotFoundError: There is none.
            CheckpointError: It is damaged, no checkpoint at all, or another kind of trainer's.
        """
        folder = self._latest() if path is None else Path(os.path.abspath(path))
        _finish_replacing(folder)
        if not folder.exists():
            raise FileNotFoundError(f"there is no checkpoint at {folder}")
        manifest = _read_manifest(folder)
        for name, digest in manifest["files"].items():
            if not (folder / name).is_file():
                raise CheckpointError(f"the checkpoint {folder} is damaged: {name} is missing")
            if _digest(folder / name) != digest:
                raise CheckpointError(f"the checkpoint {folder} is damaged: {name} was changed")
        training = None
        if manifest["kind"] == "full":
            if manifest["trainer"] != self.trainer:
                raise CheckpointError(
                    f"{folder} is a full checkpoint of a {manifest['trainer']} trainer, this is a "
                    f"{self.trainer} one; save it with weights_only=True to carry weights over"
                )
            training = torch.load(folder / TRAINING, map_location="cpu", weights_only=True)
        weights = load_file(folder / WEIGHTS)
        return Checkpoint(str(folder), manifest["model_config"], weights, training)

    def _latest(self) -> Path:
        for replaced in self.folder.glob(f"{_REPLACED}*"):
            _finish_replacing(replaced.with_name(replaced.name.removeprefix(_REPLACED)))
        # Saves are numbered: neither names, steps nor file times tell which came last.
        sequences = {
            path: manifest["sequence"]
            for path, manifest in _manifests(self.folder).items()
            if (manifest["kind"], manifest["trainer"]) == ("full", self.trainer)
        }
        if not sequences:
            raise FileNotFoundError(
                f"there is no full checkpoint in {self.folder}; save one, or give a path"
            )
        return max(sequences, key=sequences.__getitem__)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and persistent buffers; shared ones once, by their first name."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), (name, tensor))
    return {name: tensor.detach() for name, tensor in tensors.values()}


def check_same_model(
    checkpoint: Checkpoint, model_config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Refuse a checkpoint whose weights aren't those of this model.

    Raises:
        CheckpointError: Names, shapes, dtypes or facts of the model differ; the message says how.
    """
    saved = checkpoint.weights
    differences = [f"{name} is missing" for name in tensors.keys() - saved.keys()]
    differences += [f"{name} is unexpected" for name in saved.keys() - tensors.keys()]
    for name in tensors.keys() & saved.keys():
        for fact in ("shape", "dtype"):
            there, here = getattr(saved[name], fact), getattr(tensors[name], fact)
            if there != here:
                differences.append(f"{name} has {fact} {there} there, {here} here")
    for key in model_config.keys() & checkpoint.model_config.keys():
        if model_config[key] != checkpoint.model_config[key]:
            differences.append(
                f"{key} is {checkpoint.model_config[key]} there, {model_config[key]} here"
            )
    if differences:
        raise CheckpointError(
            f"the checkpoint {checkpoint.path} is of another model: "
            + "; ".join(sorted(differences)[:5])
            + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
        )


def _move_into_place(finished: Path, target: Path) -> None:
    """Rename `finished` to `target`; a checkpoint that is there makes way first.

    No portable call exchanges two folders. Killed between the two renames, the older one is found
    under the name it made way to, and `_finish_replacing` puts it back.
    """
    _finish_replacing(target)
    replaced = target.with_name(_REPLACED + target.name)
    if not (target / MANIFEST).is_file():
        os.replace(finished, target)
    else:
        os.replace(target, replaced)
        try:
            os.replace(finished, target)
        except BaseException:
            os.replace(replaced, target)
            raise
    _sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _finish_replacing(target: Path) -> None:
    """Settle what a killed save left: the older one goes back, or away if the newer is there."""
    replaced = target.with_name(_REPLACED + target.name)
    if not replaced.exists():
        return
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        os.replace(replaced, target)


def _manifests(folder: Path) -> dict[Path, dict[str, Any]]:
    """The checkpoints in `folder` with their manifests; whatever else is there is passed over."""
    found = {}
    for path in folder.glob(f"[!.]*/{MANIFEST}"):
        try:
            found[path.parent] = _read_manifest(path.parent)
        except CheckpointError:
            continue
    return found


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    (folder / MANIFEST).write_text(
        json.dumps({"digest": _digest_of(manifest), **manifest}, indent=2) + "\n"
    )


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        digest = manifest.pop("digest")
    except OSError as error:
        raise CheckpointError(f"{folder} is not a checkpoint, or damaged: {error}") from error
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {MANIFEST}: {error}") from error
    if digest != _digest_of(manifest):
        raise CheckpointError(f"the checkpoint {folder} is damaged: {MANIFEST} was changed")
    return dict(manifest)


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
