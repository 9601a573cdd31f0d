"""Area checkpoint: damaged checkpoints and those of other models; all is loaded, or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from forge_conformance.checks.courses import Course, course, expect_same_course, probe_logits
from forge_conformance.checks.registry import check
from forge_conformance.contract import Need
from forge_conformance.finding import (
    Broken,
    NotChecked,
    broken,
    expect,
    expect_same,
    identical,
)
from forge_conformance.lab import Lab
from forge_conformance.observe.exported import changed_copy, files_of, read_weights
from forge_conformance.observe.parameters import Tensors
from forge_conformance.scenarios.batches import make_batch
from forge_conformance.subject import CallFailed, Status, TrainerFault

_MOST_FILES = 12
"""Of a checkpoint in more files, so many are damaged, spread evenly."""

_DAMAGES: Mapping[str, Callable[[bytes], bytes | None]] = {
    "cut to half": lambda content: content[: len(content) // 2],
    "without its last byte": lambda content: content[:-1],
    "emptied": lambda content: b"",
    "removed": lambda content: None,
}


@check("checkpoint.damaged", alone=True)
def damage_is_refused_or_undone(lab: Lab) -> None:
    """Read and compare all (every file, a digest of each, names and shapes) before the first
    weight is overwritten, gradients are cleared or the optimizer is rebuilt. What is there in part
    must not pass for a smaller checkpoint: without its optimizer's file, a full one isn't
    weights alone."""
    scene = Scene(lab)
    for saved in (scene.full, scene.weights):
        in_place = not _loads_elsewhere(scene, saved)
        files = _some_files(saved)
        for file in files:
            content = file.read_bytes()
            for damage, spoil in _DAMAGES.items():
                what = f"{saved.kind} with {file.name} {damage}"
                with _spoiled(lab, saved, [file], spoil(content), in_place) as path:
                    scene.expect_all_or_nothing(path, saved, what)
        if Path(saved.location).is_dir():
            what = f"{saved.kind} with all files removed"
            with _spoiled(lab, saved, files_of(Path(saved.location)), None, in_place) as path:
                scene.expect_all_or_nothing(path, saved, what)
        _advise_about_other_content(scene, saved, files, in_place)


@check("checkpoint.foreign", alone=True)
def other_models_checkpoints_are_refused(lab: Lab) -> None:
    """Are names and shapes compared both ways before anything is copied? `strict=False`, a loop
    over the names that are there, and `copy_`, which spreads one row over all, take what isn't
    this model's."""
    scene = Scene(lab)
    with suppress(NotChecked):
        _expect_refusals_of_changed(scene)
    if "other_model" in lab.target.variants:
        other = lab.variant("other_model")
        full, weights = (
            other.save("other", str(lab.new_folder()), weights_only)
            for weights_only in (False, True)
        )
        other.load(weights)  # a writer in the background has come to its end then
        if not _fits(weights, scene.weights.location):
            scene.expect_refusal(full, "a full checkpoint of another model")
            scene.expect_refusal(weights, "weights of another model")
    if not scene.attempts:
        raise NotChecked(
            "no checkpoint of another model can be had: declare Target.variants['other_model'], "
            "which makes this trainer with a model of other parameters, or save weights alone as "
            "safetensors"
        )


# Parts


class Aftermath(NamedTuple):
    """What shows a trainer's state: its status, its logits, and how it trains on."""

    status: Status
    logits: Tensor
    course: Course


@dataclass(frozen=True)
class Saved:
    """A checkpoint, another one of the same trainer, and what follows on a load of the first."""

    location: str
    other: str
    weights_only: bool
    restored: Aftermath

    @property
    def kind(self) -> str:
        """What to call it."""
        return "a weights-only checkpoint" if self.weights_only else "a full checkpoint"


class Scene:
    """A trainer that is brought to one state again and again, with two checkpoints of an earlier.

    In that state it has been trained further than they are, and a microbatch is pending.

    Raises:
        NotChecked: A load doesn't bring it there, or its checkpoints are elsewhere.
    """

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.attempts = 0
        self.trainer = lab.fresh()
        course(lab, self.trainer, 2)
        early = [self._saved(weights_only) for weights_only in (False, True)]
        course(lab, self.trainer, 2, seed=10)
        later = [self._saved(weights_only) for weights_only in (False, True)]
        self.state = later[0]
        self.arrange()
        self.unchanged = self._aftermath()
        self.arrange()
        self._expect_repeats()
        self.full, self.weights = (
            Saved(location, other, weights_only, self._restored(location))
            for location, other, weights_only in zip(early, later, (False, True), strict=True)
        )

    def arrange(self) -> None:
        """Bring the trainer to the state."""
        self.trainer.load(self.state)
        self.lab.reseed()
        self.trainer.forward_backward(make_batch(self.lab.domain, self.lab.domain.usual_shape, 20))

    def expect_all_or_nothing(self, path: str, saved: Saved, what: str) -> None:
        """Break the clause if a load leaves neither the state as it was nor the saved one."""
        self.arrange()
        try:
            self.trainer.load(path)
        except CallFailed as refusal:
            self._expect_unchanged(what, refusal)
            return
        if not saved.weights_only:
            what = f"all that was saved, after load took {what} (it may refuse)"
            self._expect_same(self._aftermath(), saved.restored, what)
            return
        what = f"the logits that were saved, after load took {what} (it may refuse)"
        logits = probe_logits(self.lab, self.trainer)
        expect_same(logits, saved.restored.logits, what, self.lab.unmoved_allowed)

    def expect_refusal(self, path: str, what: str) -> None:
        """Break the clause unless a load is refused and changes nothing."""
        self.attempts += 1
        self.arrange()
        try:
            self.trainer.load(path)
        except CallFailed as refusal:
            self._expect_unchanged(what, refusal)
            return
        broken(expected=f"load to refuse {what}", seen="it was loaded")

    def start_over(self) -> None:
        """Take a new trainer, where the one before may be beyond repair."""
        self.trainer = self.lab.fresh()

    def _saved(self, weights_only: bool) -> str:
        location = self.trainer.save("saved", str(self.lab.new_folder()), weights_only)
        if not Path(location).exists():
            raise NotChecked("what save wrote isn't on this machine", Need.LOCAL_FILES)
        return location

    def _restored(self, location: str) -> Aftermath:
        self.arrange()
        self.trainer.load(location)
        return self._aftermath()

    def _aftermath(self) -> Aftermath:
        lab, trainer = self.lab, self.trainer
        status, logits = trainer.get_status(), probe_logits(lab, trainer)
        return Aftermath(status, logits, course(lab, trainer, 2, seed=30))

    def _expect_repeats(self) -> None:
        try:
            self._expect_same(self._aftermath(), self.unchanged, "as before")
        except Broken as error:
            raise NotChecked(
                "load doesn't bring this trainer back to one state, which checkpoint.resumes "
                f"judges: {error}"
            ) from error

    def _expect_unchanged(self, what: str, refusal: CallFailed) -> None:
        what = f"the state as it was, after load refused {what} ({refusal.error!r:.80})"
        self._expect_same(self._aftermath(), self.unchanged, what)

    def _expect_same(self, seen: Aftermath, reference: Aftermath, what: str) -> None:
        expect(
            seen.status == reference.status,
            expected=f"{what}: {reference.status}",
            seen=f"{seen.status}",
        )
        allowed = self.lab.unmoved_allowed
        expect_same(seen.logits, reference.logits, f"{what}: its logits", allowed)
        expect_same_course(self.lab, seen.course, reference.course, what)


# Parts of damaged


def _some_files(saved: Saved) -> list[Path]:
    files = files_of(Path(saved.location))
    step = max(1, len(files) / _MOST_FILES)
    return [files[int(number * step)] for number in range(min(len(files), _MOST_FILES))]


@contextmanager
def _spoiled(
    lab: Lab, saved: Saved, files: list[Path], content: bytes | None, in_place: bool
) -> Iterator[str]:
    """A copy of the checkpoint in which `files` have other content, or are removed; in its own
    place the checkpoint itself, which is put back afterwards."""
    original = Path(saved.location)
    folder = lab.new_folder()
    copy = _copied(original, folder / original.name)
    _copied(Path(saved.other), folder / "another one beside")
    place = original if in_place else copy
    for file in files:
        spoiled = place / file.relative_to(original)
        # A new file: the old one may still be mapped into memory.
        spoiled.unlink()
        if content is not None:
            spoiled.write_bytes(content)
    try:
        yield str(place)
    finally:
        if in_place:
            for file in files:
                file.unlink(missing_ok=True)
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(copy / file.relative_to(original), file)
        shutil.rmtree(folder, ignore_errors=True)


def _copied(original: Path, copy: Path) -> Path:
    if original.is_dir():
        shutil.copytree(original, copy)
    else:
        shutil.copy2(original, copy)
    return copy


def _loads_elsewhere(scene: Scene, saved: Saved) -> bool:
    """Whether the trainer loads an undamaged copy as it loads the checkpoint itself."""
    original = Path(saved.location)
    copy = _copied(original, scene.lab.new_folder() / original.name)
    scene.arrange()
    try:
        scene.trainer.load(str(copy))
    except CallFailed:
        return False
    return identical(probe_logits(scene.lab, scene.trainer), saved.restored.logits)


def _advise_about_other_content(
    scene: Scene, saved: Saved, files: list[Path], in_place: bool
) -> None:
    """Flip bits, and put in the file of another checkpoint: at the first of each kind that makes
    another state, advise."""
    changes: dict[str, Callable[[Path, bytes], bytes | None]] = {
        "a flipped bit in its middle": lambda file, content: _flipped(content, 1 / 2),
        "a flipped bit near its start": lambda file, content: _flipped(content, 1 / 8),
        "the content that it has in another checkpoint": lambda file, content: _of_other(
            saved, file
        ),
    }
    for change, make in changes.items():
        for file in files:
            content = file.read_bytes()
            spoiled = make(file, content)
            if spoiled is None or spoiled == content:
                continue
            what = f"{saved.kind} with {change} in {file.name}"
            try:
                with _spoiled(scene.lab, saved, [file], spoiled, in_place) as path:
                    scene.expect_all_or_nothing(path, saved, what)
            except (Broken, TrainerFault) as error:
                scene.lab.advise(f"not noticed: {error}")
                scene.start_over()
                break


def _flipped(content: bytes, where: float) -> bytes:
    place = int(len(content) * where)
    return (
        content[:place]
        + bytes(byte ^ 1 for byte in content[place : place + 1])
        + content[place + 1 :]
    )


def _of_other(saved: Saved, file: Path) -> bytes | None:
    """The content of a file in the other checkpoint; None if the file is all that differs, so that
    this would be the other checkpoint itself."""
    here, there = Path(saved.location), Path(saved.other)
    if not any(
        each != file and _content(there / each.relative_to(here)) != each.read_bytes()
        for each in files_of(here)
    ):
        return None
    return _content(there / file.relative_to(here))


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


# Parts of foreign


def _renamed(tensors: Tensors, name: str) -> Tensors:
    return {f"{key}.renamed" if key == name else key: tensor for key, tensor in tensors.items()}


def _dropped(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def _added(tensors: Tensors, name: str) -> Tensors:
    return {**tensors, f"{name}.added": tensors[name].clone()}


def _one_row_more(tensors: Tensors, name: str) -> Tensors:
    return {**tensors, name: torch.cat([tensors[name], tensors[name][:1]])}


def _one_row(tensors: Tensors, name: str) -> Tensors:
    return {**tensors, name: tensors[name][:1].clone()}


def _on_its_side(tensors: Tensors, name: str) -> Tensors:
    return {**tensors, name: tensors[name].T.contiguous()}


_CHANGES: Mapping[str, Callable[[Tensors, str], Tensors]] = {
    "one matrix renamed": _renamed,
    "one matrix missing": _dropped,
    "one matrix more": _added,
    "one row more in a matrix": _one_row_more,
    "one row of a matrix only": _one_row,
    "a matrix on its side": _on_its_side,
}


def _expect_refusals_of_changed(scene: Scene) -> None:
    """Break the clause unless copies of the weights with one matrix changed are refused.

    Raises:
        NotChecked: They can't be read or written.
    """
    saved = Path(scene.weights.location)
    weights = _by_name(read_weights(str(saved)))
    name = _trained_matrix(weights, _by_name(read_weights(scene.weights.other)))
    listed = any(
        file.suffix != ".safetensors" and name.encode() in file.read_bytes()
        for file in files_of(saved)
    )
    for change, make in _CHANGES.items():
        same_shape = _shapes(make(weights, name)) == _shapes(weights)
        # What an index of all tensors doesn't list isn't a part of the checkpoint.
        if same_shape or (make is _added and listed):
            continue
        copy = changed_copy(
            str(saved),
            scene.lab.new_folder(),
            lambda tensors, make=make: make(tensors, name) if name in tensors else tensors,  # type: ignore[misc]
        )
        scene.expect_refusal(copy, f"weights with {change}: {name}")


def _trained_matrix(weights: Tensors, later: Tensors) -> str:
    """A matrix that training moves and that is saved once: the largest of those not square, the
    first of its size.

    Raises:
        NotChecked: There is none.
    """
    matrices = {name: tensor for name, tensor in weights.items() if tensor.dim() == 2}
    alone = [
        name
        for name, tensor in matrices.items()
        if name in later
        and not identical(tensor, later[name])
        and sum(identical(tensor, other) for other in matrices.values()) == 1
    ]
    if not alone:
        raise NotChecked("the exported weights hold no matrix that training moves")
    return max(alone, key=lambda name: (len({*weights[name].shape}), weights[name].numel()))


def _fits(weights: str, own: str) -> bool:
    """Whether exported weights can be read, and have the names and shapes of the trainer's own."""
    with suppress(NotChecked):
        return _shapes(read_weights(weights)) == _shapes(read_weights(own))
    return False


def _by_name(weights: Tensors) -> Tensors:
    """Weights without the names of the files, which come first where there are several."""
    return {name.rpartition(" ")[2]: tensor for name, tensor in weights.items()}


def _shapes(weights: Tensors) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in weights.items()}
