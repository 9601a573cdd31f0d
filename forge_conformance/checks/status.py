"""Area status: the step and the pending microbatches, against a small model of the bookkeeping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from forge.api import TextTrainBatch
from forge_conformance.access import parameters_of
from forge_conformance.checks.comparing import stacked
from forge_conformance.checks.registry import check
from forge_conformance.finding import NotChecked, expect, expect_same, identical
from forge_conformance.lab import Lab
from forge_conformance.observe.parameters import Tensors
from forge_conformance.scenarios.batches import batches, make_batch
from forge_conformance.scenarios.domain import Domain
from forge_conformance.scenarios.losses import mean_nll
from forge_conformance.subject import CallFailed, Status, Subject

OPERATIONS = (
    "forward_backward",
    "forward_backward with a loss",
    "forward_backward that fails",
    "forward_backward that keeps nothing",
    "optim_step",
    "clear_gradients",
    "forward",
    "get_config",
    "save",
    "save weights",
    "load",
    "load weights",
)
_TOUR = (
    *("forward_backward", "forward_backward with a loss", "optim_step"),
    *("forward_backward", "clear_gradients", "forward_backward", "save", "optim_step"),
    *("forward_backward", "forward_backward that fails", "forward_backward that keeps nothing"),
    *(
        "load",
        "forward_backward",
        "forward",
        "get_config",
        *("forward_backward",) * 8,
        "optim_step",
    ),
    *("save weights", "forward_backward", "load weights", "forward_backward", "optim_step"),
)
"""A program that uses everything where it matters; tried before all others."""


def programs() -> Callable[[Domain], st.SearchStrategy[list[str]]]:
    """Sequences of operations; `_TOUR` in place of none at all."""
    drawn = st.lists(st.sampled_from(OPERATIONS), max_size=8)
    return lambda _: drawn.map(lambda operations: operations or list(_TOUR))


@check("status.counts", program=programs())
def pending_microbatches_are_counted(lab: Lab, program: list[str]) -> None:
    """Count in `forward_backward` where it has succeeded, whatever the loss and the kept tokens,
    and set to 0 in `optim_step`, `clear_gradients` and `load` alike. Is a microbatch counted that
    failed, or a batch by its rows?"""
    for moment in _follow(lab, program):
        expect(
            moment.seen.accumulated_microbatches == moment.model.pending,
            expected=f"accumulated_microbatches = {moment.model.pending} after {moment.so_far}",
            seen=f"{moment.seen.accumulated_microbatches}",
        )


@check("status.step", program=programs())
def step_rises_with_each_update_only(lab: Lab, program: list[str]) -> None:
    """The step counts updates: not microbatches, not tokens, not saves. A full checkpoint holds
    the step of its moment: is it kept, by `load` brought back, and neither rounded nor multiplied
    by the microbatches?"""
    for moment in _follow(lab, program):
        expect(
            moment.seen.step == moment.model.step,
            expected=f"step = {moment.model.step} after {moment.so_far} (before: {moment.before})",
            seen=f"{moment.seen.step}",
        )


@check("status.read_only", batch=batches())
def asking_changes_nothing(lab: Lab, batch: TextTrainBatch) -> None:
    """Does one of `get_status`, `get_config`, `get_tokenizer` reset or advance something: a count
    read and cleared, a random stream used, gradients dropped, the model in another mode?"""
    _expect_untouched(lab, batch)

    def training(subject: Subject, times: int) -> Tensor:
        shown: list[Tensor | float] = []
        for _ in range(2):
            _ask(subject, times)
            shown.append(subject.forward_backward(batch).loss)
            _ask(subject, times)
            shown.append(subject.forward_backward(batch, mean_nll).loss)
            _ask(subject, times)
            update = subject.optim_step()
            shown += [update.step, update.learning_rate, update.accumulated_microbatches]
        shown.append(subject.forward(batch.input_ids))
        return stacked(*shown)

    with suppress(NotChecked):  # without twins what was seen above is all there is to see
        alone, asked = lab.pair_results(lambda s: training(s, 0), lambda s: training(s, 1))
        expect_same(
            asked,
            alone,
            "losses, updates and logits of a run with get_* called are those of one without",
            lab.run_allowed,
        )


@dataclass
class _Model:
    """What the status must be; `saved` is the last full checkpoint and its step."""

    step: int
    pending: int = 0
    saved: tuple[str, int] | None = None
    saved_weights: str | None = None


class _Moment(NamedTuple):
    model: _Model
    seen: Status
    before: int
    so_far: str


@dataclass
class _Run:
    lab: Lab
    subject: Subject
    model: _Model
    batch: TextTrainBatch
    done: list[str] = field(default_factory=list)

    def do(self, operation: str) -> None:
        """Make the call, and let the model follow."""
        subject, model = self.subject, self.model
        match operation:
            case "forward_backward":
                subject.forward_backward(self.batch)
                model.pending += 1
            case "forward_backward with a loss":
                subject.forward_backward(self.batch, mean_nll)
                model.pending += 1
            case "forward_backward that fails":
                with suppress(CallFailed):
                    subject.forward_backward(self.batch, _failing_loss)
                    model.pending += 1
            case "forward_backward that keeps nothing":
                masked = replace(self.batch, target_mask=torch.zeros(self.batch.target_ids.shape))
                with suppress(CallFailed):  # it may be refused
                    subject.forward_backward(masked)
                    model.pending += 1
            case "optim_step" if model.pending:  # without gradients it may raise
                subject.optim_step()
                model.step, model.pending = model.step + 1, 0
            case "clear_gradients":
                subject.clear_gradients()
                model.pending = 0
            case "forward":
                subject.forward(self.batch.input_ids)
            case "get_config":
                subject.get_config()
            case "save":
                location = subject.save("full", str(self.lab.new_folder()))
                model.saved = location, model.step
            case "save weights":
                location = subject.save("weights", str(self.lab.new_folder()), weights_only=True)
                model.saved_weights = location
            case "load" if model.saved is not None:
                subject.load(model.saved[0])
                model.step, model.pending = model.saved[1], 0
            case "load weights" if model.saved_weights is not None:
                subject.load(model.saved_weights)
                # What weights alone do to the step is the author's choice.
                model.step, model.pending = subject.get_status().step, 0
            case _:
                return
        self.done.append(operation)


def _follow(lab: Lab, program: list[str]) -> Iterator[_Moment]:
    """The status after each operation beside what it must be."""
    subject = lab.trainer
    before = subject.get_status()
    run = _Run(
        lab,
        subject,
        _Model(step=before.step),
        make_batch(lab.domain, lab.domain.usual_shape),
    )
    yield _Moment(run.model, before, before.step, "clear_gradients")
    for operation in program:
        run.do(operation)
        seen = subject.get_status()
        yield _Moment(run.model, seen, before.step, ", ".join(run.done))


def _failing_loss(outputs: dict[str, Any], batch: TextTrainBatch) -> Tensor:
    raise ValueError("this loss always fails")


def _ask(subject: Subject, times: int) -> None:
    for _ in range(times):
        subject.get_status()
        subject.get_config()
        subject.get_tokenizer()


def _expect_untouched(lab: Lab, batch: TextTrainBatch) -> None:
    """Ask in the middle of accumulation; status, logits and gradients must be as before."""
    subject = lab.trainer
    parameters = parameters_of(lab, subject) if lab.sees_gradients else None
    subject.forward_backward(batch)

    def gradients() -> Tensors:
        return parameters.gradients() if parameters is not None else {}

    before, logits, status = gradients(), subject.forward(batch.input_ids), subject.get_status()
    for name in ("get_status", "get_config", "get_tokenizer"):
        subject.call(name)
        seen = subject.get_status()
        expect(seen == status, expected=f"{status} after {name} as before", seen=f"{seen}")
    after = gradients()
    same = before.keys() == after.keys() and all(identical(after[n], before[n]) for n in before)
    expect(same, expected="the accumulated gradients as before get_*", seen="others")
    expect_same(
        subject.forward(batch.input_ids),
        logits,
        "the logits after get_* are those before",
        lab.logits_allowed,
    )
