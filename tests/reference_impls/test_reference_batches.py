"""Which batches the reference trainers refuse, and what they say."""

from __future__ import annotations

import asyncio
import doctest
import importlib

import pytest
import torch

from reference_impls.byte_tokenizer import ByteTokenizer
from reference_impls.plain import PlainTrainer

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
ONES = torch.ones(2, 3)


def at(values, position, value):
    changed = values.clone()
    changed[position] = value
    return changed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_ids": at(IDS, (1, 2), 256)}, r"input_ids\[1, 2\] is 256, outside the vocabulary"),
        ({"input_ids": at(IDS, (0, 0), -1)}, r"input_ids\[0, 0\] is -1, outside the vocabulary"),
        ({"target_ids": at(IDS, (1, 0), 999)}, r"target_ids\[1, 0\] is 999, outside"),
        ({"target_ids": at(IDS, (1, 0), -100)}, r"target_ids\[1, 0\] is -100, outside"),
        ({"input_ids": IDS.float()}, "input_ids is torch.float32; ids must be torch.int64"),
        ({"target_ids": IDS.float()}, "target_ids is torch.float32; ids must be torch.int64"),
        ({"input_ids": IDS[0]}, r"input_ids has shape \[3\]; it must be \[batch, seq\]"),
        ({"input_ids": IDS[:0]}, "input_ids is empty"),
        ({"input_ids": IDS.repeat(1, 30)}, "90 tokens, over max_seq_len=64"),
        ({"target_ids": IDS[:, :2]}, r"target_ids has shape \[2, 2\], input_ids \[2, 3\]"),
        ({"target_mask": ONES[:1]}, r"target_mask has shape \[1, 3\]"),
        ({"target_mask": ONES / 2}, r"target_mask\[0, 0\] is 0.5, neither 0 nor 1"),
        ({"target_weights": ONES[0]}, r"target_weights has shape \[3\]"),
        ({"target_weights": IDS}, "target_weights is torch.int64; it must be floating"),
        ({"target_ids": None}, "target_ids is NoneType; it must be a torch.Tensor"),
    ],
)
def test_a_bad_batch_is_refused_with_the_reason(make_batch, fields, message):
    batch = make_batch(
        **{"input_ids": IDS, "target_ids": IDS, "target_mask": ONES, "target_weights": ONES}
        | fields
    )
    trainer = PlainTrainer()
    with pytest.raises((TypeError, ValueError), match=message):
        asyncio.run(trainer.forward_backward(batch))
    assert asyncio.run(trainer.get_status()).accumulated_microbatches == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32])
def test_a_mask_may_be_of_any_dtype(make, make_batch, dtype):
    batch = make_batch()
    other = make_batch(target_mask=batch.target_mask.to(dtype))
    losses = [asyncio.run(make().forward_backward(each)).loss for each in (batch, other)]
    assert losses[0] == losses[1]


def test_a_masked_target_may_hold_anything(make, make_batch):
    batch = make_batch()
    other = make_batch(target_ids=batch.target_ids.where(batch.target_mask, -100))
    losses = [asyncio.run(make().forward_backward(each)).loss for each in (batch, other)]
    assert losses[0] == losses[1]


def test_forward_takes_input_ids_alone(make):
    trainer = make()
    for inputs in ({"input_ids": IDS + 255}, {"input_ids": IDS, "attention_mask": ONES}, {}):
        with pytest.raises(ValueError, match="input_ids"):
            asyncio.run(trainer.forward(inputs))


@pytest.mark.parametrize("text", ["", "plain", "né 你好 \x00\r\n  two  spaces", "🙂<|x|>"])
def test_tokenizers_round_trip(make, text):
    tokenizer = asyncio.run(make().get_tokenizer())
    ids = tokenizer.encode(text)
    assert all(0 <= token < 256 for token in ids)
    assert tokenizer.decode(ids) == text
    assert list(tokenizer(text)["input_ids"]) == ids == ByteTokenizer().encode(text)


@pytest.mark.parametrize("name", ["byte_tokenizer", "losses", "optimization", "random_stream"])
def test_the_examples_in_docstrings(name):
    module = importlib.import_module(f"reference_impls.{name}")
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed
