"""What the cores can do at the most, so that speeds can be told as shares of it."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from parallel_llama.config import ModelArgs
from parallel_llama.engine.machine import measure
from parallel_llama.families import parameters
from parallel_llama.parallel.collectives import Solo

_OUTER = "tok_embeddings.weight", "output.weight"
_SIDE, _REPEATS = 2048, 3


@dataclass(frozen=True)
class Rates:
    """Bytes of memory read in a second, and operations of products of float32 matrices."""

    read_bytes_per_s: float
    product_flops_per_s: float


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


def rates(n_threads: int) -> Rates:
    """How fast that many threads together read memory, and multiply matrices, by torch."""
    torch.set_num_threads(n_threads)
    read_bytes_per_s = measure(Solo(), torch.device("cpu")).read_bytes_per_s
    a, b = torch.ones(2, _SIDE, _SIDE)
    out = torch.empty_like(a)
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        seconds.append(time.perf_counter() - started)
    return Rates(read_bytes_per_s, 2 * _SIDE**3 / min(seconds))


def best_of(looks: Sequence[Rates]) -> Rates:
    """What the machine can do: others on it can only lower it."""
    return Rates(
        max(each.read_bytes_per_s for each in looks),
        max(each.product_flops_per_s for each in looks),
    )
