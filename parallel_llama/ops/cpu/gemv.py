"""GEMV: products of few rows of x with a weight, at memory bandwidth.

A tile is a few rows of the weight. It stays in the L1 cache while it is multiplied by the rows of
x, a group of rows at a time, with the sums of a group in registers. The next tile is prefetched
into the L2 cache, since the L1 cache has no room for two tiles of long rows. The order of summation
is the same for any number of rows and threads.

A thread cuts its rows of the weight into as many stretches as a tile has rows, and a tile has one
row of every stretch. So memory is read as a few sequential streams, a pattern that hardware
prefetchers recognise. For a single row of x, the kernel itself prefetches nothing.

Source: GotoBLAS, "Anatomy of high-performance matrix multiplication", section 4.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from operator import add
from typing import Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Integer, Integers, Numbers, T, Weights
from parallel_llama.ops.cpu.ir import (
    Lanes,
    Thread,
    Value,
    Variable,
    fma,
    in_groups,
    larger,
    loop,
    reduced,
    smaller,
    when,
)
from parallel_llama.ops.cpu.jit import CompiledKernel, CPUFeatures, Launcher, at_once, this_machine
from parallel_llama.ops.dispatch import Dispatch

# With more rows, arithmetic takes longer than reading the weight: `gemm` is faster.
MAX_ROWS = 32

# Rows of x in a group.
_ROWS = 6

# Inputs that are summed in the lanes of a vector before the lanes are added up. `gemm` sums in the
# same order, and its panels of this many inputs fit the L2 cache.
SUMMED_INPUTS = 1024

# Returns the addresses of the i-th row of x and of its result.
RowAddresses = Callable[[Value], tuple[Value, Value]]


@dataclass(slots=True, kw_only=True)
class _GemvArguments(Generic[T]):
    x: Numbers[T]
    x_stride: Integer[T]
    weight: Weights[T]
    y: Numbers[T]
    n: Integer[T]
    k: Integer[T]
    m: Integer[T]


@dataclass(slots=True, kw_only=True)
class _RoutedGemvArguments(Generic[T]):
    x: Numbers[T]
    x_stride: Integer[T]
    sources: Integers[T]
    targets: Integers[T]
    starts: Integers[T]
    n_weights: Integer[T]
    n_rows: Integer[T]
    weights: Weights[T]  # their addresses
    y: Numbers[T]
    k: Integer[T]
    m: Integer[T]


class GemvKernel:
    """x @ weight.T, for any number of rows of x but fast for few.

    The weight may have 16 bits if x is float32.

    Shapes: x [n, k], rows contiguous; weight [m, k] contiguous; the result [n, m].
    """

    def __init__(self, dtype: torch.dtype, stored: torch.dtype, machine: CPUFeatures) -> None:
        lanes, self._stored = machine.lanes(dtype), stored
        of_weight = replace(lanes, stored=stored)
        self._program = CompiledKernel(
            _GemvArguments[float],
            partial(_gemv, lanes, of_weight, tile_rows(machine)),
            numbers=lanes.pointer,
            weights=of_weight.pointer,
        )

    def __call__(self, x: Tensor, weight: Tensor, run: Launcher = at_once) -> Tensor:
        (n, k), m = x.shape, len(weight)
        assert x.stride(1) == 1 and weight.dtype == self._stored
        assert weight.is_contiguous() and weight.shape[1] == k
        y = x.new_empty(n, m)
        if n:
            arguments = _GemvArguments(
                x=x.data_ptr(), x_stride=x.stride(0), weight=weight.data_ptr(), y=y.data_ptr(), n=n,
                k=k, m=m,
            )  # fmt: skip
            run(self._program, torch.get_num_threads(), arguments)
        return y


class RoutedGemvKernel:
    """Multiplies each row by one of several weights, with the bits of `GemvKernel`.

    `weights` are the addresses of the weights. Rows that no weight computes are zeros.

    Shapes: x [n, k], rows contiguous; each weight [m, k] contiguous; the result
    [len(dispatch.targets), m].
    """

    def __init__(self, dtype: torch.dtype, stored: torch.dtype, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        of_weight = replace(lanes, stored=stored)
        self._program = CompiledKernel(
            _RoutedGemvArguments[float],
            partial(_routed_gemv, lanes, of_weight, tile_rows(machine)),
            numbers=lanes.pointer,
            weights=of_weight.pointer.as_pointer(),
        )

    def __call__(
        self, x: Tensor, weights: "array[int]", m: int, dispatch: Dispatch, run: Launcher = at_once
    ) -> Tensor:
        assert x.stride(1) == 1 and len(weights) == len(dispatch.starts) - 1
        n_rows, k = len(dispatch.targets), x.shape[1]
        y = x.new_empty(n_rows, m)
        arguments = _RoutedGemvArguments(
            x=x.data_ptr(), x_stride=x.stride(0), sources=dispatch.sources.data_ptr(),
            targets=dispatch.targets.data_ptr(), starts=dispatch.starts.data_ptr(),
            n_weights=len(weights), n_rows=n_rows, weights=weights.buffer_info()[0], y=y.data_ptr(),
            k=k, m=m,
        )  # fmt: skip
        run(self._program, torch.get_num_threads(), arguments)
        return y


@cache
def make_gemv(dtype: torch.dtype, stored: torch.dtype) -> GemvKernel:
    return GemvKernel(dtype, stored, this_machine())


@cache
def make_routed_gemv(dtype: torch.dtype, stored: torch.dtype) -> RoutedGemvKernel:
    return RoutedGemvKernel(dtype, stored, this_machine())


def tile_rows(machine: CPUFeatures) -> int:
    """Rows of the weight in a tile: with one row of x and the sums, they fill the registers."""
    return (machine.n_vectors - 1) // (_ROWS + 1)


def _gemv(
    lanes: Lanes,
    of_weight: Lanes,
    n_tile: int,
    _: ir.IRBuilder,
    thread: Thread,
    args: _GemvArguments[Value],
) -> None:

    def row(i: Value) -> tuple[Value, Value]:
        return args.x + i * args.x_stride, args.y + i * args.m

    columns = thread.part_of(args.m)
    multiply(lanes, of_weight, n_tile, columns, row, args.weight, args.n, args.k)


def _routed_gemv(
    lanes: Lanes,
    of_weight: Lanes,
    n_tile: int,
    b: ir.IRBuilder,
    thread: Thread,
    args: _RoutedGemvArguments[Value],
) -> None:
    """Computes one product after the other, without a barrier between them."""
    sources, targets, k, m = args.sources, args.targets, args.k, args.m
    with loop(b, 0, args.n_weights) as number:
        start = args.starts[number]
        n = args.starts[number + 1] - start

        def row(i: Value) -> tuple[Value, Value]:
            return args.x + sources[start + i] * args.x_stride, args.y + targets[start + i] * m

        with when(n > 0):
            columns = thread.part_of(m)
            multiply(lanes, of_weight, n_tile, columns, row, args.weights[number], n, k)
    n_computed = args.starts[args.n_weights]
    first, last = thread.part_of(args.n_rows - n_computed)
    with loop(b, n_computed + first, n_computed + last) as i:
        zeros = args.y + targets[i] * m
        with loop(b, 0, m, lanes.width) as column:
            lanes.store(zeros + column, lanes.constant(b, 0), lanes.first(m - column))


def multiply(
    lanes: Lanes,
    of_weight: Lanes,
    n_tile: int,
    outputs: tuple[Value, Value],
    row: RowAddresses,
    weight: Value,
    n: Value,
    k: Value,
) -> None:
    """Emits the product of n rows of x with rows outputs[0] to outputs[1] - 1 of the weight.

    for tile in this thread's tiles, n_tile rows of weight each:
        for inputs, SUMMED_INPUTS at a time:
            for group in x, _ROWS rows each, then 4, 2 or 1 of the remaining rows:
                y[group, tile] += x[group, inputs] @ weight[tile, inputs].T
    """
    b = n.b
    first, last = outputs
    stretch = (last - first) // n_tile

    def multiply_tile(column: Value, n_columns: int, group_rows: int) -> None:
        """Multiplies all rows of x by one row of each stretch of the weight."""
        numbers = [column + stretch * number for number in range(n_columns)]
        columns = [weight + number * k for number in numbers]
        # Each group of several rows prefetches a part of the next tile: for each vector that it
        # reads, `n_ahead` numbers.
        n_prefetching = larger((n + (group_rows - 2)) // group_rows, n.like(1))
        n_ahead = (n_prefetching - 1 + lanes.width) // n_prefetching

        def multiply_group(start: Value, first_row: Value, n_rows: int) -> None:
            rows, results = zip(*(row(first_row + i) for i in range(n_rows)), strict=True)
            prefetched = k + (k * (first_row // group_rows) + start) // lanes.width * n_ahead
            sums = _products(
                lanes,
                of_weight,
                rows,
                columns,
                (start, smaller(start + SUMMED_INPUTS, k)),
                (prefetched, n_ahead) if n_rows > 1 else None,
            )
            targets = list(product(results, numbers))
            totals = [Variable(total) for total in sums]
            with when(start > 0):
                for total, (result, number) in zip(totals, targets, strict=True):
                    total.value = result[number] + total.value
            for total, (result, number) in zip(totals, targets, strict=True):
                result[number] = total.value

        with loop(b, 0, larger(k, k.like(1)), SUMMED_INPUTS) as start:
            in_groups(0, n, group_rows, partial(multiply_group, start))

    # One row has a loop of its own, compiled without the code for larger groups of rows.
    with when(n < 2), loop(b, first, first + stretch) as column:
        multiply_tile(column, n_tile, 1)
    with when(n > 1), loop(b, first, first + stretch) as column:
        multiply_tile(column, n_tile, _ROWS)
    with loop(b, first + stretch * n_tile, last) as column:
        multiply_tile(column, 1, 1)


def _products(
    lanes: Lanes,
    of_weight: Lanes,
    rows: Sequence[Value],
    columns: Sequence[Value],
    inputs: tuple[Value, Value],
    prefetched: tuple[Value, Value] | None,
) -> list[Value]:
    """row @ column for each pair of a row and a column.

    Args:
        inputs: the first input, a multiple of the lanes, and the last + 1.
        prefetched: where prefetching starts, counted from the start of each column, and by how many
            numbers it advances with each vector; None for no prefetching.
    """
    first, stop = inputs
    b, width = stop.b, lanes.width
    sums = [Variable(lanes.constant(b, 0)) for _ in product(rows, columns)]
    first_ahead, n_ahead = prefetched or (stop, stop)
    next_ahead = Variable(first_ahead)

    def add_products(i: Value, mask: Value | None = None) -> None:
        x_vectors = [lanes.load(row + i, mask) for row in rows]
        weight_vectors = [of_weight.load(column + i, mask) for column in columns]
        for total, (one, other) in zip(sums, product(x_vectors, weight_vectors), strict=True):
            total.value = fma(one, other, total.value)

    def add_vector(i: Value) -> None:
        if prefetched is not None:
            for column in columns:
                (column + next_ahead.value).prefetch(cache=2)
            next_ahead.value += n_ahead
        add_products(i)

    whole = stop & -width
    paired = whole - ((whole - first) & width)
    with loop(b, first, paired, 2 * width) as i:  # LLVM does not unroll this loop
        add_vector(i)
        add_vector(i + width)
    with loop(b, paired, whole, width) as i:
        add_vector(i)
    with loop(b, whole, stop, width) as i:
        add_products(i, lanes.first(stop - whole))
    return [number for total in _reduced(lanes, sums) for number in total.lanes()]


def _reduced(lanes: Lanes, vectors: Sequence[Variable]) -> list[Value]:
    """The sums of the lanes: those of every W vectors in a vector, and the rest as single numbers.

    Reducing W vectors at once has the bits of `Lanes.reduce` in a third of the instructions.
    """
    values, width = [vector.value for vector in vectors], lanes.width
    n_whole = len(values) // width * width
    wholes = [reduced(values[start : start + width]) for start in range(0, n_whole, width)]
    return wholes + [lanes.reduce(add, value) for value in values[n_whole:]]
