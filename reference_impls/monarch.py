"""`MonarchTrainer`: the contract kept by a `TitanTrainer` in processes of its own.

    trainer = await spawn_titan("llama3", procs=2)

Its methods are awaited as any trainer's; that Monarch's actors answer them doesn't show.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from forge.api import (
    ForwardBackwardResult,
    LossFn,
    MetricSpec,
    OptimStepResult,
    TextTrainBatch,
    TrainerConfig,
    TrainerStatus,
)

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

    from reference_impls.byte_tokenizer import ByteTokenizer
    from reference_impls.monarch_actor import TrainerProcesses


class TrainerLostError(RuntimeError):
    """A process of the trainer has died, and its state with it."""


class TrainerClosedError(RuntimeError):
    """The trainer was closed, so that it takes no more calls."""


async def spawn_titan(
    model: str | ModelSpec = "llama3",
    *,
    procs: int = 1,
    checkpoint_dir: str | os.PathLike[str] = "checkpoints",
    **options: Any,
) -> MonarchTrainer:
    """Start processes on this machine and make a `TitanTrainer` in them, one rank in each.

    They end with `close`, and not later than two or three seconds after this process.

    Args:
        model: As `TitanTrainer` takes it.
        procs: How many processes.
        checkpoint_dir: The default folder of checkpoints; a relative one is of this process.
        options: Whatever else `TitanTrainer` takes; everything must be picklable.

    Raises:
        Exception: What making a `TitanTrainer` raises on any rank.
    """
    # Here, since it starts threads: who imports this module only may still fork.
    from reference_impls.monarch_actor import TrainerProcesses

    options |= {"model": model, "checkpoint_dir": os.path.abspath(checkpoint_dir)}
    processes = TrainerProcesses(procs)
    try:
        await processes.start(options)
    except BaseException:
        await processes.stop()
        raise
    return MonarchTrainer(processes)


class MonarchTrainer:
    """A trainer in processes of its own; `spawn_titan` makes one.

    Calls that overlap run one after the other in the order they were issued. One that is cancelled
    has either not begun or is completed there, before later ones.

    Every method raises `TrainerLostError` once a process of the trainer has died, and
    `TrainerClosedError` after `close`.

    Args:
        processes: Where the trainer runs.
    """

    def __init__(self, processes: TrainerProcesses) -> None:
        self._processes = processes

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        """As the protocol has it; `loss_fn` runs there, a copy of it and of what it captures.

        Captured tensors arrive on the CPU, wherever the logits are.

        Raises:
            TypeError: It captures what can't be pickled.
        """
        fields = (batch.input_ids, batch.target_ids, batch.target_mask, batch.target_weights)
        result: ForwardBackwardResult = await self._processes.call(
            "forward_backward", TextTrainBatch(*map(_cut_out, fields)), loss_fn
        )
        return result

    async def optim_step(self) -> OptimStepResult:
        result: OptimStepResult = await self._processes.call("optim_step")
        return result

    async def clear_gradients(self) -> None:
        await self._processes.call("clear_gradients")

    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        logits: Tensor = await self._processes.call(
            "forward", {name: _cut_out(tensor) for name, tensor in inputs.items()}
        )
        return logits

    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        saved: str = await self._processes.call("save", name, _from_here(path), weights_only)
        return saved

    async def load(self, path: str | None = None) -> str:
        loaded: str = await self._processes.call("load", _from_here(path))
        return loaded

    async def get_config(self) -> TrainerConfig:
        config: TrainerConfig = await self._processes.call("get_config")
        return config

    async def get_status(self) -> TrainerStatus:
        status: TrainerStatus = await self._processes.call("get_status")
        return status

    async def get_tokenizer(self) -> ByteTokenizer:
        tokenizer: ByteTokenizer = await self._processes.call("get_tokenizer")
        return tokenizer

    async def metric_schema(self) -> Mapping[str, MetricSpec]:
        schema: Mapping[str, MetricSpec] = await self._processes.call("metric_schema")
        return schema

    async def close(self) -> None:
        """End the trainer's processes; a call that is under way gets a few seconds to return."""
        await self._processes.stop()


def _cut_out(tensor: Any) -> Any:
    """The tensor without the rest of the storage that it is a view of, which would travel along."""
    if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() > tensor.nbytes:
        return tensor.clone()
    return tensor


def _from_here(path: str | None) -> str | None:
    """A relative path is of this process's working folder, which the trainer's needn't share."""
    return None if path is None else os.path.abspath(path)
