"""The reference trainers, each in a few shapes, with checkpoints in a folder of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.api import TextTrainBatch
from reference_impls.plain import PlainTrainer

PLAIN = {
    "plain": {},
    "plain-tied-dropout": {"tie_weights": True, "dropout": 0.2},
    "plain-bfloat16": {"compute_dtype": torch.bfloat16},
}
HF = {
    "llama": {"model": "llama"},
    "qwen2-tied-dropout": {"model": "qwen2", "tie_weights": True, "dropout": 0.2},
    "qwen3": {"model": "qwen3"},
}


@pytest.fixture(params=[*PLAIN, *HF])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """Makes a trainer, always in the same initial state."""
    folder = tmp_path / "checkpoints"
    if request.param in PLAIN:
        return lambda **options: PlainTrainer(
            **{"checkpoint_dir": folder, **PLAIN[request.param], **options}
        )
    pytest.importorskip("transformers")
    from reference_impls.hf import HFTrainer

    return lambda **options: HFTrainer(**{"checkpoint_dir": folder, **HF[request.param], **options})


@pytest.fixture
def make_batch() -> Callable[..., TextTrainBatch]:
    """Random tokens with a ragged mask and uneven weights, the same for the same seed."""

    def make_batch(seed: int = 0, batch: int = 2, seq: int = 12, **fields: Any) -> TextTrainBatch:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 256, (batch, seq + 1), generator=generator)
        mask = torch.rand(batch, seq, generator=generator) < 0.7
        drawn = {
            "input_ids": tokens[:, :-1],
            "target_ids": tokens[:, 1:],
            "target_mask": mask,
            "target_weights": torch.rand(batch, seq, generator=generator) + 0.5,
        }
        return TextTrainBatch(**{**drawn, **fields})

    return make_batch
