"""`TitanTrainer` on several ranks, started by torchrun, is the trainer of one process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs torchtitan: pip install -e '.[titan]'")

from reference_impls.titan import TitanTrainer
from tests.reference_impls import titan_on_ranks
from tests.reference_impls.titan_on_ranks import BATCHES, train

LIMIT = 180  # Seconds, for a machine that is busy with other things.


def torchrun(ranks, folders):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", titan_on_ranks.__name__, *map(str, folders)]
    with subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        try:
            output, _ = running.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            running.terminate()  # It ends its ranks.
            output, _ = running.communicate()
            pytest.fail(f"not done after {LIMIT} s:\n{output}")
    assert running.returncode == 0, output


@pytest.mark.parametrize(
    ("ranks", "parallelisms"),
    [
        pytest.param(
            2,
            {
                "sharded, by default": {},
                "tensor parallel": {"tensor_parallel_degree": 2},
                "replicated": {"data_parallel_replicate_degree": 2},
            },
            id="2",
        ),
        pytest.param(
            4,
            {
                "replicas of shards": {"data_parallel_replicate_degree": 2},
                "sharded and tensor parallel": {"tensor_parallel_degree": 2},
            },
            id="4",
        ),
    ],
)
def test_several_ranks_are_as_one(tmp_path, ranks, parallelisms):
    folders = [tmp_path / name for name in parallelisms]
    one = TitanTrainer()
    train(one, BATCHES)
    for folder, degrees in zip(folders, parallelisms.values(), strict=True):
        asyncio.run(one.save("of one", path=str(folder)))
        damaged = Path(asyncio.run(one.save("damaged", path=str(folder))), "training.pt")
        damaged.write_bytes(damaged.read_bytes()[:-7])
        (folder / "degrees.json").write_text(json.dumps(degrees))

    torchrun(ranks, folders)

    for folder in folders:
        many = TitanTrainer(seed=1)
        asyncio.run(many.load(str(folder / "of many")))
        expected = json.loads((folder / "afterwards.json").read_text())
        for ours, theirs in zip(train(many, BATCHES), expected, strict=True):
            assert ours == pytest.approx(tuple(theirs), rel=1e-5)
