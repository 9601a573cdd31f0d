"""Area forward: logits of the model as it is, and nothing else happens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

from forge.api import TextTrainBatch
from forge_conformance.checks.comparing import stacked
from forge_conformance.checks.registry import check
from forge_conformance.finding import Undecided, expect, expect_same
from forge_conformance.lab import Lab
from forge_conformance.scenarios.batches import (
    LaterChange,
    batches,
    later_change,
    make_batch,
    make_ids,
    token_ids,
)
from forge_conformance.subject import Subject


@check("forward.shape")
def logits_have_the_inputs_shape(lab: Lab) -> None:
    """Look at what `forward` returns last: a tensor of the whole vocabulary for every position,
    neither an output object nor the last position's logits alone, and no placeholder of a fused
    loss. Are short and longest sequences treated by another path?"""
    trainer = lab.trainer
    for shape in lab.domain.edge_shapes:
        ids = make_ids(lab.domain, shape)
        logits = trainer.call("forward", {"input_ids": ids})
        wanted = [*shape, lab.domain.vocab_size]
        expect(
            type(logits) is Tensor and not logits.is_meta,
            expected=f"a plain torch.Tensor for ids of shape {list(shape)}",
            seen=f"{type(logits).__name__} on {getattr(logits, 'device', 'no device')}",
        )
        expect(
            list(logits.shape) == wanted and logits.is_floating_point(),
            expected=f"floating logits of shape {wanted} for ids of shape {list(shape)}",
            seen=f"{logits.dtype} of shape {list(logits.shape)}",
        )
        expect(
            bool(logits.isfinite().all()),
            expected=f"finite logits for ids of shape {list(shape)}",
            seen=f"{int((~logits.isfinite()).sum())} of {logits.numel()} not finite",
        )


@check("forward.no_grad", ids=token_ids())
def logits_carry_no_graph(lab: Lab, ids: Tensor) -> None:
    """Is `forward` run under `torch.no_grad()` (or its result detached)?"""
    logits = lab.trainer.call("forward", {"input_ids": ids})
    expect(
        logits.grad_fn is None and not logits.requires_grad,
        expected="logits without an autograd graph",
        seen=f"requires_grad={logits.requires_grad}, grad_fn={logits.grad_fn}",
    )


@check("forward.repeatable", ids=token_ids())
def the_same_input_gives_the_same_logits(lab: Lab, ids: Tensor) -> None:
    """Is the model in eval mode in `forward`? Dropout, sampling or a cache that grows would show
    as differing logits."""
    trainer = lab.trainer
    trainer.forward_backward(make_batch(lab.domain, lab.domain.usual_shape))
    trainer.optim_step()
    lab.reseed(1)
    first = trainer.forward(ids)
    for seed in (2, 3):
        lab.reseed(seed)
        what = "the same logits for the same input"
        expect_same(trainer.forward(ids), first, what, lab.logits_allowed)


@check("forward.pure", batch=batches(), looks=lambda _: st.integers(1, 3))
def forward_leaves_training_as_it_was(lab: Lab, batch: TextTrainBatch, looks: int) -> None:
    """What does `forward` leave behind: eval mode, a counter or running statistic in a buffer, a
    draw from the random stream that dropout uses next, gradients cleared or added?"""

    def training(subject: Subject, looks: int) -> Tensor:
        shown: list[Tensor | float] = []
        for _ in range(2):
            _look(lab, subject, looks)
            shown.append(subject.forward_backward(batch).loss)
            _look(lab, subject, looks)
            shown += subject.get_status()
            shown.append(subject.optim_step().learning_rate)
        return stacked(*shown, subject.forward(batch.input_ids))

    with_looks, without = lab.pair_results(
        lambda subject: training(subject, looks), lambda subject: training(subject, 0)
    )
    expect_same(
        with_looks,
        without,
        "losses, status and logits of a training with calls of forward in between are those "
        "of the same training without",
        lab.run_allowed,
    )


@check("forward.causal", change=later_change())
def logits_ignore_later_tokens(lab: Lab, change: LaterChange) -> None:
    """Is the attention mask causal on every path of `forward` (fused and plain attention, short
    and long sequences, with a mask given and without)? Does anything else mix positions, such as
    a mean over the sequence?"""
    trainer = lab.trainer
    before = trainer.forward(change.ids)
    after = trainer.forward(change.changed_ids)
    kept = slice(0, change.position)
    expect_same(
        after[:, kept],
        before[:, kept],
        f"logits before position {change.position} don't change with the tokens from there on",
        lab.logits_allowed,
    )


@check("forward.rows_independent", ids=token_ids(min_batch=2), seed=lambda _: st.integers(0, 99))
def rows_do_not_see_each_other(lab: Lab, ids: Tensor, seed: int) -> None:
    """Does anything mix the rows of a batch: statistics over the batch, padding to the longest
    row that changes positions, capacity limits of experts, a cache keyed too coarsely?"""
    trainer = lab.trainer
    together = trainer.forward(ids)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    expect_same(
        trainer.forward(ids[order]),
        together[order],
        f"the rows' logits in the order {order.tolist()} are the same rows' logits",
        lab.logits_allowed,
    )
    others = make_ids(lab.domain, (len(ids), ids.shape[1]), seed=seed + 1)
    others[0] = ids[0]
    expect_same(
        trainer.forward(others)[0],
        together[0],
        "row 0's logits beside other rows are its logits",
        lab.logits_allowed,
    )
    if lab.domain.takes((1, ids.shape[1])):
        expect_same(
            trainer.forward(ids[-1:])[0],
            together[-1],
            "a row's logits by itself are its logits in the batch",
            lab.logits_allowed,
        )


@check("forward.input_untouched", ids=token_ids())
def inputs_stay_as_they_were(lab: Lab, ids: Tensor) -> None:
    """Does `forward` change its input in place, or add to and pop from the mapping it is given?"""
    trainer = lab.trainer
    inputs = {"input_ids": ids.clone()}
    trainer.call("forward", inputs)
    expect(
        list(inputs) == ["input_ids"],
        expected="the caller's mapping with the key input_ids as before",
        seen=f"the keys {list(inputs)}",
    )
    expect_same(inputs["input_ids"], ids, "the ids after forward are those before")
    rows = ids[:1].expand(ids.shape[0], -1)
    trainer.call("forward", {"input_ids": rows})
    expect_same(rows, ids[:1].expand_as(ids), "the ids of rows that share memory stay")


@check("forward.output_owned", ids=token_ids())
def returned_logits_never_change(lab: Lab, ids: Tensor) -> None:
    """Does `forward` write into a buffer that it has handed out before?"""
    trainer = lab.trainer
    logits = trainer.call("forward", {"input_ids": ids})
    if not isinstance(logits, Tensor) or logits.is_meta:
        raise Undecided("forward returned no tensor with values")
    before = logits.detach().clone()
    other = make_ids(lab.domain, (ids.shape[0], ids.shape[1]), seed=7)
    later_calls: dict[str, Callable[[], object]] = {
        "forward_backward": lambda: trainer.forward_backward(TextTrainBatch(other, ids)),
        "optim_step": trainer.optim_step,
        "forward": lambda: trainer.forward(other),
    }
    for name, call in later_calls.items():
        call()
        expect_same(logits.detach(), before, f"logits returned earlier, after {name}")


def _look(lab: Lab, subject: Subject, times: int) -> None:
    for seed in range(times):
        subject.forward(make_ids(lab.domain, lab.domain.usual_shape, seed))
