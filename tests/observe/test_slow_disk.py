"""A slow disk holds up background writers, and nobody else."""

from __future__ import annotations

import threading
import time

import torch

from forge_conformance.observe.slow_disk import slow_for_background_writers


def test_only_other_threads_wait(tmp_path):
    tensor = torch.zeros(2)

    def write(name: str) -> None:
        torch.save(tensor, tmp_path / name)

    with slow_for_background_writers(0.3):
        started = time.perf_counter()
        write("own")
        assert time.perf_counter() - started < 0.3
        writer = threading.Thread(target=write, args=("background",))
        writer.start()
        tensor += 1
        writer.join()
    assert torch.load(tmp_path / "own").sum() == 0
    assert torch.load(tmp_path / "background").sum() == 2
