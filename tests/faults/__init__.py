"""The corpus of faulty and of unusual trainers; importing it enters them all."""

from tests.faults import (
    clear_gradients,
    config,
    forward,
    forward_backward,
    forward_backward_failures,
    honest,
    honest_training,
    metrics,
    numerics,
    optim_step,
    remote,
    status,
    structure,
    tokenizer,
)
from tests.faults.corpus import FAULTS, HONEST

__all__ = [
    "FAULTS",
    "HONEST",
    "clear_gradients",
    "config",
    "forward",
    "forward_backward",
    "forward_backward_failures",
    "honest",
    "honest_training",
    "metrics",
    "numerics",
    "optim_step",
    "remote",
    "status",
    "structure",
    "tokenizer",
]
