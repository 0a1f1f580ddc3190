"""Consecutive tokens of one sequence, which run in one step."""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel_llama.model.kv_cache import Blocks

# Most tokens of a chunk that are decoded as separate queries: a token and its drafts, so that the
# results are bitwise those of decoding without drafts.
MAX_DECODED = 9


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence, the first of them at position `start`.

    `tables` are the sequence's block tables, one for each KV group, at least up to the chunk's last
    token; `n_prompt` is the length of the sequence's prompt.
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
        """Whether its tokens are separate queries, and not tiles of queries."""
        return len(self.tokens) <= MAX_DECODED
