"""Faulty trainers of the area tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from reference_impls.byte_tokenizer import ByteTokenizer
from reference_impls.plain import PlainTrainer
from tests.faults.corpus import faulty


class With(PlainTrainer):
    """Has another tokenizer than its own."""

    tokenizer_class: type[Any] = ByteTokenizer

    async def get_tokenizer(self) -> Any:
        return self.tokenizer_class()


class AddsATokenAtTheEnd(ByteTokenizer):
    eos_token_id = 256

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*super().encode(text), self.eos_token_id]


@faulty("tokenizer.ids_fit", "an end of text was added to the tokenizer, not to the embedding")
class OutgrowsTheEmbedding(With):
    tokenizer_class = AddsATokenAtTheEnd


class Characters(ByteTokenizer):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, token_ids))


@faulty("tokenizer.ids_fit", "code points are taken for ids: right for ASCII alone")
class TakesCodePoints(With):
    tokenizer_class = Characters


class Ascii(ByteTokenizer):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("ascii"))


@faulty("tokenizer.ids_fit", "text that isn't ASCII can't be encoded")
class KnowsAsciiOnly(With):
    tokenizer_class = Ascii


class Pieces(ByteTokenizer):
    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> Any:
        return [chr(token) for token in token_ids]


@faulty("tokenizer.ids_fit", "decode gives a list of pieces")
class DecodesToPieces(With):
    tokenizer_class = Pieces


class Tokens(ByteTokenizer):
    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        return text.split()


@faulty("tokenizer.ids_fit", "encode gives tokens in place of ids")
class EncodesToTokens(With):
    tokenizer_class = Tokens


@faulty("tokenizer.ids_fit", "there is no tokenizer")
class HasNoTokenizer(PlainTrainer):
    async def get_tokenizer(self) -> Any:
        return None


class LowerCase(ByteTokenizer):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text.lower())


@faulty("tokenizer.round_trip", "capitals are lost")
class LosesCapitals(With):
    tokenizer_class = LowerCase


class Clipped(ByteTokenizer):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text)[:512]


@faulty("tokenizer.round_trip", "long text is cut without a word")
class CutsLongText(With):
    tokenizer_class = Clipped


class Bare:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode()


@faulty("tokenizer.round_trip", "the tokenizer doesn't say what pads and what ends a text")
class HasNoSpecialTokens(With):
    tokenizer_class = Bare


class Padded(ByteTokenizer):
    pad_token_id = -1


@faulty("tokenizer.round_trip", "text is padded with an id that the model doesn't know")
class PadsOutsideTheVocabulary(With):
    tokenizer_class = Padded


class CalledOtherwise(ByteTokenizer):
    def __call__(self, text: Any) -> Any:
        return {"input_ids": [*self.encode(text), self.eos_token_id]}


@faulty("tokenizer.round_trip", "a call gives other ids than encode")
class CallsOtherwise(With):
    tokenizer_class = CalledOtherwise
