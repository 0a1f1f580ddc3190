"""The prompts of a comparison, and the rates that follow from the measured times.

Every round has different prompts, so that a prefix cache has no effect.
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
    """Prompts of `lengths` tokens, each with `n_new` greedy tokens; end tokens are ignored."""

    kind: Kind
    lengths: tuple[int, ...]
    n_new: int
    vocab_size: int

    @property
    def max_seq_len(self) -> int:
        return max(self.lengths) + self.n_new

    def prompts(self, number: int) -> list[list[int]]:
        """Random token ids, which depend only on the number of the round."""
        draw = random.Random(number)
        return [[draw.randrange(self.vocab_size) for _ in range(n)] for n in self.lengths]

    def rates(self, run: Measurement) -> dict[str, float]:
        """The rates of one run; there is a decode rate only if n_new > 1."""
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
        """The speed of `ours` over that of `peer`, computed within each round."""
        pairs = [(self.rates(a), self.rates(b)) for a, b in zip(ours, peer, strict=True)]
        return {
            key: spread([a[key] / b[key] for a, b in pairs])
            for key in pairs[0][0]
            if key.endswith("_per_s")
        }


def make_task(
    kind: Kind, prompt_tokens: int, n_new: int, vocab_size: int, n_streams: int = 1
) -> Task:
    """A stream task with prompts of `prompt_tokens`, or a ragged task of 16 prompts.

    Lengths of a ragged task are evenly spaced from 16 to `prompt_tokens`.

    Raises: UsageError if `prompt_tokens` of a ragged task is less than 16.
    """
    if kind == "stream":
        return Task(kind, (prompt_tokens,) * n_streams, n_new, vocab_size)
    if prompt_tokens < SHORTEST_RAGGED:
        raise UsageError(
            f"--prompt-tokens={prompt_tokens}: use at least {SHORTEST_RAGGED} tokens for ragged"
        )
    step = (prompt_tokens - SHORTEST_RAGGED) / (N_RAGGED - 1)
    lengths = tuple(round(SHORTEST_RAGGED + step * number) for number in range(N_RAGGED))
    return Task(kind, lengths, n_new, vocab_size)


def spread(values: Sequence[float]) -> Spread:
    """Median, minimum and maximum, to four significant digits."""
    chosen = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: float(f"{value:.4g}") for name, value in chosen.items()}
