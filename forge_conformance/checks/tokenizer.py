"""Area tokenizer: text becomes ids that the model knows, and becomes text again."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import strategies as st

from forge_conformance.checks.registry import check
from forge_conformance.finding import broken, expect
from forge_conformance.lab import Lab
from forge_conformance.subject import CallTimedOut

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "def f(x):\n    return x**2  # 0123456789",
    "Grüße, żółw, 你好世界, Привет, 🙂 é",
    "a",
    "word " * 300 + "end",
)
"""Plain, code, other scripts, one letter, and longer than any context."""

_CHARACTERS = "aZ0 .,\n\t<>|/'\\éßøżЖλ中한🙂\u0301\u200d\x00\ufffd"


@check("tokenizer.ids_fit", text=lambda _: st.text(_CHARACTERS, max_size=30))
def ids_are_in_the_vocabulary(lab: Lab, text: str) -> None:
    """Is it the tokenizer of this model? Tokens added to it (a pad, an end of text) want rows in
    the embedding, and bytes that it doesn't know want ids of their own."""
    tokenizer = _tokenizer(lab)
    for each in (*TEXTS, "", text):
        ids = _encode(lab, tokenizer, each)
        outside = [token for token in ids if not 0 <= token < lab.domain.vocab_size]
        expect(
            not outside,
            expected=f"ids of {each[:40]!r} in the model's [0, {lab.domain.vocab_size})",
            seen=f"{outside[:8]}",
        )
        expect(
            bool(ids) or not each.strip(),
            expected=f"ids for {each[:40]!r}",
            seen="none",
        )
        decoded = _ask(lab, f"decode({ids[:8]}…)", partial(tokenizer.decode, ids))
        expect(
            isinstance(decoded, str),
            expected="decode() to return a str",
            seen=f"{type(decoded).__name__} {decoded!r:.80}",
        )


@check("tokenizer.round_trip")
def text_comes_back(lab: Lab) -> None:
    """Does the tokenizer normalise, drop unknown characters, or clean up spaces? The ids of pad
    and end of text are attributes, None where there is none, and inside the vocabulary."""
    tokenizer = _tokenizer(lab)
    for text in TEXTS:
        ids = _encode(lab, tokenizer, text)
        decoded = _ask(lab, "decode(ids)", partial(_text_of, tokenizer, ids))
        expect(
            decoded == text or _without_special_tokens(lab, tokenizer, text) == text,
            expected=f"{text[:60]!r} again",
            seen=f"{decoded!r:.80}",
        )
        if callable(tokenizer):
            called = _ask(lab, "tokenizer(text)", partial(_ids_by_call, tokenizer, text))
            expect(
                _as_ids(text, called) == ids,
                expected="tokenizer(text)['input_ids'] to be tokenizer.encode(text)",
                seen=f"{called!r:.80} instead of {ids[:20]}",
            )
    for name in ("pad_token_id", "eos_token_id"):
        expect(
            hasattr(tokenizer, name), expected=f"{name}, an id or None", seen="no such attribute"
        )
        token = getattr(tokenizer, name)
        expect(
            token is None or (_is_id(token) and 0 <= token < lab.domain.vocab_size),
            expected=f"{name}, an id in [0, {lab.domain.vocab_size}) or None",
            seen=f"{token!r:.80}",
        )


def _tokenizer(lab: Lab) -> Any:
    tokenizer = lab.trainer.get_tokenizer()
    expect(
        hasattr(tokenizer, "encode") or callable(tokenizer),
        expected="a tokenizer with encode(text), or called as tokenizer(text)",
        seen=f"{type(tokenizer).__name__} {tokenizer!r:.80}",
    )
    return tokenizer


def _encode(lab: Lab, tokenizer: Any, text: str) -> list[int]:
    def encoded() -> Any:
        return (
            tokenizer.encode(text) if hasattr(tokenizer, "encode") else tokenizer(text)["input_ids"]
        )

    return _as_ids(text, _ask(lab, f"encode({text[:40]!r})", encoded))


def _as_ids(text: str, encoded: Any) -> list[int]:
    """Ids as a list, from a list, tensor, array or encoding; also of a batch of one text."""
    ids = encoded.ids if hasattr(encoded, "ids") else encoded
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(ids, list | tuple) and len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]
    if not isinstance(ids, list | tuple) or not all(_is_id(token) for token in ids):
        broken(
            expected=f"the ids of {text[:40]!r} as a list of ints",
            seen=f"{type(encoded).__name__} {encoded!r:.80}",
        )
    return [int(token) for token in ids]


def _is_id(token: Any) -> bool:
    return isinstance(token, numbers.Integral) and not isinstance(token, bool)


def _ids_by_call(tokenizer: Any, text: str) -> Any:
    return tokenizer(text)["input_ids"]


def _text_of(tokenizer: Any, ids: list[int]) -> Any:
    try:
        return tokenizer.decode(ids, skip_special_tokens=True)
    except TypeError:
        return tokenizer.decode(ids)


def _without_special_tokens(lab: Lab, tokenizer: Any, text: str) -> Any:
    """The text, encoded without special tokens and decoded; None where that can't be asked for."""
    try:
        encoded = lab.loop.call(partial(tokenizer.encode, text, add_special_tokens=False))
        return lab.loop.call(partial(tokenizer.decode, _as_ids(text, encoded)))
    except Exception:
        return None


def _ask(lab: Lab, what: str, question: Callable[[], Any]) -> Any:
    """The tokenizer's answer, within the time limit."""
    try:
        return lab.loop.call(question)
    except CallTimedOut as error:
        broken(expected=f"{what} to return", seen=f"{error}")
    except Exception as error:
        broken(expected=f"{what} to return", seen=f"{type(error).__name__}: {error!s:.200}")
