"""Text of a running completion, token by token."""

import codecs
from collections.abc import Sequence

from parallel_llama.tokenizer.vocabulary import Tokenizer


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
