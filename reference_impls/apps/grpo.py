"""Group relative policy optimization on any trainer: a model learns what a reward asks for.

    python -m reference_impls.apps.grpo --trainer=reference_impls.plain:PlainTrainer

The reward can be verified: the share of digits in what the model writes after a prompt. It is about
0.04 for a fresh model, and rises to nearly 1. Each iteration

1. samples a group of completions of each prompt from the trainer itself, by `forward`;
2. rates them; the advantage of a completion is how far its reward is from the mean of its group,
   in the group's standard deviations, so that no second model has to estimate values;
3. makes a few updates by a loss of its own: it makes the tokens of better completions likelier and
   those of worse ones less likely, up to a share of what they were when they were sampled.

The method is that of Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in
Open Language Models", 2024 (arXiv:2402.03300). Its penalty for leaving a reference model is left
out, and all completions have one length.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge.api import TextTrainBatch, Trainer
from reference_impls.apps.arguments import make_parser, positive
from reference_impls.apps.curves import Curve, say, write
from reference_impls.apps.trainers import opened

PROMPTS = ["Room: ", "Year: ", "Code: ", "Extension: "]
COMPLETION_TOKENS = 12
TEMPERATURE = 1.0
CLIP = 0.2
"""How far a token's probability may move from what it was, as a share of that."""


def reward(completion: str) -> float:
    """The share of digits among the characters."""
    return sum(character in "0123456789" for character in completion) / max(len(completion), 1)


@dataclass(frozen=True)
class Group:
    """Completions of one prompt, and all that is learned from.

    Args:
        batch: The rows, `[group, seq]`; the completions' tokens are the targets that count.
        log_probabilities: Of the targets, as they were sampled, `[group, seq]`.
        rewards: `[group]`.
    """

    batch: TextTrainBatch
    log_probabilities: Tensor
    rewards: Tensor

    @property
    def advantages(self) -> Tensor:
        """`[group, 1]`; all 0 where the rewards are equal."""
        deviations = self.rewards - self.rewards.mean()
        return (deviations / (self.rewards.std(correction=0) + 1e-4)).unsqueeze(1)


def log_policy(logits: Tensor) -> Tensor:
    """The log-probabilities that tokens are sampled by."""
    return (logits.float() / TEMPERATURE).log_softmax(dim=-1)


def target_log_probabilities(logits: Tensor, target_ids: Tensor) -> Tensor:
    """Of each target, `[group, seq]`."""
    return log_policy(logits).gather(-1, target_ids.unsqueeze(-1)).squeeze(-1)


async def sample(trainer: Trainer, prompt: str, rows: int, random: torch.Generator) -> Group:
    """`rows` completions of one prompt; each token takes a `forward` of all before it."""
    tokenizer = await trainer.get_tokenizer()
    prompt_ids = tokenizer.encode(prompt)
    tokens = torch.tensor([prompt_ids] * rows)
    for _ in range(COMPLETION_TOKENS):
        logits = (await trainer.forward({"input_ids": tokens}))[:, -1].cpu()
        sampled = torch.multinomial(log_policy(logits).exp(), 1, generator=random)
        tokens = torch.cat([tokens, sampled], dim=1)
    texts = [tokenizer.decode(row) for row in tokens[:, len(prompt_ids) :].tolist()]
    kept = torch.zeros(rows, tokens.shape[1] - 1, dtype=torch.bool)
    kept[:, -COMPLETION_TOKENS:] = True
    batch = TextTrainBatch(input_ids=tokens[:, :-1], target_ids=tokens[:, 1:], target_mask=kept)
    logits = (await trainer.forward({"input_ids": batch.input_ids})).cpu()
    return Group(
        batch,
        target_log_probabilities(logits, batch.target_ids),
        torch.tensor([reward(text) for text in texts]),
    )


def clipped_loss(
    outputs: dict[str, Any],
    batch: TextTrainBatch,
    *,
    sampled: Tensor,
    advantages: Tensor,
    groups: int,
) -> Tensor:
    """Minus the mean clipped gain of the completions' tokens, divided by the number of groups.

    So the losses and gradients of all groups add up to those of their mean. `sampled` are the
    targets' log-probabilities as they were sampled.
    """
    logits = outputs["logits"]
    assert batch.target_mask is not None
    kept, targets, sampled, advantages = (
        each.to(logits.device)
        for each in (batch.target_mask, batch.target_ids, sampled, advantages)
    )
    ratio = (target_log_probabilities(logits, targets) - sampled).exp()
    # The lesser of the two: nothing is gained by moving further, but a step too far is undone.
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -gain[kept].mean() / groups


async def optimize(
    trainer: Trainer, *, iterations: int = 40, rows: int = 16, updates: int = 2, seed: int = 0
) -> list[tuple[int, float]]:
    """Train for `iterations`, each with `updates` on groups of `rows` completions.

    Returns:
        Each iteration, from 1, with the mean reward of what was sampled in it.
    """
    random = torch.Generator().manual_seed(seed)
    rewards = []
    for iteration in range(1, iterations + 1):
        started = time.perf_counter()
        groups = [await sample(trainer, prompt, rows, random) for prompt in PROMPTS]
        for _ in range(updates):
            loss = 0.0
            for group in groups:
                loss_fn = partial(
                    clipped_loss,
                    sampled=group.log_probabilities,
                    advantages=group.advantages,
                    groups=len(groups),
                )
                loss += (await trainer.forward_backward(group.batch, loss_fn)).loss
            update = await trainer.optim_step()
        rewards.append((iteration, torch.cat([group.rewards for group in groups]).mean().item()))
        say(
            f"iteration {iteration:3}  reward {rewards[-1][1]:.3f}  loss {loss:7.4f}  "
            f"lr {update.learning_rate:.1e}  {time.perf_counter() - started:.2f} s"
        )
    return rewards


async def run(options: argparse.Namespace) -> list[Curve]:
    """Train each of the trainers, one after the other; their mean rewards."""
    curves = []
    for factory in options.trainer:
        async with opened(factory) as trainer:
            say(f"{factory.name}: {(await trainer.get_config()).model_name}")
            if options.weights is not None:
                say(f"weights from {await trainer.load(options.weights)}")
            rewards = await optimize(
                trainer, iterations=options.iterations, rows=options.rows, updates=options.updates
            )
            curves.append(Curve(factory.name, rewards))
    return curves


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says."""
    parser = make_parser("reference_impls.apps.grpo", __doc__)
    add = parser.add_argument
    add("--rewards", type=Path, metavar="JSON", help="write the mean rewards here")
    add("--iterations", type=positive, default=40, help="how many (%(default)s)")
    add("--rows", type=positive, default=16, help="completions of each prompt (%(default)s)")
    add("--updates", type=positive, default=2, help="of each iteration (%(default)s)")
    add("--weights", metavar="PATH", help="a checkpoint that all trainers load")
    options = parser.parse_args(arguments)
    curves = asyncio.run(run(options))
    write(curves, options.rewards, options.plot, "mean reward")


if __name__ == "__main__":
    main()
