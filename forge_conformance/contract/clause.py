"""One clause of the contract: its id, its level, its text, and what judging it needs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """What breaking a clause means."""

    MUST = "MUST"
    """The trainer doesn't conform, and the run fails."""

    SHOULD = "SHOULD"
    """Advice; it fails the run only when that is asked for."""


class Need(StrEnum):
    """What a check needs beyond the bare protocol; where it is missing, the clause isn't checked.

    The value is the need's name in the contract; `hint` says how to meet it.
    """

    IN_PROCESS = "in-process"
    TWIN = "twin"
    DECLARED_OPTIMIZER = "declared optimizer"
    DECLARED_SCHEDULE = "declared schedule"
    DECLARED_CLIPPING = "declared clipping"
    DECLARED_DEFAULT_LOSS = "declared default loss"
    DECLARED_DETERMINISTIC = "declared deterministic"
    DECLARED_COMPUTE_DTYPE = "declared compute dtype"
    DECLARED_METRIC_SCHEMA = "declared metric schema"
    DECLARED_SHAPES = "declared shapes"
    LOCAL_FILES = "local files"
    SECOND_TRAINER = "second trainer"
    CUDA = "cuda"
    RANKS = "ranks"

    @property
    def hint(self) -> str:
        """One line that tells the trainer's author what unlocks the clause."""
        return _HINTS[self]


_HINTS = {
    Need.IN_PROCESS: (
        "declare Target.parameters, the trainable parameters by name, and Target.gradients "
        "where they aren't in .grad (with Target.loss_scale where they are scaled)"
    ),
    Need.TWIN: (
        "let Target.factory make every trainer in the same initial state (seed it), "
        "or let load restore what save wrote"
    ),
    Need.DECLARED_OPTIMIZER: (
        "declare Target.optimizer, a function from float64 parameters by name to a torch optimizer"
    ),
    Need.DECLARED_SCHEDULE: (
        "declare Target.learning_rate, a function from the number of the update to its rate"
    ),
    Need.DECLARED_CLIPPING: (
        "declare Target.clip_norm, the 2-norm that gradients are clipped to (math.inf for none)"
    ),
    Need.DECLARED_DEFAULT_LOSS: (
        "declare Target.default_loss, a function from the outputs and the batch to the loss"
    ),
    Need.DECLARED_DETERMINISTIC: (
        "declare Target.deterministic=True if two trainers fed the same agree bitwise"
    ),
    Need.DECLARED_COMPUTE_DTYPE: (
        "declare Target.compute_dtype, the lowest precision that the forward pass computes in"
    ),
    Need.DECLARED_METRIC_SCHEMA: (
        "declare Target.metrics, what each reported metric promises, by its name"
    ),
    Need.DECLARED_SHAPES: "declare Target.shapes, the (batch, seq) pairs that the trainer takes",
    Need.LOCAL_FILES: "run the kit on a machine that sees the paths which save returns",
    Need.SECOND_TRAINER: (
        "name one that can load this one's exported weights, with --trainer-against=module:Name"
    ),
    Need.CUDA: "run the kit on a machine with a CUDA device, with a trainer that uses it",
    Need.RANKS: "run the kit in several processes, under torchrun or another launcher",
}


@dataclass(frozen=True)
class Clause:
    """One promise of the contract.

    Args:
        id: `area.name`. It is public, and never reused for another meaning.
        level: Whether it must hold or should.
        text: The promise, as a sentence that begins "a conforming trainer …".
        needs: What its check can't do without: all of these. Where only a part of the clause
            needs more, the text says so.
        or_needs: What does as well instead, all of these; empty if there is no other way.
        pending: Why no check for it exists yet; None if one does.

    Example:
        >>> causal = Clause("forward.causal", Level.MUST, "gives logits that …")
        >>> causal.area
        'forward'
    """

    id: str
    level: Level
    text: str
    needs: tuple[Need, ...] = ()
    or_needs: tuple[Need, ...] = ()
    pending: str | None = None

    @property
    def area(self) -> str:
        """The part of the id before the dot."""
        return self.id.partition(".")[0]

    @property
    def sentence(self) -> str:
        """The promise as a whole sentence."""
        return f"A conforming trainer {self.text}."
