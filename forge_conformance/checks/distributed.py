"""Area distributed: the ranks of one trainer, among each other and beside one rank alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from forge.api import TextTrainBatch
from forge_conformance.checks.calling import attempt
from forge_conformance.checks.comparing import stacked
from forge_conformance.checks.courses import Course, course, expect_same_course, probe_logits
from forge_conformance.checks.histories import new_trainer
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
from forge_conformance.oracle.tolerance import Allowed, apart, training_error
from forge_conformance.scenarios.batches import batches, make_batch
from forge_conformance.scenarios.failures import DeliberateError
from forge_conformance.scenarios.losses import mean_nll
from forge_conformance.subject import CallFailed, Subject
from forge_conformance.subject.elsewhere import Ended
from forge_conformance.subject.faults import brief

T = TypeVar("T")

OF_THE_WHOLE_BATCH = ("tokens", "num_tokens", "grad_norm", "loss", "lr", "learning_rate", "step")
"""Metrics that are about the batch or the model, not about a rank's own time and memory."""


@check("distributed.agree", batch=batches())
def every_rank_returns_the_same(lab: Lab, batch: TextTrainBatch) -> None:
    """An application on every rank decides by what is returned there, and must decide the same:
    is a loss, a count, or a path told that only this rank's rows, shard or clock make? Reduce it
    over the ranks, or broadcast the first one's."""
    _require_ranks(lab)
    trainer = lab.trainer
    told = []
    for _ in range(2):
        trainer.clear_gradients()
        told.append(_plain(trainer.forward_backward(batch).metrics))
    everywhere = lab.ranks.exchange("metrics", told)
    # What differs from call to call is a time, say.
    varying = {name for one, two in everywhere for name in two if one.get(name) != two[name]}
    first = everywhere[0][0]
    for rank, (metrics, _) in enumerate(everywhere):
        for name in sorted((first.keys() | metrics.keys()) - varying):
            here, there = first.get(name, "none"), metrics.get(name, "none")
            if here == there:
                continue
            seen = f"metrics[{name!r}] = {here} on rank 0 and {there} on rank {rank}"
            if name in OF_THE_WHOLE_BATCH:
                broken(expected="the same metrics on every rank", seen=seen)
            lab.advise(f"a metric should be the same on every rank; {seen}")
    trainer.optim_step()
    trainer.get_status()
    trainer.forward(batch.input_ids)
    trainer.load(trainer.save(path=str(lab.new_folder())))
    ids = lab.ranks.exchange("ids", _encoded(trainer.get_tokenizer()))
    expect(
        all(each == ids[0] for each in ids),
        expected="a tokenizer that encodes the same on every rank",
        seen="other ids on another rank",
    )


@check("distributed.same_as_one", share=0.25, seed=lambda _: st.integers(0, 99))
def ranks_together_train_as_one(lab: Lab, seed: int) -> None:
    """By what are sums over a rank's rows divided: by its own kept tokens, by the number of ranks
    a second time, or by the kept tokens of the whole batch? Do all ranks add up gradients, take
    every step, and clip by the norm of the whole gradient?"""
    _require_ranks(lab)
    if lab.stochastic:
        raise NotChecked("dropout: ranks draw otherwise than one does; judge it without")
    for name in ["", *sorted(lab.target.variants.keys() & {"sgd"})]:
        ranks = new_trainer(lab, name)
        start = ranks.save(path=str(lab.new_folder()))
        updates = lab.idle_updates + 3
        together = _training(lab, ranks, updates, seed)
        if identical(together.start, together.end):
            raise Undecided("the updates moved nothing")
        one = _on_one_rank(lab, _train_from, start, name, updates, seed)
        if one.refusal and apart(one.start, together.start) > lab.logits_allowed.error:
            raise NotChecked(f"one rank can't start where {lab.ranks.size} do: {one.refusal}")
        whose = f"{lab.ranks.size} ranks" + (f" of the variant {name!r}" if name else "")
        what = f"from one state {whose} train as a single one does"
        expect_same_course(lab, together.course, one.course, what, _by_order_of_arithmetic(lab))


@check("distributed.checkpoint", share=0.25, updates=lambda _: st.integers(1, 3))
def checkpoints_cross_world_sizes(lab: Lab, updates: int) -> None:
    """Is the checkpoint made of shards that only as many ranks can read, or of one rank's part?
    Gather the weights and the optimizer's state, or save them so that they can be resharded."""
    _require_ranks(lab)
    if lab.stochastic:
        raise NotChecked("dropout: ranks draw otherwise than one does; judge it without")
    ranks = lab.fresh()
    course(lab, ranks, updates)
    saved = ranks.save(path=str(lab.new_folder()))
    step, logits = ranks.get_status().step, probe_logits(lab, ranks)
    going_on = course(lab, ranks, lab.idle_updates + 2, seed=50)
    one = _on_one_rank(lab, _load_and_go_on, saved, len(going_on), str(lab.new_folder()))
    if one.refusal:
        broken(
            expected=f"one rank to load what {lab.ranks.size} have saved",
            seen=one.refusal,
        )
    size = lab.ranks.size
    expect(one.step == step, expected=f"step {step} on one rank after load", seen=f"{one.step}")
    what = f"logits of one rank after load are those of the {size} that saved"
    expect_same(one.start, logits, what, lab.logits_allowed)
    what = f"one rank goes on as the {size} that saved"
    expect_same_course(lab, one.course, going_on, what, _by_order_of_arithmetic(lab))
    back = lab.fresh()
    try:
        back.load(one.saved)
    except CallFailed as refusal:
        broken(expected=f"{size} ranks to load what one has saved", seen=str(refusal))
    what = f"logits of {size} ranks after load are those of the one that saved"
    expect_same(probe_logits(lab, back), one.end, what, lab.logits_allowed)


@check("distributed.failure", share=0.5, rank=lambda _: st.integers(0, 7), batch=batches())
def what_fails_on_one_rank_fails_on_all(lab: Lab, rank: int, batch: TextTrainBatch) -> None:
    """A rank that fails before a collective leaves the others waiting in it: agree on whether all
    are well (a flag, reduced over the ranks) before the first one, and raise on all."""
    _require_ranks(lab)
    computing = _ranks_that_compute_the_loss(lab, batch)
    failing = computing[rank % len(computing)]

    def fails_there(outputs: dict[str, Any], batch: TextTrainBatch) -> Tensor:
        if lab.ranks.rank == failing:
            raise DeliberateError(f"a loss_fn that raises on rank {failing} only")
        return mean_nll(outputs, batch)

    def training(subject: Subject, fail: bool) -> Tensor:
        subject.forward_backward(make_batch(lab.domain, lab.domain.usual_shape, seed=7))
        if fail:
            _expect_an_error(attempt(subject, batch, fails_there), failing)
        moments = course(lab, subject, 2)
        return stacked(*[m.loss for m in moments], moments[-1].logits)

    try:
        failed, without = lab.pair_results(
            lambda subject: training(subject, True), lambda subject: training(subject, False)
        )
    except NotChecked:  # without twins there is the failure itself to see
        _expect_an_error(attempt(lab.trainer, batch, fails_there), failing)
        return
    if lab.stochastic:
        return  # a call that failed has drawn too
    what = f"a training on after a failure on rank {failing} is one without it"
    expect_same(failed, without, what, lab.run_allowed)


# Programs for a process of its own, which is a world of one rank


@dataclass(frozen=True)
class _Training:
    """What a training showed: logits before and after it, each update, and what was told beside."""

    start: Tensor
    course: Course
    end: Tensor
    refusal: str = ""
    step: int = 0
    saved: str = ""


def _train_from(lab: Lab, start: str, variant: str, updates: int, seed: int) -> _Training:
    _require_one(lab)
    subject = new_trainer(lab, variant)
    refusal = _refusal(subject, start)
    seen = _training(lab, subject, updates, seed)
    return replace(seen, refusal=refusal)


def _load_and_go_on(lab: Lab, saved: str, updates: int, folder: str) -> _Training:
    _require_one(lab)
    subject = lab.fresh()
    if refusal := _refusal(subject, saved):
        return _Training(torch.empty(0), [], torch.empty(0), refusal)
    step = subject.get_status().step
    seen = _training(lab, subject, updates, seed=50)
    return replace(seen, step=step, saved=subject.save(path=folder))


def _refusal(subject: Subject, path: str) -> str:
    try:
        subject.load(path)
    except CallFailed as error:
        return str(error)
    return ""


def _require_one(lab: Lab) -> None:
    parallelism = getattr(lab.fresh().get_config(), "parallelism", None)
    if getattr(parallelism, "world_size", 1) != 1:
        raise NotChecked("without a launcher the factory still makes a trainer of several ranks")


# Parts


def _require_ranks(lab: Lab) -> None:
    if not lab.ranks.several:
        raise NotChecked("this process is the only rank", Need.RANKS)


def _training(lab: Lab, subject: Subject, updates: int, seed: int) -> _Training:
    start = probe_logits(lab, subject)
    shown = course(lab, subject, updates, seed)
    return _Training(start, shown, probe_logits(lab, subject))


def _on_one_rank(lab: Lab, program: Callable[..., T], *arguments: Any) -> T:
    """What a program returns on a trainer that the factory makes without a launcher."""

    def run() -> Ended:
        return lab.elsewhere.run(program, *arguments)

    ended = lab.ranks.from_first("one rank alone", run, longer=lab.elsewhere.limit)
    if ended.killed:
        raise NotChecked("the process of one rank alone was killed")
    expect(
        not ended.failure,
        expected=f"one rank to train on from what {lab.ranks.size} have saved",
        seen=ended.failure,
    )
    value: T = ended.value
    return value


def _expect_an_error(error: BaseException | None, failing: int) -> None:
    expected = f"an error on every rank, as on rank {failing}"
    expect(error is not None, expected=expected, seen="a result")


def _ranks_that_compute_the_loss(lab: Lab, batch: TextTrainBatch) -> list[int]:
    """Not all do where the model is a pipeline.

    Raises:
        NotChecked: None does.
    """
    seen: list[TextTrainBatch] = []

    def loss_fn(outputs: dict[str, Any], batch: TextTrainBatch) -> Tensor:
        seen.append(batch)
        return mean_nll(outputs, batch)

    lab.trainer.forward_backward(batch, loss_fn)
    saw = lab.ranks.exchange("a loss", bool(seen))
    if not any(saw):
        raise NotChecked("the loss runs in other processes than the ranks'")
    return [rank for rank, its in enumerate(saw) if its]


def _by_order_of_arithmetic(lab: Lab) -> Callable[[int], Allowed]:
    """Ranks add up in another order than one does; updates let that grow."""
    return lambda updates: training_error(lab.arithmetic, updates)


def _plain(metrics: Any) -> dict[str, str]:
    """The metrics by name, as text that can be compared."""
    found = {}
    for name, value in dict(metrics).items():
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        found[str(name)] = brief(value)
    return found


def _encoded(tokenizer: Any) -> list[int]:
    with suppress(Exception):  # how well it encodes is another clause's matter
        return [int(each) for each in tokenizer.encode("The same on every rank?")]
    return []
