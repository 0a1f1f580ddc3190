"""Low-rank products of LoRA adapters, for all adapters of a batch at once.

The rows of one adapter are a segment. The first kernel multiplies the rows of each segment by the
matrix A of its adapter; the second kernel multiplies these products by B and adds the results to
the outputs of a layer. Both kernels read the addresses of the matrices from memory, so adapters can
be loaded and unloaded without recording the step again. Rows without an adapter are in no segment,
and are neither read nor written.

Sums have the same bits as in `gemv`, for any segments and any number of threads.

    adapter   cells of 8 bytes, LAYER_CELLS for each layer: the address of A, the number of its
              rows, and for each part of the layer's outputs that has a matrix B: the address of B,
              its first output, its number of outputs, its rank, and its first row of A
    room      cells of 8 bytes: the number of segments, the address and the row stride of the
              products with A; for each segment the address of its adapter; the first row of each
              segment, and the last + 1; and the numbers of the rows

Source: segmented gather matrix-vector products, Punica, arXiv 2310.18547, section 4.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, chain
from typing import Generic

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Integer, Integers, Numbers, T
from parallel_llama.ops.cpu.gemv import multiply, tile_rows
from parallel_llama.ops.cpu.ir import (
    I64,
    LINE_BYTES,
    Lanes,
    Thread,
    Value,
    Variable,
    fma,
    larger,
    loop,
    reduced,
    smaller,
    when,
)
from parallel_llama.ops.cpu.jit import CompiledKernel, CPUFeatures, Launcher, at_once, this_machine

# A fused layer has a matrix B for each of the layers that are fused: at most wq, wk and wv.
MAX_PARTS = 3

_PART_CELLS = 5
_B, _FIRST_OUTPUT, _N_OUTPUTS, _RANK, _FIRST_ROW = range(_PART_CELLS)
_A, _N_ROWS, _PARTS = range(3)
LAYER_CELLS = _PARTS + MAX_PARTS * _PART_CELLS

# How far ahead B is prefetched. The matrices B of a layer follow each other.
_BYTES_AHEAD = 4096

_N_SEGMENTS, _SUMS, _SUMS_STRIDE, _SEGMENTS = range(4)


class AdapterAddresses:
    """The addresses of an adapter's matrices, for each layer.

    The matrices must stay alive as long as the addresses are used.

    Args:
        n_layers: The number of layers that may have matrices.

    Attributes:
        address: The address of the cells.
        n_rows: The largest number of rows of a matrix A.
    """

    def __init__(self, n_layers: int) -> None:
        self._cells = np.zeros((n_layers, LAYER_CELLS), dtype=np.int64)
        self.address: int = self._cells.ctypes.data
        self.n_rows = 0

    def add(self, layer: int, a: Tensor, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Add the matrices of a layer.

        Args:
            parts: For each part of the outputs its first output and its B, in order of A's rows.

        Shapes: a [the sum of the ranks, in] contiguous; each b [outputs, rank] contiguous.
        """
        assert len(parts) <= MAX_PARTS and sum(b.shape[1] for _, b in parts) == len(a)
        assert a.is_contiguous() and all(b.is_contiguous() for _, b in parts)
        cells, first_row = [a.data_ptr(), len(a)], 0
        for first, b in parts:
            cells += (b.data_ptr(), first, *b.shape, first_row)
            first_row += b.shape[1]
        self._cells[layer, : len(cells)] = cells
        self.n_rows = max(self.n_rows, len(a))


class AdapterRoom:
    """Which rows of a batch run with which adapters, at fixed addresses.

    Args:
        n_rows: The number of rows of the batch.
        dtype: The dtype of the rows and of the adapters.
    """

    def __init__(self, n_rows: int, dtype: torch.dtype) -> None:
        self.n_rows = n_rows
        self._sums = torch.empty(n_rows, 0, dtype=dtype)  # the products with A
        self._cells = np.zeros(_SEGMENTS + 3 * n_rows + 1, dtype=np.int64)
        self.address: int = self._cells.ctypes.data

    def fill(self, adapters: Sequence[AdapterAddresses | None]) -> None:
        """Replace the adapter of each row; None for a row without an adapter.

        The adapters must stay alive until the products have been computed.
        """
        n_sums = max((each.n_rows for each in adapters if each is not None), default=0)
        if n_sums > self._sums.shape[1]:
            self._sums = self._sums.new_empty(self.n_rows, n_sums)
        rows_of: dict[int, list[int]] = {}
        for row, adapter in enumerate(adapters):
            if adapter is not None:
                rows_of.setdefault(adapter.address, []).append(row)
        starts = accumulate(map(len, rows_of.values()), initial=0)
        unused = [0] * (self.n_rows - len(rows_of))
        rows = chain.from_iterable(rows_of.values())
        cells = [len(rows_of), self._sums.data_ptr(), self._sums.stride(0)]
        cells += [*rows_of, *unused, *starts, *unused, *rows]
        self._cells[: len(cells)] = cells


@dataclass(slots=True, kw_only=True)
class _RoomArguments(Generic[T]):
    """An `AdapterRoom`, and a layer."""

    cells: Integers[T]
    n_rows: Integer[T]
    layer: Integer[T]


@dataclass(slots=True, kw_only=True)
class _ShrinkArguments(Generic[T]):
    room: _RoomArguments[T]
    x: Numbers[T]
    x_stride: Integer[T]
    k: Integer[T]


@dataclass(slots=True, kw_only=True)
class _ExpandArguments(Generic[T]):
    room: _RoomArguments[T]
    y: Numbers[T]
    y_stride: Integer[T]


class LowRankKernel:
    """Adds x A B to y, in the rows of a room, with the A and B of each row's adapter.

    Shapes: x [n, k], y [n, m], rows contiguous.
    """

    def __init__(self, dtype: torch.dtype, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        self._shrink = CompiledKernel(
            _ShrinkArguments[float],
            partial(_shrink, lanes, tile_rows(machine)),
            numbers=lanes.pointer,
        )
        self._expand = CompiledKernel(
            _ExpandArguments[float], partial(_expand, lanes), numbers=lanes.pointer
        )

    def __call__(
        self, y: Tensor, x: Tensor, room: AdapterRoom, layer: int, run: Launcher = at_once
    ) -> None:
        assert len(x) == len(y) == room.n_rows and x.dtype == y.dtype
        assert x.stride(1) == y.stride(1) == 1
        n_threads = torch.get_num_threads()
        of_layer = _RoomArguments(cells=room.address, n_rows=room.n_rows, layer=layer)
        run(
            self._shrink,
            n_threads,
            _ShrinkArguments(room=of_layer, x=x.data_ptr(), x_stride=x.stride(0), k=x.shape[1]),
        )
        run(
            self._expand,
            n_threads,
            _ExpandArguments(room=of_layer, y=y.data_ptr(), y_stride=y.stride(0)),
        )


@cache
def make_low_rank(dtype: torch.dtype) -> LowRankKernel:
    return LowRankKernel(dtype, this_machine())


class _Room:
    """The cells of a room within a kernel."""

    def __init__(self, lanes: Lanes, args: _RoomArguments[Value]) -> None:
        cells, n = args.cells, args.n_rows
        self._lanes, self._cells, self._layer = lanes, cells, args.layer
        self.n_segments, self._sums_stride = cells[_N_SEGMENTS], cells[_SUMS_STRIDE]
        self._sums = self.numbers(cells[_SUMS])
        self.starts, self._rows = cells + (n + _SEGMENTS), cells + (n * 2 + (_SEGMENTS + 1))

    def numbers(self, address: Value) -> Value:
        """Converts an address in a cell to a pointer to numbers."""
        return Value(address.b, address.b.inttoptr(address.raw, self._lanes.pointer))

    def adapter(self, segment: Value) -> Value:
        """The cells of a segment's adapter for this layer."""
        address, b = self._cells[segment + _SEGMENTS], segment.b
        cells = Value(b, b.inttoptr(address.raw, I64.as_pointer()))
        return cells + self._layer * LAYER_CELLS

    def row(self, number: Value) -> tuple[Value, Value]:
        """The number-th row of all segments, and its products with A."""
        row = self._rows[number]
        return row, self._sums + row * self._sums_stride


def _shrink(
    lanes: Lanes, n_tile: int, b: ir.IRBuilder, thread: Thread, args: _ShrinkArguments[Value]
) -> None:
    """
    for segment, and this thread's rows of its A:
        sums[rows of the segment, rows of A] = x[rows of the segment] @ A[rows].T
    """
    room = _Room(lanes, args.room)

    def multiply_rows(segment: Value, first: Value, last: Value) -> None:
        start, adapter = room.starts[segment], room.adapter(segment)

        def row(i: Value) -> tuple[Value, Value]:
            number, sums = room.row(start + i)
            return args.x + number * args.x_stride, sums

        n = room.starts[segment + 1] - start
        a = room.numbers(adapter[_A])
        multiply(lanes, lanes, n_tile, (first, last), row, a, n, args.k)

    def n_rows(segment: Value) -> Value:
        return room.adapter(segment)[_N_ROWS]

    _in_equal_parts(b, thread, room.n_segments, n_rows, multiply_rows)


def _expand(lanes: Lanes, b: ir.IRBuilder, thread: Thread, args: _ExpandArguments[Value]) -> None:
    """
    for part of the outputs in segment, and this thread's outputs of the part, a vector at a time:
        for row in the segment:
            y[row, outputs] += sums[row, rows of A for the part] @ B[outputs].T
    """
    room = _Room(lanes, args.room)
    # For small ranks, half a vector: the other half of a row of B would be zeros.
    narrow = replace(lanes, width=lanes.width // 2)
    n_ahead = _BYTES_AHEAD // lanes.stored.itemsize

    def part_of(item: Value) -> Value:
        return room.adapter(item // MAX_PARTS) + (item % MAX_PARTS * _PART_CELLS + _PARTS)

    def n_vectors(item: Value) -> Value:
        return (part_of(item)[_N_OUTPUTS] + (lanes.width - 1)) // lanes.width

    def add_outputs(item: Value, first: Value, last: Value) -> None:
        segment, part = item // MAX_PARTS, part_of(item)
        matrix, rank, n_outputs = room.numbers(part[_B]), part[_RANK], part[_N_OUTPUTS]

        def add_vector(vector_lanes: Lanes, start: Value) -> None:
            rows_of_b = [
                matrix + smaller(start + i, n_outputs - 1) * rank for i in range(vector_lanes.width)
            ]
            mask = vector_lanes.first(n_outputs - start)
            with loop(b, room.starts[segment], room.starts[segment + 1]) as number:
                row, sums = room.row(number)
                outputs = args.y + (row * args.y_stride + part[_FIRST_OUTPUT] + start)
                product = _products(vector_lanes, sums + part[_FIRST_ROW], rows_of_b, rank)
                vector_lanes.store(outputs, vector_lanes.load(outputs, mask) + product, mask)

        with loop(b, first, last) as vector:
            start = vector * lanes.width
            with loop(b, 0, rank * lanes.width, LINE_BYTES // lanes.stored.itemsize) as number:
                (matrix + start * rank + number + n_ahead).prefetch()
            is_narrow = rank < narrow.width + 1
            with when(is_narrow):
                add_vector(narrow, start)
                add_vector(narrow, start + narrow.width)
            with when(is_narrow ^ 1):
                add_vector(lanes, start)

    _in_equal_parts(b, thread, room.n_segments * MAX_PARTS, n_vectors, add_outputs)


def _products(lanes: Lanes, x: Value, rows: Sequence[Value], n: Value) -> Value:
    """The products of x with W rows of n numbers each, in the lanes of a vector."""
    totals = [Variable(lanes.constant(n.b, 0)) for _ in rows]
    with loop(n.b, 0, n, lanes.width) as i:
        mask = lanes.first(n - i)
        x_vector = lanes.load(x + i, mask)
        for total, row in zip(totals, rows, strict=True):
            total.value = fma(x_vector, lanes.load(row + i, mask), total.value)
    return reduced([total.value for total in totals])


def _in_equal_parts(
    b: ir.IRBuilder,
    thread: Thread,
    n: Value,
    size: Callable[[Value], Value],
    build: Callable[[Value, Value, Value], None],
) -> None:
    """Splits the units of n items evenly among the threads; item i has size(i) units.

    Emits `build(item, first, last)` for each item with units of this thread.
    """
    total = Variable(n.like(0))
    with loop(b, 0, n) as item:
        total.value += size(item)
    start, stop = thread.part_of(total.value)
    before = Variable(n.like(0))
    with loop(b, 0, n) as item:
        n_units = size(item)
        first = larger(start - before.value, n.like(0))
        last = smaller(stop - before.value, n_units)
        with when(first < last):
            build(item, first, last)
        before.value += n_units
