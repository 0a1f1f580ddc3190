"""Stop strings in a text that arrives in pieces. Pure Python."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Prefix:
    """A prefix of one or more stop strings, `length` characters long."""

    length: int
    n_match: int = 0  # length of the longest stop string that ends here; 0: none
    longer: "dict[str, _Prefix]" = field(default_factory=dict)
    shorter: "_Prefix | None" = None  # its longest proper suffix that is a prefix too

    def step(self, char: str) -> "_Prefix":
        """The longest prefix that is a suffix of the text after `char`."""
        prefix = self
        while char not in prefix.longer:
            if prefix.shorter is None:
                return prefix
            prefix = prefix.shorter
        return prefix.longer[char]


class StopChecker:
    """Finds stop strings in a text that arrives in pieces, and releases only text that is final.

    The occurrence that ends first wins, and the longest of those that end together. The text is cut
    before it, or after it with `shows_stop`; so the result does not depend on how the text is split
    into pieces. The longest suffix of the text that starts a stop string is held back.

    Cost: building takes one step per character of the stop strings; `push` takes an amortised
    constant number of steps per character, independent of the number of stop strings.
    Source: Aho and Corasick, Efficient string matching, 1975, algorithms 2 and 3.
    """

    def __init__(self, stop: Sequence[str], shows_stop: bool = False) -> None:
        self.found = ""  # the stop string that ended the text
        self._shows_stop = shows_stop
        self._prefix = _automaton(stop)
        self._held = ""

    def push(self, piece: str) -> str:
        """Add a piece. Returns: the text that is now final; "" from the first stop string on."""
        if self.found:
            return ""
        text = self._held + piece
        for n_read, char in enumerate(piece, len(self._held) + 1):
            self._prefix = self._prefix.step(char)
            if n_match := self._prefix.n_match:
                self.found, self._held = text[n_read - n_match : n_read], ""
                return text[: n_read if self._shows_stop else n_read - n_match]
        n_shown = len(text) - self._prefix.length
        self._held = text[n_shown:]
        return text[:n_shown]

    def flush(self) -> str:
        """End the text. Returns: the text that was held back; "" after a stop string."""
        held, self._held = self._held, ""
        return held


def _automaton(stop: Sequence[str]) -> _Prefix:
    """The empty prefix, from which all other prefixes are reached."""
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
