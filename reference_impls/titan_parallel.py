"""Torchtitan's parallelisms as `TitanTrainer` uses them: degrees, shards, the logits of all rows.

Every rank computes the logits of its own rows and, by collectives that are differentiated, gets
those of all rows, with the whole vocabulary. So every rank sees one and the same loss of the whole
batch, whatever it normalises by. Its gradient at a rank's own rows is that rank's to propagate,
and what the ranks propagate adds up: gradients are summed over them, never averaged.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import parallel_dims as titan_dims
from torchtitan.protocols.model_spec import ModelSpec

from reference_impls.optimization import backward_or_restore
from reference_impls.ranks import Ranks, own_device, process_group

_KINDS_OF_DEGREES = {
    "context_parallel_degree": "context",
    "pipeline_parallel_degree": "pipeline",
    "expert_parallel_degree": "expert",
}


class Parallel:
    """How one trainer is spread over processes.

    Args:
        parallelism: Torchtitan's degrees of data and tensor parallelism. All of 1 is this process
            alone, whatever others there are. Of the ways to carry them out the one that works on
            several ranks is taken, and weights are always resharded after a forward: where they
            weren't, one without backward would leave some that no later update reaches.
        device: Where to compute.

    Raises:
        ValueError: The degrees aren't those of the processes there are, or aren't supported.
    """

    def __init__(self, parallelism: ParallelismConfig, device: torch.device) -> None:
        for degree, kind in _KINDS_OF_DEGREES.items():
            if getattr(parallelism, degree) != 1:
                raise ValueError(
                    f"{degree} is {getattr(parallelism, degree)}; this trainer has data and "
                    f"tensor parallelism, not {kind} parallelism: leave it at 1"
                )
        self.config = replace(
            parallelism, spmd_backend="partial_dtensor", fsdp_reshard_after_forward="always"
        )
        degrees = (
            parallelism.data_parallel_replicate_degree,
            parallelism.data_parallel_shard_degree,
            parallelism.tensor_parallel_degree,
        )
        group = None if degrees == (1, 1, 1) else process_group(device)
        self.device = device if group is None else own_device(device)
        self.ranks = Ranks(group, self.device)
        self.dims = _dims(*degrees, device.type, group)

    @property
    def data_degree(self) -> int:
        """Over how many ranks the rows are divided."""
        return int(self.dims.dp_replicate * self.dims.dp_shard)

    @property
    def data_rank(self) -> int:
        """Which part of the rows is this rank's."""
        return self._rank_in("loss") if self.data_degree > 1 else 0

    @property
    def tensor_rank(self) -> int:
        """Which part of each sharded matrix is this rank's."""
        return self._rank_in("tp") if self.dims.tp > 1 else 0

    def prepare(self, spec: ModelSpec) -> None:
        """Let the specification tell which weights are sharded; before the model is built.

        Raises:
            ValueError: The model can't be divided by the degree of tensor parallelism.
        """
        if self.ranks.size > 1:
            spec.model.update_from_config(config=SimpleNamespace(parallelism=self.config))

    def shard(self, model: Any, spec: ModelSpec) -> None:
        """Replace a whole model's weights, the same on every rank, by this rank's shards."""
        if self.ranks.size == 1:
            return
        if model.enable_weight_tying and self.dims.tp_enabled:
            # Torchtitan would shard each of the two for itself; what is sharded it leaves alone.
            tied = distribute_tensor(model.lm_head.weight, self.dims.get_mesh("tp"), [Shard(0)])
            model.lm_head.weight = model.tok_embeddings.weight = nn.Parameter(tied)
        spec.parallelize_fn(
            model,
            parallel_dims=self.dims,
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=self.config,
            compile_config=CompileConfig(),
            ac_config=None,
            dump_folder="",
        )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Else it multiplies while it sums, by 1, which gloo can't.
                module.set_force_sum_reduction_for_comms(True)

    def logits(self, model: nn.Module, input_ids: Tensor) -> Tensor:
        """The logits of all rows, `[batch, seq, vocab]`, of which each rank computes a part."""
        if self.ranks.size == 1:
            return cast(Tensor, model(input_ids))
        rows, degree = len(input_ids), self.data_degree
        # No rank may be without rows: those that are added are cut off again below.
        share = -(-rows // degree)
        filled = nn.functional.pad(input_ids, (0, 0, 0, share * degree - rows))
        with self.ranks.in_step():
            logits: Tensor = model(filled[share * self.data_rank :][:share])
            if isinstance(logits, DTensor):
                logits = logits.full_tensor()
            if degree > 1:
                mesh = self.dims.get_mesh("loss")
                logits = DTensor.from_local(logits, mesh, [Shard(0)], run_check=False).full_tensor()
        # A copy, which a loss may change in place, as it may what a single process computes.
        return logits[:rows].clone()

    def backward(self, loss: Tensor, logits: Tensor, parameters: Sequence[Tensor]) -> None:
        """Add the gradient of `loss` to each parameter's, or raise and leave all as they were.

        The exception is a failure below the logits on several ranks: see `Ranks.in_step`.

        Raises:
            ValueError: On several ranks: the loss depends on something else than the logits.
        """
        if self.ranks.size == 1:
            backward_or_restore(loss, parameters)
            return
        # The caller's part of the graph can fail on one rank only: not once others would wait.
        with self.ranks.all_or_none():
            found: tuple[Tensor | None, ...] = torch.autograd.grad(
                loss, [logits, *parameters], allow_unused=True
            )
            gradient, *others = found
            if gradient is None or any(each is not None for each in others):
                raise ValueError(
                    "on several ranks a loss is differentiated through outputs['logits'] alone; "
                    "compute it from these, and not from weights"
                )
        with self.ranks.in_step():
            logits.backward(gradient)

    def gathered(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state with whole tensors instead of shards on rank 0; nothing on the others."""
        whole = {}
        for name, value in state.items():
            # One at a time, and kept off the device: together they may not fit there.
            if isinstance(value, DTensor):
                value = value.full_tensor().cpu()
            if self.ranks.rank == 0:
                whole[name] = value
        return whole

    def _rank_in(self, axis: str) -> int:
        return int(self.dims.get_mesh(axis).get_local_rank())


def sharded_like(whole: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A state of whole tensors, the same on every rank, sharded as this rank's own state is."""
    return {name: _sharded_like(value, own.get(name)) for name, value in whole.items()}


def _sharded_like(whole: Any, own: Any) -> Any:
    if not isinstance(own, DTensor):
        return whole
    mesh, placements = own.device_mesh, own.placements
    return distribute_tensor(whole.to(own.device), mesh, placements, src_data_rank=None)


@functools.cache
def _dims(
    dp_replicate: int,
    dp_shard: int,
    tp: int,
    device_type: str,
    group: dist.ProcessGroup | None,
) -> ParallelDims:
    """The degrees with their meshes, made once: each mesh makes groups, which stay."""
    world_size = 1 if group is None else group.size()
    try:
        dims = ParallelDims(
            dp_replicate=dp_replicate,
            dp_shard=dp_shard,
            cp=1,
            tp=tp,
            pp=1,
            ep=1,
            world_size=world_size,
            spmd_backend="partial_dtensor",
        )
    except AssertionError as error:
        raise ValueError(
            f"{dp_replicate} replicas of {dp_shard} shards, each split {tp} ways, don't make "
            f"{world_size} process(es); start as many as the degrees multiply to, for example with "
            "torchrun --nproc-per-node, or leave the degrees at their defaults"
        ) from error
    if group is not None:
        with _meshes_on(device_type):
            dims.build_mesh()
    return dims


@contextmanager
def _meshes_on(device_type: str) -> Iterator[None]:
    """Torchtitan makes meshes for the machine's accelerator, and takes it to have one."""
    usual, titan_dims.device_type = titan_dims.device_type, device_type
    try:
        yield
    finally:
        titan_dims.device_type = usual
