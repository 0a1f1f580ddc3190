"""What the cores can do at the most, so that speeds can be told as shares of it."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from parallel_llama.config import ModelArgs
from parallel_llama.engine.machine import READ_BYTES, reading
from parallel_llama.families import parameters

_OUTER = "tok_embeddings.weight", "output.weight"
_SIDE, _REPEATS = 2048, 5


@dataclass(frozen=True)
class Rates:
    """Bytes of memory read in a second, and operations of products of float32 matrices."""

    read_bytes_per_s: float
    product_flops_per_s: float

    def mean(self, other: "Rates") -> "Rates":
        return Rates(
            (self.read_bytes_per_s + other.read_bytes_per_s) / 2,
            (self.product_flops_per_s + other.product_flops_per_s) / 2,
        )


def prefill_flops(args: ModelArgs, lengths: Sequence[int]) -> int:
    """Multiplications and additions that reading prompts of these lengths takes at the least.

    Those are the products with weights, of which the head's is for each last token alone, and of
    queries, keys and values that see each other; of a mixture, the experts that tokens go to.
    """
    per_token = 0
    for param in parameters(args):
        if param.name not in _OUTER and len(param.shape) > 1:
            share = 1 if param.expert is None else args.n_active_experts / args.n_experts
            per_token += round(math.prod(param.shape) * share)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    attention = 2 * pairs * args.n_layers * args.n_heads * args.head_dim
    head = len(lengths) * args.dim * args.vocab_size
    return 2 * (sum(lengths) * per_token + attention + head)


def meter(n_threads: int) -> Callable[[], Rates]:
    """What measures how fast that many threads together read memory, and multiply matrices.

    torch does both, each time in the same memory: what is given back in a virtual machine goes to
    its host, and whoever comes next waits for that to come again.
    """
    n_bytes, read = reading(READ_BYTES)
    a, b = torch.ones(2, _SIDE, _SIDE)
    multiply = partial(torch.mm, a, b, out=torch.empty_like(a))

    def look() -> Rates:
        torch.set_num_threads(n_threads)
        return Rates(n_bytes / _least_s(read), 2 * _SIDE**3 / _least_s(multiply))

    return look


def _least_s(run: Callable[[], object]) -> float:
    """The seconds of the fastest of some runs."""
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
