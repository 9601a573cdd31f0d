"""`TitanTrainer`: what torchtitan's pieces do wrong stays outside, and Hugging Face agrees."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge.api import Closable, DeclaresMetrics, Trainer
from forge_conformance.checks import CHECKS
from forge_conformance.engine import PROFILES, judge
from forge_conformance.lab import Lab
from forge_conformance.outcome import Verdict
from forge_conformance.report.text import failure_line
from reference_impls.checkpoints import CheckpointError

pytest.importorskip("torchtitan", reason="needs torchtitan: pip install -e '.[titan]'")

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import ParallelismConfig

from reference_impls.targets import hf_trainer, titan_trainer
from reference_impls.titan import TitanTrainer
from reference_impls.titan_components import adamw, flavour_spec, sgd, small_spec

FAMILIES = ["llama3", "qwen3"]
TIED = [pytest.param(tied, id="tied" if tied else "untied") for tied in (False, True)]

pytestmark = pytest.mark.filterwarnings("error:To get the last learning rate")


@pytest.fixture
def make(tmp_path):
    """Makes a trainer, always in the same initial state."""
    return lambda *args, **options: TitanTrainer(*args, checkpoint_dir=tmp_path / "own", **options)


async def train(trainer, batches):
    """One step per batch; the losses."""
    losses = []
    for batch in batches:
        losses.append((await trainer.forward_backward(batch)).loss)
        await trainer.optim_step()
    return losses


def logits(trainer, batch):
    return asyncio.run(trainer.forward({"input_ids": batch.input_ids}))


def gradients(trainer):
    return [None if p.grad is None else p.grad.clone() for p in trainer.model.parameters()]


def assert_equal(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=0)


# Training


@pytest.mark.parametrize("family", FAMILIES)
def test_trains_and_resumes_bitwise_in_a_fresh_instance(make, make_batch, family):
    trainer, batches = make(family), [make_batch(seed) for seed in range(12)]
    assert isinstance(trainer, Trainer)
    assert isinstance(trainer, Closable)
    assert isinstance(trainer, DeclaresMetrics)
    first = asyncio.run(train(trainer, batches[:6]))
    path = asyncio.run(trainer.save())
    uninterrupted = asyncio.run(train(trainer, batches[6:]))
    assert asyncio.run(train(make(family), batches)) == first + uninterrupted
    resumed = make(family, seed=5)
    assert asyncio.run(resumed.load()) == path
    assert asyncio.run(resumed.get_status()).step == 6
    assert asyncio.run(train(resumed, batches[6:])) == uninterrupted


def test_norms_dont_decay_and_matrices_do(make):
    trainer = make()
    decays = {
        name: group["weight_decay"]
        for group in trainer.optimizers.optimizers[0].param_groups
        for name in group["param_names"]
    }
    assert {name for name, decay in decays.items() if decay == 0.0} == {
        name for name, p in trainer.model.named_parameters() if p.dim() == 1
    }
    assert set(decays.values()) == {0.0, 0.1}


def test_plain_sgd_moves_weights_by_the_clipped_gradient(make, make_batch):
    trainer = make(optimizer=sgd(), schedule=lambda _: 0.5, clip_norm=0.25)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    asyncio.run(train(trainer, [make_batch()]))
    moves = [b - p.detach() for b, p in zip(before, trainer.model.parameters(), strict=True)]
    assert torch.nn.utils.get_total_norm(moves).item() == pytest.approx(0.5 * 0.25, rel=1e-4)


def test_the_callers_default_dtype_and_random_streams_dont_matter(make, make_batch):
    expected = asyncio.run(train(make(), [make_batch()]))
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        trainer = make()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert asyncio.run(train(trainer, [make_batch()])) == expected


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_keeps_the_contract_on_cuda(family):
    clauses = [each for each in CHECKS if each.startswith(("numerics.", "optim_step."))]
    judged([*clauses, "checkpoint.round_trip"], titan_trainer(family, device="cuda"))


# What torchtitan's pieces do wrong


def test_the_containers_own_state_counts_a_step(make):
    """If this fails, torchtitan is mended, and `Optimizers` needs no `__init__` any more."""
    container = OptimizersContainer(adamw(), model_parts=[make().model])
    assert {float(v) for k, v in container.state_dict().items() if k.endswith(".step")} == {1.0}


def test_saving_before_the_first_step_changes_nothing(make, make_batch):
    saved, other = make(), make()
    weights = [p.detach().clone() for p in make().model.parameters()]
    assert_equal([p.detach() for p in saved.model.parameters()], weights)
    assert set(saved.optimizers.state_dict()) >= {"state.norm.weight.exp_avg"}
    asyncio.run(saved.save())
    steps = [v for k, v in saved.optimizers.state_dict().items() if k.endswith(".step")]
    assert steps
    assert not any(steps)
    batches = [make_batch(seed) for seed in range(3)]
    assert asyncio.run(train(saved, batches)) == asyncio.run(train(other, batches))


def test_what_is_saved_with_gradients_pending_has_the_optimizers_state(make, make_batch):
    async def two_microbatches(trainer, save):
        await trainer.forward_backward(make_batch(0))
        path = await trainer.save() if save else None
        await trainer.forward_backward(make_batch(1))
        return path, await trainer.optim_step()

    trainer, other = make(), make()
    path, result = asyncio.run(two_microbatches(trainer, save=True))
    assert asyncio.run(two_microbatches(other, save=False))[1] == result
    assert_equal(logits(trainer, make_batch()), logits(other, make_batch()))
    # Into a trainer with gradients pending, too: neither are kept.
    asyncio.run(trainer.forward_backward(make_batch(2)))
    asyncio.run(trainer.load(path))
    assert not any(gradients(trainer))
    batches = [make_batch(seed) for seed in range(3)]
    assert asyncio.run(train(trainer, batches)) == asyncio.run(train(make(), batches))


def test_forward_after_a_step_has_the_new_weights(make, make_batch):
    trainer, batch = make(), make_batch()
    before = logits(trainer, batch)
    asyncio.run(train(trainer, [batch]))
    after = logits(trainer, batch)
    assert not torch.equal(after, before)
    assert_equal(after, trainer.model(batch.input_ids).detach())


def raises(*_):
    raise ArithmeticError("on purpose")


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_failed_call_leaves_gradients_as_they_were(make, make_batch, in_backward):
    trainer, other = make(), make()
    asyncio.run(trainer.forward_backward(make_batch(0)))
    before = gradients(trainer)
    # Of all gradients the embedding's comes last: the others are complete then.
    hook = trainer.model.tok_embeddings.weight.register_hook(raises) if in_backward else None
    with pytest.raises(ArithmeticError, match="on purpose"):
        asyncio.run(trainer.forward_backward(make_batch(1), None if in_backward else raises))
    if hook is not None:
        hook.remove()
    assert_equal(gradients(trainer), before)
    asyncio.run(other.forward_backward(make_batch(0)))
    for each in (trainer, other):
        asyncio.run(each.optim_step())
    batches = [make_batch(2), make_batch(3)]
    assert asyncio.run(train(trainer, batches)) == asyncio.run(train(other, batches))


def test_no_process_group_and_no_setting_of_the_process(make, make_batch):
    def settings():
        return (
            torch.autograd.is_multithreading_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.get_default_dtype(),
            torch.distributed.is_initialized(),
        )

    before = settings()
    trainer = make()
    asyncio.run(train(trainer, [make_batch()]))
    asyncio.run(trainer.load(asyncio.run(trainer.save())))
    assert settings() == before
    assert before[0]
    assert not before[-1]


def test_rows_over_the_longest_are_refused_clearly(make, make_batch):
    trainer = make()
    for seq, refused in ((64, False), (65, True)):
        batch = make_batch(seq=seq)
        for call, argument in (
            (trainer.forward, {"input_ids": batch.input_ids}),
            (trainer.forward_backward, batch),
        ):
            if refused:
                with pytest.raises(ValueError, match="over max_seq_len=64"):
                    asyncio.run(call(argument))
            else:
                asyncio.run(call(argument))


SHARD = "optimizers/shard-00001-model-00001-of-00001.safetensors"


@pytest.mark.parametrize("file", ["model.safetensors", "training.pt", "config.json", SHARD])
def test_a_damaged_checkpoint_changes_nothing_and_raises_an_exception(make, make_batch, file):
    trainer, batch = make(), make_batch()
    asyncio.run(train(trainer, [batch] * 2))
    checkpoint = asyncio.run(trainer.save())
    path = Path(checkpoint, file)
    path.write_bytes(path.read_bytes()[:-7])
    assert_unchanged_by_loading(trainer, batch, checkpoint, CheckpointError)


def test_another_models_or_optimizers_checkpoint_changes_nothing(make, make_batch, tmp_path):
    trainer, batch = make(), make_batch()
    asyncio.run(train(trainer, [batch] * 2))
    for other in (
        make(small_spec("llama3", hidden_size=64)),
        make(small_spec("llama3", num_layers=3)),
        make(small_spec("llama3", tie_weights=True)),
        make(small_spec("llama3", num_attention_heads=2)),
        make("qwen3"),
        make(optimizer=sgd()),
    ):
        path = asyncio.run(other.save("other", path=str(tmp_path)))
        assert_unchanged_by_loading(trainer, batch, path, CheckpointError)


def assert_unchanged_by_loading(trainer, batch, path, error):
    asyncio.run(trainer.forward_backward(batch))
    before = asyncio.run(trainer.get_status()), logits(trainer, batch), gradients(trainer)
    state = copy.deepcopy(trainer.optimizers.state_dict())
    with pytest.raises(error) as raised:
        asyncio.run(trainer.load(str(path)))
    assert isinstance(raised.value, Exception)
    assert str(path) in str(raised.value) or "optimizer state" in str(raised.value)
    assert asyncio.run(trainer.get_status()) == before[0]
    assert_equal(logits(trainer, batch), before[1])
    assert_equal(gradients(trainer), before[2])
    assert_equal(trainer.optimizers.state_dict(), state)
    asyncio.run(trainer.clear_gradients())


def test_checkpoints_are_saved_when_and_where_the_caller_says(make, tmp_path):
    trainer = make()
    paths = [asyncio.run(trainer.save(name, path=str(tmp_path / "né w"))) for name in "ab"]
    assert paths == [str(tmp_path / "né w" / name) for name in "ab"]
    assert sorted(each.name for each in (tmp_path / "né w").iterdir()) == ["a", "b"]


def test_loading_warns_of_nothing(make):
    trainer = make()
    path = asyncio.run(trainer.save())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(trainer.load(path))


# Hugging Face


def louder(trainer):
    """Fresh small weights hide a wrong rotation: larger attention weights show it."""
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "qkv_linear" in name:
                parameter.mul_(10)
    return trainer


def hf_logits(path, batch, dtype):
    """What `transformers` computes from an exported checkpoint."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    with torch.no_grad():
        return model(batch.input_ids).logits


def apart(trainer, path, batch):
    """How far the logits are from `transformers` in float64, and how far its own float32 is."""
    exact = hf_logits(path, batch, torch.float64)
    own, rounded = logits(trainer, batch), hf_logits(path, batch, torch.float32)
    return ((own - exact).norm() / exact.norm(), (rounded - exact).norm() / exact.norm())


MODELS = {
    "llama3": lambda: small_spec("llama3"),
    "llama3 tied": lambda: small_spec("llama3", tie_weights=True),
    "qwen3": lambda: small_spec("qwen3"),
    "qwen3 tied": lambda: small_spec("qwen3", tie_weights=True),
    "llama3 debugmodel": lambda: flavour_spec("llama3", "debugmodel"),
    "qwen3 debugmodel": lambda: flavour_spec("qwen3", "debugmodel"),
}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_from_what_is_exported(make, make_batch, name):
    trainer = louder(make(MODELS[name](), max_seq_len=64))
    batch = make_batch(seq=64)
    path = asyncio.run(trainer.save("exported", weights_only=True))
    assert ("lm_head.weight" in load_file(Path(path, "model.safetensors"))) == (
        not trainer.spec.model.enable_weight_tying
    )
    error, rounding = apart(trainer, path, batch)
    assert error <= 3 * rounding


def unpermuted(config, weights):
    name = "model.layers.0.self_attn.q_proj.weight"
    rows = weights[name].unflatten(0, (config["num_attention_heads"], 2, -1))
    weights[name] = rows.transpose(1, 2).flatten(0, 2).contiguous()


def unscaled(config, weights):
    config["rope_parameters"]["rope_type"] = "default"


@pytest.mark.parametrize("change", [unpermuted, unscaled])
def test_a_wrong_export_would_show(make, make_batch, change):
    trainer = louder(make("llama3", flavour="debugmodel", max_seq_len=64))
    path = asyncio.run(trainer.save("exported", weights_only=True))
    config = json.loads(Path(path, "config.json").read_text())
    weights = load_file(Path(path, "model.safetensors"))
    change(config, weights)
    Path(path, "config.json").write_text(json.dumps(config))
    save_file(weights, Path(path, "model.safetensors"), metadata={"format": "pt"})
    error, rounding = apart(trainer, path, make_batch(seq=64))
    assert error > 30 * rounding


@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_come_back_from_transformers_bit_for_bit(make, make_batch, tmp_path, family, tied):
    pytest.importorskip("transformers")
    from reference_impls.hf import HFTrainer

    trainer = louder(make(small_spec(family, tie_weights=tied)))
    path = asyncio.run(trainer.save("there", weights_only=True))
    hf = HFTrainer(family.removesuffix("3") if family == "llama3" else family, tie_weights=tied)
    asyncio.run(hf.load(path))
    back = asyncio.run(hf.save("back", path=str(tmp_path), weights_only=True))
    other = make(small_spec(family, tie_weights=tied), seed=3)
    asyncio.run(other.load(back))
    assert_equal(other.model.state_dict(), trainer.model.state_dict())
    assert_equal(logits(other, make_batch()), logits(trainer, make_batch()))
    model = other.model
    assert (model.lm_head.weight is model.tok_embeddings.weight) == tied
    assert asyncio.run(train(other, [make_batch()])) == asyncio.run(train(trainer, [make_batch()]))


@pytest.mark.parametrize(("family", "hf"), [("llama3", "llama"), ("qwen3", "qwen3")])
def test_agrees_with_the_hugging_face_trainer(family, hf):
    pytest.importorskip("transformers")
    judged(["numerics.parity"], titan_trainer(family), hf_trainer(hf))


def judged(clauses, target, against=None):
    lab = Lab(target, timeout=60, against=replace(against, name="other") if against else None)
    try:
        outcomes = [judge(CHECKS[each], lab, PROFILES["default"], seed=0) for each in clauses]
    finally:
        lab.close()
    accepted = {Verdict.HELD} if len(clauses) == 1 else {Verdict.HELD, Verdict.NOT_CHECKED}
    assert not [failure_line(each) for each in outcomes if each.verdict not in accepted]


# What can be asked for


def test_torchtitans_own_flavours(make, make_batch):
    trainer = make("llama3", flavour="debugmodel", max_seq_len=64)
    config = asyncio.run(trainer.get_config())
    assert config.model_name == "llama3-debugmodel"
    assert config.model_config["vocab_size"] == 2048
    assert config.model_config["max_seq_len"] == 64
    losses = asyncio.run(train(trainer, [make_batch()] * 3))
    assert losses[-1] < losses[0]
    assert asyncio.run(make(flavour="debugmodel").get_config()).model_config["max_seq_len"] > 10000


def test_a_specification_is_the_callers_own(make):
    spec = small_spec("llama3", num_layers=1)
    asyncio.run(make(spec, max_seq_len=8).get_config())
    assert spec.model.max_seq_len == 64


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"model": "gpt2"}, "no family"),
        ({"flavour": "9B"}, "no flavour '9B'; it has debugmodel, 1B"),
        ({"model": "qwen3", "flavour": "debugmodel_moe"}, "mixture of experts"),
        ({"max_seq_len": 65}, "takes 1 to 64"),
        ({"parallelism": ParallelismConfig(tensor_parallel_degree=2)}, r"make 1 process\(es\)"),
        ({"parallelism": ParallelismConfig(data_parallel_shard_degree=2)}, "start as many"),
        ({"parallelism": ParallelismConfig(context_parallel_degree=2)}, "not context parallelism"),
    ],
)
def test_what_cant_be_had_is_refused(make, arguments, match):
    with pytest.raises(ValueError, match=match):
        make(**arguments)


def test_sizes_that_dont_go_together_are_refused(make):
    with pytest.raises(ValueError, match="multiple of twice"):
        small_spec("llama3", hidden_size=36)
    with pytest.raises(ValueError, match="has its sizes already"):
        make(small_spec("llama3"), flavour="debugmodel")


def test_the_other_targets_do_without_torchtitan():
    code = "import sys, reference_impls.targets; sys.exit('torchtitan' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
