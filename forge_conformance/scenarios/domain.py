"""The inputs that a trainer takes: its vocabulary, its longest sequence, its shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hypothesis import strategies as st

Shape = tuple[int, int]
"""`(batch, seq)`."""

LONGEST_LOGITS = 2**25
"""Elements of the largest logits that the kit asks for; longer sequences are cut to this."""


@dataclass(frozen=True)
class Domain:
    """What batches may look like.

    Args:
        vocab_size: Ids lie in `[0, vocab_size)`.
        max_seq_len: The longest sequence, where the trainer tells one.
        declared_shapes: The only `(batch, seq)` pairs to use, where the author declared them.
    """

    vocab_size: int
    max_seq_len: int | None = None
    declared_shapes: Sequence[Shape] | None = None

    max_batch = 6
    usual_seq = 12
    short_enough = 128
    """A longest sequence up to here is drawn like any other; a longer one costs too much."""

    def shapes(self, min_batch: int = 1, min_seq: int = 1) -> st.SearchStrategy[Shape]:
        """Shapes of at least so many rows and positions; the smallest ones first."""
        if self.declared_shapes is not None:
            fitting = sorted(
                s for s in self.declared_shapes if s[0] >= min_batch and s[1] >= min_seq
            )
            return st.sampled_from(fitting) if fitting else st.nothing()
        longest = min(self.usual_seq, self.max_seq_len or self.usual_seq)
        if longest < min_seq:
            return st.nothing()
        lengths = list(range(min_seq, longest + 1))
        whole = self.longest_seq
        if whole is not None and longest < whole <= self.short_enough:
            lengths += [whole] * 4
        return st.tuples(
            st.integers(min_batch, max(self.max_batch, min_batch)), st.sampled_from(lengths)
        )

    @property
    def usual_shape(self) -> Shape:
        """A shape for batches that needn't vary: several rows and positions where possible."""
        if self.declared_shapes is not None:
            return max(self.declared_shapes)
        return 3, min(8, self.max_seq_len or 8)

    @property
    def longest_seq(self) -> int | None:
        """The longest sequence worth a call; None where the trainer tells no longest one."""
        if self.declared_shapes is not None:
            return max(seq for _, seq in self.declared_shapes)
        if self.max_seq_len is None:
            return None
        return max(1, min(self.max_seq_len, LONGEST_LOGITS // self.vocab_size))

    @property
    def edge_shapes(self) -> list[Shape]:
        """The smallest and the longest, one of each kind that tends to be treated apart."""
        longest = self.longest_seq or self.usual_seq
        if self.declared_shapes is not None:
            return list(self.declared_shapes)
        candidates = [(1, 1), (self.max_batch, 1), (1, longest), (3, min(5, longest))]
        return list(dict.fromkeys(candidates))

    def takes(self, shape: Shape) -> bool:
        """Whether batches of `shape` may be asked for."""
        if self.declared_shapes is not None:
            return shape in self.declared_shapes
        return self.max_seq_len is None or shape[1] <= self.max_seq_len


Drawn: TypeAlias = Callable[[Domain], st.SearchStrategy[Any]]
"""What a check varies: a strategy, once the inputs that the trainer takes are known."""
