"""The applications: they learn, any trainer will do, and all trainers learn the same."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from reference_impls.apps import grpo, sft
from reference_impls.apps.arguments import picture
from reference_impls.apps.curves import Curve, write
from reference_impls.apps.questions import ask, make_batch, split_words
from reference_impls.apps.trainers import opened, trainer_factory
from reference_impls.byte_tokenizer import ByteTokenizer
from reference_impls.plain import PlainTrainer

PLAIN = "reference_impls.plain:PlainTrainer"
OTHERS = {
    "reference_impls.hf:HFTrainer": "transformers",
    "reference_impls.titan:TitanTrainer": "torchtitan",
}

STEPS = 60
AGREE = 1e-5
"""Relative, of each of the losses. Seen on one machine: 1.6e-7 between plain and Hugging Face,
5.3e-7 between plain and Titan."""


def losses(file):
    """Of each trainer, step by step."""
    return {each["trainer"]: dict(each["points"]) for each in json.loads(file.read_text())}


def apart(left, right):
    """The largest relative difference of two curves over the same steps."""
    left, right = dict(left), dict(right)
    assert left.keys() == right.keys()
    return max(abs(left[step] - right[step]) / abs(right[step]) for step in right)


def fine_tuned(trainer, **options):
    return asyncio.run(sft.fine_tune(trainer, **options))


# All trainers learn the same


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """A folder where those trainers that run in this process have learnt from the same weights."""
    folder = tmp_path_factory.mktemp("together")
    names = [PLAIN, *(name for name, needs in OTHERS.items() if find_spec(needs))]
    with contextlib.chdir(folder):
        sft.main(
            [
                *(f"--trainer={name}" for name in names),
                "--same-weights",
                f"--steps={STEPS}",
                "--losses=losses.json",
            ]
        )
    return folder


@pytest.mark.parametrize("name", OTHERS)
def test_the_same_weights_give_the_same_losses(together, name):
    pytest.importorskip(OTHERS[name], reason=f"needs {OTHERS[name]}")
    curves = losses(together / "losses.json")
    assert len(curves[name]) == STEPS
    assert apart(curves[name], curves[PLAIN]) <= AGREE


def command(folder, *arguments):
    """Run Python with these arguments in a process of its own, from `folder`; what it printed."""
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "name", "needs"),
    [
        pytest.param([], "reference_impls.monarch:spawn_titan", "monarch", id="monarch"),
        pytest.param(
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
            "reference_impls.titan:TitanTrainer",
            "torchtitan",
            id="torchrun",
        ),
    ],
)
def test_a_trainer_in_processes_of_its_own_learns_the_same(together, launcher, name, needs):
    pytest.importorskip(needs, reason=f"needs {needs}")
    pytest.importorskip("torchtitan", reason="needs torchtitan")
    printed = command(
        together,
        *launcher,
        "-m",
        "reference_impls.apps.sft",
        f"--trainer={name}",
        "--weights=checkpoints/sft-initial",
        "--steps=20",
        "--losses=apart.json",
    )
    # However many ranks there are, one speaks.
    assert [line[:8] for line in printed.splitlines()].count("step  20") == 1
    plain, there = (losses(together / file) for file in ("losses.json", "apart.json"))
    assert apart(there[name], {step: plain[PLAIN][step] for step in range(1, 21)}) <= AGREE


class ScaledLoss(PlainTrainer):
    def _loss(self, logits, batch, loss_fn):
        return super()._loss(logits, batch, loss_fn) * 1.005


class ShiftsTargets(PlainTrainer):
    async def forward_backward(self, batch, loss_fn=None):
        shifted = replace(batch, target_ids=batch.target_ids.roll(-1, dims=1))
        return await super().forward_backward(shifted, loss_fn)


class OtherRotation(PlainTrainer):
    def _make_model(self):
        model = super()._make_model()
        model.get_buffer("model.rotation").copy_(model.get_buffer("model.rotation").roll(1, 2))
        return model


class LateRate(PlainTrainer):
    def _learning_rate(self):
        return self.schedule(self.step)


class LastMicrobatchOnly(PlainTrainer):
    def _backward(self, loss):
        self.model.zero_grad()
        super()._backward(loss)


class NoDecay(PlainTrainer):
    def _make_optimizer(self):
        optimizer = super()._make_optimizer()
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        return optimizer


@pytest.fixture(scope="module")
def sound():
    return fine_tuned(PlainTrainer(), steps=20)


@pytest.mark.parametrize(
    "faulty", [ScaledLoss, ShiftsTargets, OtherRotation, LateRate, LastMicrobatchOnly, NoDecay]
)
def test_a_fault_would_be_seen_in_the_losses(sound, faulty):
    assert apart(fine_tuned(faulty(), steps=20), sound) > 30 * AGREE


def test_how_a_step_is_split_into_microbatches_makes_no_difference(sound):
    for microbatches, rows in ((1, 32), (8, 4)):
        split = fine_tuned(PlainTrainer(), steps=20, microbatches=microbatches, rows=rows)
        assert apart(split, sound) <= AGREE


# Supervised fine-tuning


@pytest.fixture(scope="module")
def taught():
    trainer = PlainTrainer()
    curve = fine_tuned(trainer, steps=180)
    return trainer, curve


def held_out(count):
    rng = random.Random(1)
    return [ask(word, rng) for word in split_words()[1][:count]]


async def greedy(trainer, question):
    """The model's own answer, token by token."""
    tokenizer = await trainer.get_tokenizer()
    ids = tokenizer.encode(question)
    start = len(ids)
    while ids[-1] != tokenizer.eos_token_id and len(ids) < start + 6:
        logits = await trainer.forward({"input_ids": torch.tensor([ids])})
        ids.append(int(logits[0, -1].argmax()))
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


def test_it_learns_what_it_was_not_shown(taught):
    trainer, curve = taught
    batch = make_batch(held_out(128), ByteTokenizer())
    before, _ = asyncio.run(sft.evaluate(PlainTrainer(), batch))
    after, exact = asyncio.run(sft.evaluate(trainer, batch))
    assert after < before / 5
    assert exact > 0.3
    assert curve[-1][1] < curve[0][1] / 5


def test_an_exact_answer_is_what_greedy_decoding_gives(taught):
    trainer, _ = taught
    verdicts = set()
    for question, answer in held_out(24):
        batch = make_batch([(question, answer)], ByteTokenizer())
        _, exact = asyncio.run(sft.evaluate(trainer, batch))
        assert (asyncio.run(greedy(trainer, question)) == answer) == bool(exact)
        verdicts.add(exact)
    assert verdicts == {0.0, 1.0}


def test_a_resumed_run_goes_on_as_the_one_that_never_stopped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = [f"--trainer={PLAIN}", "--save-every=4"]
    sft.main([*common, "--steps=6"])
    sft.main([*common, "--steps=9", "--resume", "--losses=resumed.json"])
    resumed = losses(tmp_path / "resumed.json")[PLAIN]
    whole = dict(fine_tuned(PlainTrainer(), steps=9))
    assert resumed == {step: whole[step] for step in (5, 6, 7, 8, 9)}


class FromSeven(PlainTrainer):
    """Its steps count from 7, which the protocol allows."""

    async def get_status(self):
        status = await super().get_status()
        return replace(status, step=status.step + 7)


def test_steps_may_count_from_any_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = f"{__name__}:FromSeven"
    sft.main([f"--trainer={name}", "--steps=3", "--save-every=3"])
    sft.main([f"--trainer={name}", "--steps=5", "--resume", "--losses=losses.json"])
    assert list(losses(tmp_path / "losses.json")[name]) == [4, 5]


# Batches of questions


class BeginsTexts(ByteTokenizer):
    """Puts a token in front of each text, as many models' tokenizers do, and has no other."""

    pad_token_id = eos_token_id = None

    def encode(self, text):
        return [1, *super().encode(text)]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BeginsTexts()])
def test_answers_alone_are_targets_and_each_is_predicted_from_what_is_before_it(tokenizer):
    examples = held_out(8)
    batch = make_batch(examples, tokenizer)
    for row, (question, answer) in enumerate(examples):
        kept = batch.target_mask[row].nonzero().squeeze(1)
        end = "" if tokenizer.eos_token_id is None else "<eos>"
        assert tokenizer.decode(batch.target_ids[row, kept]) == answer + end
        assert batch.input_ids[row, : kept[0] + 1].tolist() == tokenizer.encode(question)
        assert torch.equal(batch.input_ids[row, 1:], batch.target_ids[row, :-1])


def test_no_word_is_both_learnt_and_held_out():
    learnt, kept_back = split_words()
    assert len({*learnt, *kept_back}) == len(learnt) + len(kept_back) == 26**3


def test_what_is_too_long_is_refused():
    with pytest.raises(ValueError, match="has 41 tokens, a row takes 33"):
        make_batch([("cat in capitals?\n" + " " * 20, "CAT")], ByteTokenizer())


# GRPO


def test_the_mean_reward_rises():
    rewards = [r for _, r in asyncio.run(grpo.optimize(PlainTrainer(), iterations=22))]
    assert sum(rewards[:3]) / 3 < 0.1
    assert sum(rewards[-3:]) / 3 > 0.5


def test_runs_repeat_and_leave_the_callers_random_stream_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    once, again = (asyncio.run(grpo.optimize(PlainTrainer(), iterations=3)) for _ in range(2))
    assert once == again
    assert torch.equal(torch.get_rng_state(), before)


async def sampled_group(trainer):
    return await grpo.sample(trainer, "Ten: ", 3, torch.Generator().manual_seed(0))


class Counts(PlainTrainer):
    """Gives probability to digits alone, and to one digit after another."""

    async def forward(self, inputs):
        following = 48 + (inputs["input_ids"] + 3) % 10
        return torch.nn.functional.one_hot(following, 256).float() * 1e4


def test_completions_follow_the_trainers_probabilities():
    group = asyncio.run(sampled_group(Counts()))
    text = bytes([*group.batch.input_ids[0], group.batch.target_ids[0, -1]]).decode()
    assert text == "Ten: 567890123456"
    assert group.rewards.tolist() == [1, 1, 1]
    assert group.log_probabilities.shape == group.batch.target_ids.shape
    kept = group.batch.target_mask
    assert kept.sum(dim=1).tolist() == [12, 12, 12]
    assert group.log_probabilities[kept].tolist() == [0] * 36
    assert not kept[:, :4].any()


def test_before_any_update_the_ratio_is_one_and_groups_add_up_to_their_mean():
    trainer = PlainTrainer()
    group = asyncio.run(sampled_group(trainer))
    advantages = torch.tensor([[1.0], [2.0], [6.0]])
    for groups in (1, 4):
        loss_fn = partial(
            grpo.clipped_loss,
            sampled=group.log_probabilities,
            advantages=advantages,
            groups=groups,
        )
        result = asyncio.run(trainer.forward_backward(group.batch, loss_fn))
        assert result.loss == pytest.approx(-3 / groups, rel=1e-5)


def test_a_reward_is_the_share_of_digits():
    assert [grpo.reward(text) for text in ("", "abc", "a1", "42", "٣")] == [0, 0, 0.5, 1, 0]


def test_equal_rewards_give_no_advantage_and_others_sum_to_nothing():
    rated = {(0.3, 0.3, 0.3): [0, 0, 0], (0.1, 0.1, 0.7): [-1, -1, 1], (0.7,): [0]}
    for rewards, signs in rated.items():
        group = grpo.Group(None, None, torch.tensor(rewards))
        assert group.advantages.squeeze(1).sign().tolist() == signs
        assert group.advantages.sum().item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("advantage", "ratio", "moves"),
    [
        (1.0, 1.0, True),
        (1.0, 1.1, True),
        (1.0, 1.3, False),
        (1.0, 0.7, True),
        (-1.0, 1.0, True),
        (-1.0, 0.9, True),
        (-1.0, 0.7, False),
        (-1.0, 1.3, True),
    ],
)
def test_a_token_is_moved_up_to_the_limit_and_back_from_any_distance(advantage, ratio, moves):
    logits = torch.tensor([[[0.5, -0.5, 0.1]]], requires_grad=True)
    batch = grpo.TextTrainBatch(*torch.tensor([[[0]], [[1]], [[1]]]))
    now = logits.detach().log_softmax(-1)[..., 1]
    loss = grpo.clipped_loss(
        {"logits": logits},
        replace(batch, target_mask=batch.target_mask.bool()),
        sampled=now - torch.tensor(ratio).log(),
        advantages=torch.tensor([[advantage]]),
        groups=1,
    )
    loss.backward()
    # The token's logit falls with the gradient: up where the advantage is positive.
    assert torch.sign(-logits.grad[0, 0, 1]).item() == (advantage if moves else 0)


# Trainers by name


async def plain_in_a_while():
    await asyncio.sleep(0)
    return PlainTrainer()


class Closing(PlainTrainer):
    closed = 0

    async def close(self):
        Closing.closed += 1


def unfit():
    return SimpleNamespace(forward=None)


async def opened_type(name):
    async with opened(trainer_factory(name)) as trainer:
        return type(trainer)


def test_a_class_or_a_function_that_may_be_async_makes_a_trainer():
    for name in (PLAIN, f"{__name__}:plain_in_a_while"):
        assert asyncio.run(opened_type(name)) is PlainTrainer


def test_a_trainer_is_closed_whatever_happens():
    async def fails():
        async with opened(trainer_factory(f"{__name__}:Closing")):
            raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(fails())
    assert Closing.closed == 1


def test_what_lacks_methods_is_refused():
    with pytest.raises(TypeError, match="SimpleNamespace, which lacks methods"):
        asyncio.run(opened_type(f"{__name__}:unfit"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("PlainTrainer", "isn't of the form module:Name"),
        ("no_such_package.trainer:Name", "can't be imported (No module named 'no_such_package')"),
        ("reference_impls.plain:NoTrainer", "has no attribute 'NoTrainer'"),
        ("reference_impls.optimization:CLIP_NORM", "is a float; name a class or a function"),
    ],
)
def test_a_name_that_makes_no_trainer_is_a_usage_error(capsys, name, says):
    with pytest.raises(SystemExit, match="2"):
        sft.main([f"--trainer={name}"])
    assert says in capsys.readouterr().err.replace("\n", " ")


# What is printed and written


def test_progress_lines(capsys):
    fine_tuned(PlainTrainer(), steps=25)
    step, held = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"step  25  loss \d\.\d{3}  lr 6\.3e-03  tokens  \d\d  \d\.\d{3} s", step)
    assert re.fullmatch(r"held out  loss \d\.\d{3}  answered exactly \d+%", held)


def test_all_curves_are_in_one_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[apps]'")
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kw: (drawn.append(self), save(self, *args, **kw))
    )
    curves = [Curve("a:One", [(1, 3.0), (2, 2.5)]), Curve("b:Two", [(2, 2.0)]), Curve("c:No", [])]
    write(curves, None, picture(tmp_path / "all.png"), "loss")
    assert (tmp_path / "all.png").stat().st_size > 1000
    (axes,) = drawn[0].axes
    lines = [(line.get_label(), line.get_xydata().tolist()) for line in axes.lines]
    assert lines == [("a:One", [[1, 3], [2, 2.5]]), ("b:Two", [[2, 2]]), ("c:No", [])]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss")
    assert [text.get_text() for text in axes.get_legend().texts] == ["a:One", "b:Two", "c:No"]


def test_without_matplotlib_a_picture_is_a_usage_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(argparse.ArgumentTypeError, match=r"forge-conformance\[apps\]"):
        picture("losses.png")


def test_ranks_but_the_first_write_and_print_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    fine_tuned(PlainTrainer(), steps=1)
    write([Curve("any:Trainer", [(1, 3.0)])], tmp_path / "losses.json", None, "loss")
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("app", [sft, grpo])
def test_help_says_what_there_is_to_know(capsys, app):
    with pytest.raises(SystemExit, match="0"):
        app.main(["--help"])
    text = capsys.readouterr().out
    assert app.__doc__.splitlines()[0] in text
    assert f"python -m {app.__name__} --trainer=" in text
    assert "--plot PNG" in text


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many"])
def test_numbers_count_from_one(capsys, text):
    with pytest.raises(SystemExit, match="2"):
        sft.main([f"--trainer={PLAIN}", f"--steps={text}"])
    assert f"argument --steps: '{text}' is no integer from 1" in capsys.readouterr().err


def test_the_applications_know_neither_backends_nor_the_kit():
    code = (
        "import sys, reference_impls.apps.sft, reference_impls.apps.grpo\n"
        "print(*(m for m in sys.modules if m.startswith(('forge_conf', 'reference_impls.'))))"
    )
    imported = command(".", "-c", code).split()
    assert imported
    assert all(name.startswith("reference_impls.apps") for name in imported)
