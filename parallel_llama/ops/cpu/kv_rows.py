"""Rows of a KV cache in kernels: how they are read and written, and a kernel that unpacks them.

`ops.kv_rows` describes the layout. If the cache's dtype is not the dtype to compute in, kernels
convert a whole row at a time.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Integer, Numbers, Rows, T
from parallel_llama.ops.cpu.ir import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    Lanes,
    Thread,
    Value,
    Variable,
    fma,
    larger,
    loop,
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
from parallel_llama.ops.cpu.vector_math import from_e4m3, to_bfloat16, to_e4m3
from parallel_llama.ops.kv_rows import LARGEST, LEAST_SCALE, row_width


@dataclass(frozen=True)
class KVRows:
    """The format of a cache's rows of D numbers, and the lanes that compute with these numbers."""

    stored: torch.dtype
    lanes: Lanes
    head_dim: int

    @property
    def is_plain(self) -> bool:
        """Whether numbers are stored in the dtype to compute in."""
        return self.stored == self.lanes.computed

    @property
    def width(self) -> int:
        """The numbers of the stored dtype that a row takes, with its scale."""
        return row_width(self.head_dim, self.stored)

    @property
    def n_bytes(self) -> int:
        return self.width * self.stored.itemsize

    @property
    def pointer(self) -> ir.PointerType:
        """The type of the address of one stored number.

        Raises: KeyError for a dtype that no cache has.
        """
        if self.is_plain:
            return self.lanes.pointer
        types = {torch.float16: F16, torch.bfloat16: I16, torch.int8: I8, torch.float8_e4m3fn: I8}
        return types[self.stored].as_pointer()

    def read(self, row: Value, target: Value) -> None:
        """Converts a row to D numbers."""
        lanes = self.lanes
        scale = self._scale(row)
        with loop(row.b, 0, self.head_dim, lanes.width) as i:
            numbers = self._wide(_load(row + i, lanes.width, self.stored.itemsize))
            lanes.store(target + i, numbers if scale is None else numbers * scale)

    def write(self, source: Value, row: Value) -> None:
        """Converts D numbers to a row."""
        lanes, b = self.lanes, row.b
        if self.is_plain:
            with loop(b, 0, self.head_dim, lanes.width) as i:
                lanes.store(row + i, lanes.load(source + i))
            return
        if self.stored in LARGEST:
            scale = self._scale_for(source)
            b.store(scale.raw, self._scale_address(row).raw, align=1)
            divisor = lanes.splat(scale.to(lanes.vector.element))
        with loop(b, 0, self.head_dim, lanes.width) as i:
            numbers = lanes.load(source + i)
            if self.stored in LARGEST:
                numbers = numbers / divisor
            narrow = self._narrow(numbers)
            address = (row + i).bits_as(narrow.raw.type.as_pointer())
            b.store(narrow.raw, address.raw, align=self.stored.itemsize)

    def _scale_address(self, row: Value) -> Value:
        return (row + self.head_dim).bits_as(F32.as_pointer())

    def _scale(self, row: Value) -> Value | None:
        """The scale of a row in all lanes, or None if its dtype has no scale."""
        if self.stored not in LARGEST:
            return None
        scale = Value(row.b, row.b.load(self._scale_address(row).raw, align=1))
        return self.lanes.splat(scale.to(self.lanes.vector.element))

    def _scale_for(self, source: Value) -> Value:
        """The scale for a row of these D numbers; NaN if a number is not finite."""
        lanes, b = self.lanes, source.b
        largest, nan_or_0 = Variable(lanes.constant(b, 0)), Variable(lanes.constant(b, 0))
        with loop(b, 0, self.head_dim, lanes.width) as i:
            numbers = lanes.load(source + i)
            largest.value = larger(largest.value, abs(numbers))
            nan_or_0.value = fma(numbers, 0, nan_or_0.value)
        scale = lanes.reduce(larger, largest.value) / LARGEST[self.stored]
        scale += lanes.reduce(lambda x, y: x + y, nan_or_0.value)
        scale = scale.to(F32)
        return where(scale < LEAST_SCALE, scale.like(LEAST_SCALE), scale)

    def _wide(self, stored: Value) -> Value:
        """Converts stored numbers to the type of the lanes, without the scale."""
        vector, n = self.lanes.vector, self.lanes.width
        if self.stored == torch.int8:
            return stored.resized(ir.VectorType(I32, n)).to(vector)
        if self.stored == torch.float16:
            return stored.to(vector)
        if self.stored == torch.bfloat16:
            bits = stored.resized(ir.VectorType(I32, n)) << 16
            return bits.bits_as(ir.VectorType(F32, n)).to(vector)
        return from_e4m3(stored, vector)

    def _narrow(self, numbers: Value) -> Value:
        """Rounds numbers, already divided by the scale, to the stored dtype, ties to even."""
        n = self.lanes.width
        if self.stored == torch.int8:
            integers = {torch.float32: I32, torch.float64: I64}[self.lanes.computed]
            # The summand's last mantissa bit is worth 1, so the sum rounds to an integer.
            n_mantissa = {torch.float32: 23, torch.float64: 52}[self.lanes.computed]
            rounded = numbers + 1.5 * 2.0**n_mantissa
            return rounded.bits_as(ir.VectorType(integers, n)).resized(ir.VectorType(I8, n))
        single = numbers.to(ir.VectorType(F32, n))
        if self.stored == torch.bfloat16:
            return to_bfloat16(single).resized(ir.VectorType(I16, n))
        if self.stored == torch.float16:
            return single.to(ir.VectorType(F16, n))
        return to_e4m3(single).resized(ir.VectorType(I8, n))


def _load(address: Value, n: int, align: int) -> Value:
    """Loads n stored numbers."""
    element = address.raw.type.pointee
    vector_address = address.bits_as(ir.VectorType(element, n).as_pointer())
    return Value(address.b, address.b.load(vector_address.raw, align=align))


@dataclass(slots=True, kw_only=True)
class _Arguments(Generic[T]):
    cache: Rows[T]
    head_stride: Integer[T]
    y: Numbers[T]
    n_slots: Integer[T]
    n: Integer[T]


class UnpackKernel:
    """`kv_rows.unpack` in one pass, bit for bit.

    Shapes: rows [1, K, S, W], contiguous for each head; the result [1, K, S, D].
    """

    def __init__(
        self, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, machine: CPUFeatures
    ) -> None:
        lanes = machine.lanes(dtype, head_dim)
        self.dtype, self._rows = dtype, KVRows(cache_dtype, lanes, head_dim)
        self._program = CompiledKernel(
            _Arguments[float],
            partial(_unpack, self._rows),
            numbers=lanes.pointer,
            rows=self._rows.pointer,
        )

    def __call__(self, rows: Tensor, run: Launcher = at_once) -> Tensor:
        _, n_heads, n_slots, width = rows.shape
        assert rows.stride()[2:] == (width, 1) and width == self._rows.width
        assert rows.dtype == self._rows.stored
        y = torch.empty(1, n_heads, n_slots, self._rows.head_dim, dtype=self.dtype)
        arguments = _Arguments(
            cache=rows.data_ptr(), head_stride=rows.stride(1), y=y.data_ptr(), n_slots=n_slots,
            n=n_heads * n_slots,
        )  # fmt: skip
        run(self._program, threads_for(y.numel()), arguments)
        return y


@cache
def make_unpack(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> UnpackKernel:
    return UnpackKernel(dtype, cache_dtype, head_dim, this_machine())


def _unpack(rows: KVRows, b: ir.IRBuilder, thread: Thread, args: _Arguments[Value]) -> None:
    """
    for (head, slot) in this thread's pairs:
        y[head, slot] = rows[head, slot], converted
    """
    n_slots = args.n_slots
    with loop(b, *thread.part_of(args.n)) as pair:
        head = args.cache + pair // n_slots * args.head_stride
        rows.read(head + pair % n_slots * rows.width, args.y + pair * rows.head_dim)
