"""Area checkpoint: where checkpoints lie, how long they stay, and what is in the files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import NamedTuple

from hypothesis import strategies as st
from torch import Tensor

from forge_conformance.access import parameters_of
from forge_conformance.checks.courses import Course, course, expect_same_course, probe_logits
from forge_conformance.checks.default_folder import (
    made_here,
    strange_default_folder,
    train,
    unique,
    with_number,
    working_folder,
)
from forge_conformance.checks.registry import check
from forge_conformance.contract import Need
from forge_conformance.finding import (
    NotChecked,
    broken,
    expect,
    expect_same,
)
from forge_conformance.lab import Lab
from forge_conformance.observe.exported import files_of, needing_unpickling, read_weights
from forge_conformance.observe.parameters import Tensors
from forge_conformance.scenarios.batches import make_batch
from forge_conformance.subject import CallFailed, Subject, TrainerFault

_NAMES = ("best", "two wörds 日本-0.001", "n" * 100)
_PATHS = ("runs", "nót/made yet/日本", "p" * 100)


@check(
    "checkpoint.location",
    alone=True,
    share=0.25,
    first=lambda _: st.integers(0, len(_NAMES) - 1),
    relative=lambda _: st.booleans(),
)
def checkpoints_lie_where_they_were_asked_for(lab: Lab, first: int, relative: bool) -> None:
    """Look at how `save` makes the place: `path/name` as given, without a suffix of its own and
    without cutting the name at a dot; folders made with their parents; an absolute path returned.
    Does `load` take and return just that?"""
    places = (True,) if strange_default_folder(lab) else (True, False)
    with lab.working_folder() as folder:
        trainer = made_here(lab)
        counted_from = trainer.get_status().step
        saved = []
        for number, (placed, named, weights_only) in enumerate(
            product(places, (True, False), (True, False))
        ):
            train(lab, trainer, seed=number)
            turn = (first + number) % len(_NAMES)
            parent = "" if relative else folder
            asked = Request(
                unique(folder, f"{number} {_NAMES[turn]}") if named else None,
                str(Path(parent, str(number), _PATHS[turn])) if placed else None,
                weights_only,
            )
            location = trainer.save(*asked)
            _expect_in_place(location, asked, folder)
            if not (placed or named):
                _expect_step_in(location, folder, trainer.get_status().step, counted_from)
            saved.append((location, asked, probe_logits(lab, trainer)))
        for location, asked, logits in saved:
            loaded = trainer.load(location)
            expect(
                _same_place(loaded, location),
                expected=f"load to return {location!r}, which it was given",
                seen=repr(loaded),
            )
            what = f"the logits after load of what {asked} saved are those of its moment"
            expect_same(probe_logits(lab, trainer), logits, what, lab.unmoved_allowed)
        _expect_text_and_try_object(lab, trainer, folder / "as an object")


@check("checkpoint.missing", alone=True)
def a_missing_checkpoint_is_refused(lab: Lab) -> None:
    """Does a path that isn't there end in the latest checkpoint, in one with a similar name, or in
    a silent new start? Does `load` look before it clears gradients, and say which path it was?"""
    with lab.working_folder():
        trainer = made_here(lab)
        by_path = str(lab.new_folder()) if strange_default_folder(lab) else None
        location = trainer.save(path=by_path)
        train(lab, trainer)
        trainer.forward_backward(make_batch(lab.domain, lab.domain.usual_shape))
        for path in _missing_paths(lab, location):
            before, logits = trainer.get_status(), probe_logits(lab, trainer)
            _expect_refusal_that_names(trainer, path)
            status = trainer.get_status()
            expect(status == before, expected=f"{before} after the refusal", seen=f"{status}")
            what = "the logits after load of a missing path are those before"
            expect_same(probe_logits(lab, trainer), logits, what, lab.unmoved_allowed)

    def training(subject: Subject, paths: list[str]) -> Course:
        train(lab, subject)
        subject.forward_backward(make_batch(lab.domain, lab.domain.usual_shape, seed=5))
        for path in paths:
            _expect_refusal_that_names(subject, path)
        return course(lab, subject, 2)

    with suppress(NotChecked):  # without twins what was seen above is all there is to see
        paths = _missing_paths(lab, location)
        alone, tried = lab.pair_results(lambda s: training(s, []), lambda s: training(s, paths))
        what = "a training in which a missing checkpoint was refused is one without"
        expect_same_course(lab, tried, alone, what)


@check("checkpoint.portable_weights")
def weights_are_safetensors_with_usual_names(lab: Lab) -> None:
    """Which files hold the weights, and under which names? A wrapper's prefix, the own names of a
    training library, or a pickle keep other programs from reading them."""
    trainer = lab.trainer
    location = _saved_and_settled(lab, trainer, weights_only=True)
    names = [file.name for file in files_of(Path(location))]
    expect(
        any(name.endswith(".safetensors") for name in names),
        expected="weights alone in *.safetensors",
        seen=f"none among {', '.join(names[:8])}",
    )
    weights = _readable(location)
    unusual = [name for name, t in weights.items() if t.is_floating_point() and not _usual(name)]
    expect(
        not unusual,
        expected="names as Hugging Face models have: model.layers.0.….weight",
        seen=f"{', '.join(unusual[:4])} ({len(unusual)} of {len(weights)})",
    )
    expect(
        any(_EMBEDDING.search(name) for name in weights) and any(map(_LAYER.match, weights)),
        expected="an embedding and numbered layers by their Hugging Face names",
        seen=f"only {', '.join([*weights][:4])}",
    )
    if lab.sees_gradients:
        wanted = sum(p.numel() for p in parameters_of(lab, trainer).tensors.values())
        held = sum(t.numel() for t in weights.values())
        expect(
            held >= wanted,
            expected=f"all {wanted} trainable values in the safetensors",
            seen=f"{held}",
        )


@check("checkpoint.safe_to_read")
def no_file_needs_unrestricted_unpickling(lab: Lab) -> None:
    """Whoever unpickles a file without restriction runs what is in it. Are objects of classes
    saved (a configuration, a schedule, NumPy's random state), where plain tensors and numbers
    would do?"""
    trainer = lab.trainer
    trainer.forward_backward(make_batch(lab.domain, lab.domain.usual_shape))
    trainer.optim_step()
    for weights_only in (False, True):
        location = _saved_and_settled(lab, trainer, weights_only)
        found = needing_unpickling(location)
        kind = "weights-only" if weights_only else "full"
        expect(
            not found,
            expected=f"files of a {kind} checkpoint that a restricted reader takes",
            seen="; ".join(f"{file}: {why}" for file, why in list(found.items())[:4]),
        )


@check("checkpoint.keeps_named", alone=True)
def named_checkpoints_stay(lab: Lab) -> None:
    """Look at what deletes old checkpoints: does it know which ones the caller named, whatever
    their names look like, or does it count all folders?"""
    with working_folder(lab) as folder:
        trainer = made_here(lab)
        for path in (None, str(folder / "given")):
            named = _saved_by_name(lab, trainer, folder, path)
            with suppress(CallFailed):  # a load waits for what is written in the background
                trainer.load([*named][-1])
            trainer.load(next(iter(named)))
            lost = [Path(location).name for location in named if not Path(location).exists()]
            expect(
                not lost,
                expected=f"all {len(named)} named checkpoints still there",
                seen=f"{', '.join(lost)} gone",
            )
            first, logits = next(iter(named.items()))
            trainer.load(first)
            what = "the logits after load of the oldest named checkpoint are those of its moment"
            expect_same(probe_logits(lab, trainer), logits, what, lab.unmoved_allowed)


# Parts of location


class Request(NamedTuple):
    """What a save is asked for."""

    name: str | None
    path: str | None
    weights_only: bool

    def __str__(self) -> str:
        return f"save(name={self.name!r}, path={self.path!r}, weights_only={self.weights_only})"


def _expect_in_place(location: str, asked: Request, folder: Path) -> None:
    """Break the clause unless `location` is a full path that exists, where it was asked for."""
    expect(
        folder.is_dir(),
        expected=f"the working folder still there after {asked}",
        seen="it is gone",
    )
    if "://" in location or not (os.path.exists(location) or any(folder.iterdir())):
        raise NotChecked("what save wrote isn't on this machine", Need.LOCAL_FILES)
    expect(
        os.path.isabs(location) and os.path.exists(location),
        expected=f"the absolute path of a checkpoint that exists, from {asked}",
        seen=repr(location),
    )
    place = _place(location)
    if asked.path is not None:
        wanted = Path(os.path.realpath(asked.path), asked.name or "")
        found = place == wanted or (asked.name is None and place.is_relative_to(wanted))
        expected = f"{wanted}" if asked.name else f"{wanted}, or inside it"
    else:
        found = asked.name in (None, place.name)
        expected = f"the trainer's own folder, named {asked.name!r}"
    expect(found, expected=f"a checkpoint at {expected}", seen=location)


def _expect_step_in(location: str, folder: Path, step: int, counted_from: int) -> None:
    """Break the clause unless the place names the step; or the updates made, where a new trainer's
    step is the number of its next one."""
    place = _place(location)
    below = place.relative_to(folder) if place.is_relative_to(folder) else Path(*place.parts[-2:])
    numbers = {int(digits) for digits in re.findall(r"\d+", str(below))}
    expect(
        bool(numbers & ({step, step - 1} if counted_from else {step})),
        expected=f"a place in the trainer's own folder that names the step, {step}",
        seen=location,
    )


def _expect_text_and_try_object(lab: Lab, trainer: Subject, folder: Path) -> None:
    answer = trainer.call("save", "by text", str(folder))
    expect(
        isinstance(answer, str),
        expected="the full path of a checkpoint as a str",
        seen=type(answer).__name__,
    )
    try:
        trainer.load(trainer.save("by object", folder))
    except TrainerFault as fault:
        lab.advise(f"a pathlib.Path as path isn't taken: {fault}")


def _place(location: str) -> Path:
    """The place itself, which may be a link: its folder's real path, and its name there."""
    path = Path(location)
    return Path(os.path.realpath(path.parent), path.name)


def _same_place(left: str, right: str) -> bool:
    return os.path.realpath(left) == os.path.realpath(right)


# Parts of missing


def _missing_paths(lab: Lab, location: str) -> list[str]:
    """Paths where nothing is: in a folder and in none, and names like that of a checkpoint."""
    folder = lab.new_folder()
    return [
        str(folder / "nowhere"),
        str(folder / "not a folder" / "nowhere"),
        f"{location}-nowhere",
        location[:-1],
    ]


def _expect_refusal_that_names(trainer: Subject, path: str) -> None:
    try:
        loaded = trainer.load(path)
    except CallFailed as fault:
        told = " ".join(_messages(fault.error))
        expect(
            Path(path).name in told,
            expected=f"an exception that names {path!r}, where no checkpoint is",
            seen=str(fault),
        )
        there = os.path.exists(path)
        expect(not there, expected=f"still nothing at {path!r}", seen="something that load made")
        return
    broken(expected=f"load to raise for {path!r}, where nothing is", seen=f"it gave {loaded!r}")


def _messages(error: BaseException | None) -> Iterator[str]:
    """What an exception, and those that led to it, say."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        with suppress(Exception):  # a message may be impossible to make
            yield str(error)
        yield from getattr(error, "__notes__", ())
        error = error.__cause__ or error.__context__


# Parts of the clauses about what is in the files


_LAYER = re.compile(
    r"(model\.|language_model\.)*"
    r"(model\.(decoder\.)?layers|transformer\.(h|blocks|layers)|gpt_neox\.layers"
    r"|backbone\.layers|rwkv\.blocks)\.\d+\."
)
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|embeddings?)\.weight$")


def _usual(name: str) -> bool:
    """Whether a tensor is named like one of a Hugging Face model: in a layer or outside of all."""
    outside = re.fullmatch(r"([A-Za-z]\w*\.)+(weight|bias)", name)
    return bool(_LAYER.match(name) or outside)


def _readable(location: str) -> Tensors:
    """The weights by their names."""
    try:
        weights = read_weights(location)
    except NotChecked as error:
        if find_spec("safetensors") is None:
            raise
        broken(expected="safetensors that can be read", seen=error.reason)
    # Where there are several files, the name of the file comes first.
    return {name.rpartition(" ")[2]: tensor for name, tensor in weights.items()}


def _saved_and_settled(lab: Lab, trainer: Subject, weights_only: bool) -> str:
    """Where a new checkpoint lies, all of it written.

    Raises:
        NotChecked: It isn't on this machine.
    """
    location = trainer.save("readable", str(lab.new_folder()), weights_only)
    if not Path(location).exists():
        raise NotChecked("what save wrote isn't on this machine", Need.LOCAL_FILES)
    trainer.load(location)
    return location


# Parts of keeps_named


def _saved_by_name(lab: Lab, trainer: Subject, folder: Path, path: str | None) -> dict[str, Tensor]:
    """The logits of checkpoints saved by name, others without a name in between, by location."""
    named: dict[str, Tensor] = {}
    probe = None if path is None else str(folder / "probe")
    train(lab, trainer)
    automatic = trainer.save(path=probe)
    if not Path(automatic).exists():
        raise NotChecked("what save wrote isn't on this machine", Need.LOCAL_FILES)
    goes_inside = probe is None or not _same_place(automatic, probe)
    if goes_inside and Path(automatic).is_relative_to(folder):
        with suppress(CallFailed):  # a trainer may keep such names to itself
            location = trainer.save(with_number(Path(automatic).name, 0), path)
            named[location] = probe_logits(lab, trainer)
    for number in range(8):
        if number != _AT_THE_SAME_STEP:
            train(lab, trainer, seed=number)
        location = trainer.save(unique(folder, f"kept {number}"), path, number % 4 == 3)
        named[location] = probe_logits(lab, trainer)
        if goes_inside and number + 1 != _AT_THE_SAME_STEP:
            train(lab, trainer, seed=number)
            trainer.save(path=path)
    another = made_here(lab)
    location = another.save(unique(folder, "kept by another trainer"), path)
    named[location] = probe_logits(lab, another)
    return named


_AT_THE_SAME_STEP = 6
"""The named checkpoint that is of the same step as the one before it."""
