"""Area checkpoint: which checkpoint of the default folder `load` takes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from hypothesis import strategies as st
from torch import Tensor

from forge_conformance.checks.courses import probe_logits
from forge_conformance.checks.default_folder import (
    made_here,
    train,
    unique,
    with_number,
    working_folder,
)
from forge_conformance.checks.registry import check
from forge_conformance.contract import Need
from forge_conformance.finding import NotChecked, Undecided, broken, expect, expect_same
from forge_conformance.lab import Lab
from forge_conformance.observe.exported import files_of
from forge_conformance.subject import CallFailed, Subject


@check("checkpoint.latest", alone=True, situation=lambda _: st.sampled_from(sorted(_SITUATIONS)))
def load_finds_what_was_saved_last(lab: Lab, situation: str) -> None:
    """How does `load` without a path choose? By name, 9 comes after 10; file times change in a
    copy; the step isn't what tells after going back; weights alone, unfinished saves and foreign
    files lie beside. What lasts is written down with the checkpoint once it is complete. And
    where there is none, nothing but an exception says so."""
    with working_folder(lab) as folder:
        history = History(lab, folder)
        _SITUATIONS[situation](history)
        # What was loaded last isn't what was saved last.
        history.trainer.load(history.oldest.location)
        found = _load_anew(lab, history.folder)
        if found is not None:
            _expect_latest(lab, "a new trainer's", found, history.latest)
        if situation == _IN_A_PROCESS_TOO and lab.target.source:
            ended = lab.elsewhere.run(_load_anew, history.folder, folder=folder)
            what = f"load() to take {history.latest} in a new process"
            expect(not ended.failure, expected=what, seen=ended.failure)
            if ended.value is not None:
                _expect_latest(lab, "a new process's", ended.value, history.latest)
        _expect_latest(lab, "the same trainer's", _load(lab, history.trainer), history.latest)


# Parts


class Saved(NamedTuple):
    """A full checkpoint, and the state that it holds."""

    location: str
    step: int
    logits: Tensor

    def __str__(self) -> str:
        return f"{Path(self.location).name!r} of step {self.step}"


def _load(lab: Lab, trainer: Subject) -> Saved:
    location = trainer.load()
    return Saved(location, trainer.get_status().step, probe_logits(lab, trainer))


def _load_anew(lab: Lab, folder: Path) -> Saved | None:
    """What a new trainer loads; None if its default folder is another than `folder`, and empty."""
    trainer = made_here(lab)
    try:
        return _load(lab, trainer)
    except CallFailed:
        if Path(trainer.save()).parent == folder:
            raise
        return None


def _expect_latest(lab: Lab, whose: str, loaded: Saved, latest: Saved) -> None:
    expect(
        loaded.step == latest.step,
        expected=f"{whose} load() to take what was saved last: {latest}",
        seen=f"{loaded}",
    )
    what = f"the logits after {whose} load() are those of {latest}, which was saved last"
    expect_same(loaded.logits, latest.logits, what, lab.unmoved_allowed)


class History:
    """A trainer that saves to its default folder, empty at first, and what it has saved so far.

    Attributes:
        saved: The full checkpoints, oldest first.
    """

    def __init__(self, lab: Lab, working_folder: Path) -> None:
        self.lab = lab
        self.working_folder = working_folder
        self.trainer = made_here(lab)
        self.saved: list[Saved] = []
        self._updates = 0
        try:
            self._found_in_nothing: str | None = self.trainer.load()
        except CallFailed:
            self._found_in_nothing = None

    @property
    def latest(self) -> Saved:
        """The last full checkpoint, which `load` ought to take."""
        return self.saved[-1]

    @property
    def oldest(self) -> Saved:
        """The first full checkpoint that is there: automatic ones may have been pruned."""
        there = (each for each in self.saved if Path(each.location).exists())
        return next(there, self.saved[0])

    @property
    def folder(self) -> Path:
        """The default folder."""
        return Path(self.latest.location).parent

    def train(self, updates: int = 1) -> None:
        """Make updates, each on a batch that was never used before."""
        train(self.lab, self.trainer, updates, seed=self._updates)
        self._updates += updates

    def save(self, name: str | None = None) -> None:
        """Make an update and save all; where this is the first, nothing can have been loaded."""
        self.train()
        name = None if name is None else unique(self.working_folder, name)
        self.save_exactly(name)

    def save_exactly(self, name: str | None) -> None:
        """Save all under a name that is in use nowhere else."""
        location = self.trainer.save(name)
        step = self.trainer.get_status().step
        self.saved.append(Saved(location, step, probe_logits(self.lab, self.trainer)))
        if self._found_in_nothing is not None and self._is_ours:
            broken(
                expected="load() to raise where no checkpoint is",
                seen=f"it returned {self._found_in_nothing!r}",
            )

    def settle(self) -> None:
        """Let everything be written, so that files can be changed and copied.

        Raises:
            Undecided: They are in a folder that isn't this trainer's alone.
            NotChecked: They aren't on this machine.
        """
        self.trainer.load(self.latest.location)
        if not Path(self.latest.location).exists():
            raise NotChecked("the checkpoints aren't on this machine", Need.LOCAL_FILES)
        if not self._is_ours:
            raise Undecided("the default folder holds what was there before")

    @property
    def _is_ours(self) -> bool:
        """Whether all that the default folder holds is from after this history began."""
        began = self.working_folder.stat().st_ctime_ns
        return self.folder.is_dir() and all(
            each.stat().st_ctime_ns >= began for each in self.folder.iterdir()
        )


def _more_digits(history: History) -> None:
    """Saves around step 10."""
    history.train(max(0, 8 - history.trainer.get_status().step))
    for _ in range(3):
        history.save()


def _names_in_disorder(history: History) -> None:
    for name in ("z", None, "m", "a"):
        history.save(name)


def _many(history: History) -> None:
    for number in range(12):
        history.save(f"many {number}" if number % 2 else None)
    history.train()
    history.save_exactly(f"大 {unique(history.working_folder, 'last')}")


def _saved_again(history: History) -> None:
    for name in ("first", "second", "third"):
        history.save(name)
    with suppress(CallFailed):  # a trainer may refuse to overwrite
        history.save("first")


def _name_of_a_later_step(history: History) -> None:
    history.save()
    history.settle()
    history.train()
    history.save_exactly(with_number(Path(history.latest.location).name, 1000))
    history.save()


def _weights_later(history: History) -> None:
    history.save()
    history.save()
    history.train()
    history.trainer.save(weights_only=True)
    history.train()
    history.trainer.save(unique(history.working_folder, "weights"), weights_only=True)


def _saved_elsewhere_later(history: History) -> None:
    history.save()
    history.save()
    history.train()
    history.trainer.save("elsewhere", str(history.lab.new_folder()))


def _back_to_an_older_one(history: History) -> None:
    for _ in range(3):
        history.save()
    history.trainer.load(history.oldest.location)
    history.save("another branch")


def _times_reversed(history: History) -> None:
    for name in (None, "z", None, "a"):
        history.save(name)
    history.settle()
    for age, saved in enumerate(reversed(history.saved)):
        path = Path(saved.location)
        time = path.stat().st_mtime_ns - 10**12 * (len(history.saved) - age)
        for each in [*files_of(path), path]:
            os.utime(each, ns=(time, time))


def _foreign_files(history: History) -> None:
    history.save()
    history.save()
    history.settle()
    name = Path(history.latest.location).name
    (history.folder / "notes.txt").write_text("the run with the new data\n")
    (history.folder / with_number(name, 1000)).mkdir()
    (history.folder / (re.sub(r"\d+", "", name) + "backup")).mkdir()


def _emptied_files(history: History) -> None:
    """What a power cut may leave: files whose contents were never written."""
    with _unfinished_save(history) as copy:
        for file in files_of(copy):
            # One that was empty is a mark that all others are complete: it comes last.
            file.write_bytes(b"") if file.stat().st_size else file.unlink()


def _first_files(history: History) -> None:
    """What a save leaves that is killed: the files that it writes first, or the half of one."""
    with _unfinished_save(history) as copy:
        if copy.is_file():
            content = copy.read_bytes()
            copy.write_bytes(content[: len(content) // 2])
            return
        written = {file: file.stat().st_mtime_ns for file in files_of(copy)}
        for file, time in written.items():
            if time == max(written.values()):
                file.unlink()


_SITUATIONS: dict[str, Callable[[History], None]] = {
    "steps of one digit and of two": _more_digits,
    "names in no order": _names_in_disorder,
    "many, and the last one's name isn't ASCII": _many,
    "the first name is saved once more": _saved_again,
    "an older one is named like a later step": _name_of_a_later_step,
    "weights alone were saved later": _weights_later,
    "another folder was saved to later": _saved_elsewhere_later,
    "training has gone back to an older one": _back_to_an_older_one,
    "file times are in reverse": _times_reversed,
    "foreign files and empty folders beside": _foreign_files,
    "a folder of emptied files beside": _emptied_files,
    "a save that was killed beside": _first_files,
}


_IN_A_PROCESS_TOO = "names in no order"


@contextmanager
def _unfinished_save(history: History) -> Iterator[Path]:
    """A copy of the latest checkpoint, under the name of a later step, to be spoiled."""
    history.save()
    history.save()
    history.settle()
    latest = Path(history.latest.location)
    copy = latest.with_name(with_number(latest.name, 1000))
    if latest.is_dir():
        shutil.copytree(latest, copy)
    else:
        shutil.copy2(latest, copy)
    yield copy
