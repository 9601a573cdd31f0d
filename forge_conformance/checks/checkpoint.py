"""Area checkpoint, the state: what is saved is the trainer's whole state, and it comes back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from hypothesis import strategies as st

from forge_conformance.access import parameters_of, probe
from forge_conformance.checks.comparing import stacked
from forge_conformance.checks.courses import (
    course,
    expect_same_course,
    probe_logits,
)
from forge_conformance.checks.default_folder import strange_default_folder
from forge_conformance.checks.histories import (
    RESUMED_IN,
    Teller,
    cold_start_differs,
    expect_same_shown,
    resumed_elsewhere,
)
from forge_conformance.checks.registry import check
from forge_conformance.finding import NotChecked, Undecided, expect, expect_same, identical
from forge_conformance.lab import Lab
from forge_conformance.observe.exported import read_tensors, read_weights
from forge_conformance.observe.parameters import Tensors
from forge_conformance.observe.slow_disk import slow_for_background_writers
from forge_conformance.oracle.tolerance import apart
from forge_conformance.scenarios.batches import make_batch
from forge_conformance.scenarios.histories import Act, histories
from forge_conformance.subject import Subject


@check(
    "checkpoint.round_trip",
    updates=lambda _: st.sampled_from([0, 10, 1, 11]),
    pending=lambda _: st.integers(0, 2),
    later=lambda _: st.integers(1, 3),
    name=lambda _: st.sampled_from([None, "v7", "best"]),
)
def the_state_of_the_moment_comes_back(
    lab: Lab, updates: int, pending: int, later: int, name: str | None
) -> None:
    """Does `load` put back every weight and buffer, and the step counter, and set the count of
    microbatches to 0: in the trainer that saved, and in one with another past?"""
    batch = make_batch(lab.domain, lab.domain.usual_shape)
    subject = lab.fresh()
    subject.save(path=str(lab.new_folder()))
    course(lab, subject, updates)
    for _ in range(pending):
        subject.forward_backward(batch)
    logits, step = probe_logits(lab, subject), subject.get_status().step
    saved = subject.save(name, str(lab.new_folder()))
    other = lab.fresh()
    for trainer in (subject, other):
        course(lab, trainer, lab.idle_updates + later, seed=50)
        if identical(probe_logits(lab, trainer), logits):
            raise Undecided("training moved nothing, so that a load has nothing to bring back")
        trainer.forward_backward(batch)
    for trainer, whose in ((subject, "the trainer that saved"), (other, "a fresh trainer")):
        trainer.load(saved)
        status = trainer.get_status()
        expect(
            (status.step, status.accumulated_microbatches) == (step, 0),
            expected=f"step {step} and 0 microbatches in {whose} after load",
            seen=f"step {status.step} and {status.accumulated_microbatches}",
        )
        what = f"logits of {whose} after load are those of the moment of save"
        expect_same(probe_logits(lab, trainer), logits, what, lab.unmoved_allowed)


@check(
    "checkpoint.resumes",
    share=0.5,
    history=histories,
    already=lambda _: st.sampled_from([0, 9]),
    variant=lambda _: st.integers(0, 7),
    in_a_process=lambda _: st.booleans(),
)
def a_resumed_run_is_the_one_that_never_stopped(
    lab: Lab, history: list[Act], already: int, variant: int, in_a_process: bool
) -> None:
    """What of the state isn't in the checkpoint, or isn't put back: moments of the optimizer and
    their step, the schedule's position (look at the very first rate after load), the step
    counter, random streams, a loss scale? What does the trainer that loads keep of its own past?"""
    names = ["", *sorted(lab.target.variants.keys() - {"other_model"})]
    name = names[variant % len(names)]
    teller = Teller(lab, name, already)
    acts = [*_OPENING, *history, *_IN_MID_ACCUMULATION, *_CLOSING]
    closing = teller.tell(acts)[-len(_CLOSING) :]
    if not cold_start_differs(lab, name, _CLOSING, closing):
        raise Undecided("a new trainer shows the same as one that has been trained")
    for save in teller.full_saves():
        last = save is teller.full_saves()[-1]
        for whose in RESUMED_IN if last else RESUMED_IN[:2]:
            teller.resume(save, whose)
    if in_a_process and lab.target.source and not lab.ranks.several:
        save = teller.full_saves()[-1]
        shown = resumed_elsewhere(lab, save.path, save.following, name)
        what = "a trainer in a fresh process goes on after load as the one that never stopped"
        for act, seen in zip(save.following, shown, strict=True):
            expect_same_shown(lab, seen, teller.shown_after(save, act), f"{what}: {act}")


_OPENING = [Act("save"), Act("update"), Act("save"), Act("save weights")]
_IN_MID_ACCUMULATION = [Act("microbatch"), Act("save"), Act("clear")]
_CLOSING = [Act("update", 0), Act("update", 1), Act("update", 0)]


@check("checkpoint.drops_gradients", seed=lambda _: st.integers(0, 99))
def a_load_leaves_nothing_pending(lab: Lab, seed: int) -> None:
    """Does `load` clear what was accumulated before it, and does `save` leave out what is pending
    when it is called?"""
    batch = make_batch(lab.domain, lab.domain.usual_shape, seed)
    subject = lab.fresh()
    course(lab, subject, lab.idle_updates + 1)
    subject.forward_backward(batch)
    saved = subject.save(path=str(lab.new_folder()))
    subject.clear_gradients()
    reference = course(lab, subject, 2)
    for trainer, whose in ((subject, "the same trainer"), (lab.fresh(), "a fresh one")):
        for _ in range(2):  # into another state, and into the one it is in
            trainer.forward_backward(batch)
            trainer.forward_backward(batch)
            trainer.load(saved)
        count = trainer.get_status().accumulated_microbatches
        expect(count == 0, expected=f"count 0 in {whose} after load", seen=f"{count}")
        what = f"with microbatches pending before save and before load in {whose}, none after load"
        expect_same_course(lab, course(lab, trainer, 2), reference, what)
    weights = subject.save(path=str(lab.new_folder()), weights_only=True)
    after_weights = []
    for pending in (0, 2):
        subject.load(saved)
        for _ in range(pending):
            subject.forward_backward(batch)
        lab.reseed()
        subject.load(weights)
        after_weights.append(course(lab, subject, 2))
    if not lab.stochastic:
        without, with_pending = after_weights
        what = "with microbatches pending before a load of weights alone, none after it"
        expect_same_course(lab, with_pending, without, what)


@check(
    "checkpoint.save_pure",
    places=lambda _: st.lists(st.booleans(), min_size=10, max_size=10).filter(any),
    weights_only=lambda _: st.booleans(),
    name=lambda _: st.sampled_from([None, "named"]),
    by_path=lambda _: st.booleans(),
)
def saving_changes_nothing(
    lab: Lab, places: list[bool], weights_only: bool, name: str | None, by_path: bool
) -> None:
    """What does `save` do to the trainer: clear or scale gradients, step the optimizer to make its
    state, move the model or its dtype, change modes, draw from a random stream?"""
    batches = [make_batch(lab.domain, lab.domain.usual_shape, seed) for seed in (1, 2)]

    def training(subject: Subject, save_at: Sequence[bool]) -> torch.Tensor:
        saves = iter(save_at)
        saved_after: set[int] = set()

        def maybe_save(updates: int) -> None:
            # One more of the same name, that of the step by default, might be refused.
            if next(saves) and (by_path or updates not in saved_after):
                saved_after.add(updates)
                folder = str(lab.new_folder()) if by_path else None
                subject.save(name and f"{name}-{updates}", folder, weights_only)

        shown: list[torch.Tensor | float] = []
        maybe_save(0)
        for updates in range(3):
            for batch in batches:
                shown.append(subject.forward_backward(batch).loss)
                maybe_save(updates)
            shown += subject.optim_step()[:3]
            maybe_save(updates + 1)
        return stacked(*shown, subject.forward(batches[0].input_ids))

    by_path = by_path or bool(strange_default_folder(lab))
    with nullcontext() if by_path else lab.working_folder():
        saving, without = lab.twin_results(
            lambda subject: training(subject, places),
            lambda subject: training(subject, [False] * len(places)),
        )
    what = "losses, steps, rates, counts and logits of a training with saves are those without"
    expect_same(saving, without, what, lab.run_allowed)


@check(
    "checkpoint.snapshot",
    share=0.5,
    weights_only=lambda _: st.booleans(),
    again=lambda _: st.booleans(),
)
def a_checkpoint_is_of_the_moment_of_save(lab: Lab, weights_only: bool, again: bool) -> None:
    """Are the tensors copied before `save` returns, or does a thread, or the next call, write what
    they have become by then? Moments of the optimizer are updated in place too."""
    subject = lab.fresh()
    course(lab, subject, 1)
    logits = probe_logits(lab, subject)
    folder = str(lab.new_folder())
    with slow_for_background_writers(_SLOW):
        saved = subject.save("first", folder, weights_only)
        after = course(lab, subject, lab.idle_updates + 2, seed=20)
        moved = probe_logits(lab, subject)
        if again:
            subject.save("second", folder, weights_only)
        time.sleep(_SLOW)
        subject.load(saved)
    if identical(moved, logits):
        raise Undecided("training on moved nothing")
    for trainer, whose in ((subject, "the trainer that saved"), (lab.fresh(), "a fresh one")):
        trainer.load(saved)
        what = f"logits of {whose} after load are those before it trained on, at once after save"
        expect_same(probe_logits(lab, trainer), logits, what, lab.unmoved_allowed)
        if not weights_only:
            going_on = course(lab, trainer, len(after), seed=20)
            expect_same_course(lab, going_on, after, f"{whose} goes on as it did after save")


_SLOW = 0.25
"""Seconds; several updates of a small model fit into them."""


@check("checkpoint.weights_only", updates=lambda _: st.integers(0, 2))
def weights_alone_come_back_and_go_on(lab: Lab, updates: int) -> None:
    """Does the weights-only form hold all weights and nothing of the optimizer; does `load` see
    which form it is given; and does the optimizer work on the loaded weights, rather than on copies
    in full precision that it made before?"""
    subject = lab.fresh()
    course(lab, subject, updates)
    logits = probe_logits(lab, subject)
    folder = str(lab.new_folder())
    # Names that tell the wrong kind.
    saved = subject.save("full", folder, weights_only=True)
    full = subject.save("weights-only", folder)
    loaded = _weights(lab, subject)
    course(lab, subject, lab.idle_updates + 16, seed=30)
    later = subject.save(path=str(lab.new_folder()), weights_only=True)
    _expect_no_optimizer_state(lab, subject, saved, later)
    before_last = _weights(lab, subject)
    course(lab, subject, 1, seed=39)
    old = _weights(lab, subject)
    whole = subject.save(path=str(lab.new_folder()))
    reference = course(lab, subject, 2)
    for trainer, whose in ((subject, "the same trainer"), (lab.fresh(), "a fresh one")):
        trainer.load(whole)
        trainer.load(saved)
        what = f"logits of {whose} after load of weights alone are those of the moment of save"
        expect_same(probe_logits(lab, trainer), logits, what, lab.unmoved_allowed)
        count = trainer.get_status().accumulated_microbatches
        expect(count == 0, expected="count 0 after load of weights alone", seen=f"{count}")
        course(lab, trainer, 1, seed=40)
        _expect_moved_on(_weights(lab, trainer), loaded, old, before_last, whose)
        trainer.load(whole)
        what = f"a full load after one of weights alone brings all back, in {whose}"
        expect_same_course(lab, course(lab, trainer, 2), reference, what)
    subject.load(full)
    what = "logits after load of the full form are those of the weights-only form"
    expect_same(probe_logits(lab, subject), logits, what, lab.unmoved_allowed)


@check("checkpoint.precision", weights_only=lambda _: st.booleans())
def weights_come_back_bit_for_bit(lab: Lab, weights_only: bool) -> None:
    """Are weights converted on their way: saved in half precision, or in that of the computation;
    loaded through another dtype?"""
    subject = lab.fresh()
    course(lab, subject, lab.idle_updates + 2)
    before = _weights(lab, subject)
    saved = subject.save(path=str(lab.new_folder()), weights_only=weights_only)
    course(lab, subject, 2, seed=20)
    for trainer, whose in ((subject, "the trainer that saved"), (lab.fresh(), "a fresh one")):
        trainer.load(saved)
        after = _weights(lab, trainer)
        for name, weight in before.items():
            expect(
                name in after and identical(after[name], weight),
                expected=f"{name} {list(weight.shape)} in {weight.dtype}, bit for bit, in {whose} "
                "after load",
                seen=_how_it_differs(after.get(name), weight),
            )


@check("checkpoint.ties", updates=lambda _: st.integers(1, 3))
def shared_weights_stay_shared(lab: Lab, updates: int) -> None:
    """Does `load` assign new tensors (`assign=True`, a new state dict) to one of two names for the
    same weight, or the optimizer get both of them?"""
    subject = lab.fresh()
    course(lab, subject, updates)
    saved = subject.save(path=str(lab.new_folder()))
    weights = subject.save(path=str(lab.new_folder()), weights_only=True)
    reference = course(lab, subject, 3, seed=20)
    leaves = _number_of_leaves(lab, subject)
    for trainer, whose in ((subject, "the trainer that saved"), (lab.fresh(), "a fresh one")):
        trainer.load(saved)
        going_on = course(lab, trainer, 3, seed=20)
        expect_same_course(lab, going_on, reference, f"{whose} trains on after load as it did")
        for form in (saved, weights):
            trainer.load(form)
            now = _number_of_leaves(lab, trainer)
            expect(
                now == leaves,
                expected=f"{leaves} distinct parameters in {whose} after load, as before",
                seen=f"{now}",
            )


# Parts


def _expect_no_optimizer_state(lab: Lab, subject: Subject, earlier: str, saved: str) -> None:
    """Two moments for each weight are what gives optimizer state away, where it can be read.

    What is the same as in an earlier checkpoint is no moment: frozen weights, say.
    """
    if not lab.sees_gradients or not lab.sees_all_parameters or not Path(saved).exists():
        return
    try:
        before, now = read_tensors(earlier), read_tensors(saved)
    except NotChecked:
        return
    own = sum(tensor.numel() for tensor in parameters_of(lab, subject).tensors.values())
    stored = sum(
        tensor.numel()
        for name, tensor in now.items()
        if tensor.is_floating_point() and not (name in before and identical(before[name], tensor))
    )
    expect(
        stored < 2.5 * own,
        expected=f"about {own} numbers that training changes in a weights-only checkpoint, as "
        "many as it changes in the model",
        seen=f"{stored}: {stored / own:.3g} times as many, as with an optimizer's moments",
    )


def _expect_moved_on(
    seen: Tensors, loaded: Tensors, old: Tensors, before_old: Tensors, whose: str
) -> None:
    """Break the clause if an update after a load of weights alone went back to the old weights.

    Judged for weights whose old values are many updates away.
    """
    for name, weight in loaded.items():
        way = _distance(old[name], weight)
        unit = torch.finfo(weight.dtype).eps * _distance(weight, torch.zeros_like(weight))
        if way <= 2 * max(_distance(old[name], before_old[name]), unit):
            continue
        expect(
            _distance(seen[name], weight) < 2 * _distance(seen[name], old[name]),
            expected=f"the update after load of weights alone to move {name} "
            f"{list(weight.shape)} on from what was loaded, in {whose}",
            seen="a weight nearer to what it was before load",
            apart=f"{_distance(seen[name], old[name]) / way:.3g} of the way from the old one, "
            f"{_distance(seen[name], weight) / way:.3g} from the loaded one",
        )


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(left.double() - right.double()))


def _weights(lab: Lab, subject: Subject) -> Tensors:
    """The weights as they are in this process, else as they are exported."""
    try:
        return parameters_of(lab, subject).weights()
    except NotChecked:
        return read_weights(subject.save(path=str(lab.new_folder()), weights_only=True))


def _how_it_differs(seen: torch.Tensor | None, weight: torch.Tensor) -> str:
    if seen is None:
        return "it is missing"
    if seen.dtype != weight.dtype or seen.shape != weight.shape:
        return f"{seen.dtype} {list(seen.shape)}"
    share = float((seen != weight).double().mean())
    return f"{share:.0%} of its entries changed, by {apart(seen, weight):.3g} relative"


def _number_of_leaves(lab: Lab, subject: Subject) -> int:
    graph = probe(lab, subject)
    return len({*map(id, graph.leaves)}) if graph is not None else 0
