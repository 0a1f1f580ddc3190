"""The product of many rows with a matrix, in blocks whose sums stay in registers.

Rows of x are kept a few together, and outputs some vectors together, input by input: so one step
takes what it needs from two places, in order. A thread lays out a panel of outputs and lets the
rows pass over it before it comes to the next. What is summed in which order depends on the number
of inputs alone, so a row's result is the same among any rows and from any number of threads.

    block of rows      [inputs, n_rows]
    panel of outputs   [inputs, n_vectors, lanes]
    sums               [n_rows, n_vectors, lanes]

Source: GotoBLAS, "Anatomy of high-performance matrix multiplication", section 4.
"""

from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

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
    smaller,
    transposed,
    when,
)
from parallel_llama.ops.cpu.program import Machine, Program, Run, at_once, this_machine

# Inputs of a panel: the second cache holds it while rows pass over it.
_MAX_INPUTS = 1024

# Inputs whose products go to a sum of their own, which is added to those before: that rounds less
# than one long sum.
_SUMMED = 128

# Rows that pass over all panels before the next ones do, so that a cache holds them; fewer where
# there would not be so many panels for each thread.
_MAX_CHUNK = 512
_PANELS_PER_THREAD = 4


@dataclass(frozen=True)
class _Shape:
    """What a kernel is made for: rows of x of a block, and vectors of outputs of a panel.

    Their sums, a vector of each of these outputs, and an input fill the registers.
    """

    lanes: Lanes
    of_weight: Lanes
    n_rows: int
    n_vectors: int = 3

    @classmethod
    def on(cls, machine: Machine, dtype: torch.dtype, stored: torch.dtype) -> "_Shape":
        lanes = machine.lanes(dtype)
        n_rows = 8 if machine.n_vectors >= 32 else 4
        return cls(lanes, replace(lanes, stored=stored), n_rows)

    @property
    def n_outputs(self) -> int:
        """Of a panel."""
        return self.n_vectors * self.lanes.width


class BlockLinearKernel:
    """Y = X A for many rows of X, with A given as torch keeps it, transposed.

    Weights may be kept in 16 bits where x has float32.

    Shapes: x [n, k], each row in one piece; weight [m, k] in one piece; the result [n, m].
    """

    def __init__(self, dtype: torch.dtype, stored: torch.dtype, machine: Machine) -> None:
        self._shape = shape = _Shape.on(machine, dtype, stored)
        numbers, of_weight = shape.lanes.pointer, shape.of_weight.pointer
        self._rows = Program("rows", [numbers, I64, numbers, I64, I64], partial(_lay_out, shape))
        types = [numbers, of_weight, numbers, numbers, *[I64] * 4]
        self._program = Program("block_linear", types, partial(_block_linear, shape))

    def __call__(self, x: Tensor, weight: Tensor, run: Run = at_once) -> Tensor:
        (n, k), m = x.shape, len(weight)
        shape, n_threads = self._shape, torch.get_num_threads()
        assert x.stride(1) == 1 and weight.dtype == shape.of_weight.stored
        assert weight.is_contiguous() and weight.shape[1] == k
        y = x.new_empty(n, m) if k else x.new_zeros(n, m)
        if not n:
            return y
        n_blocks = -(-n // shape.n_rows)
        blocks = x.new_empty(n_blocks * shape.n_rows, k)
        run(self._rows, n_threads, x.data_ptr(), x.stride(0), blocks.data_ptr(), n, k)
        panels = x.new_empty(n_threads, _MAX_INPUTS, shape.n_outputs)
        n_panels = -(-m // shape.n_outputs)
        n_chunks = max(-(-n // _MAX_CHUNK), _PANELS_PER_THREAD * n_threads // max(n_panels, 1))
        chunk = -(-n_blocks // n_chunks) * shape.n_rows
        addresses = (each.data_ptr() for each in (blocks, weight, panels, y))
        run(self._program, n_threads, *addresses, n, k, m, chunk)
        return y


@cache
def make_block_linear(dtype: torch.dtype, stored: torch.dtype) -> BlockLinearKernel:
    """The kernel for this machine; `computes` says for which types to compute in."""
    return BlockLinearKernel(dtype, stored, this_machine())


def _lay_out(shape: _Shape, b: ir.IRBuilder, thread: Thread, arguments: list[Value]) -> None:
    """Rows in blocks, input by input; the last row fills up the last block.

    Shapes: x [n, k] -> blocks [n_blocks, k, n_rows].
    """
    x, x_stride, blocks, n, k = arguments
    n_rows = shape.n_rows
    with loop(b, *thread.part_of((n + (n_rows - 1)) // n_rows)) as block:
        rows = [x + smaller(block * n_rows + i, n - 1) * x_stride for i in range(n_rows)]
        own = blocks + block * n_rows * k
        with loop(b, 0, k) as i:
            for number, row in enumerate(rows):
                (own + i * n_rows)[number] = row[i]


def _block_linear(shape: _Shape, b: ir.IRBuilder, thread: Thread, arguments: list[Value]) -> None:
    """The kernel.

    for inputs, _MAX_INPUTS at a time:
        for (chunk of rows, panel of outputs) in this thread's:
            lay out weight[outputs, inputs]
            for block in rows of the chunk:
                y[block, outputs] += x[block, inputs] @ weight[outputs, inputs].T
    """
    blocks, weight, panels, y, n, k, m, chunk = arguments
    panel = panels + thread.number * (_MAX_INPUTS * shape.n_outputs)
    n_chunks = (n + chunk - 1) // chunk
    n_panels = (m + (shape.n_outputs - 1)) // shape.n_outputs
    with (
        loop(b, 0, k, _MAX_INPUTS) as start,
        loop(b, *thread.part_of(n_chunks * n_panels)) as item,
    ):
        first = item % n_panels * shape.n_outputs
        n_inputs = smaller(k - start, _MAX_INPUTS)
        _lay_out_panel(shape, weight + start, panel, first, n_inputs, k, m)
        first_row = item // n_panels * chunk
        with loop(b, first_row, smaller(first_row + chunk, n), shape.n_rows) as row:
            own = blocks + row * k + start * shape.n_rows
            _add_products(shape, own, panel, y, (row, first), start, n_inputs, n, m)


def _lay_out_panel(
    shape: _Shape, weight: Value, panel: Value, first: Value, n_inputs: Value, k: Value, m: Value
) -> None:
    """Outputs from the first on, input by input; the last one stands for those beyond it.

    Inputs are made up to whole vectors with zeros.
    """
    width, b = shape.lanes.width, k.b
    with loop(b, 0, shape.n_outputs, width) as vector:
        rows = [weight + smaller(first + vector + i, m - 1) * k for i in range(width)]
        with loop(b, 0, n_inputs, width) as i:
            mask = shape.lanes.first(n_inputs - i)
            columns = transposed([shape.of_weight.load(row + i, mask) for row in rows])
            place = panel + i * shape.n_outputs + vector
            for number, column in enumerate(columns):
                shape.lanes.store(place + number * shape.n_outputs, column)


def _add_products(
    shape: _Shape,
    rows: Value,
    panel: Value,
    y: Value,
    place: tuple[Value, Value],
    n_before: Value,
    n_inputs: Value,
    n: Value,
    m: Value,
) -> None:
    """A block of rows by a panel: added to the rows and outputs of y from `place` on.

    Where no inputs came before, it is written there.
    """
    lanes, b = shape.lanes, n.b
    first_row, first = place
    starts = range(0, shape.n_outputs, lanes.width)
    masks = [lanes.first(m - first - start) for start in starts]
    own = [y + smaller(first_row + i, n - 1) * m + first for i in range(shape.n_rows)]
    places = [(row + start, mask) for row in own for start, mask in zip(starts, masks, strict=True)]
    with loop(b, 0, n_inputs, _SUMMED) as segment:
        sums = [Variable(lanes.constant(b, 0)) for _ in places]
        with loop(b, segment, smaller(segment + _SUMMED, n_inputs)) as i:
            outputs = [lanes.load(panel + i * shape.n_outputs + start) for start in starts]
            inputs = [lanes.splat((rows + i * shape.n_rows)[row]) for row in range(shape.n_rows)]
            for total, (x, weights) in zip(sums, product(inputs, outputs), strict=True):
                total.value = fma(x, weights, total.value)
        with when(n_before + segment > 0):
            for total, (address, mask) in zip(sums, places, strict=True):
                total.value += lanes.load(address, mask)
        for total, (address, mask) in zip(sums, places, strict=True):
            lanes.store(address, total.value, mask)
