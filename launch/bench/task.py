"""What every engine is asked, and what the time that it took comes to.

Every round has prompts of its own, so that an engine which keeps the keys and values of earlier
prompts gains nothing by it.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from launch.bench.engines import Measurement
from parallel_llama.errors import UsageError

N_RAGGED = 16
SHORTEST_RAGGED = 16

Kind = Literal["stream", "ragged"]
Spread = dict[str, float]


@dataclass(frozen=True)
class Task:
    """Prompts of `lengths` tokens, each followed by `n_new` greedy ones, whatever they are."""

    kind: Kind
    lengths: tuple[int, ...]
    n_new: int
    vocab_size: int

    @property
    def max_seq_len(self) -> int:
        return max(self.lengths) + self.n_new

    def prompts(self, number: int) -> list[list[int]]:
        """Random token ids; the same for the same round."""
        draw = random.Random(number)
        return [[draw.randrange(self.vocab_size) for _ in range(n)] for n in self.lengths]

    def rates(self, run: Measurement) -> dict[str, float]:
        """What one run comes to; a decode rate only where there is a token after the first."""
        if self.kind == "ragged":
            n_tokens = len(self.lengths) * self.n_new
            return {"new_tokens_per_s": n_tokens / run.total_s, "total_s": run.total_s}
        prefill_s = run.first_token_s if run.prefill_s is None else run.prefill_s
        figures = {"prefill_tokens_per_s": sum(self.lengths) / prefill_s}
        if self.n_new > 1:
            n_tokens = len(self.lengths) * (self.n_new - 1) - run.n_early
            figures["decode_tokens_per_s"] = n_tokens / (run.total_s - prefill_s)
        return figures

    def spreads(self, runs: Sequence[Measurement]) -> dict[str, Spread]:
        figures = [self.rates(run) for run in runs]
        return {key: spread([each[key] for each in figures]) for key in figures[0]}

    def ratios(self, ours: Sequence[Measurement], peer: Sequence[Measurement]) -> dict[str, Spread]:
        """How many times as fast `ours` is, round by round: what slows a round down slows both."""
        pairs = [(self.rates(a), self.rates(b)) for a, b in zip(ours, peer, strict=True)]
        return {
            key: spread([a[key] / b[key] for a, b in pairs])
            for key in pairs[0][0]
            if key.endswith("_per_s")
        }


def make_task(
    kind: Kind, prompt_tokens: int, n_new: int, vocab_size: int, n_streams: int = 1
) -> Task:
    """Equal prompts of `prompt_tokens`, or 16 from 16 tokens to that many, evenly spaced.

    Raises: UsageError where that many are fewer.
    """
    if kind == "stream":
        return Task(kind, (prompt_tokens,) * n_streams, n_new, vocab_size)
    if prompt_tokens < SHORTEST_RAGGED:
        raise UsageError(f"--prompt-tokens: ragged prompts begin at {SHORTEST_RAGGED} tokens")
    step = (prompt_tokens - SHORTEST_RAGGED) / (N_RAGGED - 1)
    lengths = tuple(round(SHORTEST_RAGGED + step * number) for number in range(N_RAGGED))
    return Task(kind, lengths, n_new, vocab_size)


def spread(values: Sequence[float]) -> Spread:
    """Median, least and most, to four significant digits."""
    chosen = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: float(f"{value:.4g}") for name, value in chosen.items()}
