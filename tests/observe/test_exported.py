"""What a trainer has saved is read without running anything that it holds."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from forge_conformance.finding import NotChecked
from forge_conformance.observe.exported import needing_unpickling, read_weights, scaled_copy

WEIGHTS = {"head.weight": torch.ones(2, 3), "norm.weight": torch.ones(3).bfloat16()}


class Runs:
    """Leaves a trace where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("unpickled",)


def write_safetensors(folder: Path) -> None:
    save_file(WEIGHTS, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")


def write_torch(folder: Path) -> None:
    torch.save({"model": WEIGHTS, "step": 3}, folder / "weights.pt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def write_distributed(folder: Path) -> None:
    dcp.save({**WEIGHTS, "step": 3}, checkpoint_id=folder, no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", [write_safetensors, write_torch, write_distributed])
def test_weights_are_read_in_the_usual_formats(tmp_path, write):
    write(tmp_path)
    found = read_weights(str(tmp_path))
    by_last_names = {".".join(name.split(".")[-2:]): tensor for name, tensor in found.items()}
    assert by_last_names.keys() == WEIGHTS.keys()
    assert all(torch.equal(by_last_names[name], tensor) for name, tensor in WEIGHTS.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("file", ["weights.pt", ".metadata"])
def test_nothing_that_could_run_is_unpickled(tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    saved = tmp_path / "saved"
    saved.mkdir()
    torch.save(Runs(), saved / file, _use_new_zipfile_serialization=file != ".metadata")
    with pytest.raises(NotChecked, match="can't be read"):
        read_weights(str(saved))
    assert not Path("unpickled").exists()


def write_pickle(folder: Path) -> None:
    (folder / "state.bin").write_bytes(pickle.dumps({"step": 3, "made by": Runs}))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", [write_safetensors, write_torch, write_distributed])
def test_what_can_be_read_without_unpickling(tmp_path, write):
    write(tmp_path)
    assert needing_unpickling(str(tmp_path)) == {}


def test_what_only_unpickling_can_read(tmp_path):
    write_pickle(tmp_path)
    torch.save({"model": Runs()}, tmp_path / "model.pt")
    needing = needing_unpickling(str(tmp_path))
    assert needing.keys() == {"state.bin", "model.pt"}
    assert "test_exported.Runs" in needing["state.bin"]


def test_a_checkpoint_that_is_one_file_is_read(tmp_path):
    torch.save(WEIGHTS, tmp_path / "step-3")
    assert read_weights(str(tmp_path / "step-3")).keys() == WEIGHTS.keys()


def test_safetensors_are_known_without_their_suffix(tmp_path):
    save_file(WEIGHTS, tmp_path / "step-3")
    assert read_weights(str(tmp_path / "step-3")).keys() == WEIGHTS.keys()


def test_a_scaled_copy_leaves_the_original_and_the_vectors(tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "copies").mkdir()
    write_safetensors(tmp_path / "saved")
    scaled = read_weights(scaled_copy(str(tmp_path / "saved"), tmp_path / "copies", 3))
    assert torch.equal(scaled["head.weight"], 3 * WEIGHTS["head.weight"])
    assert torch.equal(scaled["norm.weight"], WEIGHTS["norm.weight"])
    assert torch.equal(read_weights(str(tmp_path / "saved"))["head.weight"], WEIGHTS["head.weight"])
