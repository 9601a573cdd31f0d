"""The corpus of faulty and of unusual trainers; importing it enters them all."""

from tests.faults import (
    checkpoint_files,
    checkpoint_state,
    clear_gradients,
    config,
    forward,
    forward_backward,
    forward_backward_failures,
    honest,
    honest_checkpoints,
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
    "checkpoint_files",
    "checkpoint_state",
    "clear_gradients",
    "config",
    "forward",
    "forward_backward",
    "forward_backward_failures",
    "honest",
    "honest_checkpoints",
    "honest_training",
    "metrics",
    "numerics",
    "optim_step",
    "remote",
    "status",
    "structure",
    "tokenizer",
]
