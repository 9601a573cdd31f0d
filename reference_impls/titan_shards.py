"""Sharded tensors on disk by torch.distributed.checkpoint: each rank writes and reads its parts.

The format is safetensors, each file with the places of its parts in the whole tensors, so that any
number of ranks reads what any other number wrote; the usual format needs an unrestricted unpickler.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from reference_impls.checkpoints import CheckpointError

Shape = tuple[torch.Size, torch.dtype]


def write_shards(
    tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None
) -> None:
    """Write this rank's parts of `tensors` into `folder`, which all ranks of `group` see.

    What several ranks hold is written once.

    Raises:
        CheckpointError: A rank couldn't write; raised on every rank.
    """
    with _telling(
        f"could not write {folder}", "free space or choose another folder, and save again"
    ):
        save(
            dict(tensors),
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            process_group=group,
            no_dist=group is None,
        )


def read_shards(
    like: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Read from `folder` tensors of the shapes of `like`, sharded as these are.

    Raises:
        CheckpointError: A rank couldn't read; raised on every rank.
    """
    tensors = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    with _telling(f"could not read {folder}", "make it readable, or load another checkpoint"):
        load(
            tensors,
            storage_reader=HuggingFaceStorageReader(str(folder)),
            process_group=group,
            no_dist=group is None,
        )
    return tensors


def shapes_in(folder: Path) -> dict[str, Shape]:
    """The shape and dtype of each whole tensor whose parts are in `folder`."""
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    return {
        name: (tensor.size, tensor.properties.dtype)
        for name, tensor in metadata.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    }


@contextmanager
def _telling(what: str, advice: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            # Of a single process torch warns, although no_dist=True says that it is meant.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as failure:
        # It is a BaseException, which would end a process that only expects errors.
        rank, (error, _traceback) = next(iter(failure.failures.items()))
        if not isinstance(error, Exception):
            raise error from None
        raise CheckpointError(
            f"{what}: {type(error).__name__} on rank {rank}: {error}; {advice}"
        ) from error
