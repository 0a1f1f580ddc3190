"""One completion's place in its grammar."""

import numpy as np
from llguidance import LLMatcher

from parallel_llama.structured.token_table import TokenTable


class MatchError(RuntimeError):
    """The completion cannot go on: the grammar went beyond a limit, or no token continues it."""


class Matcher:
    """Which tokens may follow those accepted so far.

    Not for two threads at once; each choice of a request takes a `copy` of its own.
    """

    def __init__(self, state: LLMatcher, table: TokenTable, *, begins_text: bool) -> None:
        self._state, self._table = state, table
        self._at_start = begins_text

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end is left; true after an eos id as well."""
        return self._state.is_stopped()

    def mask(self) -> bytes:
        """The allowed tokens: bit t % 8 of byte t // 8 for token t, ceil(vocab_size / 8) bytes.

        The eos ids are allowed exactly where the text may end. A model without any ends by
        `is_finished` alone.

        Raises: MatchError where nothing is allowed and the text is not at its end.
        """
        table = self._table
        # The words of llguidance end behind the vocabulary, with the end's bit and padding.
        bits = np.frombuffer(self._state.compute_bitmask(), dtype=np.uint8)
        allowed = bits[: len(table.text_bits)] & table.text_bits
        if self._at_start:
            # These tokens lose their space where they begin a text, so they would not spell there
            # what the grammar takes them for.
            allowed &= ~table.opening_bits
        if self._state.is_error():
            raise self._failure()
        if self._state.is_accepting():
            allowed |= table.eos_bits
        elif not allowed.any():
            raise MatchError("no token of the vocabulary continues the grammar here")
        return allowed.tobytes()

    def accept(self, token: int) -> None:
        """Go on behind a token that the mask allowed.

        Raises: MatchError for a token that the grammar does not allow here.
        """
        id = self._table.end_id if token in self._table.eos_ids else token
        if not self._state.consume_token(id):
            raise self._failure()
        self._at_start = False

    def copy(self) -> "Matcher":
        """A matcher at the same place that goes its own way from here."""
        return Matcher(self._state.deep_copy(), self._table, begins_text=self._at_start)

    def _failure(self) -> MatchError:
        return MatchError(f"the completion cannot follow its grammar: {self._state.get_error()}")
