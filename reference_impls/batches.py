"""What a batch must be: checked before anything is computed, so that a refusal changes nothing."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from forge.api import TextTrainBatch


def check_batch(batch: TextTrainBatch, *, vocab_size: int, max_seq_len: int) -> None:
    """Refuse a batch that can't be trained on as it is.

    Raises:
        TypeError: A field isn't a tensor, or has a dtype that its meaning doesn't allow.
        ValueError: A shape, an id or a mask value is wrong; the message says which and where.
    """
    check_input_ids(batch.input_ids, vocab_size=vocab_size, max_seq_len=max_seq_len)
    for name in ("target_ids", "target_mask", "target_weights"):
        field = getattr(batch, name)
        if field is None and name != "target_ids":
            continue
        _check_tensor(name, field)
        if field.shape != batch.input_ids.shape:
            raise ValueError(
                f"{name} has shape {list(field.shape)}, "
                f"input_ids {list(batch.input_ids.shape)}; they must be equal"
            )
    _check_int64("target_ids", batch.target_ids)
    kept = torch.ones_like(batch.target_ids, dtype=torch.bool)
    if batch.target_mask is not None:
        if batch.target_mask.is_complex():
            raise TypeError("target_mask is complex; it must be bool, int or float")
        kept = (batch.target_mask != 0).to(kept.device)
        _refuse_where(
            kept & (batch.target_mask != 1).to(kept.device),
            "target_mask",
            batch.target_mask,
            "neither 0 nor 1; a fraction belongs into target_weights",
        )
    if batch.target_weights is not None and not batch.target_weights.is_floating_point():
        raise TypeError(f"target_weights is {batch.target_weights.dtype}; it must be floating")
    outside = (batch.target_ids < 0) | (batch.target_ids >= vocab_size)
    _refuse_where(outside & kept, "target_ids", batch.target_ids, _outside(vocab_size))


def check_input_ids(input_ids: Tensor, *, vocab_size: int, max_seq_len: int) -> None:
    """Refuse ids that the model can't compute on; raises as `check_batch` does."""
    _check_tensor("input_ids", input_ids)
    _check_int64("input_ids", input_ids)
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}; it must be [batch, seq]")
    if input_ids.numel() == 0:
        raise ValueError(f"input_ids is empty: its shape is {list(input_ids.shape)}")
    if input_ids.shape[1] > max_seq_len:
        raise ValueError(
            f"input_ids has rows of {input_ids.shape[1]} tokens, over max_seq_len={max_seq_len}; "
            "split them"
        )
    outside = (input_ids < 0) | (input_ids >= vocab_size)
    _refuse_where(outside, "input_ids", input_ids, _outside(vocab_size))


def check_inputs(inputs: dict[str, Tensor], *, vocab_size: int, max_seq_len: int) -> None:
    """Refuse inputs of `forward` other than `{"input_ids": ids}`; raises as `check_batch` does."""
    if set(inputs) != {"input_ids"}:
        raise ValueError(f"forward takes input_ids and nothing else; it was given {list(inputs)}")
    check_input_ids(inputs["input_ids"], vocab_size=vocab_size, max_seq_len=max_seq_len)


def to_device(batch: TextTrainBatch, device: torch.device) -> TextTrainBatch:
    """The batch with its tensors on `device`; those that are there already aren't copied."""
    mask, weights = batch.target_mask, batch.target_weights
    return replace(
        batch,
        input_ids=batch.input_ids.to(device),
        target_ids=batch.target_ids.to(device),
        target_mask=None if mask is None else mask.to(device),
        target_weights=None if weights is None else weights.to(device),
    )


def count_kept(batch: TextTrainBatch) -> int:
    """How many targets the mask keeps."""
    if batch.target_mask is None:
        return batch.target_ids.numel()
    return int((batch.target_mask != 0).sum())


def _check_tensor(name: str, field: object) -> None:
    if not isinstance(field, Tensor):
        raise TypeError(f"{name} is {type(field).__name__}; it must be a torch.Tensor [batch, seq]")


def _check_int64(name: str, ids: Tensor) -> None:
    if ids.dtype != torch.int64:
        raise TypeError(f"{name} is {ids.dtype}; ids must be torch.int64")


def _outside(vocab_size: int) -> str:
    return f"outside the vocabulary [0, {vocab_size})"


def _refuse_where(wrong: Tensor, name: str, values: Tensor, reason: str) -> None:
    if wrong.any():
        row, position = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name}[{row}, {position}] is {values[row, position].item()}, {reason}")
