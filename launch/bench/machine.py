"""Measures the peak rates of the cores; reports give speeds as fractions of these rates."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from parallel_llama.engine.machine import READ_BYTES, reading
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs

_OUTER = "tok_embeddings.weight", "output.weight"
_SIDE, _REPEATS = 2048, 5


@dataclass(frozen=True)
class Rates:
    """Bytes of memory read per second, and operations of float32 matrix products per second."""

    read_bytes_per_s: float
    product_flops_per_s: float

    def mean(self, other: "Rates") -> "Rates":
        return Rates(
            (self.read_bytes_per_s + other.read_bytes_per_s) / 2,
            (self.product_flops_per_s + other.product_flops_per_s) / 2,
        )


def prefill_flops(args: ModelArgs, lengths: Sequence[int]) -> int:
    """The number of multiplications and additions that prefill of these lengths takes.

    It counts products with weights, the output head for each prompt's last token only, attention
    of each token to all before it (windows are ignored), and the active experts of a mixture.
    """
    per_token = 0
    for param in parameters(args):
        if param.name not in _OUTER and len(param.shape) > 1:
            part = 1 if param.expert is None else args.n_active_experts / args.n_experts
            per_token += round(math.prod(param.shape) * part)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    attention = 2 * pairs * args.n_layers * args.n_heads * args.head_dim
    head = len(lengths) * args.dim * args.vocab_size
    return 2 * (sum(lengths) * per_token + attention + head)


def meter(n_threads: int) -> Callable[[], Rates]:
    """Returns a function that measures the rates of `n_threads` threads.

    It reuses the same memory, because a virtual machine returns freed memory to its host, and new
    memory is slow at first.
    """
    n_bytes, read = reading(READ_BYTES)
    a, b = torch.ones(2, _SIDE, _SIDE)
    multiply = partial(torch.mm, a, b, out=torch.empty_like(a))

    def measure() -> Rates:
        torch.set_num_threads(n_threads)
        return Rates(n_bytes / _least_s(read), 2 * _SIDE**3 / _least_s(multiply))

    return measure


def _least_s(run: Callable[[], object]) -> float:
    """The seconds of the fastest of `_REPEATS` runs."""
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
