"""What a call costs more through `MonarchTrainer` than in the process; `make bench` prints it.

Nothing here fails for being slow: machines differ. The goal, on two cores: ≤ 5 ms for a
`forward_backward` of a tiny batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

import pytest
import torch

from forge.api import TextTrainBatch, Trainer

pytest.importorskip("torchtitan", reason="needs torchtitan: pip install -e '.[titan]'")
pytest.importorskip("monarch", reason="needs torchmonarch: pip install -e '.[monarch]'")

from reference_impls.monarch import spawn_titan
from reference_impls.titan import TitanTrainer

GOAL = 5.0
TIMES = 100

TOKENS = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(0))
BATCH = TextTrainBatch(TOKENS[:, :-1], TOKENS[:, 1:])
CALLS: dict[str, Callable[[Trainer], Awaitable[object]]] = {
    "forward_backward": lambda trainer: trainer.forward_backward(BATCH),
    "forward": lambda trainer: trainer.forward({"input_ids": BATCH.input_ids}),
    "optim_step": lambda trainer: trainer.optim_step(),
    "get_status": lambda trainer: trainer.get_status(),
}


async def milliseconds(*trainers: Trainer) -> dict[str, list[float]]:
    """The median of each call on each trainer; they take turns."""
    taken: dict[str, list[list[float]]] = {name: [[] for _ in trainers] for name in CALLS}
    for _ in range(TIMES):
        for name, call in CALLS.items():
            for trainer, times in zip(trainers, taken[name], strict=True):
                started = time.perf_counter()
                await call(trainer)
                times.append(1000 * (time.perf_counter() - started))
    return {name: [median(times) for times in each] for name, each in taken.items()}


def test_overhead_of_the_wrapper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def both() -> dict[str, list[float]]:
        there = await spawn_titan(checkpoint_dir=tmp_path)
        try:
            return await milliseconds(TitanTrainer(checkpoint_dir=tmp_path), there)
        finally:
            await there.close()

    taken = asyncio.run(both())
    with capsys.disabled():
        for name, (here, there) in taken.items():
            print(
                f"\n{name}: {there:.2f} ms through Monarch, {here:.2f} ms in the process, "
                f"{there - here:+.2f} ms (goal {GOAL:g} ms)",
                end="",
            )
