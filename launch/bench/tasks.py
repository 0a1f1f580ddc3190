"""What every engine is asked: prompts of known lengths, and how many tokens each is to get.

Every turn has prompts of its own, so that an engine which keeps the keys and values of earlier
prompts gains nothing by it.
"""

import random
from dataclasses import dataclass
from typing import Literal

N_RAGGED = 16
SHORTEST_RAGGED = 16

Kind = Literal["stream", "ragged"]


@dataclass(frozen=True)
class Task:
    """Prompts of `lengths` tokens, each followed by `n_new` greedy ones, whatever they are."""

    kind: Kind
    lengths: tuple[int, ...]
    n_new: int

    @property
    def max_seq_len(self) -> int:
        return max(self.lengths) + self.n_new

    def prompts(self, vocab_size: int, turn: int) -> list[list[int]]:
        """Random token ids; the same for the same turn."""
        draw = random.Random(turn)
        return [[draw.randrange(vocab_size) for _ in range(n)] for n in self.lengths]


def make_task(kind: Kind, prompt_tokens: int, n_new: int) -> Task:
    """One prompt of `prompt_tokens`, or 16 from 16 tokens to that many, evenly spaced."""
    if kind == "stream":
        return Task(kind, (prompt_tokens,), n_new)
    step = (prompt_tokens - SHORTEST_RAGGED) / (N_RAGGED - 1)
    lengths = tuple(round(SHORTEST_RAGGED + step * number) for number in range(N_RAGGED))
    return Task(kind, lengths, n_new)
