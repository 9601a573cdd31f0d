"""A random stream of a trainer's own, kept apart from the caller's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class RandomStream:
    """Torch's default generators as they would be if nobody else drew from them.

    Modules such as `torch.nn.Dropout` draw from the default generators and from no other. Inside
    `active()` these hold the stream's own state; outside, the caller's.

    Args:
        seed: Where the stream starts.
        device: The device that draws beside the CPU, if it is another.

    Example:
        >>> stream = RandomStream(seed=0, device=torch.device("cpu"))
        >>> before = torch.get_rng_state()
        >>> with stream.active():
        ...     noise = torch.rand(3)
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._cpu_state = torch.Generator().manual_seed(seed).get_state()
        self._cuda_state: Tensor | None = None
        self._cuda_devices: list[torch.device] = []
        if device.type == "cuda":
            self._cuda_devices = [device]
            self._cuda_state = torch.Generator(device).manual_seed(seed).get_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Everything drawn from the default generators in here is drawn from this stream."""
        with torch.random.fork_rng(devices=self._cuda_devices):
            torch.set_rng_state(self._cpu_state)
            if self._cuda_state is not None:
                torch.cuda.set_rng_state(self._cuda_state, self._cuda_devices[0])
            try:
                yield
            finally:
                self._cpu_state = torch.get_rng_state()
                if self._cuda_state is not None:
                    self._cuda_state = torch.cuda.get_rng_state(self._cuda_devices[0])

    def state_dict(self) -> dict[str, Tensor | None]:
        """Where the stream is, for a checkpoint."""
        return {"cpu": self._cpu_state, "cuda": self._cuda_state}

    def load_state_dict(self, state: dict[str, Tensor | None]) -> None:
        """Go to where another stream was; its CUDA part is used if both have one."""
        assert state["cpu"] is not None
        self._cpu_state = state["cpu"]
        if self._cuda_state is not None and state["cuda"] is not None:
            self._cuda_state = state["cuda"]
