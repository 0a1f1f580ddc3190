"""Finding special tokens in text, for tokenizers whose library does not."""

import re
from collections.abc import Iterator, Mapping


class SpecialTokens:
    """Cuts a text at the special tokens written in it."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        # Longest first, so that a token is not mistaken for another that it begins with.
        texts = sorted(filter(None, ids), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def split(self, text: str) -> Iterator[str | int]:
        """Pieces of ordinary text (never empty) and ids of special tokens, in order.

        >>> list(SpecialTokens({"<s>": 1}).split("<s>a<s><s>b"))
        [1, 'a', 1, 1, 'b']
        """
        position = 0
        for match in self._pattern.finditer(text):
            if match.start() > position:
                yield text[position : match.start()]
            yield self._ids[match.group()]
            position = match.end()
        if position < len(text):
            yield text[position:]
