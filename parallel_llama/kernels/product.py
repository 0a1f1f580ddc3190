"""The product of few rows with a weight, as fast as the weight comes from memory.

Some rows of the weight, a tile, stay in the first cache while groups of rows of x pass over them;
the sums of a group stay in registers, and meanwhile memory is asked for the next tile. What is
summed, and in which order, is the same for any number of rows and threads.

Source: GotoBLAS, "Anatomy of high-performance matrix multiplication", section 4.
"""

from collections.abc import Sequence
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.kernels.builder import I64, VOID, Lanes, at, function, loop, part_of, prefetch
from parallel_llama.kernels.program import Machine, Program, computes, this_machine

# Beyond so many rows arithmetic and not memory sets the pace, and torch's product is faster.
MAX_ROWS = 32

# Rows of x in a group. What is left of the rows is made up of groups of 4, 2 and 1: 7 at most.
_ROWS = 6


class Product:
    """Y = X A for few rows of X, with A given as torch keeps it, transposed.

    Shapes: x [n, k], each row in one piece; weight [m, k] in one piece; the result [n, m].
    """

    def __init__(self, dtype: torch.dtype, machine: Machine) -> None:
        self._program = Program("product", 7, _Body(dtype, machine))

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        (n, k), m = x.shape, len(weight)
        assert x.stride(1) == 1 and x.dtype == weight.dtype
        assert weight.is_contiguous() and weight.shape[1] == k
        y = x.new_empty(n, m)
        if n:
            addresses = (x.data_ptr(), x.stride(0), weight.data_ptr(), y.data_ptr())
            self._program(torch.get_num_threads(), *addresses, n, k, m)
        return y


@cache
def make_product(dtype: torch.dtype, device: torch.device) -> Product | None:
    """The kernel for weights of this type and place; None where torch has to do."""
    return Product(dtype, this_machine()) if computes(dtype, device) else None


class _Body:
    """Builds the kernel: arguments x, its row stride, weight, y, n, k, m."""

    def __init__(self, dtype: torch.dtype, machine: Machine) -> None:
        self.lanes = Lanes(dtype, machine.vector_bytes // dtype.itemsize)
        # The sums, as many vectors of the weight and one of x fill the registers.
        self.n_tile = (machine.n_vectors - 1) // (_ROWS + 1)

    def __call__(
        self, b: ir.IRBuilder, arguments: Sequence[ir.Value], thread: ir.Value, n_threads: ir.Value
    ) -> None:
        x, stride, weight, y, n, k, m = arguments
        x, weight, y = (b.inttoptr(address, self.lanes.pointer) for address in (x, weight, y))
        operands = (x, stride, weight, y, n, k, m)
        n_tiles = b.sdiv(m, I64(self.n_tile))
        with loop(b, *part_of(b, n_tiles, thread, n_threads)) as tile:
            first = b.mul(tile.index, I64(self.n_tile))
            self._pass(b, operands, first, self.n_tile, _ROWS)
        # What is left of the weight, less than a tile, is the last thread's, row by row.
        is_last = b.icmp_signed("==", b.add(thread, I64(1)), n_threads)
        rest = b.select(is_last, b.mul(n_tiles, I64(self.n_tile)), m)
        with loop(b, rest, m) as row:
            self._pass(b, operands, row.index, 1, 1)

    def _pass(
        self,
        b: ir.IRBuilder,
        operands: Sequence[ir.Value],
        first: ir.Value,
        n_tile: int,
        n_rows: int,
    ) -> None:
        """All rows of x, so many at a time, by the tile that begins with this row of the weight."""
        x, stride, weight, y, n, k, m = operands
        tile = at(b, weight, b.mul(first, k))
        following = at(b, tile, b.mul(k, I64(n_tile)))
        # Each group asks for its share of the next tile: so many numbers where a vector is used.
        n_groups = b.sdiv(b.add(n, I64(n_rows - 1)), I64(n_rows))
        share = b.sdiv(b.add(b.sub(n_groups, I64(1)), I64(self.lanes.width)), n_groups)
        share_size = b.mul(b.sdiv(b.mul(k, share), I64(self.lanes.width)), I64(n_tile))

        def call(rows: int, row: ir.Value) -> None:
            number = b.sdiv(row, I64(n_rows))
            arguments = [
                at(b, x, b.mul(row, stride)),
                stride,
                tile,
                at(b, y, b.mul(row, m), first),
                m,
                k,
                at(b, following, b.mul(share_size, number)),
                share,
            ]
            b.call(self._group(b.module, rows, n_tile), arguments)

        whole = b.mul(b.sdiv(n, I64(n_rows)), I64(n_rows))
        with loop(b, I64(0), whole, n_rows) as row:
            call(n_rows, row.index)
        # The rows that are left, fewer than a group, are a sum of powers of two.
        left, done = b.sub(n, whole), whole
        for rows in (rows for rows in (4, 2, 1) if rows < n_rows):
            size = b.and_(left, I64(rows))
            with b.if_then(b.icmp_signed("!=", size, I64(0))):
                call(rows, done)
            done = b.add(done, size)

    def _group(self, module: ir.Module, rows: int, n_tile: int) -> ir.Function:
        """A function: the products of some rows of x with the rows of a tile.

        Arguments: x, its row stride, tile, y, its row stride, k, from where to prefetch, and how
        many numbers at once.
        """
        lanes, pointer = self.lanes, self.lanes.pointer
        kinds = [pointer, I64, pointer, pointer, I64, I64, pointer, I64]
        name = f"rows_{rows}_tile_{n_tile}"
        if name in module.globals:
            return module.globals[name]
        b, (x, stride, tile, y, m, k, ahead, share) = function(module, name, VOID, kinds)
        lines = [at(b, x, b.mul(stride, I64(row))) for row in range(rows)]
        weights = [at(b, tile, b.mul(k, I64(row))) for row in range(n_tile)]
        whole = b.and_(k, I64(-lanes.width))
        with loop(b, I64(0), whole, lanes.width, [lanes.every(0)] * (rows * n_tile)) as main:
            turn = b.udiv(main.index, I64(lanes.width))
            place = at(b, ahead, b.mul(b.mul(turn, share), I64(n_tile)))
            for number in range(n_tile):
                prefetch(b, at(b, place, b.mul(share, I64(number))))
            load = lanes.load
            main.next = self._products(
                b,
                [load(b, at(b, line, main.index)) for line in lines],
                [load(b, at(b, line, main.index)) for line in weights],
                main.values,
            )
        mask = lanes.first(b, b.sub(k, whole))
        with loop(b, whole, k, lanes.width, main.results) as rest:
            rest.next = self._products(
                b,
                [lanes.load_some(b, at(b, line, rest.index), mask) for line in lines],
                [lanes.load_some(b, at(b, line, rest.index), mask) for line in weights],
                rest.values,
            )
        for number, products in enumerate(rest.results):
            row, column = divmod(number, n_tile)
            b.store(lanes.sum(b, products), at(b, y, b.mul(m, I64(row)), column))
        b.ret_void()
        return b.function

    def _products(
        self,
        b: ir.IRBuilder,
        rows: Sequence[ir.Value],
        weights: Sequence[ir.Value],
        sums: Sequence[ir.Value],
    ) -> list[ir.Value]:
        """The sums, row by row, with the product of each row and each weight added."""
        pairs = ((row, weight) for row in rows for weight in weights)
        return [
            self.lanes.fma(b, row, weight, value)
            for (row, weight), value in zip(pairs, sums, strict=True)
        ]
