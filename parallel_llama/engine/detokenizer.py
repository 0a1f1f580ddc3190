"""Converts the tokens of a completion to text, and finds its end. Only rank 0 uses it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from parallel_llama.request import Request
from parallel_llama.tokenizer import StreamDecoder, Tokenizer


@dataclass(slots=True, eq=False)
class _Prefix:
    """A node of the Aho-Corasick automaton: a prefix of one or more stop strings.

    Args:
        length: in characters.
        n_match: the length of the longest stop string that ends here; 0 without one.
        longer: the prefixes with one more character, by that character.
        shorter: the longest proper suffix that is also a prefix of a stop string.
    """

    length: int
    n_match: int = 0
    longer: "dict[str, _Prefix]" = field(default_factory=dict)
    shorter: "_Prefix | None" = None

    def step(self, char: str) -> "_Prefix":
        """The longest prefix that the text ends with after `char` is appended."""
        prefix = self
        while char not in prefix.longer:
            if prefix.shorter is None:
                return prefix
            prefix = prefix.shorter
        return prefix.longer[char]


class StopChecker:
    """Finds stop strings in a text that arrives in pieces, and releases only text that is final.

    The occurrence that ends first wins; if several end together, the longest. The text is cut
    before that occurrence, or after it with `shows_stop`. The result does not depend on how the
    text is split into pieces: the longest suffix that could begin a stop string is held back.

    Cost: building takes one step per character of the stop strings; `push` takes an amortised
    constant number of steps per character, independent of the number of stop strings.
    Source: Aho and Corasick, Efficient string matching, 1975, algorithms 2 and 3.
    """

    def __init__(self, stop: Sequence[str], shows_stop: bool = False) -> None:
        self.found = ""  # the stop string that ended the text
        self._shows_stop = shows_stop
        self._root = self._prefix = _automaton(stop)
        self._withheld = ""

    def push(self, piece: str, may_end: bool = True) -> str:
        """Add a piece. Returns: the text that is now final; "" after the first stop string.

        With `may_end` false, stop strings that end in this piece do not end the text.
        """
        if self.found:
            return ""
        text = self._withheld + piece
        for n_read, char in enumerate(piece, len(self._withheld) + 1):
            self._prefix = self._prefix.step(char)
            if may_end and (n_match := self._prefix.n_match):
                self.found, self._withheld = text[n_read - n_match : n_read], ""
                return text[: n_read if self._shows_stop else n_read - n_match]
        while not self._prefix.longer and self._prefix.shorter:  # a stop string that did not count
            self._prefix = self._prefix.shorter
        n_shown = len(text) - self._prefix.length
        self._withheld = text[n_shown:]
        return text[:n_shown]

    def flush(self) -> str:
        """Make all text final. Returns: the text that was held back; "" after a stop string.

        A stop string that begins before this call and ends after it is not found.
        """
        withheld, self._withheld, self._prefix = self._withheld, "", self._root
        return withheld


def _automaton(stop: Sequence[str]) -> _Prefix:
    """Builds the automaton. Returns: the empty prefix, its root."""
    root = _Prefix(0)
    for string in stop:
        prefix = root
        for length, char in enumerate(string, 1):
            prefix = prefix.longer.setdefault(char, _Prefix(length))
        prefix.n_match = len(string)
    queue = deque([root])
    while queue:
        prefix = queue.popleft()
        for char, longer in prefix.longer.items():
            longer.shorter = prefix.shorter.step(char) if prefix.shorter else root
            longer.n_match = longer.n_match or longer.shorter.n_match
            queue.append(longer)
    return root


class Detokenizer:
    """Builds the text of a sequence and finds its end; without a tokenizer, only its end.

    A sequence ends at a stop id, or at a stop string that ends after the request's min_tokens. The
    text excludes both, unless the request has include_stop_str_in_output. If the request hides
    markers, the text excludes a special token that ends the sequence, and stop strings match only
    in the text between special tokens.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self._request, params = request, request.params
        self._decoder = (
            StreamDecoder(tokenizer, request.prompt, skip_special=params.skip_special_tokens)
            if tokenizer
            else None
        )
        # `piece` of the vocabulary returns b"" for a marker. None if the request hides no markers.
        self._vocabulary = tokenizer.vocabulary if tokenizer and request.hides_markers else None
        self._stop = StopChecker(params.stop, shows_stop=params.include_stop_str_in_output)
        self._shown: list[str] = []
        self._n_tokens = 0
        self._stop_id: int | None = None

    @property
    def text(self) -> str:
        """All text that has been shown."""
        return "".join(self._shown)

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the id of stop_token_ids that ended the text."""
        return self._stop.found or self._stop_id

    def push(self, token: int, is_last: bool) -> tuple[str, bool]:
        """Add a token. Returns: text to show now, and whether the completion stops here.

        With `is_last` no token follows, so no text is held back.
        """
        self._n_tokens += 1
        is_stop = token in self._request.stop_ids
        if token in self._request.params.stop_token_ids:
            self._stop_id = token
        is_marker = self._vocabulary is not None and not self._vocabulary.piece(token)
        # The reader of an answer needs no marker at its end.
        is_shown_stop = self._request.params.include_stop_str_in_output and not is_marker
        is_text = not is_stop or is_shown_stop
        shown = ""
        if self._decoder is not None and is_text:
            piece = self._decoder.push(token)
            final = self._stop.flush() + piece if is_marker else self._check_stop_strings(piece)
            shown = self._show(final)
        if is_stop or is_last:
            shown += self.close()
        return shown, is_stop or bool(self._stop.found)

    def close(self) -> str:
        """End the sequence. Returns: the text that was held back."""
        if self._decoder is None or self._stop.found:
            return ""
        tail = self._check_stop_strings(self._decoder.flush())
        return self._show(tail + self._stop.flush())

    def _check_stop_strings(self, piece: str) -> str:
        """Search a piece for stop strings that end after min_tokens. Returns: its final text."""
        return self._stop.push(piece, may_end=self._n_tokens > self._request.params.min_tokens)

    def _show(self, piece: str) -> str:
        if piece:
            self._shown.append(piece)
        return piece
