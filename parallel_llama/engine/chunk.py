"""Consecutive tokens of one sequence, which run in one step."""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel_llama.model.kv_cache import Blocks

# Tokens of a chunk that are decoded one by one: a token and its drafts, so that these get to the
# last bit what they would get alone.
MAX_DECODED = 9


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence, the first of them at position `start`.

    `tables` are the sequence's block tables, one for each group of layers, as far as the chunk's
    last token or longer; `n_prompt` is the number of tokens that the sequence began with.
    """

    tokens: Sequence[int]
    start: int
    tables: Sequence[Blocks]
    n_prompt: int

    @property
    def positions(self) -> range:
        return range(self.start, self.start + len(self.tokens))

    @property
    def is_decoded(self) -> bool:
        """Whether each of its tokens is a query of its own, and not all of them tiles."""
        return len(self.tokens) <= MAX_DECODED
