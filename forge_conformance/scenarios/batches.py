"""Batches to train on, and how Hypothesis draws them.

Contents come from a drawn seed rather than token by token: that keeps an example to a handful of
draws, and what matters to a trainer (shape, mask, weights) is drawn, and shrinks, by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from forge.api import TextTrainBatch
from forge_conformance.scenarios.domain import Domain, Shape

MASKS = ("none", "all", "one", "ragged")
WEIGHTS = ("none", "ones", "fractional")
_SEEDS = st.integers(0, 2**16)


def make_batch(
    domain: Domain, shape: Shape, seed: int = 0, mask: str = "ragged", weights: str = "none"
) -> TextTrainBatch:
    """A batch of random ids.

    Args:
        mask: "none" (no mask), "all" (of ones), "one" (a single kept target), "ragged" (rows that
            keep none, one and many targets, as far as there are rows; at least one is kept).
        weights: "none", "ones", or "fractional" (of 0, ¼, ½, 1, 1½ and 2; not all kept ones 0).
    """
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(domain.vocab_size, shape, generator=generator)
    target_ids = torch.randint(domain.vocab_size, shape, generator=generator)
    input_ids = _with_special_ids(domain, input_ids, seed)
    kept = torch.ones(shape)
    if mask == "one":
        kept.zero_()[_position(shape, generator)] = 1
    elif mask == "ragged":
        kept = _ragged(shape, generator)
    factors = torch.tensor([0.0, 0.25, 0.5, 1.0, 1.5, 2.0])
    fractional = factors[torch.randint(len(factors), shape, generator=generator)]
    first_kept = tuple(kept.nonzero()[0].tolist())
    fractional[first_kept] = 0.5
    return TextTrainBatch(
        input_ids=input_ids,
        target_ids=target_ids,
        target_mask=None if mask == "none" else kept,
        target_weights={"none": None, "ones": torch.ones(shape), "fractional": fractional}[weights],
    )


def batches(
    min_batch: int = 1,
    min_seq: int = 1,
    masks: tuple[str, ...] = MASKS,
    weights: tuple[str, ...] = WEIGHTS,
) -> Callable[[Domain], st.SearchStrategy[TextTrainBatch]]:
    """Batches of at least so many rows and positions, with these masks and weights."""

    def strategy(domain: Domain) -> st.SearchStrategy[TextTrainBatch]:
        return st.builds(
            make_batch,
            st.just(domain),
            domain.shapes(min_batch, min_seq),
            _SEEDS,
            st.sampled_from(masks),
            st.sampled_from(weights),
        )

    return strategy


def token_ids(
    min_batch: int = 1, min_seq: int = 1
) -> Callable[[Domain], st.SearchStrategy[Tensor]]:
    """Input ids, int64 `[batch, seq]`, of at least so many rows and positions."""

    def strategy(domain: Domain) -> st.SearchStrategy[Tensor]:
        return st.builds(make_ids, st.just(domain), domain.shapes(min_batch, min_seq), _SEEDS)

    return strategy


def make_ids(domain: Domain, shape: Shape, seed: int = 0) -> Tensor:
    """Random ids, int64 `[batch, seq]`."""
    ids = torch.randint(
        domain.vocab_size, shape, generator=torch.Generator().manual_seed(seed + 2**20)
    )
    return _with_special_ids(domain, ids, seed)


@dataclass(frozen=True)
class LaterChange:
    """Ids, the same ids with other tokens from a position on, and the position."""

    ids: Tensor
    changed_ids: Tensor
    position: int


def later_change() -> Callable[[Domain], st.SearchStrategy[LaterChange]]:
    """Changes of some rows' tokens from a position ≥ 1 on."""

    def strategy(domain: Domain) -> st.SearchStrategy[LaterChange]:
        return st.builds(
            _change, st.just(domain), domain.shapes(min_seq=2), _SEEDS, st.integers(0, 2**16)
        )

    return strategy


def _change(domain: Domain, shape: Shape, seed: int, place: int) -> LaterChange:
    ids = make_ids(domain, shape, seed)
    position = 1 + place % (shape[1] - 1)
    changed = ids.clone()
    changed[:, position:] = (ids[:, position:] + 1 + place % 7) % domain.vocab_size
    return LaterChange(ids, changed, position)


def kept_mask(batch: TextTrainBatch) -> Tensor:
    """Which targets count, bool `[batch, seq]`: all where there is no mask."""
    if batch.target_mask is None:
        return torch.ones_like(batch.target_ids, dtype=torch.bool)
    return batch.target_mask.bool()


def _with_special_ids(domain: Domain, ids: Tensor, seed: int) -> Tensor:
    """The same with 0 and the last id somewhere, which padding and special tokens tend to be."""
    flat = ids.flatten()
    if len(flat) > 2:
        flat[seed % len(flat)] = 0
        flat[(seed + 1 + seed // 7) % len(flat)] = domain.vocab_size - 1
    return flat.view_as(ids)


def _position(shape: Shape, generator: torch.Generator) -> tuple[int, int]:
    row, column = (int(torch.randint(size, (), generator=generator)) for size in shape)
    return row, column


def _ragged(shape: Shape, generator: torch.Generator) -> Tensor:
    rows, columns = shape
    kept = (torch.rand(shape, generator=generator) < 0.6).float()
    if rows > 1:
        kept[0] = 0
        kept[1] = 0
        kept[1, int(torch.randint(columns, (), generator=generator))] = 1
    if not kept.any():
        kept[_position(shape, generator)] = 1
    return kept
