"""Converts a tokenizer's vocabulary for llguidance: the bytes of each token inside a text."""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from parallel_llama.errors import CheckpointError
from parallel_llama.tokenizer import Tokenizer

Bits = NDArray[np.uint8]  # [ceil(vocab_size / 8)], bit t % 8 of byte t // 8 for token t

# A byte that texts do not contain and tokenizers do not merge with others. What follows it is
# encoded as in the middle of a text, without the space that SentencePiece puts before a text.
_MARK = b"\x02"


class TokenTable:
    """The bytes of every token of a model's vocabulary, whatever its tokenizer.

    Special tokens, eos ids and the ids of padding rows have no bytes, so they match no text.
    `end_id`, the first id after the vocabulary, stands for every eos id; models without eos ids
    have it too.

    Shapes: text_bits, eos_bits and opening_bits are masks over vocab_size tokens: tokens with
    text; eos ids; tokens whose text differs at the start of a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        vocabulary = tokenizer.vocabulary
        textless_ids = eos_ids.union(vocabulary.special_ids.values())
        self._tokenizer = tokenizer
        self.end_id = vocab_size
        self.eos_ids = eos_ids
        self.tokens = [
            b""
            if id in textless_ids or b"\xff" in piece
            else piece  # 0xff is llguidance's own marker
            for id, piece in enumerate(vocabulary.pieces[:vocab_size])
        ]
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        self.text_bits = _bits((id for id, piece in enumerate(self.tokens) if piece), vocab_size)
        self.eos_bits = _bits(eos_ids, vocab_size)
        self.opening_bits = _bits(vocabulary.openings, vocab_size)

    def encode(self, text: bytes) -> list[int]:
        """Token ids whose bytes are exactly `text`: the tokenizer's own if it preserves the bytes.

        If the tokenizer normalises the text or cannot encode it (a damaged file), these are the
        longest matching tokens from the left, up to a byte that begins no token.
        """
        marked = (_MARK + text).decode("utf-8", "replace")
        try:
            ids = self._tokenizer.encode(marked, bos=False, special=False)
        except CheckpointError:
            return self._longest(text)
        spelled = [self.tokens[id] if id < len(self.tokens) else b"" for id in ids]
        start = spelled.index(_MARK) + 1 if _MARK in spelled else 0
        return ids[start:] if b"".join(spelled[start:]) == text else self._longest(text)

    def to_llguidance(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(_Adapter(self)), n_vocab=self.end_id + 1)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {piece: id for id, piece in enumerate(self.tokens) if piece}

    def _longest(self, text: bytes) -> list[int]:
        ids = []
        longest = max(map(len, self._ids), default=0)
        while text:
            sizes = range(min(longest, len(text)), 0, -1)
            size = next((size for size in sizes if text[:size] in self._ids), None)
            if size is None:
                break
            ids.append(self._ids[text[:size]])
            text = text[size:]
        return ids


class _Adapter:
    """A TokenTable with the attributes that llguidance's TokenizerWrapper reads."""

    bos_token_id = None

    def __init__(self, table: TokenTable) -> None:
        self.eos_token_id = table.end_id
        self.special_token_ids = [table.end_id]
        self.tokens = [*table.tokens, b"end"]
        self._table = table

    def __call__(self, text: bytes) -> list[int]:
        return self._table.encode(text)


def _bits(ids: Iterable[int], vocab_size: int) -> Bits:
    flags: NDArray[Any] = np.zeros(vocab_size, dtype=np.uint8)
    flags[[id for id in ids if id < vocab_size]] = 1
    return np.packbits(flags, bitorder="little")
