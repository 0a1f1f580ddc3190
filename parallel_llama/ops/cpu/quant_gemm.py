"""Products of rows with a quantised matrix in panels; `ops.quant` describes their layout.

For integer formats, such as int4, the inputs are rounded to int8. The products of a group are
summed exactly, as integers; `add_byte_dots` has the instructions of each kind of CPU. The sums of
the groups are added in order, in float32. For fp8 the inputs are not rounded, and products are
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

# Rows per block; their inputs fit a cache, and are multiplied by all panels before the next block.
_BLOCK = 16 * _ROWS

_WORD = I32.as_pointer()

_ROUNDING = 1.5 * 2.0**23  # the low bits of its sum with a float32 are a rounded integer


@dataclass(slots=True, kw_only=True)
class _Rounded(Generic[T]):
    """Inputs as int8, their scales, and the negated sums of the int8: see `_round`."""

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
    """out = x @ A.T with A quantised and in panels; x is rounded to int8 if A has integers.

    Shapes: x [n, in] and out [n, n_outputs] float32, rows contiguous; panels [n_panels, n_bytes]
    uint8.
    """

    def __init__(self, form: QuantFormat, machine: CPUFeatures) -> None:
        lanes = machine.lanes(torch.float32)
        self.n_rows, reader = lanes.width, PanelReader(lanes, form)
        self._fp8_kernel: CompiledKernel[_FloatArguments[float]] | None = None
        if form.is_float:
            self._fp8_kernel = CompiledKernel(
                _FloatArguments[float], partial(_quant_gemm, _FloatProducts(reader))
            )
            return
        self._round = _make_round(machine, form.n_parts)
        self._integer_kernel = CompiledKernel(
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
        if self._fp8_kernel is not None:
            floats = _FloatArguments(x=x.data_ptr(), x_stride=x.stride(0), outputs=outputs)
            run(self._fp8_kernel, n_threads, floats)
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
        run(self._integer_kernel, n_threads, product)


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
        group = args.x + number // n_groups * args.x_stride + number % n_groups * QUANT_GROUP_SIZE
        vectors = [lanes.load(group + i) for i in range(0, QUANT_GROUP_SIZE, lanes.width)]
        largest_lanes = lanes.constant(b, 0)
        for vector in vectors:
            largest_lanes = larger(abs(vector), largest_lanes)
        nan_or_0 = reduce(add, (vector * 0 for vector in vectors))
        largest = lanes.reduce(larger, largest_lanes)
        to.scales[number] = largest / 127 + lanes.reduce(add, nan_or_0)
        inverse = lanes.splat(where(largest < LEAST_INPUT, largest.like(0), 127 / largest))
        zeros = Value(b, ir.VectorType(I32, lanes.width)([0] * lanes.width))
        totals = [zeros] * n_parts
        for index, vector in enumerate(vectors):
            rounded = (vector * inverse + _ROUNDING).bits_as(zeros.raw.type)
            rounded = (rounded << 24).signed_shift(24)
            totals[index * n_parts // len(vectors)] -= rounded
            narrow = rounded.resized(ir.VectorType(I8, lanes.width))
            target = to.integers + number * QUANT_GROUP_SIZE + index * lanes.width
            b.store(narrow.raw, target.bits_as(narrow.raw.type.as_pointer()).raw, align=1)
        for part, total in enumerate(totals):
            to.sums[number * n_parts + part] = lanes.reduce(add, total)


_RowT = TypeVar("_RowT")  # the addresses of a row of inputs


@dataclass(frozen=True)
class _Products(ABC, Generic[_RowT]):
    """How the products of inputs and panels are summed, for one kind of format."""

    reader: PanelReader

    @abstractmethod
    def row_at(self, args: Any, number: Value) -> _RowT:
        """The addresses of a row of the inputs."""

    @abstractmethod
    def add_group(
        self,
        rows: Sequence[_RowT],
        panels: Sequence[Panel],
        group: Group,
        totals: Sequence[Sequence[Variable]],
    ) -> None:
        """Adds a group's products of each row and each panel to totals[row][panel]."""


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
        x, first, n_parts = args.inputs, number * args.n_groups, self.reader.form.n_parts
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
        for part in range(self.reader.form.n_parts):
            self._add_part(part, rows, panels, group, totals)

    def _add_part(
        self,
        part: int,
        rows: Sequence[_Row],
        panels: Sequence[Panel],
        group: Group,
        totals: Sequence[Sequence[Variable]],
    ) -> None:
        lanes, form, n_parts = self.reader.lanes, self.reader.form, self.reader.form.n_parts
        negated_sums = [row.sums[group.number * n_parts + part] for row in rows]
        # dots[row][panel], which begin with -zero * the sum of the row's inputs.
        dots = [[lanes.splat(negated * form.zero) for _ in panels] for negated in negated_sums]
        for number, panel in enumerate(panels):
            for column, unsigned in self.reader.unsigned(panel, group, part):
                for row, row_dots in zip(rows, dots, strict=True):
                    address = row.integers + group.number * QUANT_GROUP_SIZE + 4 * column
                    signed = lanes.splat(address.bits_as(_WORD)[0])
                    row_dots[number] = add_byte_dots(
                        self.byte_dots, row_dots[number], unsigned, signed
                    )
        for number, panel in enumerate(panels):
            scale = self.reader.scale(panel, group, part)
            least = self.reader.least(panel, group, part) if form.has_min else None
            for row, row_dots, row_totals, negated in zip(
                rows, dots, totals, negated_sums, strict=True
            ):
                x_scale, total = lanes.splat(row.scales[group.number]), row_totals[number]
                if least is not None:
                    negated_x_sum = lanes.splat(negated).to(lanes.vector) * x_scale
                    total.value = total.value - negated_x_sum * least
                total.value = fma(row_dots[number].to(lanes.vector), scale * x_scale, total.value)


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
        lanes = self.reader.lanes
        sums = [[lanes.constant(group.number.b, 0) for _ in panels] for _ in rows]
        for number, panel in enumerate(panels):
            for index, weights in self.reader.floats(panel, group):
                for row, row_sums in zip(rows, sums, strict=True):
                    x = lanes.splat(row[group.number * QUANT_GROUP_SIZE + index])
                    row_sums[number] = fma(weights, x, row_sums[number])
        for number, panel in enumerate(panels):
            scale = self.reader.scale(panel, group, 0)
            for row_sums, row_totals in zip(sums, totals, strict=True):
                total = row_totals[number]
                total.value = fma(row_sums[number], scale, total.value)


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
    reader, lanes = products.reader, products.reader.lanes

    def multiply(block: Value, first: Value, n_panels: int) -> None:
        """Multiplies the rows of a block by consecutive panels."""
        panels, next_panels = (
            [panel_at(to.panels, first + (start + number), shape) for number in range(n_panels)]
            for start in (0, n_panels)
        )

        def multiply_rows(first_row: Value, n_rows: int) -> None:
            rows = [products.row_at(args, first_row + row) for row in range(n_rows)]
            totals = [[Variable(lanes.constant(b, 0)) for _ in panels] for _ in rows]
            is_first = first_row < block + 1
            with loop(b, 0, shape.n_groups) as index:
                group = reader.group_at(index, shape.n_before)
                with when(is_first):
                    for panel in next_panels:
                        reader.prefetch(panel, group)
                products.add_group(rows, panels, group, totals)
            for row, row_totals in enumerate(totals):
                for number, total in enumerate(row_totals):
                    column = (first + number) * lanes.width
                    target = to.y + (first_row + row) * to.y_stride + column
                    lanes.store(target, total.value, lanes.first(to.m - column))

        in_groups(block, smaller(block + _BLOCK, to.n), _ROWS, multiply_rows)

    n_panels = (to.m + (lanes.width - 1)) // lanes.width
    start, stop = thread.part_of(n_panels)
    pairs = start + (stop - start) // _PANELS * _PANELS
    with loop(b, 0, to.n, _BLOCK) as block:
        with loop(b, start, pairs, _PANELS) as panel:
            multiply(block, panel, _PANELS)
        with loop(b, pairs, stop) as panel:
            multiply(block, panel, 1)
