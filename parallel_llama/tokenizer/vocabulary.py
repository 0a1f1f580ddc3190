"""What every token spells, in bytes; decoding needs nothing else.

All four kinds of tokenizer spell a token as the same bytes wherever it stands, but for one leading
space, so text is a join of bytes followed by one UTF-8 decoding. That makes streaming exact and of
constant cost per token. Bytes that are not UTF-8 become U+FFFD by Unicode's rule (one for each
longest valid beginning), which tokenizers' libraries do each in a way of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from parallel_llama.errors import UsageError

MAX_PIECES = 1 << 20  # of a tokenizer file


@dataclass(frozen=True)
class Vocabulary:
    """The spelling of each token id.

    `pieces[id]` is what the token spells; `special_ids` maps the text of each special token to its
    id; `openings` are the spellings of tokens that spell something else, a space less, where they
    begin a text. `units` are the texts of tokens that are not special and yet are found in text
    before anything else.
    """

    pieces: Sequence[bytes]
    special_ids: Mapping[str, int]
    openings: Mapping[int, bytes] = field(default_factory=dict)
    units: frozenset[str] = frozenset()

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.special_ids.values())

    def piece(self, id: int, *, skip_special: bool = True) -> bytes:
        """What a token spells inside a text: nothing for a special one that is skipped.

        Ids beyond the vocabulary spell nothing: models pad their output with rows that no
        tokenizer knows.

        Raises: UsageError for a negative id.
        """
        if id < 0:
            raise UsageError(f"token id {id} is negative; ids count from 0")
        if id >= len(self.pieces) or (skip_special and id in self._special):
            return b""
        return self.pieces[id]

    def first_piece(self, id: int, *, skip_special: bool = True) -> bytes:
        """What a token spells as the first of a text that spells anything."""
        piece = self.piece(id, skip_special=skip_special)
        return self.openings.get(id, piece) if piece else piece

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of a whole sequence of tokens."""
        pieces = [self.piece(id, skip_special=skip_special) for id in ids]
        first = next((index for index, piece in enumerate(pieces) if piece), None)
        if first is not None:
            pieces[first] = self.first_piece(ids[first], skip_special=skip_special)
        return b"".join(pieces).decode("utf-8", "replace")
