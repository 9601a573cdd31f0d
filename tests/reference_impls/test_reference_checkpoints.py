"""Saving and loading: exact, atomic, and refused as a whole where something is wrong."""

from __future__ import annotations

import asyncio
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reference_impls import checkpoints
from reference_impls.checkpoints import CheckpointError
from reference_impls.plain import PlainTrainer


async def train(trainer, batches):
    """One step per batch; the losses."""
    losses = []
    for batch in batches:
        losses.append((await trainer.forward_backward(batch)).loss)
        await trainer.optim_step()
    return losses


def logits(trainer, batch):
    return asyncio.run(trainer.forward({"input_ids": batch.input_ids}))


def test_a_fresh_instance_resumes_bitwise(make, make_batch):
    """Weights, optimizer, schedule, step and dropout's stream all go on from where they were."""
    trainer, batches = make(), [make_batch(seed) for seed in range(12)]
    asyncio.run(train(trainer, batches[:6]))
    path = asyncio.run(trainer.save())
    uninterrupted = asyncio.run(train(trainer, batches[6:]))
    resumed = make(seed=5)
    assert asyncio.run(resumed.load(path)) == path
    assert asyncio.run(resumed.get_status()).step == 6
    assert asyncio.run(train(resumed, batches[6:])) == uninterrupted
    assert asyncio.run(train(make(seed=5), batches[6:])) != uninterrupted


def test_tied_weights_stay_tied_after_load(make, make_batch):
    trainer = make(tie_weights=True)
    asyncio.run(trainer.load(asyncio.run(trainer.save())))
    asyncio.run(train(trainer, [make_batch()] * 2))
    assert torch.equal(trainer.model.lm_head.weight, trainer.model.model.embed_tokens.weight)


def test_saving_between_microbatches_disturbs_nothing(make, make_batch):
    async def two_microbatches(trainer, save):
        await trainer.forward_backward(make_batch(0))
        if save:
            await trainer.save()
        await trainer.forward_backward(make_batch(1))
        return await trainer.optim_step()

    trainers = make(), make()
    results = [asyncio.run(two_microbatches(t, save=t is trainers[0])) for t in trainers]
    assert results[0] == results[1]
    assert torch.equal(*(logits(t, make_batch()) for t in trainers))


def test_transformers_reads_the_weights(make, make_batch):
    transformers = pytest.importorskip("transformers")
    trainer, batch = make(), make_batch()
    asyncio.run(train(trainer, [batch] * 2))
    path = asyncio.run(trainer.save("best", weights_only=True))
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.no_grad():
        theirs = model(batch.input_ids).logits
    tolerance = 0.1 if getattr(trainer, "compute_dtype", None) is torch.bfloat16 else 1e-4
    torch.testing.assert_close(theirs, logits(trainer, batch), rtol=tolerance, atol=tolerance)


def test_weights_only_starts_afresh_from_the_loaded_weights(make, make_batch):
    trainer, batch = make(dropout=0.0), make_batch()
    asyncio.run(train(trainer, [batch] * 3))
    before = logits(trainer, batch)
    path = asyncio.run(trainer.save(weights_only=True))
    assert not Path(path, "training.pt").exists()
    asyncio.run(trainer.load(path))
    assert torch.equal(logits(trainer, batch), before)
    fresh = make(dropout=0.0, seed=9)
    asyncio.run(fresh.load(path))
    losses = [asyncio.run(train(t, [make_batch(1)] * 3)) for t in (trainer, fresh)]
    assert losses[0] == losses[1]


def test_weights_carry_over_between_trainers(make_batch, tmp_path):
    """The same model, once in plain torch and once in transformers, from one checkpoint."""
    transformers = pytest.importorskip("transformers")
    from reference_impls.hf import HFTrainer

    plain, batch = PlainTrainer(checkpoint_dir=tmp_path), make_batch()
    path = asyncio.run(plain.save("shared", weights_only=True))
    hf = HFTrainer(transformers.AutoConfig.from_pretrained(path), checkpoint_dir=tmp_path)
    asyncio.run(hf.load(path))
    torch.testing.assert_close(logits(hf, batch), logits(plain, batch))
    full = asyncio.run(plain.save("full"))
    with pytest.raises(CheckpointError, match="full checkpoint of a plain trainer"):
        asyncio.run(hf.load(full))
    with pytest.raises(FileNotFoundError, match="no full checkpoint"):
        asyncio.run(hf.load())


# Where


def test_where_checkpoints_go(tmp_path):
    trainer = PlainTrainer(checkpoint_dir=tmp_path / "own")
    assert not (tmp_path / "own").exists()

    def save(**arguments):
        return Path(asyncio.run(trainer.save(**arguments)))

    assert save() == tmp_path / "own" / "step-0"
    assert save(weights_only=True) == tmp_path / "own" / "step-0-weights"
    assert save(name="best") == tmp_path / "own" / "best"
    assert save(path=str(tmp_path / "a b")) == tmp_path / "a b" / "step-0"
    assert save(name="né 你好", path=str(tmp_path / "new/er")) == tmp_path / "new/er/né 你好"


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "../up", "/absolute", "a/"])
def test_a_name_is_one_file_name(tmp_path, name):
    with pytest.raises(ValueError, match="can't name a checkpoint"):
        asyncio.run(PlainTrainer(checkpoint_dir=tmp_path).save(name))


def test_latest_is_the_last_full_save_whatever_names_and_times_say(tmp_path, make_batch):
    trainer = PlainTrainer(checkpoint_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match="no full checkpoint"):
        asyncio.run(trainer.load())
    saved = []
    for _ in range(11):
        asyncio.run(train(trainer, [make_batch()]))
        saved.append(asyncio.run(trainer.save()))
    asyncio.run(trainer.save("zz", weights_only=True))
    (tmp_path / "step-99").mkdir()
    (tmp_path / "step-98").write_text("not a checkpoint")
    os.utime(saved[2])
    assert asyncio.run(trainer.load()) == saved[-1]
    asyncio.run(trainer.load(saved[4]))
    assert asyncio.run(trainer.load(asyncio.run(trainer.save("again")))) == str(tmp_path / "again")
    assert asyncio.run(PlainTrainer(checkpoint_dir=tmp_path).load()) == str(tmp_path / "again")


# What goes wrong


def assert_unchanged_by(trainer, batch, error, match, action):
    asyncio.run(trainer.forward_backward(batch))
    before = asyncio.run(trainer.get_status()), logits(trainer, batch)
    with pytest.raises(error, match=match):
        asyncio.run(action())
    assert asyncio.run(trainer.get_status()) == before[0]
    assert torch.equal(logits(trainer, batch), before[1])
    asyncio.run(trainer.optim_step())


def test_a_missing_checkpoint_is_named(make, make_batch, tmp_path):
    trainer = make()
    missing = str(tmp_path / "no such")
    assert_unchanged_by(
        trainer, make_batch(), FileNotFoundError, missing, lambda: trainer.load(missing)
    )


def damages():
    files = ["model.safetensors", "training.pt", "config.json", "manifest.json"]
    return [(file, damage) for file in files for damage in ("cut", "emptied", "removed", "flipped")]


@pytest.mark.parametrize(("file", "damage"), damages())
def test_a_damaged_checkpoint_is_refused(make_batch, tmp_path, file, damage):
    trainer, batch = PlainTrainer(checkpoint_dir=tmp_path), make_batch()
    asyncio.run(train(trainer, [batch]))
    path = Path(asyncio.run(trainer.save()), file)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes({"cut": content[:-7], "emptied": b"", "flipped": content}[damage])
    asyncio.run(train(trainer, [batch]))
    folder = str(path.parent)
    assert_unchanged_by(trainer, batch, CheckpointError, folder, lambda: trainer.load(folder))


def test_another_models_checkpoint_is_refused(make_batch, tmp_path):
    trainer, batch = PlainTrainer(), make_batch()
    for options, match in (
        ({"hidden_size": 64}, "has shape"),
        ({"num_layers": 1}, "is missing"),
        ({"num_layers": 3}, "is unexpected"),
        ({"num_attention_heads": 2}, "num_attention_heads is 2 there, 4 here"),
    ):
        other = PlainTrainer(**options)
        path = asyncio.run(other.save("other", path=str(tmp_path)))
        assert_unchanged_by(trainer, batch, CheckpointError, match, partial(trainer.load, path))


def test_another_optimizers_state_is_refused(make_batch, tmp_path):
    trainer, batch = PlainTrainer(), make_batch()
    other = PlainTrainer(optimizer=lambda named: torch.optim.Adagrad(named.values()))
    asyncio.run(train(other, [batch]))
    path = asyncio.run(other.save(path=str(tmp_path)))
    assert_unchanged_by(trainer, batch, ValueError, "optimizer state", lambda: trainer.load(path))


@pytest.mark.parametrize("fails", ["save_file", "_write_manifest", "_move_into_place"])
def test_a_save_that_fails_leaves_the_old_checkpoint(make_batch, tmp_path, monkeypatch, fails):
    trainer, batch = PlainTrainer(checkpoint_dir=tmp_path), make_batch()
    path = asyncio.run(trainer.save("best"))
    kept = logits(trainer, batch)
    asyncio.run(train(trainer, [batch]))

    def no_space(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, fails, no_space)
        assert_unchanged_by(
            trainer, batch, CheckpointError, "No space left", lambda: trainer.save("best")
        )
    assert os.listdir(tmp_path) == ["best"]
    assert asyncio.run(trainer.load()) == path
    assert torch.equal(logits(trainer, batch), kept)


def test_a_rename_that_fails_puts_the_old_checkpoint_back(make_batch, tmp_path, monkeypatch):
    trainer = PlainTrainer(checkpoint_dir=tmp_path)
    path = asyncio.run(trainer.save("best"))
    rename = os.replace

    def fails_for_the_new(source, target):
        if Path(source).name.startswith(".saving-"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(checkpoints.os, "replace", fails_for_the_new)
    with pytest.raises(CheckpointError, match="Input/output error"):
        asyncio.run(trainer.save("best"))
    assert os.listdir(tmp_path) == ["best"]
    assert asyncio.run(trainer.load()) == path


@pytest.mark.parametrize("by_path", [True, False])
def test_killed_while_replacing_the_old_checkpoint_is_found(tmp_path, by_path):
    """Between the two renames the old one bears another name; the next load gives it back."""
    trainer = PlainTrainer(checkpoint_dir=tmp_path)
    path = asyncio.run(trainer.save("best"))
    shutil.copytree(path, tmp_path / ".saving-0")
    os.replace(path, tmp_path / ".replaced-best")
    assert asyncio.run(trainer.load(path if by_path else None)) == path


def test_killed_before_the_rename_nothing_unfinished_is_loaded(tmp_path):
    trainer = PlainTrainer(checkpoint_dir=tmp_path)
    path = asyncio.run(trainer.save("best"))
    os.replace(asyncio.run(trainer.save("newer")), tmp_path / ".saving-0")
    assert asyncio.run(trainer.load()) == path


def test_a_folder_of_the_callers_is_not_replaced(tmp_path):
    trainer = PlainTrainer(checkpoint_dir=tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match="could not save"):
        asyncio.run(trainer.save("notes"))
    assert (tmp_path / "notes" / "todo.txt").read_text() == "keep me"


def test_an_unwritable_place_is_an_error(make_batch, tmp_path):
    trainer = PlainTrainer()
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "folder")
    assert_unchanged_by(
        trainer, make_batch(), CheckpointError, "could not save", lambda: trainer.save(path=place)
    )


def test_what_is_written_needs_no_unrestricted_unpickler(tmp_path):
    path = asyncio.run(PlainTrainer().save(path=str(tmp_path)))
    assert torch.load(Path(path, "training.pt"), weights_only=True)["step"] == 0
    assert "lm_head.weight" in load_file(Path(path, "model.safetensors"))
