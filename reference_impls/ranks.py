"""What the processes of one trainer agree on, so that none goes on alone or waits for ever."""

from __future__ import annotations

import atexit
import hashlib
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

T = TypeVar("T")

# For a rank that is busy, with writing a checkpoint for example; one that died is noticed at once.
_LONGEST_WAIT = timedelta(minutes=10)


class Ranks:
    """The processes that run one trainer between them; every one of them makes the same calls.

    With one process there is nobody to agree with, and nothing here does anything.

    Args:
        group: The group of the processes; None for this one alone.
        device: Where they exchange tensors.

    Attributes:
        group: As given.
        rank: Which of the processes this is, from 0.
        size: How many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.group = group
        self._device = device
        self._lost: str | None = None

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """What is done in here is done on every rank, or raises on every rank.

        For what can fail on one rank and not on another. A rank that failed raises its own error,
        the others that of the first one that failed.
        """
        self._refuse_if_lost()
        if self.size == 1:
            yield
            return
        own: BaseException | None = None
        try:
            yield
        except BaseException as error:
            own = error
        try:
            (anybody_failed,) = self._highest(int(own is not None))
            if anybody_failed:
                first = self._first_error(own)
                raise first if own is None else own
        finally:
            del own  # Its traceback leads back to here, and holds all that was computed.

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """In here the ranks wait for each other; after a failure the trainer can't be used again.

        One rank's failure leaves the others waiting, or a sharded backward half done, which
        nothing undoes: its later gradients would be wrong without a sign.
        """
        self._refuse_if_lost()
        try:
            yield
        except BaseException as error:
            if self.size > 1:
                self._lost = f"{type(error).__name__}: {error}"
            raise

    def check_same(self, what: str, tensors: Mapping[str, Tensor]) -> None:
        """Refuse, on every rank, what isn't the same on every rank.

        Raises:
            ValueError: Names, shapes, dtypes or contents differ.
        """
        if self.size == 1:
            return
        mark = _digest(tensors)
        highest, lowest = self._highest(mark, -mark)
        if highest != -lowest:
            raise ValueError(
                f"the ranks were given different {what}: call the trainer with the same, whole "
                f"{what} on every rank; it divides the rows itself"
            )

    def from_first(self, value: T) -> T:
        """The value that rank 0 gives."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def _refuse_if_lost(self) -> None:
        if self._lost is not None:
            raise RuntimeError(
                f"this trainer can't go on: an earlier call failed midway with {self._lost}; make "
                "a new one on every rank and load the last checkpoint"
            )

    def _first_error(self, own: BaseException | None) -> BaseException:
        """The error of the first rank that has one."""
        packed: list[bytes | None] = [None] * self.size
        dist.all_gather_object(packed, _packed(own, self.rank), group=self.group)
        first: BaseException = pickle.loads(next(each for each in packed if each is not None))
        return first

    def _highest(self, *numbers: int) -> list[int]:
        """The highest of each number on any rank."""
        highest = torch.tensor(numbers, device=self._device)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group)
        return [int(number) for number in highest.tolist()]


def process_group(device: torch.device) -> dist.ProcessGroup | None:
    """The group of all processes that a launcher such as torchrun started; None if it's just one.

    The first trainer of a process makes it, unless the program did; it is left to the trainers
    that follow until the process ends.
    """
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return None
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=_LONGEST_WAIT)
        atexit.register(_destroy_process_group)
    return dist.group.WORLD if dist.get_world_size() > 1 else None


def own_device(device: torch.device) -> torch.device:
    """This process's own of several devices of a kind, by the launcher's `LOCAL_RANK`."""
    if device.type != "cuda" or device.index is not None or "LOCAL_RANK" not in os.environ:
        return device
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(own)
    return own


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _packed(error: BaseException | None, rank: int) -> bytes | None:
    """The error for other ranks to raise; a stand-in if it can't travel."""
    if error is None:
        return None
    # Not every exception can be pickled, or be made again from what was.
    with suppress(Exception):
        packed = pickle.dumps(error)
        if isinstance(error, Exception) and type(pickle.loads(packed)) is type(error):
            return packed
    return pickle.dumps(RuntimeError(f"rank {rank} raised {type(error).__name__}: {error}"))


def _digest(tensors: Mapping[str, Tensor]) -> int:
    """A positive int64 that differs if anything does."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:7])
