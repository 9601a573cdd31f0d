"""What fine-tuning learns here: questions with known answers, and batches of them."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Sequence
from typing import Any

import torch

from forge.api import TextTrainBatch

SEQ = 32
"""All rows are padded to this length, so that what is compiled for a shape is compiled once."""


def split_words(held_out: int = 128) -> tuple[list[str], list[str]]:
    """All words of three letters, in a random order: those to train on, those held out."""
    words = ["".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=3)]
    random.Random(0).shuffle(words)
    return words[held_out:], words[:held_out]


def ask(word: str, rng: random.Random) -> tuple[str, str]:
    """A question about `word`, and its answer."""
    return rng.choice(
        [
            (f"first letter of {word}?\n", word[0]),
            (f"last letter of {word}?\n", word[-1]),
            (f"{word} in capitals?\n", word.upper()),
        ]
    )


def make_batch(examples: Sequence[tuple[str, str]], tokenizer: Any) -> TextTrainBatch:
    """Rows of question, answer and end of text, `[len(examples), SEQ]`.

    Only answer and end of text are targets; the mask is bool. The tokenizer's `pad_token_id` and
    `eos_token_id` may be None.

    Raises:
        ValueError: A question and its answer have too many tokens for a row.

    Example:
        >>> from reference_impls.byte_tokenizer import ByteTokenizer
        >>> batch = make_batch([("cat in capitals?\\n", "CAT")], ByteTokenizer())
        >>> ByteTokenizer().decode(batch.target_ids[batch.target_mask])
        'CAT<eos>'
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokens = torch.full((len(examples), SEQ + 1), tokenizer.pad_token_id or 0)
    kept = torch.zeros(len(examples), SEQ, dtype=torch.bool)
    for row, (question, answer) in enumerate(examples):
        # Encoded together: a tokenizer that begins each text with a token of its own does so once.
        ids = list(tokenizer.encode(question + answer)) + end
        if len(ids) > SEQ + 1:
            raise ValueError(f"{question + answer!r} has {len(ids)} tokens, a row takes {SEQ + 1}")
        tokens[row, : len(ids)] = torch.tensor(ids)
        # The logits at the question's last token predict the answer's first.
        kept[row, len(tokenizer.encode(question)) - 1 : len(ids) - 1] = True
    return TextTrainBatch(input_ids=tokens[:, :-1], target_ids=tokens[:, 1:], target_mask=kept)
