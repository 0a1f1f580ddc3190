"""The largest number of each row and its first place, for rows as long as a vocabulary.

A row is searched in parts, so that one row keeps the whole device busy, and a second launch has
the largest of the parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.ops.cuda.launch import launch, tile

_SIZE = 4096


def largest(x: Tensor, first: int) -> Tensor:
    """The largest number of each row, and where it first is, counted from `first`; nan is largest.

    Shapes: [n, m], m > 0 -> [n, 2] float64.
    """
    assert x.stride(1) == 1
    n, m = x.shape
    n_parts = triton.cdiv(m, _SIZE)
    values = x.new_empty(n, n_parts, dtype=torch.float32)
    places = x.new_empty(n, n_parts, dtype=torch.int32)
    size = min(_SIZE, tile(m))
    launch(_of_parts, (n_parts, n), x, values, places, x.stride(0), m, SIZE=size, num_warps=4)
    pairs = x.new_empty(n, 2, dtype=torch.float64)
    launch(_of_rows, (n,), values, places, pairs, n_parts, first, SIZE=tile(n_parts), num_warps=1)
    return pairs


@triton.jit
def _of_parts(x, values, places, stride, m, SIZE: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = part * SIZE + tl.arange(0, SIZE)
    is_there = columns < m
    numbers = tl.load(x + row * stride + columns, is_there, -float("inf")).to(tl.float32)
    value, place = _first_largest(numbers, columns)
    at = row * tl.num_programs(0) + part
    tl.store(values + at, value)
    tl.store(places + at, place)


@triton.jit
def _of_rows(values, places, pairs, n_parts, first, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, SIZE)
    is_there = parts < n_parts
    numbers = tl.load(values + row * n_parts + parts, is_there, -float("inf"))
    where = tl.load(places + row * n_parts + parts, is_there, 0)
    value, place = _first_largest(numbers, where)
    tl.store(pairs + 2 * row, value.to(tl.float64))
    tl.store(pairs + 2 * row + 1, (place.to(tl.int64) + first).to(tl.float64))


@triton.jit
def _first_largest(numbers, places):
    """The largest number and the first of its places; -inf may be one that is not there."""
    is_nan = numbers != numbers
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    value = tl.max(tl.where(is_nan, -float("inf"), numbers), 0)
    is_it = tl.where(has_nan, is_nan, numbers == value)
    place = tl.min(tl.where(is_it, places, 0x7FFFFFFF), 0)
    return tl.where(has_nan, float("nan"), value), place
