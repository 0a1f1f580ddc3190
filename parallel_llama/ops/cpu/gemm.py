"""GEMM for many rows: blocks of rows of x times panels of outputs, with the sums in registers.

The rows of x are packed in blocks and the outputs of the weight in panels, both input by input, so
the inner loop reads two streams sequentially. A thread packs a panel, multiplies a chunk of rows by
it, and goes on to the next panel.

    block of rows      [inputs, n_rows]
    panel of outputs   [inputs, n_vectors, W]
    sums               [n_rows, n_vectors, W]

The results have the same bits as those of `gemv`, although the W lanes of a vector hold inputs
there and outputs here. In `gemv`, lane i sums the inputs i, i + W, i + 2 W, ...; then a tree adds
up the W lane sums, half of the lanes to the other half at each level. This kernel computes the same
lane sums, but one after another: it sums the inputs of lane 0, then those of lane W / 2, and so on
in bit-reversed order. In this order the operands of each addition of the tree are computed one
after the other, so `_LaneSums` can add them up as they are completed. Inputs are packed in the
order in which they are summed.

Source: GotoBLAS, "Anatomy of high-performance matrix multiplication", section 4.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Integer, Numbers, T, Weights
from parallel_llama.ops.cpu.gemv import SUMMED_INPUTS
from parallel_llama.ops.cpu.ir import (
    LINE_BYTES,
    Lanes,
    Thread,
    Value,
    Variable,
    fma,
    loop,
    smaller,
    transposed,
    when,
)
from parallel_llama.ops.cpu.jit import CompiledKernel, CPUFeatures, Launcher, at_once, this_machine

# The most rows per chunk: their packed inputs fit a cache. With few panels, chunks are smaller, so
# that there are about _ITEMS_PER_THREAD work items (a chunk and a panel) per thread.
_MAX_CHUNK = 512
_ITEMS_PER_THREAD = 4


@dataclass(frozen=True)
class _Shape:
    """The sizes that a kernel is compiled for: the rows of a block, and the vectors of a panel.

    They are chosen so that the sums, a panel's vectors of one input, and one number of x fill the
    registers.
    """

    lanes: Lanes
    of_weight: Lanes
    n_rows: int
    n_vectors: int = 3

    @classmethod
    def on(cls, machine: CPUFeatures, dtype: torch.dtype, stored: torch.dtype) -> "_Shape":
        lanes = machine.lanes(dtype)
        n_rows = 8 if machine.n_vectors >= 32 else 4
        return cls(lanes, replace(lanes, stored=stored), n_rows)

    @property
    def n_outputs(self) -> int:
        return self.n_vectors * self.lanes.width

    def padded(self, n_inputs: int) -> int:
        """The number of inputs, rounded up to whole vectors."""
        return -(-n_inputs // self.lanes.width) * self.lanes.width

    def packed_index(self, step: Value, lane: int, n_inputs: Value) -> Value:
        """Where input step * W + lane is packed: lane by lane, in bit-reversed order of lanes."""
        width = self.lanes.width
        order = int(f"{lane:0{width.bit_length() - 1}b}"[::-1], 2)  # the bits reversed
        return (n_inputs + (width - 1)) // width * order + step


@dataclass(slots=True, kw_only=True)
class _PackArguments(Generic[T]):
    x: Numbers[T]
    x_stride: Integer[T]
    blocks: Numbers[T]
    n: Integer[T]
    k: Integer[T]


@dataclass(slots=True, kw_only=True)
class _GemmArguments(Generic[T]):
    blocks: Numbers[T]
    weight: Weights[T]
    panels: Numbers[T]
    y: Numbers[T]
    n: Integer[T]
    k: Integer[T]
    m: Integer[T]
    chunk: Integer[T]


class GemmKernel:
    """x @ weight.T for many rows of x, with the bits of `GemvKernel`.

    The weight may have 16 bits if x is float32.

    Shapes: x [n, k], rows contiguous; weight [m, k] contiguous; the result [n, m].
    """

    def __init__(self, dtype: torch.dtype, stored: torch.dtype, machine: CPUFeatures) -> None:
        self._shape = shape = _Shape.on(machine, dtype, stored)
        numbers, weights = shape.lanes.pointer, shape.of_weight.pointer
        self._pack = CompiledKernel(_PackArguments[float], partial(_pack, shape), numbers=numbers)
        self._program = CompiledKernel(
            _GemmArguments[float], partial(_gemm, shape), numbers=numbers, weights=weights
        )

    def __call__(self, x: Tensor, weight: Tensor, run: Launcher = at_once) -> Tensor:
        (n, k), m = x.shape, len(weight)
        shape, n_threads = self._shape, torch.get_num_threads()
        assert x.stride(1) == 1 and weight.dtype == shape.of_weight.stored
        assert weight.is_contiguous() and weight.shape[1] == k
        y = x.new_empty(n, m) if k else x.new_zeros(n, m)
        if not n:
            return y
        n_blocks = -(-n // shape.n_rows)
        blocks = x.new_empty(n_blocks * shape.n_rows, shape.padded(k))
        rows = _PackArguments(
            x=x.data_ptr(), x_stride=x.stride(0), blocks=blocks.data_ptr(), n=n, k=k
        )
        run(self._pack, n_threads, rows)
        panels = x.new_empty(n_threads, SUMMED_INPUTS, shape.n_outputs)
        n_panels = -(-m // shape.n_outputs)
        n_chunks = max(-(-n // _MAX_CHUNK), _ITEMS_PER_THREAD * n_threads // max(n_panels, 1))
        arguments = _GemmArguments(
            blocks=blocks.data_ptr(), weight=weight.data_ptr(), panels=panels.data_ptr(),
            y=y.data_ptr(), n=n, k=k, m=m, chunk=-(-n_blocks // n_chunks) * shape.n_rows,
        )  # fmt: skip
        run(self._program, n_threads, arguments)
        return y


@cache
def make_gemm(dtype: torch.dtype, stored: torch.dtype) -> GemmKernel:
    return GemmKernel(dtype, stored, this_machine())


def _pack(shape: _Shape, b: ir.IRBuilder, thread: Thread, args: _PackArguments[Value]) -> None:
    """Packs rows in blocks, input by input; the last block repeats the last row.

    Shapes: x [n, k] -> blocks [n_blocks, k rounded up to whole vectors, n_rows].
    """
    n, k = args.n, args.k
    n_rows, width = shape.n_rows, shape.lanes.width
    side = min(n_rows, width)
    square = replace(shape.lanes, width=side)
    n_padded = (k + (width - 1)) // width * width
    with (
        loop(b, *thread.part_of((n + (n_rows - 1)) // n_rows)) as block,
        loop(b, 0, k, SUMMED_INPUTS) as start,
    ):
        numbers = (smaller(block * n_rows + i, n - 1) for i in range(n_rows))
        rows = [args.x + number * args.x_stride + start for number in numbers]
        packed = args.blocks + (block * n_padded + start) * n_rows
        n_inputs = smaller(k - start, SUMMED_INPUTS)
        with loop(b, 0, n_inputs, width) as i:
            for first, first_row in product(range(0, width, side), range(0, n_rows, side)):
                mask = square.first(n_inputs - i - first)
                square_rows = rows[first_row : first_row + side]
                columns = transposed([square.load(row + (i + first), mask) for row in square_rows])
                for number, column in enumerate(columns):
                    index = shape.packed_index(i // width, first + number, n_inputs)
                    square.store(packed + index * n_rows + first_row, column)


def _gemm(shape: _Shape, b: ir.IRBuilder, thread: Thread, args: _GemmArguments[Value]) -> None:
    """
    for inputs, SUMMED_INPUTS at a time:
        for (chunk of rows, panel of outputs) in this thread's pairs:
            pack weight[outputs, inputs]
            for block in rows of the chunk:
                y[block, outputs] += x[block, inputs] @ weight[outputs, inputs].T
    """
    n, k, m, chunk = args.n, args.k, args.m, args.chunk
    width, lane_sums = shape.lanes.width, _LaneSums(shape, b)
    panel = args.panels + thread.number * (SUMMED_INPUTS * shape.n_outputs)
    n_chunks = (n + chunk - 1) // chunk
    n_panels = (m + (shape.n_outputs - 1)) // shape.n_outputs
    n_padded = (k + (width - 1)) // width * width
    with (
        loop(b, 0, k, SUMMED_INPUTS) as start,
        loop(b, *thread.part_of(n_chunks * n_panels)) as item,
    ):
        first = item % n_panels * shape.n_outputs
        n_inputs = smaller(k - start, SUMMED_INPUTS)
        _pack_panel(shape, args.weight + start, panel, first, n_inputs, k, m)
        first_row = item // n_panels * chunk
        with loop(b, first_row, smaller(first_row + chunk, n), shape.n_rows) as row:
            block = args.blocks + row * n_padded + start * shape.n_rows
            target = _Target(args.y, row, first, n, m)
            _add_products(shape, block, panel, target, start, n_inputs, lane_sums)


def _pack_panel(
    shape: _Shape, weight: Value, panel: Value, first: Value, n_inputs: Value, k: Value, m: Value
) -> None:
    """Packs the outputs of a panel, input by input. Pads inputs with zeros to whole vectors.

    A panel that extends beyond the last output repeats that output.
    """
    width, b = shape.lanes.width, k.b
    with loop(b, 0, shape.n_outputs, width) as vector:
        rows = [weight + smaller(first + vector + i, m - 1) * k for i in range(width)]
        with loop(b, 0, n_inputs, width) as i:
            mask = shape.lanes.first(n_inputs - i)
            columns = transposed([shape.of_weight.load(row + i, mask) for row in rows])
            for number, column in enumerate(columns):
                index = shape.packed_index(i // width, number, n_inputs) * shape.n_outputs + vector
                shape.lanes.store(panel + index, column)


class _LaneSums:
    """Adds the W lane sums of a product in the tree order of `Lanes.reduce`.

    It works like a binary counter. Lane sums arrive in bit-reversed order of lanes: 0, W/2, W/4,
    3W/4, ... Each level of the tree has a buffer for one sum. A sum that finds the buffer of a
    level full is added to it, and the result goes to the next level; a sum that finds the buffer
    empty stays there.
    """

    def __init__(self, shape: _Shape, b: ir.IRBuilder) -> None:
        self._lanes, self._n_numbers = shape.lanes, shape.n_rows * shape.n_outputs
        self._depth = shape.lanes.width.bit_length() - 1
        buffers = b.alloca(shape.lanes.vector.element, self._depth * self._n_numbers)
        buffers.align = LINE_BYTES
        self._buffers = Value(b, buffers)

    def add(
        self, sums: list[Variable], number: Value, put: Callable[[list[Variable]], None]
    ) -> None:
        """Emits the addition of the `number`-th lane sums, for all rows and outputs.

        The level is a variable of the kernel, so that LLVM keeps the buffers in memory. With
        constant levels LLVM would keep sums in registers, and spill them to unaligned addresses.

        Args:
            put: Emits the store of the totals after the last lane sums.
        """
        width, n_completed = self._lanes.width, self._n_completed(number)
        with loop(number.b, 0, n_completed) as level:
            earlier = self._buffers + level * self._n_numbers
            for at, total in enumerate(sums):
                total.value = self._lanes.load(earlier + at * width) + total.value
        is_last = number > width - 2
        with when(is_last):
            put(sums)
        with when(is_last ^ 1):
            buffer = self._buffers + n_completed * self._n_numbers
            for at, total in enumerate(sums):
                self._lanes.store(buffer + at * width, total.value)

    def _n_completed(self, number: Value) -> Value:
        """How many levels of the tree a lane completes: the trailing one bits of its number."""
        ones = number & 1
        n_ones = ones
        for bit in range(1, self._depth):
            ones = ones & (number >> bit)
            n_ones = n_ones + ones
        return n_ones


@dataclass(frozen=True)
class _Target:
    """Where the products of a block and a panel begin in y [n, m]: a row and an output."""

    y: Value
    row: Value
    output: Value
    n: Value
    m: Value


def _add_products(
    shape: _Shape,
    rows: Value,
    panel: Value,
    target: _Target,
    n_before: Value,
    n_inputs: Value,
    lane_sums: _LaneSums,
) -> None:
    """Multiplies a block of rows by a panel: y = the products, or y += if `n_before` is not 0."""
    lanes, b = shape.lanes, n_inputs.b
    starts = range(0, shape.n_outputs, lanes.width)
    n_steps = (n_inputs + (lanes.width - 1)) // lanes.width

    def put(totals: list[Variable]) -> None:
        masks = [lanes.first(target.m - target.output - start) for start in starts]
        y_rows = [
            target.y + smaller(target.row + i, target.n - 1) * target.m + target.output
            for i in range(shape.n_rows)
        ]
        vectors = [
            (row + start, mask)
            for row, (start, mask) in product(y_rows, zip(starts, masks, strict=True))
        ]
        with when(n_before > 0):
            for total, (address, mask) in zip(totals, vectors, strict=True):
                total.value = lanes.load(address, mask) + total.value
        for total, (address, mask) in zip(totals, vectors, strict=True):
            lanes.store(address, total.value, mask)

    with loop(b, 0, lanes.width) as number:
        sums = [Variable(lanes.constant(b, 0)) for _ in range(shape.n_rows * shape.n_vectors)]
        with loop(b, number * n_steps, (number + 1) * n_steps) as i:
            outputs = [lanes.load(panel + i * shape.n_outputs + start) for start in starts]
            inputs = [lanes.splat((rows + i * shape.n_rows)[row]) for row in range(shape.n_rows)]
            for total, (x, weights) in zip(sums, product(inputs, outputs), strict=True):
                total.value = fma(x, weights, total.value)
        lane_sums.add(sums, number, put)
