"""What every token spells, in bytes; decoding needs nothing else.

All four kinds of tokenizer spell a token as the same bytes wherever it stands, but for one leading
space, so text is a join of bytes followed by one UTF-8 decoding. That makes streaming exact and of
constant cost per token. Bytes that are not UTF-8 become U+FFFD by Unicode's rule (one for each
longest valid beginning), which tokenizers' libraries do each in a way of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from parallel_llama.errors import UsageError


@dataclass(frozen=True)
class Vocabulary:
    """The spelling of each token id.

    `pieces[id]` is what the token spells; `special_ids` maps the text of each special token to its
    id; `openings` are the spellings of tokens that spell something else, a space less, where they
    begin a text.
    """

    pieces: Sequence[bytes]
    special_ids: Mapping[str, int]
    openings: Mapping[int, bytes] = field(default_factory=dict)
    _special: frozenset[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_special", frozenset(self.special_ids.values()))

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
        for index, piece in enumerate(pieces):
            if piece:
                pieces[index] = self.first_piece(ids[index], skip_special=skip_special)
                break
        return b"".join(pieces).decode("utf-8", "replace")


class Tokenizer(Protocol):
    """Text to token ids and back, the same for every kind of tokenizer file.

    `eos_ids` are those that the tokenizer's own files name; `bos_id` is None where they name none.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    def encode(self, text: str, *, bos: bool = True, special: bool = True) -> list[int]:
        """Token ids of a text.

        `bos` puts in front what the model's own tokenizer puts there, which may be nothing;
        with `special`, text such as <|im_start|> becomes that token, else it stays text.

        Raises: UsageError if the text holds half of a surrogate pair.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of a whole sequence of tokens."""
        ...


def require_unicode(text: str) -> None:
    """Refuse text that no UTF-8 can carry, such as an undecodable byte of the command line."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"character {error.start} of the text is {text[error.start]!r}, half of a surrogate "
            "pair; give text that is valid Unicode"
        ) from error
