"""Living through histories with saves and loads, and remembering what each moment showed.

A state is named by what led to it. Two moments of the same name, one reached without stopping and
one by `load`, must show the same whatever is done next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from forge_conformance.checks.calling import attempt
from forge_conformance.checks.courses import course, probe_logits
from forge_conformance.finding import NotChecked, expect, expect_near, expect_same, identical
from forge_conformance.lab import Lab
from forge_conformance.oracle.tolerance import Allowed
from forge_conformance.scenarios.batches import make_batch
from forge_conformance.scenarios.failures import raising_loss
from forge_conformance.scenarios.histories import Act
from forge_conformance.subject import Subject

State: TypeAlias = tuple[Act | str, ...]
"""The acts that led to a state, oldest first."""


FRESH, AFTER_WEIGHTS = "a fresh trainer", "a trainer that has loaded weights alone"
RESUMED_IN = ("the same trainer", FRESH, "a trainer that has resumed before", AFTER_WEIGHTS)
"""Trainers with different pasts, in the order in which `Teller.resume` can have them."""


@dataclass(frozen=True)
class Shown:
    """What one act showed: numbers by name, and the logits after it."""

    numbers: dict[str, float]
    logits: Tensor


@dataclass
class Save:
    """One save of a history: where, of which state, what was shown, and what came next."""

    path: str
    full: bool
    state: State
    shown: Shown
    following: list[Act] = field(default_factory=list)


class Teller:
    """Lives through histories on trainers of one kind, and compares what comes twice.

    Args:
        variant: Which of the target's variants; empty for its own factory.
        already: Updates that the first trainer has made before.
    """

    def __init__(self, lab: Lab, variant: str, already: int = 0) -> None:
        self.lab = lab
        self.variant = variant
        self.saves: list[Save] = []
        self._memory: dict[tuple[State, Act], Shown] = {}
        self._subject = new_trainer(lab, variant)
        self._state: State = ()
        course(lab, self._subject, already)

    def tell(self, acts: list[Act]) -> list[Shown]:
        """Let all this happen, one after the other, on the first trainer; what it showed."""
        open_saves: list[Save] = []
        told = []
        for act in acts:
            if act.kind in ("save", "save weights"):
                open_saves.append(self._save(full=act.kind == "save"))
            elif act.kind == "load":
                if self.saves:
                    self._load(self.saves[act.number % len(self.saves)], self._subject)
                    open_saves = []
            else:
                for save in open_saves:
                    save.following.append(act)
                told.append(self._happen(act, "the same state"))
        return told

    def full_saves(self) -> list[Save]:
        return [save for save in self.saves if save.full]

    def resume(self, save: Save, whose: str) -> None:
        """Load it, and let happen again what came next, in a trainer with another past.

        Args:
            whose: One of `RESUMED_IN`.
        """
        if whose == FRESH:
            self._subject = new_trainer(self.lab, self.variant)
        if whose == AFTER_WEIGHTS:
            self._load(next(each for each in self.saves if not each.full), self._subject)
        if whose != FRESH:  # loading the last checkpoint is what is done after a failure
            batch = make_batch(self.lab.domain, self.lab.domain.usual_shape)
            attempt(self._subject, batch, raising_loss)
        self._load(save, self._subject)
        for act in save.following:
            self._happen(act, f"the run that never stopped, after load in {whose}")

    def shown_after(self, save: Save, act: Act) -> Shown:
        """What `act` showed in the course that followed on `save`, once it has been resumed."""
        state = save.state
        for before in save.following:
            if before is act:
                break
            state = _after(state, before)
        return self._memory[state, act]

    def _happen(self, act: Act, like: str) -> Shown:
        shown = do(self.lab, self._subject, act)
        earlier = self._memory.setdefault((self._state, act), shown)
        expect_same_shown(self.lab, shown, earlier, f"{act} shows what it showed in {like}")
        self._state = _after(self._state, act)
        return shown

    def _save(self, full: bool) -> Save:
        # Automatic ones may be pruned when others come.
        name = f"save {len(self.saves)}"
        path = self._subject.save(name, str(self.lab.new_folder()), weights_only=not full)
        state = _without_pending(self._state)
        save = Save(path, full, state, _shown(self.lab, self._subject))
        self.saves.append(save)
        return save

    def _load(self, save: Save, subject: Subject) -> None:
        subject.load(save.path)
        # What weights alone do to step, schedule and optimizer is the author's choice: a new state.
        self._state = save.state if save.full else ("weights", *map(str, save.state), str(id(save)))
        if not save.full:
            self._state = (*self._state, str(len(self._memory)))
        what = "logits after load are those of the moment of save"
        expect_same(
            probe_logits(self.lab, subject), save.shown.logits, what, self.lab.unmoved_allowed
        )
        status = subject.get_status()
        if save.full:
            step = save.shown.numbers["step"]
            expect(status.step == step, expected=f"step {step:g} after load", seen=f"{status.step}")
        expect(
            status.accumulated_microbatches == 0,
            expected="0 microbatches after load",
            seen=f"{status.accumulated_microbatches}",
        )


def new_trainer(lab: Lab, variant: str) -> Subject:
    """A new trainer of a variant; of the target's own factory where it has no name."""
    return lab.variant(variant) if variant else lab.fresh()


def do(lab: Lab, subject: Subject, act: Act) -> Shown:
    """Let it happen; the global random streams are set anew, for trainers that draw from these."""
    lab.reseed(act.number)
    batch = make_batch(lab.domain, lab.domain.usual_shape, act.number)
    numbers: dict[str, float] = {}
    if act.kind in ("update", "microbatch"):
        numbers["loss"] = subject.forward_backward(batch).loss
    if act.kind == "update":
        update = subject.optim_step()
        numbers |= {"rate": update.learning_rate, "applied": update.accumulated_microbatches}
    if act.kind == "clear":
        subject.clear_gradients()
    shown = _shown(lab, subject)
    return Shown({**numbers, **shown.numbers}, shown.logits)


def expect_same_shown(lab: Lab, seen: Shown, reference: Shown, what: str) -> None:
    """Break the clause unless two moments show the same."""
    allowed = lab.rerun_allowed
    for name, number in reference.numbers.items():
        error = 0.0 if allowed is None or name != "loss" else allowed.error * abs(number)
        why = "bitwise" if allowed is None else allowed.why
        expect_near(seen.numbers[name], number, f"{what}: {name}", Allowed(error, why))
    expect_same(seen.logits, reference.logits, f"{what}: the logits after it", allowed)


def cold_start_differs(lab: Lab, variant: str, acts: list[Act], warm: list[Shown]) -> bool:
    """Whether a new trainer that loads nothing shows something else in these acts.

    Else nothing of the state can be seen in them, and being equal says nothing.
    """
    subject = new_trainer(lab, variant)
    cold = [do(lab, subject, act) for act in acts]
    return any(
        not identical(mine.logits, theirs.logits) for mine, theirs in zip(cold, warm, strict=True)
    )


def resumed_elsewhere(lab: Lab, path: str, following: list[Act], variant: str) -> list[Shown]:
    """What the acts show in a trainer that loads `path` in a process of its own.

    Raises:
        NotChecked: The process ended without an answer.
    """
    ended = lab.elsewhere.run(_resume, path, following, variant)
    expect(
        not ended.failure,
        expected="load and training to go on in a fresh process",
        seen=ended.failure,
    )
    if ended.value is None:
        raise NotChecked("the process that was to load was killed")
    shown: list[Shown] = ended.value
    return shown


def _resume(lab: Lab, path: str, following: list[Act], variant: str) -> list[Shown]:
    subject = new_trainer(lab, variant)
    subject.load(path)
    return [do(lab, subject, act) for act in following]


def _shown(lab: Lab, subject: Subject) -> Shown:
    status = subject.get_status()
    return Shown({"step": status.step}, probe_logits(lab, subject))


def _after(state: State, act: Act) -> State:
    if act.kind == "forward":
        return state
    if act.kind == "clear":
        return _without_pending(state)
    return (*state, act)


def _without_pending(state: State) -> State:
    """The state once its pending microbatches are dropped; their dropout has been drawn."""
    last = state[-1] if state else None
    pending = isinstance(last, Act) and last.kind == "microbatch"
    return (*state, "cleared") if pending else state
