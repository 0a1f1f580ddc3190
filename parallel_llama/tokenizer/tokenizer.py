"""The interface of all tokenizers, the bytes of their tokens, and streaming decoding."""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from os.path import commonprefix

from parallel_llama.errors import UsageError

MAX_PIECES = 1 << 20  # of a tokenizer file
MAX_NESTING = 64  # groups in a regular expression; `re` recurses into each


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of each token id; decoding needs nothing else.

    In all types of tokenizers a token has the same bytes at every position, except for one leading
    space at the start of a text. So decoding concatenates bytes and decodes UTF-8 once, and
    streaming is exact at constant cost per token. Invalid UTF-8 becomes U+FFFD by Unicode's rule,
    one per maximal valid prefix; the libraries differ here.

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


class Tokenizer(ABC):
    """Converts text to token ids and back; subclasses implement encoding.

    Args:
        bos_id, eos_ids: the ids in the tokenizer's files, if any.
        prefix: ids that the model's own tokenizer puts before a text; may be empty.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        bos_id: int | None,
        eos_ids: frozenset[int],
        prefix: Sequence[int],
    ) -> None:
        self.vocabulary, self.bos_id, self.eos_ids = vocabulary, bos_id, eos_ids
        self._prefix = prefix

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary.pieces)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(vocab_size={self.vocab_size})"

    def close(self) -> None:
        """Ends the tokenizer's process, if it has one; the next call starts the process again."""
        return

    def encode(self, text: str, *, bos: bool = True, special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            bos: whether to start with the prefix.
            special: whether text such as <|im_start|> becomes that token.

        Raises: UsageError if the text contains an unpaired surrogate.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:  # such as an undecodable byte of the command line
            raise UsageError(
                f"character {error.start} of the text is {text[error.start]!r}, an unpaired "
                "surrogate; give valid Unicode text"
            ) from error
        return [*(self._prefix if bos else ()), *self._encoded(text, special)]

    def begins_with_prefix(self, text: str) -> bool:
        """Whether a text has the prefix already, as texts of many chat templates do."""
        return text.startswith(self.decode(self._prefix, skip_special=False))

    def encode_pieces(self, pieces: Sequence[str], *, bos: bool = True) -> list[int]:
        """Token ids of a text given in pieces; no token spans two pieces.

        Raises: like `encode`.
        """
        first, *others = pieces
        ids = self.encode(first, bos=bos)
        for piece in filter(None, others):
            ids += self._continued(piece, special=True)
        return ids

    def encode_continued(self, text: str) -> list[int]:
        """Token ids of a text, not empty, that follows other text; no part is a special token."""
        return self._continued(text, special=False)

    @abstractmethod
    def _encoded(self, text: str, special: bool) -> list[int]: ...

    def _continued(self, text: str, special: bool) -> list[int]:
        """Token ids of a text that follows other text."""
        return self._encoded(text, special)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of a complete sequence of tokens."""
        return self.vocabulary.decode(ids, skip_special=skip_special)


def longest_of(texts: Iterable[str]) -> str:
    """A regular expression that matches the longest of some texts that a position begins with.

    Empty texts never match. Texts with a common beginning share it in the expression, so that the
    cost at a position depends on the length of the texts and not on their number.

    >>> longest_of(["<a>", "<a", "<b>"])
    '(?:<(?:a(?:>|)|b>))'
    """
    return f"(?:{_alternatives(sorted({*texts} - {''}), MAX_NESTING) or '(?!)'})"


def _alternatives(texts: Sequence[str], nesting: int) -> str:
    """Alternatives for sorted texts, in groups that are nested at most `nesting` deep."""
    if nesting == 0:
        return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
    branches = []
    for _, group in groupby(filter(None, texts), key=itemgetter(0)):
        same_start = list(group)
        start = commonprefix(same_start)  # noqa: RUF071, of texts
        ends = [text[len(start) :] for text in same_start]
        rest = f"(?:{_alternatives(ends, nesting - 1)})" if len(ends) > 1 else ""
        branches.append(re.escape(start) + rest)
    if "" in texts:
        branches.append("")  # last, so that a longer text matches first
    return "|".join(branches)


class SpecialTokens:
    """Matches special tokens in text, for tokenizers whose library does not."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._pattern = re.compile(f"({longest_of(ids)})")

    def split(self, text: str) -> Iterator[str | int]:
        """Pieces of ordinary text (never empty) and ids of special tokens, in order.

        >>> list(SpecialTokens({"<s>": 1}).split("<s>a<s><s>b"))
        [1, 'a', 1, 1, 'b']
        """
        for index, part in enumerate(self._pattern.split(text)):
            if part:
                yield self._ids[part] if index % 2 else part

    def encode(self, text: str, encode: Callable[[str], Sequence[int]]) -> list[int]:
        """The ids of a text; `encode` encodes each piece of ordinary text."""
        ids: list[int] = []
        for part in self.split(text):
            ids += [part] if isinstance(part, int) else encode(part)
        return ids


class StreamDecoder:
    """Decodes a completion token by token, at constant cost per token.

    The pieces and the result of `flush`, joined, equal `decode` of all ids; no piece ends inside a
    character.

    Args:
        prompt_ids: the prompt, so that the completion keeps its leading space, and includes the
            bytes of a character that the prompt leaves incomplete. Empty for a chat reply, which
            starts a new text.
        skip_special: whether special tokens of the completion decode to "".
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special: bool = True
    ) -> None:
        self._vocabulary, self._skips = tokenizer.vocabulary, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for id in reversed(prompt_ids):
            if len(tail) >= 3:  # an incomplete character has at most 3 bytes
                break
            tail = self._vocabulary.piece(id) + tail
        self._at_start = not tail
        self._utf8.decode(tail)

    def push(self, id: int) -> str:
        """The text that this token completes; it may be empty."""
        piece = self._vocabulary.piece(id, skip_special=self._skips)
        if piece and self._at_start:
            self._at_start = False
            piece = self._vocabulary.first_piece(id, skip_special=self._skips)
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """The rest of the text: U+FFFD for an incomplete character, else ""."""
        return self._utf8.decode(b"", final=True)
