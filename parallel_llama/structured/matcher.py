"""The position of one completion in its grammar."""

import numpy as np
from llguidance import LLMatcher

from parallel_llama.structured.token_table import TokenTable


class MatchError(RuntimeError):
    """The grammar exceeded a limit, or no token continues the completion."""


class Matcher:
    """Which tokens may follow those accepted so far.

    Not thread-safe; each choice of a request uses its own `copy`.
    """

    def __init__(self, state: LLMatcher, table: TokenTable, *, begins_text: bool) -> None:
        self._state, self._table = state, table
        self._at_start = begins_text

    @property
    def is_finished(self) -> bool:
        """Whether the completion can only end; also true after an eos id."""
        return self._state.is_stopped()

    def mask(self) -> bytes:
        """The allowed tokens: bit t % 8 of byte t // 8 for token t, ceil(vocab_size / 8) bytes.

        The eos ids are allowed exactly where the text may end. For a model without eos ids,
        `is_finished` is the only end.

        Raises: MatchError if no token is allowed and the text may not end.
        """
        table = self._table
        # llguidance's bitmask is longer than the vocabulary: end_id's bit and padding follow.
        bits = np.frombuffer(self._state.compute_bitmask(), dtype=np.uint8)
        allowed = bits[: len(table.text_bits)] & table.text_bits
        if self._at_start:
            # At the start of a text these tokens decode without their leading space, so their text
            # is not what the grammar matched.
            allowed &= ~table.opening_bits
        if self._state.is_error():
            raise self._failure()
        if self._state.is_accepting():
            allowed |= table.eos_bits
        elif not allowed.any():
            raise MatchError("no token of the vocabulary continues the completion's grammar")
        return allowed.tobytes()

    def accept(self, token: int) -> None:
        """Advances past a token.

        Raises: MatchError for a token that the mask does not allow.
        """
        id = self._table.end_id if token in self._table.eos_ids else token
        if not self._state.consume_token(id):
            raise self._failure()
        self._at_start = False

    def copy(self) -> "Matcher":
        """An independent matcher at the same position."""
        return Matcher(self._state.deep_copy(), self._table, begins_text=self._at_start)

    def _failure(self) -> MatchError:
        return MatchError(f"the completion cannot follow its grammar: {self._state.get_error()}")
