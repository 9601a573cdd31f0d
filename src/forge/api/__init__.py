"""The Trainer contract's Python face: one protocol, the dataclasses it speaks in, narrow traits.

A trainer conforms by its structure: it may import this package, and it needn't. What the types
can't say (that `forward` is causal, that gradients add up) is the contract's clauses, judged by a
conformance kit that this package knows nothing of. It needs torch and nothing else.
"""

from __future__ import annotations

from forge.api.metrics import Metric, MetricSpec, Reduce
from forge.api.trainer import Trainer
from forge.api.traits import Closable, DeclaresMetrics
from forge.api.types import (
    ForwardBackwardResult,
    LossFn,
    OptimStepResult,
    ParallelismConfig,
    TextTrainBatch,
    TrainerConfig,
    TrainerStatus,
)

__all__ = [
    "Closable",
    "DeclaresMetrics",
    "ForwardBackwardResult",
    "LossFn",
    "Metric",
    "MetricSpec",
    "OptimStepResult",
    "ParallelismConfig",
    "Reduce",
    "TextTrainBatch",
    "Trainer",
    "TrainerConfig",
    "TrainerStatus",
]
