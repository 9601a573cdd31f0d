"""What a check works with: a shared trainer, twins of it, and what is known about it."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from forge.api import TextTrainBatch
from forge_conformance.access import parameters_of, probe
from forge_conformance.contract import Need
from forge_conformance.finding import NotChecked, identical
from forge_conformance.observe.graph import Graph
from forge_conformance.observe.witness import Witness
from forge_conformance.oracle import tolerance
from forge_conformance.oracle.tolerance import Arithmetic
from forge_conformance.scenarios.batches import make_batch, make_ids
from forge_conformance.scenarios.domain import Domain
from forge_conformance.scenarios.losses import mean_nll
from forge_conformance.subject import (
    Journal,
    Loop,
    Program,
    Ranks,
    Subject,
    TrainerFault,
)
from forge_conformance.subject.building import Builder
from forge_conformance.subject.elsewhere import Elsewhere
from forge_conformance.target import Target
from forge_conformance.twins import TwinSource, find_twin_source

T = TypeVar("T")

_USES_OF_A_PAIR = 16
_LONGEST_WARM_UP = 8
_UPDATES_UNTIL_ALL_TAKES_PART = 4
_LARGEST_VOCABULARY = 2**31


class Lab:
    """The trainers of one run, and the facts about them that checks share.

    `trainer` is one trainer that all checks train further, so that nothing may be assumed about
    its history; `twins` are fresh ones that agree with each other. A check that breaks a clause
    leaves them behind: the next one gets new ones.
    """

    def __init__(
        self,
        target: Target,
        timeout: float,
        against: Target | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.target = target
        self.against = against
        self.ranks = ranks or Ranks()
        self.loop = Loop(timeout, self.ranks.last_words)
        self.journal = Journal()
        self.builder = Builder(self.loop, self.journal, self.ranks)
        self.advice: list[str] = []
        self._shared: Subject | None = None
        self._scouting: Subject | None = None
        self._pair: list[Subject] | None = None
        self._pair_uses = 0
        self._twins: TwinSource | NotChecked | None = None
        self._temporary = tempfile.TemporaryDirectory(prefix="forge-conformance-")
        self._folder = Path(self.ranks.from_first("a folder", lambda: self._temporary.name))
        self._folders = 0
        self._found: dict[Callable[[Lab], Any], Any] = {}

    # Trainers

    @property
    def trainer(self) -> Subject:
        """The shared trainer, with nothing accumulated."""
        self.build_first()
        assert self._shared is not None
        self._shared.clear_gradients()
        return self._shared

    def fresh(self) -> Subject:
        """A new trainer in the factory's initial state.

        Raises:
            TargetError: The factory raises, hangs, or gives None.
        """
        return self.builder.build("the factory", self.target.factory)

    def variant(self, name: str) -> Subject:
        """A new trainer of the declared variant `name`."""
        return self.builder.build(f"the variant {name!r}", self.target.variants[name])

    def other(self) -> Subject:
        """A new trainer of the second target, which the first one is compared with.

        Raises:
            NotChecked: None is named.
        """
        if self.against is None:
            raise NotChecked("no second trainer is named", Need.SECOND_TRAINER)
        return self.builder.build(f"the factory of {self.against.name}", self.against.factory)

    def twins(self, count: int = 2) -> list[Subject]:
        """New trainers in equal states.

        Raises:
            NotChecked: Neither the factory nor `save` and `load` makes equal trainers.
        """
        return self._twin_source.make(count)

    def twin_results(self, *programs: Program[T]) -> list[T]:
        """What each program shows, each on a new twin and with the same random streams."""
        return self.run_each(self.twins(len(programs)), programs)

    def pair_results(self, left: Program[T], right: Program[T]) -> list[T]:
        """What two programs show that ought to leave equal states behind.

        The pair of twins is used again until a check breaks, for trainers that are costly to
        build: programs find them with a history, but the same one.
        """
        if self._pair is None or self._pair_uses == _USES_OF_A_PAIR:
            self._retire_pair()
            self._pair = self.twins(2)
        self._pair_uses += 1
        try:
            return self.run_each(self._pair, (left, right))
        except Exception:
            self._retire_pair()
            raise

    def run_each(self, subjects: list[Subject], programs: Sequence[Program[T]]) -> list[T]:
        """What each program shows on its trainer, all with the same random streams."""
        results = []
        for subject, program in zip(subjects, programs, strict=True):
            self.reseed()
            results.append(program(subject))
        return results

    def build_first(self) -> None:
        """Build the shared trainer.

        Raises:
            TargetError: It can't be built.
        """
        if self._shared is None:
            self._shared = self.fresh()

    @contextmanager
    def guests(self) -> Iterator[Callable[[], Awaitable[Any]]]:
        """A maker of trainers for an author's own test, closed at its end."""
        made: list[Subject] = []

        async def make() -> Any:
            made.append(await self.builder.build_inside(self.target.factory))
            return made[-1].trainer

        try:
            yield make
        finally:
            for subject in made:
                self.builder.retire(subject)

    def discard(self) -> None:
        """Leave the trainers behind: they may be in a state that fails innocent checks."""
        if self._shared is not None:
            self.builder.retire(self._shared)
            self._shared = None
        if self._scouting is not None:
            self.builder.retire(self._scouting)
            self._scouting = None
        self._retire_pair()

    def close(self) -> None:
        """End the run: the trainers, the loop, and the files that were saved."""
        if not self.ranks.lost:
            self.discard()
            for subject in list(self.builder.alive):
                self.builder.retire(subject)
        self.loop.close()
        self._temporary.cleanup()

    def retire_others(self) -> None:
        """Close the trainers that no check will use again."""
        kept = [self._shared, self._scouting, *(self._pair or [])]
        for subject in [each for each in self.builder.alive if each not in kept]:
            self.builder.retire(subject)

    # Facts, each found once; the trainer that shows them serves for nothing else

    @property
    def _scout(self) -> Subject:
        if self._scouting is None:
            self._scouting = self.fresh()
        return self._scouting

    @cached_property
    def domain(self) -> Domain:
        """The inputs that the trainer takes, by its configuration and the author's declaration."""
        config = self._scout.get_config()
        model_config = getattr(config, "model_config", None)
        values = model_config if isinstance(model_config, Mapping) else {}
        vocab_size = values.get("vocab_size")
        if (
            not isinstance(vocab_size, int)
            or isinstance(vocab_size, bool)
            or not 0 < vocab_size < _LARGEST_VOCABULARY
        ):
            fault = TrainerFault(
                "get_config", f"tells vocab_size = {vocab_size!r:.80}, not the size of a vocabulary"
            )
            fault.root = "config.fields"
            raise fault
        longest = values.get("max_seq_len")
        return Domain(
            vocab_size=vocab_size,
            max_seq_len=longest if isinstance(longest, int) and longest > 0 else None,
            declared_shapes=self.target.shapes,
        )

    @cached_property
    def arithmetic(self) -> Arithmetic:
        """What the trainer computes with: as found, and what it tells of depth and device."""
        config = self._scout.get_config()
        values = getattr(config, "model_config", {})
        told = values.get("num_layers") if isinstance(values, Mapping) else None
        num_layers = told if isinstance(told, int) and told > 0 else 2
        return Arithmetic(self.dtype, num_layers, self.device)

    @cached_property
    def device(self) -> str:
        """The kind of device that the trainer tells, where there is one here; else "cpu"."""
        parallelism = getattr(self._scout.get_config(), "parallelism", None)
        with suppress(Exception):  # whatever is told may be junk
            device = torch.device(getattr(parallelism, "device", "cpu"))
            torch.empty(1, device=device)
            return "cpu" if device.type == "meta" else device.type
        return "cpu"

    @cached_property
    def graph(self) -> Graph | None:
        """What the autograd graph of the logits shows; None where the loss runs elsewhere."""
        return probe(self, self._scout)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The lowest precision that takes part in the forward pass."""
        return self.dtype_of(self._scout, self.target)

    def dtype_of(self, subject: Subject, target: Target) -> torch.dtype:
        """The same of a trainer, which makes an update to show it unless it is declared."""
        if target.compute_dtype is not None:
            return target.compute_dtype
        batch = make_batch(self.domain, self.domain.usual_shape)
        subject.forward_backward(batch)
        subject.optim_step()
        looks = [subject.forward(batch.input_ids) for _ in range(2)]
        found = {logits.dtype for logits in looks}
        for narrow in (torch.bfloat16, torch.float16):
            if all(identical(logits.to(narrow).to(logits.dtype), logits) for logits in looks):
                found.add(narrow)
        graph = probe(self, subject)
        if graph is not None:
            found |= graph.dtypes
        return max(found, key=lambda dtype: torch.finfo(dtype).eps)

    @cached_property
    def stochastic(self) -> bool:
        """Whether the same call on the same batch sees other logits: dropout and its like.

        Where the loss runs in this process the logits themselves tell; elsewhere the loss. After
        some updates they are asked again: at first a branch with dropout may add nothing yet.
        """
        subject = self.fresh()
        batch = make_batch(self.domain, self.domain.usual_shape)
        if self._varies(subject, batch):
            return True
        with suppress(NotChecked):
            for _ in range(self.idle_updates + _UPDATES_UNTIL_ALL_TAKES_PART):
                subject.forward_backward(batch)
                subject.optim_step()
        return self._varies(subject, batch)

    def _varies(self, subject: Subject, batch: TextTrainBatch) -> bool:
        witnesses = [Witness(mean_nll) for _ in range(2)]
        losses = []
        for witness in witnesses:
            losses.append(subject.forward_backward(batch, witness).loss)
            subject.clear_gradients()
        first, second = (witness.logits for witness in witnesses)
        if first is None or second is None:
            return losses[0] != losses[1]
        return tolerance.apart(first, second) > self.logits_allowed.error

    @property
    def logits_allowed(self) -> tolerance.Allowed:
        """How far apart logits may be that ought to be equal, by another order of arithmetic."""
        return tolerance.logits_error(self.arithmetic)

    @property
    def gradients_allowed(self) -> tolerance.Allowed:
        """The same for the gradient of one parameter."""
        return tolerance.gradients_error(self.arithmetic)

    @property
    def repeats(self) -> bool:
        """Whether twins that run the same program agree bitwise."""
        return self._twin_source.bitwise

    @property
    def run_allowed(self) -> tolerance.Allowed | None:
        """How far apart the logits of two equal runs may be; None: they are equal bitwise."""
        return None if self.repeats else self.logits_allowed

    @property
    def rerun_allowed(self) -> tolerance.Allowed | None:
        """The same, where no twins can be had: within the tolerance of the dtype then."""
        try:
            return self.run_allowed
        except NotChecked:
            return self.logits_allowed

    @cached_property
    def unmoved_allowed(self) -> tolerance.Allowed | None:
        """How far apart logits may be between which nothing has changed; None: equal bitwise."""
        ids = make_ids(self.domain, self.domain.usual_shape)
        repeats = identical(self._scout.forward(ids), self._scout.forward(ids))
        return None if repeats else self.logits_allowed

    @cached_property
    def sees_gradients(self) -> bool:
        """Whether parameters and accumulated gradients can be read in this process."""
        try:
            parameters_of(self, self._scout)
        except NotChecked:
            return False
        return True

    @cached_property
    def sees_all_parameters(self) -> bool:
        """Whether the parameters found are all there are: declared, or all leaves of a graph
        without gaps."""
        if self.target.parameters is not None or self.graph is None:
            return True
        found = len(parameters_of(self, self._scout).tensors) if self.sees_gradients else 0
        return self.graph.whole and found == len(self.graph.leaves)

    @cached_property
    def idle_updates(self) -> int:
        """How many updates a new trainer makes before one moves its logits: warm-up from 0.

        Raises:
            NotChecked: Its first updates all leave the logits as they were.
        """
        subject = self.fresh()
        batch = make_batch(self.domain, self.domain.usual_shape)
        before = subject.forward(batch.input_ids)
        for idle in range(_LONGEST_WARM_UP):
            subject.forward_backward(batch)
            subject.optim_step()
            if not identical(subject.forward(batch.input_ids), before):
                return idle
        raise NotChecked(f"the first {_LONGEST_WARM_UP} updates of a new trainer move nothing")

    @property
    def _twin_source(self) -> TwinSource:
        if self._twins is None:
            self._twins = find_twin_source(self)
        if isinstance(self._twins, NotChecked):
            raise self._twins
        return self._twins

    def _retire_pair(self) -> None:
        for twin in self._pair or []:
            self.builder.retire(twin)
        self._pair = None
        self._pair_uses = 0

    # Small services

    def once(self, find: Callable[[Lab], T]) -> T:
        """What `find` gives for this lab, found when it is first asked for."""
        if find not in self._found:
            self._found[find] = find(self)
        found: T = self._found[find]
        return found

    def reseed(self, seed: int = 0) -> None:
        """Set the global random streams, for trainers that draw from them."""
        random.seed(seed)
        torch.manual_seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed)

    def new_folder(self) -> Path:
        """A new empty folder for checkpoints, gone when the run ends."""
        self._folders += 1
        folder = self._folder / str(self._folders)
        folder.mkdir(exist_ok=self.ranks.several)
        return folder

    @contextmanager
    def working_folder(self) -> Iterator[Path]:
        """A new empty folder, which the process works in meanwhile: default folders lie there."""
        before = Path.cwd()
        folder = self.new_folder()
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)

    @cached_property
    def elsewhere(self) -> Elsewhere:
        """Processes of their own, each a world of one rank.

        Raises:
            NotChecked: Another process can't make this trainer.
        """
        return Elsewhere(self.target.source, self.loop.timeout, self.new_folder())

    def advise(self, text: str) -> None:
        """Note a SHOULD that a MUST clause contains and that the trainer doesn't keep."""
        if text not in self.advice:
            self.advice.append(text)
