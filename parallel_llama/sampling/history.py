"""Which tokens a sequence holds, counted once and not in every step."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor


class History:
    """The distinct tokens of one sequence and how often each was drawn; it grows with the sequence.

    Only a draw with penalties needs one. Appending takes amortised constant time, and reading time
    proportional to the distinct tokens, however long the sequence is.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self._place = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._tokens = np.array(list(self._place), dtype=np.int64)
        self._n_drawn = np.zeros(len(self._place))

    def append(self, token: int) -> None:
        """Take note of a token that was drawn and kept."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):
            longer = 2 * place + 16
            self._tokens = np.resize(self._tokens, longer)
            self._n_drawn = np.concatenate([self._n_drawn, np.zeros(longer - place)])
        self._tokens[place] = token
        self._n_drawn[place] += 1

    def counts(self, drafts: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Every distinct token, and how often it was drawn, as if the drafts had been drawn too.

        Returns: [n] int64 and [n] float64, to be read before the next append.
        """
        n = len(self._place)
        tokens, n_drawn = self._tokens[:n], self._n_drawn[:n]
        if drafts:
            new = [token for token in dict.fromkeys(drafts) if token not in self._place]
            tokens = np.concatenate([tokens, np.array(new, dtype=np.int64)])
            n_drawn = np.concatenate([n_drawn, np.zeros(len(new))])
            new_place = {token: n + number for number, token in enumerate(new)}
            for token in drafts:
                n_drawn[self._place[token] if token in self._place else new_place[token]] += 1
        return torch.from_numpy(tokens), torch.from_numpy(n_drawn)
