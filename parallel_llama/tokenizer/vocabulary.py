"""The bytes of every token; decoding needs nothing else.

In all types of tokenizers a token has the same bytes at every position, except for one leading
space at the start of a text. So decoding joins bytes and decodes UTF-8 once, and streaming is exact
at constant cost per token. Invalid UTF-8 becomes U+FFFD by Unicode's rule (one per maximal valid
prefix), where the libraries differ from each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from parallel_llama.errors import UsageError

MAX_PIECES = 1 << 20  # of a tokenizer file


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of each token id.

    Args:
        pieces: bytes of each token.
        special_ids: ids of special tokens by their texts.
        openings: bytes of tokens at the start of a text, if these lack the leading space.
        units: texts of non-special tokens that are matched before a text is split.
    """

    pieces: Sequence[bytes]
    special_ids: Mapping[str, int]
    openings: Mapping[int, bytes] = field(default_factory=dict)
    units: frozenset[str] = frozenset()

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.special_ids.values())

    def piece(self, id: int, *, skip_special: bool = True) -> bytes:
        """The bytes of a token inside a text; b"" for a special token that is skipped.

        Ids beyond the vocabulary are b"": a model's vocabulary may be padded.

        Raises: UsageError for a negative id.
        """
        if id < 0:
            raise UsageError(f"token id {id} is negative; ids start at 0")
        if id >= len(self.pieces) or (skip_special and id in self._special):
            return b""
        return self.pieces[id]

    def first_piece(self, id: int, *, skip_special: bool = True) -> bytes:
        """The bytes of a token at the start of a text."""
        piece = self.piece(id, skip_special=skip_special)
        return self.openings.get(id, piece) if piece else piece

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of a complete sequence of tokens."""
        pieces = [self.piece(id, skip_special=skip_special) for id in ids]
        first = next((index for index, piece in enumerate(pieces) if piece), None)
        if first is not None:
            pieces[first] = self.first_piece(ids[first], skip_special=skip_special)
        return b"".join(pieces).decode("utf-8", "replace")
