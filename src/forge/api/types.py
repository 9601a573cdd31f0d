"""What goes into a trainer and comes out of it: batches, losses, results, configuration, status.

The dataclasses are a convenience: a trainer may return objects of its own with the same fields.
None of them checks what it is given; refusing a bad batch is the trainer's part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor


@dataclass(eq=False)
class TextTrainBatch:
    """Token ids to train on; all tensors `[batch, seq]`, on the CPU or any other device.

    `target_ids[b, t]` is the token that the logits at `[b, t]` predict. Whoever makes the batch
    has shifted it: a trainer never shifts. Two batches are equal only if they are one object.

    Args:
        input_ids: int64, each in `[0, vocab_size)`.
        target_ids: int64, each in `[0, vocab_size)` where it is kept; anything where it is masked.
        target_mask: bool, int or float; 1 keeps the target, 0 leaves it out. None keeps all.
        target_weights: float; a factor on each target's loss. None weights all by 1.

    Example:
        >>> import torch
        >>> tokens = torch.tensor([[5, 3, 8, 1]])
        >>> batch = TextTrainBatch(
        ...     input_ids=tokens[:, :-1],
        ...     target_ids=tokens[:, 1:],
        ...     target_mask=torch.tensor([[0, 1, 1]]),
        ... )
        >>> batch.target_ids.shape
        torch.Size([1, 3])
    """

    input_ids: Tensor
    target_ids: Tensor
    target_mask: Tensor | None = None
    target_weights: Tensor | None = None


LossFn: TypeAlias = Callable[[dict[str, Any], TextTrainBatch], Tensor]
"""A loss of the caller's own: takes the outputs and the batch, returns a floating 0-dim tensor.

`outputs["logits"]` is a floating tensor `[batch, seq, vocab_size]` that carries an autograd graph;
what is returned must carry it on. Both arguments are to be read, not changed.
"""


@dataclass
class ForwardBackwardResult:
    """What one `forward_backward` computed.

    Args:
        loss: The value that was differentiated, in the loss function's own unit.
        metrics: Non-empty names to values of this call: numbers, strings, booleans, tensors
            without a graph, `Metric`s, or lists and mappings of these. May be empty.

    Example:
        >>> result = ForwardBackwardResult(loss=2.5, metrics={"num_tokens": 12})
        >>> result.metrics["num_tokens"]
        12
    """

    loss: float
    metrics: dict[str, Any]


@dataclass
class OptimStepResult:
    """What one `optim_step` did.

    Args:
        step: The step count after it, as `get_status` now reports it.
        learning_rate: The rate that this step used (not the next one's): finite and ≥ 0.
        accumulated_microbatches: How many `forward_backward` calls it applied.

    Example:
        >>> OptimStepResult(step=1, learning_rate=3e-4, accumulated_microbatches=2).step
        1
    """

    step: int
    learning_rate: float
    accumulated_microbatches: int


@dataclass
class ParallelismConfig:
    """How a trainer is spread over processes; the defaults are one process on the CPU.

    Args:
        dp_degree: Data parallel degree, ≥ 1, like every degree.
        tp_degree: Tensor parallel degree.
        pp_degree: Pipeline parallel degree.
        cp_degree: Context parallel degree.
        ep_degree: Expert parallel degree; its ranks are also counted in the others.
        world_size: Number of processes: `dp_degree * tp_degree * pp_degree * cp_degree`.
        dp_rank: This process's data parallel rank, in `[0, dp_degree)`.
        tp_rank: This process's tensor parallel rank, in `[0, tp_degree)`.
        device: Where this process computes, as `torch.device` takes it.

    Example:
        >>> ParallelismConfig(dp_degree=2, world_size=2, dp_rank=1, device="cuda:1").tp_degree
        1
    """

    dp_degree: int = 1
    tp_degree: int = 1
    pp_degree: int = 1
    cp_degree: int = 1
    ep_degree: int = 1
    world_size: int = 1
    dp_rank: int = 0
    tp_rank: int = 0
    device: str = "cpu"


@dataclass
class TrainerConfig:
    """What a trainer is; the same for as long as it lives.

    Args:
        model_name: Name or path of the model, non-empty.
        model_config: Facts of the model. `vocab_size`, an int > 0, must be there; `hidden_size`,
            `num_layers`, `num_attention_heads` and `max_seq_len` should; JSON should hold it all.
        parallelism: How the trainer is spread over processes.

    Example:
        >>> config = TrainerConfig("tiny", {"vocab_size": 256}, ParallelismConfig())
        >>> config.model_config["vocab_size"], config.parallelism.device
        (256, 'cpu')
    """

    model_name: str
    model_config: dict[str, Any]
    parallelism: ParallelismConfig


@dataclass
class TrainerStatus:
    """Where a trainer stands.

    Args:
        step: The step count. It may start at any number; an `optim_step` that applied its
            gradients raises it by one, and `load` sets it.
        accumulated_microbatches: `forward_backward` calls that succeeded and whose gradients are
            still pending; 0 after `optim_step`, `clear_gradients` and `load`.

    Example:
        >>> TrainerStatus(step=10, accumulated_microbatches=0)
        TrainerStatus(step=10, accumulated_microbatches=0)
    """

    step: int
    accumulated_microbatches: int
