"""The product of rows, rounded to bytes, with a matrix of small integers in panels.

Integers are summed exactly, a group at a time, for all rows of a panel at once; only the sum over
groups, in their order, is of rounded numbers. So a row's result is the same to the last bit among
any number of rows, on any number of threads, and there is no number of rows beyond which another
product is taken.

Source: `ops.groups` says how panels lie.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce
from operator import add, or_

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.dtypes import GROUP_SIZE, GroupFormat
from parallel_llama.ops.cpu.builder import (
    F16,
    F32,
    I8,
    I32,
    I64,
    Lanes,
    Thread,
    Value,
    Variable,
    fma,
    in_groups,
    larger,
    loop,
    smaller,
    when,
    where,
)
from parallel_llama.ops.cpu.byte_dots import ByteDots, add_byte_dots
from parallel_llama.ops.cpu.program import (
    Machine,
    Program,
    Run,
    at_once,
    this_machine,
    threads_for,
)
from parallel_llama.ops.groups import LEAST_INPUT, PanelShape, Plane, planes_of

# Panels that are multiplied with the same inputs, and rows that are multiplied with the same panel:
# their sums, of integers and of numbers, fill the registers.
_PANELS = 2
_ROWS = 6

# Rows that pass over all panels before the next ones do: so few that a cache holds their inputs.
_BLOCK = 16 * _ROWS

_WORD = I32.as_pointer()
_ALL_FOUR = 0x01010101  # times a byte, that byte in all places of a word
_LINE_BYTES = 64

_ROUNDING = 1.5 * 2.0**23  # added to a float32 and taken away again, it rounds to whole numbers


class GroupLinearKernel:
    """Y = X A with the inputs rounded in groups, A in panels.

    Shapes: x [n, in] and out [n, n_outputs] float32, each row in one piece; panels [n_panels,
    n_bytes] uint8.
    """

    def __init__(self, form: GroupFormat, machine: Machine) -> None:
        lanes = machine.lanes(torch.float32)
        bytes_, numbers, integers = (type_.as_pointer() for type_ in (I8, F32, I32))
        self.n_rows = lanes.width
        self._round = _make_round(machine, form.n_parts)
        types = [bytes_, numbers, integers, bytes_, numbers, *[I64] * 9]
        body = partial(_group_linear, _Products(lanes, form, machine.byte_dots))
        self._program = Program("group_linear", types, body)

    def __call__(
        self,
        x: Tensor,
        panels: Tensor,
        shape: PanelShape,
        out: Tensor,
        run: Run = at_once,
    ) -> None:
        n, n_groups = len(x), shape.n_groups
        assert x.shape[1] == shape.n_inputs and x.stride(1) == 1 and x.dtype == torch.float32
        assert panels.is_contiguous() and panels.shape[1] == shape.n_bytes
        assert len(out) == n and out.stride(1) == 1 and out.dtype == torch.float32
        integers = torch.empty(n, shape.n_inputs, dtype=torch.int8)
        scales = x.new_empty(n, n_groups)
        sums = torch.empty(n, n_groups * shape.form.n_parts, dtype=torch.int32)
        inputs = integers.data_ptr(), scales.data_ptr(), sums.data_ptr()
        of_x = x.data_ptr(), x.stride(0)
        run(self._round, threads_for(x.numel()), *of_x, *inputs, n, n_groups)
        sizes = n, out.shape[1], out.stride(0), n_groups, shape.n_before
        places = shape.scale_bytes, shape.factors_at, shape.integers_at, shape.n_bytes
        addresses = *inputs, panels.data_ptr(), out.data_ptr()
        run(self._program, torch.get_num_threads(), *addresses, *sizes, *places)


@cache
def make_group_linear(form: GroupFormat) -> GroupLinearKernel:
    """The kernel for this machine; `computes` says whether there can be one."""
    return GroupLinearKernel(form, this_machine())


@cache
def _make_round(machine: Machine, n_parts: int) -> Program:
    """What rounds inputs, for all formats with so many parts of a group."""
    bytes_, numbers, integers = (type_.as_pointer() for type_ in (I8, F32, I32))
    types = [numbers, I64, bytes_, numbers, integers, I64, I64]
    return Program("round", types, partial(_round, machine.lanes(torch.float32), n_parts))


def _round(
    lanes: Lanes, n_parts: int, b: ir.IRBuilder, thread: Thread, arguments: list[Value]
) -> None:
    """Inputs in bytes, their scales, and minus the sum of each part of a group.

    for (row, group) in this thread's groups:
        scales[row, group] = max(abs(x[row, group])) / 127
        integers[row, group] = round(x[row, group] / scales[row, group])
    """
    x, x_stride, integers, scales, sums, n, n_groups = arguments
    with loop(b, *thread.part_of(n * n_groups)) as number:
        own = x + number // n_groups * x_stride + number % n_groups * GROUP_SIZE
        vectors = [lanes.load(own + i) for i in range(0, GROUP_SIZE, lanes.width)]
        largest = lanes.constant(b, 0)
        for vector in vectors:
            largest = larger(abs(vector), largest)
        spoilt = reduce(add, (vector * 0 for vector in vectors))
        top = lanes.reduce(larger, largest)
        scales[number] = top / 127 + lanes.reduce(add, spoilt)
        inverse = lanes.splat(where(top < LEAST_INPUT, top.like(0), 127 / top))
        zeros = Value(b, ir.VectorType(I32, lanes.width)([0] * lanes.width))
        totals = [zeros] * n_parts
        for place, vector in enumerate(vectors):
            rounded = (vector * inverse + _ROUNDING).bits_as(zeros.raw.type)
            rounded = (rounded << 24).signed_shift(24)
            totals[place * n_parts // len(vectors)] -= rounded
            narrow = rounded.resized(ir.VectorType(I8, lanes.width))
            target = integers + number * GROUP_SIZE + place * lanes.width
            b.store(narrow.raw, target.bits_as(narrow.raw.type.as_pointer()).raw, align=1)
        for part, total in enumerate(totals):
            sums[number * n_parts + part] = lanes.reduce(add, total)


@dataclass(frozen=True)
class _Row:
    """Where a row of inputs has its integers, its scales, and minus the sums of its parts."""

    integers: Value
    scales: Value
    sums: Value


@dataclass(frozen=True)
class _Panel:
    """Where a panel has its scales, its minima, its factors and its integers."""

    scales: Value
    mins: Value
    factors: Value
    integers: Value


@dataclass(frozen=True)
class _Group:
    """The number of a group of inputs, and that of its block."""

    number: Value
    block: Value


@dataclass(frozen=True)
class _Products:
    """How products with panels of a format are added up, for vectors of some width."""

    lanes: Lanes
    form: GroupFormat
    byte_dots: ByteDots

    @property
    def vector_bytes(self) -> int:
        return 4 * self.lanes.width

    @property
    def group_bytes(self) -> int:
        """Bytes of a group's integers, of all rows of a panel."""
        return GROUP_SIZE * self.form.n_bits // 8 * self.lanes.width

    def group_at(self, number: Value, n_before: Value) -> _Group:
        """A group of a matrix whose first block began so many groups before."""
        is_shared = self.form.n_shared > 1
        return _Group(number, (number + n_before) // self.form.n_shared if is_shared else number)

    def add_group(
        self,
        rows: Sequence[_Row],
        panels: Sequence[_Panel],
        group: _Group,
        totals: Sequence[Sequence[Variable]],
    ) -> None:
        """Add one group's products of every row with every panel to its total."""
        for part in range(self.form.n_parts):
            self._add_part(part, rows, panels, group, totals)

    def _add_part(
        self,
        part: int,
        rows: Sequence[_Row],
        panels: Sequence[_Panel],
        group: _Group,
        totals: Sequence[Sequence[Variable]],
    ) -> None:
        lanes, n_parts = self.lanes, self.form.n_parts
        inputs_sums = [row.sums[group.number * n_parts + part] for row in rows]
        sums = [[lanes.splat(of_row * self.form.zero) for _ in panels] for of_row in inputs_sums]
        for number, panel in enumerate(panels):
            for column, unsigned in self._unsigned(panel, group, part):
                for row, of_row in zip(rows, sums, strict=True):
                    place = row.integers + group.number * GROUP_SIZE + 4 * column
                    signed = lanes.splat(place.bits_as(_WORD)[0])
                    of_row[number] = add_byte_dots(self.byte_dots, of_row[number], unsigned, signed)
        for number, panel in enumerate(panels):
            scale = self._halves(panel.scales, group)
            if self.form.scale_factors:
                scale = scale * self._factors(panel, group, part)
            least = self._least(panel, group, part) if self.form.has_min else None
            for row, of_row, of_totals, inputs_sum in zip(
                rows, sums, totals, inputs_sums, strict=True
            ):
                x_scale, total = lanes.splat(row.scales[group.number]), of_totals[number]
                if least is not None:  # the sums are there with a minus
                    of_least = lanes.splat(inputs_sum).to(lanes.vector) * x_scale
                    total.value = total.value - of_least * least
                total.value = fma(of_row[number].to(lanes.vector), scale * x_scale, total.value)

    def prefetch(self, panel: _Panel, group: _Group) -> None:
        """Ask for a group's integers and scales."""
        for line in range(0, self.group_bytes, _LINE_BYTES):
            (panel.integers + group.number * self.group_bytes + line).prefetch()
        (panel.scales + group.block * 2 * self.lanes.width).prefetch()
        if self.form.n_factors:
            self._factors_at(panel, group, 0).prefetch()

    def _unsigned(self, panel: _Panel, group: _Group, part: int) -> Iterator[tuple[int, Value]]:
        """A part's integers from 0 on, in bytes, and which four inputs of the group they are for.

        Columns that share a word of the first plane come one after the other.
        """
        planes = planes_of(self.form.n_bits)
        n_columns = 8 // self.form.n_parts
        for column in sorted(
            range(part * n_columns, (part + 1) * n_columns), key=planes[0].word_of
        ):
            bits = (self._bits(panel, group, plane, column) for plane in planes)
            yield column, reduce(or_, bits)

    def _bits(self, panel: _Panel, group: _Group, plane: Plane, column: int) -> Value:
        """What a plane has of a column, each byte's bits where they belong in it."""
        words = ir.VectorType(I32, self.lanes.width)
        at = group.number * self.group_bytes + plane.word_of(column) * self.vector_bytes
        place = (panel.integers + at).bits_as(words.as_pointer())
        stored = Value(place.b, place.b.load(place.raw, align=4))
        if plane.width == 8:
            return stored
        shift = plane.shift_of(column) - plane.first
        mask = _signed((plane.mask << plane.first) * _ALL_FOUR)
        return (stored >> shift if shift > 0 else stored << -shift) & mask

    def _least(self, panel: _Panel, group: _Group, part: int) -> Value:
        """The minimum of a part."""
        least = self._halves(panel.mins, group)
        if not self.form.min_factors:
            return least
        first = self.form.n_factors - self.form.n_parts
        return least * self._factors(panel, group, first + part)

    def _halves(self, numbers: Value, group: _Group) -> Value:
        """Numbers of float16 of a block, one for each row of a panel."""
        halves = ir.VectorType(F16, self.lanes.width)
        place = (numbers + group.block * 2 * self.lanes.width).bits_as(halves.as_pointer())
        return Value(place.b, place.b.load(place.raw, align=2)).to(self.lanes.vector)

    def _factors(self, panel: _Panel, group: _Group, number: int) -> Value:
        """One of a group's factors for each row of a panel."""
        factors = ir.VectorType(I8, self.lanes.width)
        place = self._factors_at(panel, group, number).bits_as(factors.as_pointer())
        return Value(place.b, place.b.load(place.raw, align=1)).to(self.lanes.vector)

    def _factors_at(self, panel: _Panel, group: _Group, number: int) -> Value:
        return panel.factors + (group.number * self.form.n_factors + number) * self.lanes.width


def _signed(word: int) -> int:
    """The same 32 bits, as LLVM's constants have them."""
    return word - (1 << 32) if word >> 31 else word


def _group_linear(
    products: _Products, b: ir.IRBuilder, thread: Thread, arguments: list[Value]
) -> None:
    """The kernel.

    for block in rows of x, _BLOCK at a time:
        for panels in this thread's, _PANELS at a time:
            for rows of the block, _ROWS at a time, then what is left:
                y[rows, panels] = sum over groups of x[rows, group] . panels[group]
    """
    integers, scales, sums, panels, y, n, m, y_stride, *sizes, panel_bytes = arguments
    n_groups, n_before, *places = sizes
    lanes = products.lanes

    def panel_at(number: Value) -> _Panel:
        start = panels + number * panel_bytes
        return _Panel(start, *(start + place for place in places))

    def row_at(number: Value) -> _Row:
        first, n_parts = number * n_groups, products.form.n_parts
        return _Row(integers + first * GROUP_SIZE, scales + first, sums + first * n_parts)

    def multiply(block: Value, first: Value, n_panels: int) -> None:
        """The rows of a block by consecutive panels."""
        own = [panel_at(first + number) for number in range(n_panels)]
        ahead = [panel_at(first + (n_panels + number)) for number in range(n_panels)]

        def multiply_rows(first_row: Value, n_rows: int) -> None:
            rows = [row_at(first_row + row) for row in range(n_rows)]
            totals = [[Variable(lanes.constant(b, 0)) for _ in own] for _ in rows]
            is_first = first_row < block + 1
            with loop(b, 0, n_groups) as index:
                group = products.group_at(index, n_before)
                with when(is_first):
                    for each in ahead:
                        products.prefetch(each, group)
                products.add_group(rows, own, group, totals)
            for row, of_row in enumerate(totals):
                for panel, total in enumerate(of_row):
                    column = (first + panel) * lanes.width
                    place = y + (first_row + row) * y_stride + column
                    lanes.store(place, total.value, lanes.first(m - column))

        in_groups(block, smaller(block + _BLOCK, n), _ROWS, multiply_rows)

    n_panels = (m + (lanes.width - 1)) // lanes.width
    start, stop = thread.part_of(n_panels)
    pairs = start + (stop - start) // _PANELS * _PANELS
    with loop(b, 0, n, _BLOCK) as block:
        with loop(b, start, pairs, _PANELS) as panel:
            multiply(block, panel, _PANELS)
        with loop(b, pairs, stop) as panel:
            multiply(block, panel, 1)
