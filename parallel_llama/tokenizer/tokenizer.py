"""Text to token ids and back, the same for every kind of tokenizer file."""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence

from parallel_llama.errors import UsageError
from parallel_llama.tokenizer.vocabulary import Vocabulary


class Tokenizer(ABC):
    """What turns text into token ids and back; how one encodes is all that its kind adds.

    `eos_ids` are those that the tokenizer's own files name; `bos_id` is None where they name none;
    `prefix` is what the model's own tokenizer puts in front of a text, which may be nothing.
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

    def encode(self, text: str, *, bos: bool = True, special: bool = True) -> list[int]:
        """Token ids of a text, behind the prefix if `bos` asks for it.

        With `special`, text such as <|im_start|> becomes that token, else it stays text.

        Raises: UsageError if the text holds half of a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:  # such as an undecodable byte of the command line
            raise UsageError(
                f"character {error.start} of the text is {text[error.start]!r}, half of a "
                "surrogate pair; give text that is valid Unicode"
            ) from error
        return [*(self._prefix if bos else ()), *self._encoded(text, special)]

    def encode_pieces(self, pieces: Sequence[str], *, bos: bool = True) -> list[int]:
        """Token ids of a text that is cut into pieces, none of which spans a cut.

        Raises: as `encode`.
        """
        first, *others = pieces
        ids = self.encode(first, bos=bos)
        for piece in filter(None, others):
            ids += self._continued(piece)
        return ids

    @abstractmethod
    def _encoded(self, text: str, special: bool) -> list[int]: ...

    def _continued(self, text: str) -> list[int]:
        """Token ids of a text that follows other text, special tokens included."""
        return self._encoded(text, special=True)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of a whole sequence of tokens."""
        return self.vocabulary.decode(ids, skip_special=skip_special)


class SpecialTokens:
    """Finds special tokens in text, for tokenizers whose library does not."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        # Longest first, so that a token is not mistaken for another that it begins with.
        texts = sorted(filter(None, ids), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, texts)) or '(?!)'})")

    def split(self, text: str) -> Iterator[str | int]:
        """Pieces of ordinary text (never empty) and ids of special tokens, in order.

        >>> list(SpecialTokens({"<s>": 1}).split("<s>a<s><s>b"))
        [1, 'a', 1, 1, 'b']
        """
        for index, part in enumerate(self._pattern.split(text)):
            if part:
                yield self._ids[part] if index % 2 else part

    def encode(self, text: str, encode: Callable[[str], Sequence[int]]) -> list[int]:
        """The ids of a text, of which `encode` gives those of each ordinary piece."""
        ids: list[int] = []
        for part in self.split(text):
            ids += [part] if isinstance(part, int) else encode(part)
        return ids


class StreamDecoder:
    """Decodes one completion as it grows, at constant cost per token.

    The pieces joined, with `flush` at the end, are the text that `decode` gives for all ids at
    once; no piece ends inside a character. A prompt gives the context: after one that spells any
    text the completion keeps its leading space, and the bytes of a character that the prompt left
    unfinished count to the completion. A chat reply begins a text of its own: give no prompt.
    Special tokens of the completion spell nothing, unless `skip_special` is false.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special: bool = True
    ) -> None:
        self._vocabulary, self._skips = tokenizer.vocabulary, True
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True
        for id in prompt_ids:
            self.push(id)
        self._skips = skip_special

    def push(self, id: int) -> str:
        """The text that this token completes; it may be empty."""
        piece = self._vocabulary.piece(id, skip_special=self._skips)
        if piece and self._at_start:
            self._at_start = False
            piece = self._vocabulary.first_piece(id, skip_special=self._skips)
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._utf8.decode(b"", final=True)
