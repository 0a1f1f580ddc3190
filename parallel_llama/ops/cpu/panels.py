"""Loads from the panels of quantised matrices; `ops.quant` describes their layout."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Generic

from llvmlite import ir

from parallel_llama.dtypes import QUANT_GROUP_SIZE, QuantFormat
from parallel_llama.ops.cpu.arguments import Integer, T
from parallel_llama.ops.cpu.ir import F16, I8, I32, LINE_BYTES, Lanes, Value, shuffle
from parallel_llama.ops.cpu.vector_math import from_e4m3
from parallel_llama.ops.quant import PanelShape, Plane, planes_of

_ALL_FOUR = 0x01010101  # its product with a byte has this byte in all four bytes of a word


@dataclass(frozen=True)
class Panel:
    """The addresses of a panel's scales, minima, factors and integers."""

    scales: Value
    mins: Value
    factors: Value
    integers: Value


@dataclass(slots=True, kw_only=True)
class PanelArguments(Generic[T]):
    """The layout of a matrix in panels."""

    n_groups: Integer[T]
    n_before: Integer[T]
    mins_at: Integer[T]
    factors_at: Integer[T]
    integers_at: Integer[T]
    panel_bytes: Integer[T]


def panel_arguments(shape: PanelShape) -> PanelArguments[int]:
    return PanelArguments(
        n_groups=shape.n_groups, n_before=shape.n_before, mins_at=shape.scale_bytes,
        factors_at=shape.factors_at, integers_at=shape.integers_at, panel_bytes=shape.n_bytes,
    )  # fmt: skip


def panel_at(panels: Value, number: Value, args: PanelArguments[Value]) -> Panel:
    start = panels + number * args.panel_bytes
    parts = (args.mins_at, args.factors_at, args.integers_at)
    return Panel(start, *(start + offset for offset in parts))


@dataclass(frozen=True)
class Group:
    """The index of a group of inputs, and the index of its block."""

    number: Value
    block: Value


@dataclass(frozen=True)
class PanelReader:
    """Loads from panels of a format, as vectors with one lane for each row of a panel."""

    lanes: Lanes
    form: QuantFormat

    def group_at(self, number: Value, n_before: Value) -> Group:
        """A group and its block, in a matrix that begins `n_before` groups into its first block."""
        is_shared = self.form.n_shared > 1
        return Group(number, (number + n_before) // self.form.n_shared if is_shared else number)

    def prefetch(self, panel: Panel, group: Group) -> None:
        """Prefetches a group's integers and scales."""
        for line in range(0, self._group_bytes, LINE_BYTES):
            (panel.integers + group.number * self._group_bytes + line).prefetch(cache=2)
        (panel.scales + group.block * 2 * self.lanes.width).prefetch(cache=2)
        if self.form.n_factors:
            self._factors_at(panel, group, 0).prefetch(cache=2)

    def unsigned(self, panel: Panel, group: Group, part: int) -> Iterator[tuple[int, Value]]:
        """Yields the number of each column of a part, and the column's unsigned integers.

        The integers are a vector with one word for each row of the panel; the bytes of a word are
        four inputs. Columns that share a word of the first plane follow each other.
        """
        planes = planes_of(self.form.n_bits)
        n_columns = 8 // self.form.n_parts
        for column in sorted(
            range(part * n_columns, (part + 1) * n_columns), key=planes[0].word_of
        ):
            bits = (self._bits(panel, group, plane, column) for plane in planes)
            yield column, reduce(or_, bits)

    def floats(self, panel: Panel, group: Group) -> Iterator[tuple[int, Value]]:
        """Yields the index of each input of a group, and its float numbers, for an fp8 format."""
        width = self.lanes.width
        for column, words in self.unsigned(panel, group, 0):
            bytes_ = words.bits_as(ir.VectorType(I8, 4 * width))
            for number in range(4):
                stored = shuffle(bytes_, range(number, 4 * width, 4))
                yield 4 * column + number, from_e4m3(stored, self.lanes.vector)

    def scale(self, panel: Panel, group: Group, part: int) -> Value:
        """The scale of a part of a group."""
        scale = self._halves(panel.scales, group)
        return scale * self._factors(panel, group, part) if self.form.scale_factors else scale

    def least(self, panel: Panel, group: Group, part: int) -> Value:
        """The minimum of a part, in a format that has minima."""
        least = self._halves(panel.mins, group)
        if not self.form.min_factors:
            return least
        first = self.form.n_factors - self.form.n_parts
        return least * self._factors(panel, group, first + part)

    @property
    def _vector_bytes(self) -> int:
        return 4 * self.lanes.width

    @property
    def _group_bytes(self) -> int:
        """The bytes of a group's integers, for all rows of a panel."""
        return QUANT_GROUP_SIZE * self.form.n_bits // 8 * self.lanes.width

    def _bits(self, panel: Panel, group: Group, plane: Plane, column: int) -> Value:
        """The bits of a column in a plane, each at its position in the byte."""
        words = ir.VectorType(I32, self.lanes.width)
        offset = group.number * self._group_bytes + plane.word_of(column) * self._vector_bytes
        address = (panel.integers + offset).bits_as(words.as_pointer())
        stored = Value(address.b, address.b.load(address.raw, align=4))
        if plane.width == 8:
            return stored
        shift = plane.shift_of(column) - plane.first
        mask = _signed((plane.mask << plane.first) * _ALL_FOUR)
        return (stored >> shift if shift > 0 else stored << -shift) & mask

    def _halves(self, numbers: Value, group: Group) -> Value:
        """The float16 numbers of a block, one for each row of a panel."""
        halves = ir.VectorType(F16, self.lanes.width)
        address = (numbers + group.block * 2 * self.lanes.width).bits_as(halves.as_pointer())
        return Value(address.b, address.b.load(address.raw, align=2)).to(self.lanes.vector)

    def _factors(self, panel: Panel, group: Group, number: int) -> Value:
        """One of a group's factors, for each row of a panel."""
        factors = ir.VectorType(I8, self.lanes.width)
        address = self._factors_at(panel, group, number).bits_as(factors.as_pointer())
        return Value(address.b, address.b.load(address.raw, align=1)).to(self.lanes.vector)

    def _factors_at(self, panel: Panel, group: Group, number: int) -> Value:
        return panel.factors + (group.number * self.form.n_factors + number) * self.lanes.width


def _signed(word: int) -> int:
    """The bits of a 32-bit word as a signed integer, the form of LLVM's constants."""
    return word - (1 << 32) if word >> 31 else word
