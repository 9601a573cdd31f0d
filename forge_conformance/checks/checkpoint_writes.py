"""Area checkpoint, failing writes: whatever happens during save, what was complete stays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st
from torch import Tensor

from forge_conformance.checks.comparing import stacked
from forge_conformance.checks.courses import Course, course, expect_same_course, probe_logits
from forge_conformance.checks.default_folder import require_default_folder
from forge_conformance.checks.registry import check
from forge_conformance.contract import Need
from forge_conformance.finding import (
    NotChecked,
    Undecided,
    broken,
    expect,
    expect_same,
    identical,
)
from forge_conformance.lab import Lab
from forge_conformance.observe.crash import Killer, largest_file
from forge_conformance.observe.exported import files_of
from forge_conformance.observe.processes import others_of_session
from forge_conformance.observe.small_disk import SmallDisk
from forge_conformance.oracle.tolerance import apart
from forge_conformance.scenarios.batches import make_batch
from forge_conformance.subject import CallFailed, Subject
from forge_conformance.subject.elsewhere import Ended, send

T = TypeVar("T")


@check(
    "checkpoint.overwrite",
    alone=True,
    share=0.5,
    weights_only=lambda _: st.booleans(),
    then_weights_only=lambda _: st.booleans(),
    place=lambda _: st.integers(0, 99),
    on_small_disk=lambda _: st.booleans(),
)
def a_name_is_replaced_whole_or_not_at_all(
    lab: Lab, weights_only: bool, then_weights_only: bool, place: int, on_small_disk: bool
) -> None:
    """Is the new checkpoint written beside the old one and put in its place at the end? Writing
    over it, or removing it first, loses both when the disk is full."""
    subject = lab.fresh()
    folder = str(lab.new_folder())
    course(lab, subject, 1)
    first = probe_logits(lab, subject)
    saved = subject.save("same", folder, weights_only)
    subject.load(saved)  # what is read of a name may be kept, and be given again later
    course(lab, subject, lab.idle_updates + 1, seed=20)
    second = probe_logits(lab, subject)
    refused = _refuses(subject, "same", folder, then_weights_only)
    separately = subject.save("other", str(lab.new_folder()), then_weights_only)
    whose = "those before, as it refuses to overwrite," if refused else "those of the new state"
    for trainer in (subject, lab.fresh()):
        trainer.load(saved)
        what = f"logits after load of a name that was saved twice are {whose}"
        expected = first if refused else second
        expect_same(probe_logits(lab, trainer), expected, what, lab.unmoved_allowed)
    if not refused:
        _expect_replaced_whole(lab, saved, separately)
    seen = _outcome(lab, _fill_the_disk, weights_only, place, on_small_disk)
    if seen.failed and identical(seen.before, seen.after):
        raise Undecided("training moved nothing between two saves")
    what = "logits after load of a name, after a save over it that a full disk made fail, are those"
    expected, when = (seen.before, "before") if seen.failed else (seen.after, "of the new state")
    expect_same(seen.loaded, expected, f"{what} {when}", lab.unmoved_allowed)


@check("checkpoint.unwritable", alone=True, share=0.25, seed=lambda _: st.integers(0, 99))
def what_cannot_be_saved_raises(lab: Lab, seed: int) -> None:
    """Does `save` swallow an error of the file system, leave a part that `load()` takes for a
    checkpoint, or leave the trainer moved, cleared, or in another mode?"""
    blocked = lab.new_folder() / "a file"
    blocked.write_text("where a folder ought to be\n")
    places = [blocked, blocked / "below"]
    batch = make_batch(lab.domain, lab.domain.usual_shape, seed + 1)
    read_only = lab.new_folder()
    read_only.chmod(0o555)
    if not os.access(read_only, os.W_OK):  # root may write anywhere
        places.append(read_only / "below")

    def training(subject: Subject, fail: bool) -> Tensor:
        subject.forward_backward(batch)
        for place in places if fail else []:
            expect(
                _refuses(subject, "new", str(place), False),
                expected=f"an error from save into {place.name!r}, where nothing can be written",
                seen="a path",
            )
        moments = course(lab, subject, 2, seed)
        return stacked(*[m.loss for m in moments], *[m.step for m in moments], moments[-1].logits)

    failing, without = lab.pair_results(
        lambda subject: training(subject, True), lambda subject: training(subject, False)
    )
    what = "losses, steps and logits of a training after failed saves are those without"
    expect_same(failing, without, what, lab.run_allowed)
    require_default_folder(lab)
    seen = _outcome(lab, _fill_the_disk_anew, seed)
    where = " and ".join(seen.accepted)
    expect(not where, expected=f"an error from save {where}", seen="a path")
    what = "logits after load(), after a save that a full disk made fail, are those saved before"
    expect_same(seen.loaded, seen.saved, what, lab.unmoved_allowed)
    expect_same_course(lab, seen.course, seen.course_without, "training on after a failed save")


@check(
    "checkpoint.crash_safe",
    alone=True,
    share=1.5,
    moment=lambda _: st.integers(0, 199),
    by_time=lambda _: st.booleans(),
    name=lambda _: st.sampled_from(["new", "first", None]),
)
def a_killed_save_loses_nothing_else(
    lab: Lab, moment: int, by_time: bool, name: str | None
) -> None:
    """What is on the disk at each moment of `save`? Write beside, make it durable, and rename at
    the end; write what points to the latest checkpoint last, and as a whole; prune after that."""
    require_default_folder(lab)
    folder = lab.new_folder()
    killed = lab.elsewhere.run(_save_and_die, moment, by_time, name, folder=folder)
    *saves, last = _saves_before(killed, folder)
    paths = [save.path for save in saves]
    after = lab.elsewhere.run(_look_after_a_crash, paths, last.path, folder=folder)
    at = f"{moment / 2:g} % of its time" if by_time else "a change of a file"
    what = f"a process killed in save(name={name!r}) at {at}"
    expect(
        not after.failure,
        expected=f"after {what}, load() and further saves to work",
        seen=after.failure,
    )
    found: _AfterCrash = after.value
    complete = {_kind(save): save.logits for save in saves}
    took_last = _same(lab, found.latest, last.logits)
    if took_last:
        going_on = f"after {what}, the state that was being saved is whole"
        expect_same_course(lab, found.course, found.course_of_last, going_on)
    candidates = [*complete.values(), last.logits]
    expect(
        any(_same(lab, found.latest, logits) for logits in candidates),
        expected=f"after {what}, load() to give one of {len(candidates)} states that were saved",
        seen=f"another one, {min(apart(found.latest, c) for c in candidates):.3g} from the nearest",
    )
    for save, logits in zip(saves, found.by_path, strict=True):
        if logits is None and save.name is None and name is None and took_last:
            continue  # an automatic one may go once a newer one is complete
        overwritten = save.name == name and name is not None
        allowed = [save.logits, *([last.logits] if overwritten else [])]
        if logits is not None and any(_same(lab, logits, each) for each in allowed):
            continue
        if overwritten:
            lab.advise("killed while it overwrites a name, it should leave the old or the new one")
            continue
        broken(
            expected=f"after {what}, {_kind(save)} to load as it was saved",
            seen="it can't be loaded" if logits is None else "another state",
        )
    expect(
        _same(lab, found.newest, found.newest_saved),
        expected=f"after {what}, load() to give a state that is saved then",
        seen="another one",
    )


# Programs for a process of its own


@dataclass(frozen=True)
class _Saved:
    """What a process saved, before it was killed."""

    name: str | None
    path: str
    logits: Tensor


@dataclass(frozen=True)
class _AfterCrash:
    latest: Tensor
    course: Course
    course_of_last: Course
    by_path: list[Tensor | None]
    newest: Tensor
    newest_saved: Tensor


@dataclass(frozen=True)
class _Overwritten:
    """The logits of two states that were saved under one name, and what its load gave then."""

    failed: bool
    before: Tensor
    after: Tensor
    loaded: Tensor


@dataclass(frozen=True)
class _AfterFailures:
    """What saves that had no room led to: where one gave a path, and what came next."""

    accepted: list[str]
    saved: Tensor
    loaded: Tensor
    course: Course
    course_without: Course


def _fill_the_disk(
    lab: Lab, disk: SmallDisk | None, weights_only: bool, place: int, on_small_disk: bool
) -> _Overwritten:
    """Save a name, then save over it with too little room."""
    subject = lab.fresh()
    course(lab, subject, 1)
    before = probe_logits(lab, subject)
    saved = subject.save("same", "here", weights_only)
    subject.load(saved)  # a writer in the background has come to its end then
    course(lab, subject, lab.idle_updates + 1, seed=20)
    after = probe_logits(lab, subject)
    limited = _ways_to_fill(disk)[-1 if on_small_disk else 0]
    with _too_little_room(limited, saved, place, half=bool(place % 2)):
        failed = _refuses(subject, "same", "here", weights_only)
    other = lab.fresh()
    other.load(saved)
    return _Overwritten(failed, before, after, probe_logits(lab, other))


def _fill_the_disk_anew(lab: Lab, disk: SmallDisk | None, place: int) -> _AfterFailures:
    """Save in the default folder, then once more there with too little room."""
    subject = lab.fresh()
    course(lab, subject, 1)
    before = probe_logits(lab, subject)
    saved = subject.save("first")
    course(lab, subject, lab.idle_updates + 1, seed=20)
    checkpoint = subject.save("here", str(Path("elsewhere").absolute()))
    for path in (saved, checkpoint):  # a writer in the background has come to its end then
        subject.load(path)
    batch = make_batch(lab.domain, lab.domain.usual_shape)
    subject.forward_backward(batch)
    accepted = []
    # The disk first: what a failed save leaves behind may make room for the next.
    for limited in reversed(_ways_to_fill(disk)):
        with _too_little_room(limited, saved, place, half=True):
            if not _refuses(subject, "second", None, False):
                accepted.append("on a full disk" if limited else "of a file that grows too large")
    Path("a file").touch()
    if not _refuses(subject, "third", str(Path("a file").absolute()), False):
        accepted.append("below a file")
    if disk is not None:
        # A file that the trainer keeps open may be in the way.
        with suppress(OSError), disk.read_only():
            if not _refuses(subject, "fourth", None, False):
                accepted.append("on a read-only disk")
    going_on = course(lab, subject, 2, seed=40)
    other = lab.fresh()
    other.load()
    loaded = probe_logits(lab, other)
    subject.load()
    if not _same(lab, probe_logits(lab, subject), loaded):
        loaded = probe_logits(lab, subject)
    other.load(checkpoint)
    other.forward_backward(batch)
    without = course(lab, other, 2, seed=40)
    return _AfterFailures(accepted, before, loaded, going_on, without)


def _save_and_die(lab: Lab, moment: int, by_time: bool, name: str | None) -> None:
    """Save twice and a third time, in which the process is killed."""
    killer = Killer()
    subject = lab.fresh()
    course(lab, subject, 1)
    with killer.watching() as moments:
        _save_completely(lab, subject, "first")
    course(lab, subject, 1, seed=20)
    _save_completely(lab, subject, None)
    course(lab, subject, lab.idle_updates + 1, seed=30)
    last = probe_logits(lab, subject)
    # Saved already, where the killed save changes nothing, so that the two can be compared.
    path = subject.save("last", "elsewhere")
    subject.load(path)
    send(_Saved("last", path, last))
    killing: AbstractContextManager[None] = nullcontext()
    # What another process does to files isn't seen here: one that writes them is killed by time.
    if by_time or others_of_session(os.getsid(0)):
        killing = killer.killing_after(moments.seconds * moment / 200)
    elif moments.events:
        killing = killer.killing_at_event(moment % moments.events)
    # A name that exists may be refused.
    with suppress(CallFailed) if name == "first" else nullcontext(), killing:
        subject.save(name)


def _save_completely(lab: Lab, subject: Subject, name: str | None) -> None:
    logits = probe_logits(lab, subject)
    path = subject.save(name)
    subject.load(path)  # a writer in the background has come to its end then
    send(_Saved(name, path, logits))


def _look_after_a_crash(lab: Lab, paths: list[str], path_of_last: str) -> _AfterCrash:
    subject = lab.fresh()
    subject.load()
    latest = probe_logits(lab, subject)
    going_on = course(lab, subject, 2, seed=60)
    subject.load(path_of_last)
    course_of_last = course(lab, subject, 2, seed=60)
    by_path = [_loaded(lab, subject, path) for path in paths]
    course(lab, subject, lab.idle_updates + 1, seed=50)
    newest_saved = probe_logits(lab, subject)
    subject.save("after the crash")
    other = lab.fresh()
    other.load()
    return _AfterCrash(
        latest, going_on, course_of_last, by_path, probe_logits(lab, other), newest_saved
    )


def _loaded(lab: Lab, subject: Subject, path: str) -> Tensor | None:
    try:
        subject.load(path)
    except CallFailed:
        return None
    return probe_logits(lab, subject)


# Parts


def _refuses(subject: Subject, name: str, folder: str | None, weights_only: bool) -> bool:
    """Whether save raises; or a later call does, of a trainer that writes in the background."""
    try:
        subject.save(name, folder, weights_only)
        for _ in range(_LATER_CALLS):
            time.sleep(0.05)
            subject.get_status()
    except CallFailed:
        return True
    return False


_LATER_CALLS = 5


def _expect_replaced_whole(lab: Lab, saved: str, separately: str) -> None:
    """Break the clause unless both checkpoints, of one state, lead to the same."""
    courses = []
    for path in (saved, separately):
        subject = lab.fresh()
        lab.reseed()
        subject.load(path)
        courses.append(course(lab, subject, 2))
    what = "a checkpoint that replaced another one goes on as the same under a new name does"
    expect_same_course(lab, courses[0], courses[1], what)


@contextmanager
def _too_little_room(disk: SmallDisk | None, saved: str, place: int, half: bool) -> Iterator[None]:
    """Leave too little room for a checkpoint like `saved`: half of it, or some of it.

    On a disk of the process's own that is room for all its files; elsewhere, for any one file.
    """
    files = files_of(Path(saved))
    if disk is None:
        sizes = sorted({file.stat().st_size for file in files})
        size = sizes[place % len(sizes)]
        with largest_file(max(size // 2 if half else size - 1, 0)):
            yield
    else:
        with disk.with_room_for(disk.size_on_disk(files) * (50 if half else place) // 100):
            yield


def _ways_to_fill(disk: SmallDisk | None) -> list[SmallDisk | None]:
    """By a limit to each file (None), which only this process keeps, and by a small disk.

    Raises:
        NotChecked: Neither is there.
    """
    here = not others_of_session(os.getsid(0))
    ways = [*([None] if here else []), *([disk] if disk else [])]
    if not ways:
        raise NotChecked("another process writes the files, on a disk that can't be made full")
    return ways


def _outcome(lab: Lab, program: Callable[..., T], *arguments: Any) -> T:
    """What a program returns that makes a disk full; a small one, where the system allows it."""
    folder = lab.new_folder()
    ended = lab.elsewhere.run(program, *arguments, folder=folder, on_small_disk=True)
    expect(
        not ended.failure,
        expected="saves and loads around a save that has no room to work",
        seen=ended.failure,
    )
    if ended.killed:
        raise NotChecked("the process whose disk was to be full was killed")
    outcome: T = ended.value
    return outcome


def _saves_before(killed: Ended, folder: Path) -> list[_Saved]:
    """What was saved before the process died; at last the state that it died saving."""
    expect(
        not killed.failure,
        expected="three saves, one after the other, to work",
        seen=killed.failure,
    )
    saves: list[_Saved] = killed.sent
    if len(saves) < 3:
        raise NotChecked("the process was killed before it was meant to be")
    if not any(Path(folder, save.path).exists() for save in saves[:-1]):
        raise NotChecked("what another process saves isn't seen here", Need.LOCAL_FILES)
    return saves


def _kind(save: _Saved) -> str:
    return f"the checkpoint named {save.name!r}" if save.name else "the automatic checkpoint"


def _same(lab: Lab, left: Tensor, right: Tensor) -> bool:
    allowed = lab.unmoved_allowed
    return identical(left, right) or (allowed is not None and apart(left, right) <= allowed.error)
