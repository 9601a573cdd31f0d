"""What a trainer returns, as plain numbers; and what can't be one, as a fault with its clause."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forge_conformance.subject import CallFailed, Journal, Loop, Malformed, NotAwaitable, Subject

IDS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.fixture
def subject():
    """A subject whose trainer returns what `subject.trainer.answer` is, from every method."""
    loop = Loop(timeout=5)
    yield Subject(Answers(), loop, Journal())
    loop.close()


class Answers:
    answer = None

    async def _answer(self, *arguments, **named):
        return self.answer

    forward_backward = optim_step = forward = save = get_status = _answer

    def sync(self):
        return self.answer

    @property
    def fails(self):
        raise RuntimeError("not connected")

    async def raises(self):
        raise ValueError("a message\nof two lines")


class Unprintable:
    def __repr__(self):
        raise RuntimeError

    loss = property(__repr__)


@pytest.mark.parametrize(
    "loss",
    [
        0.5,
        np.float32(0.5),
        Fraction(1, 2),
        torch.tensor(0.5),
        torch.tensor([0.5], requires_grad=True),
    ],
)
def test_any_number_is_a_number(subject, loss):
    subject.trainer.answer = SimpleNamespace(loss=loss, metrics={})
    assert subject.forward_backward(None).loss == 0.5


def test_results_are_read_by_their_fields(subject):
    subject.trainer.answer = SimpleNamespace(step=3.0, accumulated_microbatches=np.int64(2))
    assert subject.get_status() == (3, 2)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "returned None (NoneType), without .metrics"),
        (
            Unprintable(),
            "returned (which can't be printed: Unprintable) (Unprintable), without .metrics",
        ),
        (SimpleNamespace(loss="0.5", metrics={}), "returned .loss = '0.5', which isn't a number"),
        (SimpleNamespace(loss=0.5, metrics=[]), "returned metrics as list, not a mapping"),
        (SimpleNamespace(loss=torch.zeros(2), metrics={}), "which isn't a number"),
        (SimpleNamespace(loss=torch.zeros((), device="meta"), metrics={}), "can't be read"),
    ],
)
def test_a_result_without_a_usable_field(subject, answer, message):
    subject.trainer.answer = answer
    with pytest.raises(Malformed) as raised:
        subject.forward_backward(None)
    assert message in str(raised.value)
    assert raised.value.root == "structure.result_types"


@pytest.mark.parametrize("step", [1.5, float("nan"), float("inf")])
def test_a_count_is_a_whole_number(subject, step):
    subject.trainer.answer = SimpleNamespace(step=step, accumulated_microbatches=0)
    with pytest.raises(Malformed, match="which isn't a count"):
        subject.get_status()


def test_paths_are_text(subject):
    subject.trainer.answer = Path("a/b")
    assert subject.save() == "a/b"
    subject.trainer.answer = 3
    with pytest.raises(Malformed, match="returned 3, which isn't a path"):
        subject.save()


def test_logits_are_a_copy_on_the_cpu(subject):
    subject.trainer.answer = torch.zeros(2, 3, 5, requires_grad=True)
    logits = subject.forward(IDS)
    assert not logits.requires_grad
    assert logits.data_ptr() != subject.trainer.answer.data_ptr()


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (3, "returned int, not a tensor"),
        (torch.zeros(2, 3, 5, dtype=torch.int64), "returned a tensor of torch.int64"),
        (torch.zeros(3, 5), "returned logits of shape [3, 5] for ids of shape [2, 3]"),
        (torch.zeros(2, 3, 5, device="meta"), "returned logits that can't be read"),
    ],
)
def test_unusable_logits_break_the_clause_of_their_shape(subject, logits, message):
    subject.trainer.answer = logits
    with pytest.raises(Malformed) as raised:
        subject.forward(IDS)
    assert message in str(raised.value)
    assert raised.value.root == "forward.shape"


def test_what_cannot_be_awaited(subject):
    with pytest.raises(NotAwaitable, match="returned NoneType, which can't be awaited") as raised:
        subject.call("sync")
    assert raised.value.root == "structure.awaitable"


@pytest.mark.parametrize(("method", "error"), [("absent", AttributeError), ("fails", RuntimeError)])
def test_a_method_that_is_not_there(subject, method, error):
    with pytest.raises(CallFailed) as raised:
        subject.call(method)
    assert isinstance(raised.value.error, error)
    assert raised.value.root == "structure.methods"


def test_the_trainers_own_exception_is_kept(subject):
    with pytest.raises(
        CallFailed,
        match=r"^raises\(\) raised ValueError: a message\nof two",
    ) as raised:
        subject.call("raises")
    assert isinstance(raised.value.__cause__, ValueError)


def test_calls_are_counted_and_timed(subject):
    subject.trainer.answer = "path"
    subject.save()
    with pytest.raises(CallFailed):
        subject.call("raises")
    assert subject.journal.calls == 2
    assert list(subject.journal.last) == ["save", "raises"]
    assert 0 < subject.journal.seconds < 1
