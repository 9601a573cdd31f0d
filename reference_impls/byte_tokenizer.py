"""A tokenizer without dependencies: a text's UTF-8 bytes are its ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class ByteTokenizer:
    """Answers as a Hugging Face tokenizer does, with the 256 byte values as vocabulary.

    UTF-8 never uses the bytes 254 and 255: they are the padding and the end of a text.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer("né")["input_ids"]
        [110, 195, 169]
        >>> tokenizer.decode([110, 195, 169, tokenizer.eos_token_id], skip_special_tokens=True)
        'né'
    """

    vocab_size = 256
    pad_token = "<pad>"
    eos_token = "<eos>"
    pad_token_id = 254
    eos_token_id = 255

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str | Sequence[str]) -> dict[str, list[int] | list[list[int]]]:
        """Ids and an attention mask of ones, of one text or of each of several."""
        if isinstance(text, str):
            ids = self.encode(text)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        rows = [self.encode(each) for each in text]
        return {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's ids; like many decoder-only models' tokenizers it adds no special token."""
        return list(text.encode())

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of these ids; bytes that are no UTF-8 become U+FFFD."""
        special = {self.pad_token_id: self.pad_token, self.eos_token_id: self.eos_token}
        if skip_special_tokens:
            special = dict.fromkeys(special, "")
        pieces = (
            special[token].encode() if token in special else bytes([token])
            for token in map(int, token_ids)
        )
        return b"".join(pieces).decode(errors="replace")
