"""Products of rows with a quantised matrix in panels, whose layout `ops.quant` describes.

For integer formats the rows are rounded to bytes. Within a group, integers are summed exactly;
groups are summed in order, in float32. For 8-bit floats the rows are not rounded, and products are
summed in the order of the inputs. So a row's result has the same bits for any number of rows and
threads, and one kernel serves any number of rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce
from operator import add
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.dtypes import QUANT_GROUP_SIZE, QuantFormat
from parallel_llama.ops.cpu.arguments import Bytes, Floats, Integer, T, Words
from parallel_llama.ops.cpu.ir import (
    I8,
    I32,
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
from parallel_llama.ops.cpu.jit import (
    CompiledKernel,
    CPUFeatures,
    Launcher,
    at_once,
    this_machine,
    threads_for,
)
from parallel_llama.ops.cpu.panels import (
    Group,
    Panel,
    PanelArguments,
    PanelReader,
    panel_arguments,
    panel_at,
)
from parallel_llama.ops.cpu.vector_math import ByteDots, add_byte_dots
from parallel_llama.ops.quant import LEAST_INPUT, PanelShape

# Panels and rows that are multiplied together: their integer and float32 sums fill the registers.
_PANELS = 2
_ROWS = 6

# Rows per block, whose inputs fit a cache; a block is multiplied by all panels.
_BLOCK = 16 * _ROWS

_WORD = I32.as_pointer()

_ROUNDING = 1.5 * 2.0**23  # added to a float32, it rounds to an integer in the low bits


@dataclass(slots=True, kw_only=True)
class _Rounded(Generic[T]):
    """Inputs as integers, their scales, and the negated sums of the integers: see `_round`."""

    integers: Bytes[T]
    scales: Floats[T]
    sums: Words[T]


@dataclass(slots=True, kw_only=True)
class _RoundArguments(Generic[T]):
    x: Floats[T]
    x_stride: Integer[T]
    rounded: _Rounded[T]
    n: Integer[T]
    n_groups: Integer[T]


@dataclass(slots=True, kw_only=True)
class _Outputs(Generic[T]):
    """The matrix and the result."""

    panels: Bytes[T]
    y: Floats[T]
    n: Integer[T]
    m: Integer[T]
    y_stride: Integer[T]
    shape: PanelArguments[T]


@dataclass(slots=True, kw_only=True)
class _FloatArguments(Generic[T]):
    x: Floats[T]
    x_stride: Integer[T]
    outputs: _Outputs[T]


@dataclass(slots=True, kw_only=True)
class _IntegerArguments(Generic[T]):
    inputs: _Rounded[T]
    n_groups: Integer[T]
    outputs: _Outputs[T]


_Arguments: TypeAlias = _FloatArguments[T] | _IntegerArguments[T]


class QuantGemmKernel:
    """out = x @ A.T with A quantised and in panels; x is rounded in groups if A has integers.

    Shapes: x [n, in] and out [n, n_outputs] float32, rows contiguous; panels [n_panels, n_bytes]
    uint8.
    """

    def __init__(self, form: QuantFormat, machine: CPUFeatures) -> None:
        lanes = machine.lanes(torch.float32)
        self.n_rows, reader = lanes.width, PanelReader(lanes, form)
        self._of_floats: CompiledKernel[_FloatArguments[float]] | None = None
        if form.is_float:
            self._of_floats = CompiledKernel(
                _FloatArguments[float], partial(_quant_gemm, _FloatProducts(reader))
            )
            return
        self._round = _make_round(machine, form.n_parts)
        self._of_integers = CompiledKernel(
            _IntegerArguments[float],
            partial(_quant_gemm, _IntegerProducts(reader, machine.byte_dots)),
        )

    def __call__(
        self,
        x: Tensor,
        panels: Tensor,
        shape: PanelShape,
        out: Tensor,
        run: Launcher = at_once,
    ) -> None:
        n, n_groups, n_threads = len(x), shape.n_groups, torch.get_num_threads()
        assert x.shape[1] == shape.n_inputs and x.stride(1) == 1 and x.dtype == torch.float32
        assert panels.is_contiguous() and panels.shape[1] == shape.n_bytes
        assert len(out) == n and out.stride(1) == 1 and out.dtype == torch.float32
        outputs = _Outputs(
            panels=panels.data_ptr(), y=out.data_ptr(), n=n, m=out.shape[1], y_stride=out.stride(0),
            shape=panel_arguments(shape),
        )  # fmt: skip
        if self._of_floats is not None:
            floats = _FloatArguments(x=x.data_ptr(), x_stride=x.stride(0), outputs=outputs)
            run(self._of_floats, n_threads, floats)
            return
        integers = torch.empty(n, shape.n_inputs, dtype=torch.int8)
        scales = x.new_empty(n, n_groups)
        sums = torch.empty(n, n_groups * shape.form.n_parts, dtype=torch.int32)
        rounded = _Rounded(
            integers=integers.data_ptr(), scales=scales.data_ptr(), sums=sums.data_ptr()
        )
        rounding = _RoundArguments(
            x=x.data_ptr(), x_stride=x.stride(0), rounded=rounded, n=n, n_groups=n_groups
        )
        run(self._round, threads_for(x.numel()), rounding)
        product = _IntegerArguments(inputs=rounded, n_groups=n_groups, outputs=outputs)
        run(self._of_integers, n_threads, product)


@cache
def make_quant_gemm(form: QuantFormat) -> QuantGemmKernel:
    return QuantGemmKernel(form, this_machine())


@cache
def _make_round(machine: CPUFeatures, n_parts: int) -> CompiledKernel[_RoundArguments[float]]:
    return CompiledKernel(
        _RoundArguments[float], partial(_round, machine.lanes(torch.float32), n_parts)
    )


def _round(
    lanes: Lanes, n_parts: int, b: ir.IRBuilder, thread: Thread, args: _RoundArguments[Value]
) -> None:
    """Rounds inputs to bytes.

    for (row, group) in this thread's groups:
        scales[row, group] = max(abs(x[row, group])) / 127
        integers[row, group] = round(x[row, group] / scales[row, group])
        sums[row, group, part] = -sum(integers[row, group, part])
    """
    to, n_groups = args.rounded, args.n_groups
    with loop(b, *thread.part_of(args.n * n_groups)) as number:
        own = args.x + number // n_groups * args.x_stride + number % n_groups * QUANT_GROUP_SIZE
        vectors = [lanes.load(own + i) for i in range(0, QUANT_GROUP_SIZE, lanes.width)]
        largest = lanes.constant(b, 0)
        for vector in vectors:
            largest = larger(abs(vector), largest)
        spoilt = reduce(add, (vector * 0 for vector in vectors))
        top = lanes.reduce(larger, largest)
        to.scales[number] = top / 127 + lanes.reduce(add, spoilt)
        inverse = lanes.splat(where(top < LEAST_INPUT, top.like(0), 127 / top))
        zeros = Value(b, ir.VectorType(I32, lanes.width)([0] * lanes.width))
        totals = [zeros] * n_parts
        for place, vector in enumerate(vectors):
            rounded = (vector * inverse + _ROUNDING).bits_as(zeros.raw.type)
            rounded = (rounded << 24).signed_shift(24)
            totals[place * n_parts // len(vectors)] -= rounded
            narrow = rounded.resized(ir.VectorType(I8, lanes.width))
            target = to.integers + number * QUANT_GROUP_SIZE + place * lanes.width
            b.store(narrow.raw, target.bits_as(narrow.raw.type.as_pointer()).raw, align=1)
        for part, total in enumerate(totals):
            to.sums[number * n_parts + part] = lanes.reduce(add, total)


_RowT = TypeVar("_RowT")  # the addresses of a row of inputs


@dataclass(frozen=True)
class _Products(ABC, Generic[_RowT]):
    """How products of inputs and panels are summed."""

    panels: PanelReader

    @abstractmethod
    def row_at(self, args: Any, number: Value) -> _RowT:
        """A row of the inputs."""

    @abstractmethod
    def add_group(
        self,
        rows: Sequence[_RowT],
        panels: Sequence[Panel],
        group: Group,
        totals: Sequence[Sequence[Variable]],
    ) -> None:
        """Adds one group's products of every row with every panel to its total."""


@dataclass(frozen=True)
class _Row:
    """The addresses of a row of rounded inputs."""

    integers: Value
    scales: Value
    sums: Value


@dataclass(frozen=True)
class _IntegerProducts(_Products[_Row]):
    """Products of rounded inputs, summed exactly within a group."""

    byte_dots: ByteDots

    def row_at(self, args: _IntegerArguments[Value], number: Value) -> _Row:
        x, first, n_parts = args.inputs, number * args.n_groups, self.panels.form.n_parts
        return _Row(
            x.integers + first * QUANT_GROUP_SIZE, x.scales + first, x.sums + first * n_parts
        )

    def add_group(
        self,
        rows: Sequence[_Row],
        panels: Sequence[Panel],
        group: Group,
        totals: Sequence[Sequence[Variable]],
    ) -> None:
        for part in range(self.panels.form.n_parts):
            self._add_part(part, rows, panels, group, totals)

    def _add_part(
        self,
        part: int,
        rows: Sequence[_Row],
        panels: Sequence[Panel],
        group: Group,
        totals: Sequence[Sequence[Variable]],
    ) -> None:
        lanes, form, n_parts = self.panels.lanes, self.panels.form, self.panels.form.n_parts
        inputs_sums = [row.sums[group.number * n_parts + part] for row in rows]
        sums = [[lanes.splat(of_row * form.zero) for _ in panels] for of_row in inputs_sums]
        for number, panel in enumerate(panels):
            for column, unsigned in self.panels.unsigned(panel, group, part):
                for row, of_row in zip(rows, sums, strict=True):
                    place = row.integers + group.number * QUANT_GROUP_SIZE + 4 * column
                    signed = lanes.splat(place.bits_as(_WORD)[0])
                    of_row[number] = add_byte_dots(self.byte_dots, of_row[number], unsigned, signed)
        for number, panel in enumerate(panels):
            scale = self.panels.scale(panel, group, part)
            least = self.panels.least(panel, group, part) if form.has_min else None
            for row, of_row, of_totals, inputs_sum in zip(
                rows, sums, totals, inputs_sums, strict=True
            ):
                x_scale, total = lanes.splat(row.scales[group.number]), of_totals[number]
                if least is not None:  # the sums of integers are stored negated
                    of_least = lanes.splat(inputs_sum).to(lanes.vector) * x_scale
                    total.value = total.value - of_least * least
                total.value = fma(of_row[number].to(lanes.vector), scale * x_scale, total.value)


@dataclass(frozen=True)
class _FloatProducts(_Products[Value]):
    """Products of float32 inputs with 8-bit floats, summed in order within a group."""

    def row_at(self, args: _FloatArguments[Value], number: Value) -> Value:
        return args.x + number * args.x_stride

    def add_group(
        self,
        rows: Sequence[Value],
        panels: Sequence[Panel],
        group: Group,
        totals: Sequence[Sequence[Variable]],
    ) -> None:
        lanes = self.panels.lanes
        sums = [[lanes.constant(group.number.b, 0) for _ in panels] for _ in rows]
        for number, panel in enumerate(panels):
            for place, weights in self.panels.floats(panel, group):
                for row, of_row in zip(rows, sums, strict=True):
                    x = lanes.splat(row[group.number * QUANT_GROUP_SIZE + place])
                    of_row[number] = fma(weights, x, of_row[number])
        for number, panel in enumerate(panels):
            scale = self.panels.scale(panel, group, 0)
            for of_row, of_totals in zip(sums, totals, strict=True):
                total = of_totals[number]
                total.value = fma(of_row[number], scale, total.value)


def _quant_gemm(
    products: _Products[Any], b: ir.IRBuilder, thread: Thread, args: _Arguments[Value]
) -> None:
    """
    for block in rows of x, _BLOCK at a time:
        for panels in this thread's, _PANELS at a time:
            for rows of the block, _ROWS at a time, then the remaining rows:
                y[rows, panels] = sum over groups of x[rows, group] . panels[group]
    """
    to, shape = args.outputs, args.outputs.shape
    reader, lanes = products.panels, products.panels.lanes

    def multiply(block: Value, first: Value, n_panels: int) -> None:
        """Multiplies the rows of a block by consecutive panels."""
        own, ahead = (
            [panel_at(to.panels, first + (start + number), shape) for number in range(n_panels)]
            for start in (0, n_panels)
        )

        def multiply_rows(first_row: Value, n_rows: int) -> None:
            rows = [products.row_at(args, first_row + row) for row in range(n_rows)]
            totals = [[Variable(lanes.constant(b, 0)) for _ in own] for _ in rows]
            is_first = first_row < block + 1
            with loop(b, 0, shape.n_groups) as index:
                group = reader.group_at(index, shape.n_before)
                with when(is_first):
                    for each in ahead:
                        reader.prefetch(each, group)
                products.add_group(rows, own, group, totals)
            for row, of_row in enumerate(totals):
                for panel, total in enumerate(of_row):
                    column = (first + panel) * lanes.width
                    place = to.y + (first_row + row) * to.y_stride + column
                    lanes.store(place, total.value, lanes.first(to.m - column))

        in_groups(block, smaller(block + _BLOCK, to.n), _ROWS, multiply_rows)

    n_panels = (to.m + (lanes.width - 1)) // lanes.width
    start, stop = thread.part_of(n_panels)
    pairs = start + (stop - start) // _PANELS * _PANELS
    with loop(b, 0, to.n, _BLOCK) as block:
        with loop(b, start, pairs, _PANELS) as panel:
            multiply(block, panel, _PANELS)
        with loop(b, pairs, stop) as panel:
            multiply(block, panel, 1)
