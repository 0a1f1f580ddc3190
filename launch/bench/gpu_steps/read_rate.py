"""A kernel that only reads, to measure the largest rate at which a GPU reads its memory."""

import triton
import triton.language as tl
from torch import Tensor

_LANES = 2048  # values of 8 bytes that a program reads at once
_ROUNDS = 8


@triton.jit
def _read(values, sums, n, LANES: tl.constexpr, ROUNDS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (LANES * ROUNDS)
    total = tl.zeros((LANES,), dtype=tl.int64)
    for number in tl.static_range(ROUNDS):
        at = first + number * LANES + tl.arange(0, LANES)
        total += tl.load(values + at, mask=at < n, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def read_sums(values: Tensor, sums: Tensor) -> None:
    """Writes the sum of each part of `values`.

    Shapes: values [n] int64; sums [n_parts(n)] int64.
    """
    n = len(values)
    _read[(n_parts(n),)](values, sums, n, _LANES, _ROUNDS, num_warps=8)


def n_parts(n: int) -> int:
    """The number of parts of `n` values, one for each program."""
    return triton.cdiv(n, _LANES * _ROUNDS)
