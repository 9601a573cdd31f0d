"""Supervised fine-tuning on any trainer: a model learns to answer short questions.

    python -m reference_impls.apps.sft --trainer=reference_impls.plain:PlainTrainer

The questions are about words of three letters ("last letter of cat?"); the words of the held-out
ones are never trained on. Several trainers run one after the other: --same-weights starts them all
from the first one's weights, and --plot draws their losses in one picture.

    python -m reference_impls.apps.sft --same-weights --plot=losses.png \\
        --trainer=reference_impls.plain:PlainTrainer \\
        --trainer=reference_impls.hf:HFTrainer

A trainer that is spread over several processes runs under torchrun: every rank makes the same
calls with the same batches, and the first one prints and writes.

    torchrun --nproc-per-node=2 -m reference_impls.apps.sft --trainer=mypkg:MyTrainer
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from forge.api import TextTrainBatch, Trainer
from reference_impls.apps.arguments import make_parser, positive
from reference_impls.apps.curves import Curve, say, write
from reference_impls.apps.questions import ask, make_batch, split_words
from reference_impls.apps.trainers import opened


def kept_targets(batch: TextTrainBatch) -> Tensor:
    """Which targets count: those of answers."""
    assert batch.target_mask is not None
    return batch.target_mask


def answer_loss(outputs: dict[str, Any], batch: TextTrainBatch, *, tokens: int) -> Tensor:
    """Cross entropy of the answers in nats, summed and divided by `tokens`.

    With `tokens` counted over all microbatches of a step, their losses and gradients add up to
    those of one mean. A mean of each would give a token more weight the fewer are beside it.
    """
    logits = outputs["logits"]
    kept = kept_targets(batch).to(logits.device)
    targets = batch.target_ids.to(logits.device)
    return cross_entropy(logits[kept], targets[kept], reduction="sum") / tokens


async def evaluate(trainer: Trainer, batch: TextTrainBatch) -> tuple[float, float]:
    """The answers' mean loss in nats, and the share of questions answered exactly.

    Greedy decoding gives the exact answer where each of its tokens is the likeliest after those
    before it, which the logits of one `forward` show.
    """
    logits = (await trainer.forward({"input_ids": batch.input_ids})).float().cpu()
    kept, targets = kept_targets(batch), batch.target_ids
    exact = ((logits.argmax(dim=-1) == targets) | ~kept).all(dim=1)
    return cross_entropy(logits[kept], targets[kept]).item(), exact.float().mean().item()


async def fine_tune(
    trainer: Trainer,
    *,
    done: int = 0,
    steps: int = 500,
    microbatches: int = 2,
    rows: int = 16,
    save_every: int | None = None,
    name: str = "sft",
) -> list[tuple[int, float]]:
    """Train from step `done + 1` to `steps`.

    Each step has `microbatches` of `rows` questions. They depend on its number alone: a run that
    is resumed sees what the uninterrupted one would have seen.

    Returns:
        Each step with its loss in nats, a mean over its answers' tokens before the update.
    """
    tokenizer = await trainer.get_tokenizer()
    words, held_out_words = split_words()
    rng = random.Random(0)
    held_out = make_batch([ask(word, rng) for word in held_out_words], tokenizer)
    losses = []
    for step in range(done + 1, steps + 1):
        started = time.perf_counter()
        rng = random.Random(step)
        batches = [
            make_batch([ask(rng.choice(words), rng) for _ in range(rows)], tokenizer)
            for _ in range(microbatches)
        ]
        tokens = sum(int(kept_targets(batch).sum()) for batch in batches)
        loss_fn = partial(answer_loss, tokens=tokens)
        results = [await trainer.forward_backward(batch, loss_fn) for batch in batches]
        update = await trainer.optim_step()
        loss = sum(result.loss for result in results)
        losses.append((step, loss))
        if step % 25 == 0 or step == steps:
            say(
                f"step {step:3}  loss {loss:.3f}  lr {update.learning_rate:.1e}  "
                f"tokens {tokens:3}  {time.perf_counter() - started:.3f} s"
            )
        if save_every and step % save_every == 0:
            say(f"saved {await trainer.save(f'{name}-{step}')}")
        if step % 100 == 0 or step == steps:
            loss, exact = await evaluate(trainer, held_out)
            say(f"held out  loss {loss:.3f}  answered exactly {exact:.0%}")
    return losses


async def run(options: argparse.Namespace) -> list[Curve]:
    """Fine-tune each of the trainers, one after the other; their losses."""
    curves, weights = [], options.weights
    for factory in options.trainer:
        async with opened(factory) as trainer:
            say(f"{factory.name}: {(await trainer.get_config()).model_name}")
            if options.same_weights and weights is None:
                weights = await trainer.save("sft-initial", weights_only=True)
            if weights is not None:
                say(f"weights from {await trainer.load(weights)}")
            # Steps are counted from here: a new trainer's count may start at any number.
            start = (await trainer.get_status()).step
            if options.resume:
                say(f"resumed from {await trainer.load()}")
            losses = await fine_tune(
                trainer,
                done=(await trainer.get_status()).step - start,
                steps=options.steps,
                microbatches=options.microbatches,
                rows=options.rows,
                save_every=options.save_every,
                name=f"sft-{factory.label}",
            )
            curves.append(Curve(factory.name, losses))
    return curves


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says."""
    parser = make_parser("reference_impls.apps.sft", __doc__)
    add = parser.add_argument
    add("--losses", type=Path, metavar="JSON", help="write the losses here")
    add("--steps", type=positive, default=500, help="updates in all (%(default)s)")
    add("--microbatches", type=positive, default=2, help="of each step (%(default)s)")
    add("--rows", type=positive, default=16, help="questions in a microbatch (%(default)s)")
    add("--save-every", type=positive, metavar="STEPS", help="save a checkpoint so often")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--weights", metavar="PATH", help="a checkpoint that all trainers load")
    start.add_argument(
        "--same-weights",
        action="store_true",
        help="save the first trainer's weights, and start all from them",
    )
    start.add_argument(
        "--resume",
        action="store_true",
        help="go on, up to --steps, from the latest checkpoint in the trainer's own folder",
    )
    options = parser.parse_args(arguments)
    curves = asyncio.run(run(options))
    write(curves, options.losses, options.plot, "loss (nats per token)")


if __name__ == "__main__":
    main()
