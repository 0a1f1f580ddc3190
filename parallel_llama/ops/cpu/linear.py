"""The product of few rows with a weight, as fast as the weight comes from memory.

Some rows of the weight, a tile, stay in the first cache while groups of rows of x pass over them;
the sums of a group stay in registers, and meanwhile memory is asked for the next tile. That one
waits in the second cache: the first has no room for two tiles of long rows. What is summed, and in
which order, is the same for any number of rows and threads.

Source: GotoBLAS, "Anatomy of high-performance matrix multiplication", section 4.
"""

from dataclasses import replace
from functools import cache, partial
from itertools import product
from operator import add

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.builder import (
    I64,
    Lanes,
    Thread,
    Value,
    Variable,
    fma,
    loop,
    when,
    where,
)
from parallel_llama.ops.cpu.program import Machine, Program, Run, at_once, this_machine

# Beyond so many rows arithmetic and not memory sets the pace, and torch's product is faster.
MAX_ROWS = 32

# Rows of x in a group. What is left of the rows is made up of groups of 4, 2 and 1: 7 at most.
_ROWS = 6


class LinearKernel:
    """Y = X A for few rows of X, with A given as torch keeps it, transposed.

    Weights may be kept in 16 bits where x has float32.

    Shapes: x [n, k], each row in one piece; weight [m, k] in one piece; the result [n, m].
    """

    def __init__(self, dtype: torch.dtype, stored: torch.dtype, machine: Machine) -> None:
        lanes, self._stored = machine.lanes(dtype), stored
        of_weight = replace(lanes, stored=stored)
        # The sums, as many vectors of the weight and one of x fill the registers.
        n_tile = (machine.n_vectors - 1) // (_ROWS + 1)
        types = [lanes.pointer, I64, of_weight.pointer, lanes.pointer, I64, I64, I64]
        self._program = Program("linear", types, partial(_linear, lanes, of_weight, n_tile))

    def __call__(self, x: Tensor, weight: Tensor, run: Run = at_once) -> Tensor:
        (n, k), m = x.shape, len(weight)
        assert x.stride(1) == 1 and weight.dtype == self._stored
        assert weight.is_contiguous() and weight.shape[1] == k
        y = x.new_empty(n, m)
        if n:
            addresses = (x.data_ptr(), x.stride(0), weight.data_ptr(), y.data_ptr())
            run(self._program, torch.get_num_threads(), *addresses, n, k, m)
        return y


@cache
def make_linear(dtype: torch.dtype, stored: torch.dtype) -> LinearKernel:
    """The kernel for this machine; `computes` says for which types to compute in."""
    return LinearKernel(dtype, stored, this_machine())


def _linear(
    lanes: Lanes,
    of_weight: Lanes,
    n_tile: int,
    b: ir.IRBuilder,
    thread: Thread,
    arguments: list[Value],
) -> None:
    """The kernel.

    for tile in this thread's tiles, n_tile rows of weight each:
        for group in x, _ROWS rows each, then what is left:
            y[group, tile] = x[group] @ weight[tile].T
    """
    x, x_stride, weight, y, n, k, m = arguments

    def multiply(first: Value, n_columns: int, n_group: int) -> None:
        """All rows of x by the rows of the weight from the first on."""
        columns = [weight + first * k + k * column for column in range(n_columns)]
        # Each group asks for its share of the next tile: so many numbers where a vector is used.
        n_groups = (n + (n_group - 1)) // n_group
        share = (n_groups - 1 + lanes.width) // n_groups
        next_tile, share_size = columns[0] + k * n_columns, k * share // lanes.width * n_columns

        def multiply_group(first_row: Value, n_rows: int) -> None:
            rows = [x + first_row * x_stride + x_stride * row for row in range(n_rows)]
            ahead = next_tile + share_size * (first_row // n_group)
            products = iter(_products(lanes, of_weight, rows, columns, k, ahead, share))
            for row in range(n_rows):
                for column in range(n_columns):
                    (y + first_row * m + first)[m * row + column] = next(products)

        done = n // n_group * n_group
        with loop(b, 0, done, n_group) as row:
            multiply_group(row, n_group)
        # The rows that are left, fewer than a group, are a sum of powers of two.
        left = n - done
        for n_rows in (n_rows for n_rows in (4, 2, 1) if n_rows < n_group):
            with when((left & n_rows) > 0):
                multiply_group(done, n_rows)
            done = done + (left & n_rows)

    n_tiles = m // n_tile
    with loop(b, *thread.part_of(n_tiles)) as tile:
        multiply(tile * n_tile, n_tile, _ROWS)
    # What is left of the weight, less than a tile, is the last thread's, row by row.
    with loop(b, where(thread.number + 1 < thread.count, m, n_tiles * n_tile), m) as row:
        multiply(row, 1, 1)


def _products(
    lanes: Lanes,
    of_weight: Lanes,
    rows: list[Value],
    columns: list[Value],
    k: Value,
    ahead: Value,
    share: Value,
) -> list[Value]:
    """row @ column for each row with each column, of k numbers each, all at the same time.

    Meanwhile it asks for what lies `ahead`, a share of it for each column where a vector is used.
    """
    sums = [Variable(lanes.constant(k.b, 0)) for _ in rows for _ in columns]
    place = Variable(ahead)

    def add_products(i: Value, mask: Value | None = None) -> None:
        of_rows = [lanes.load(row + i, mask) for row in rows]
        of_columns = [of_weight.load(column + i, mask) for column in columns]
        for total, (one, other) in zip(sums, product(of_rows, of_columns), strict=True):
            total.value = fma(one, other, total.value)

    whole = k & -lanes.width
    with loop(k.b, 0, whole, lanes.width) as i:
        for _ in columns:
            place.value.prefetch(cache=2)
            place.value += share
        add_products(i)
    mask = lanes.first(k - whole)
    with loop(k.b, whole, k, lanes.width) as i:
        add_products(i, mask)
    return [lanes.reduce(add, total.value) for total in sums]
