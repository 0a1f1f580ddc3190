"""RMSNorm in one pass; torch needs several, and for few rows each takes longer than the work."""

import struct
from collections.abc import Sequence
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.kernels.builder import F64, I64, Lanes, at, declared, loop, part_of
from parallel_llama.kernels.program import (
    Machine,
    Program,
    computes,
    this_machine,
    worthwhile_threads,
)


class Norm:
    """x / rms(x) * weight, and nan for a row whose squares are too large to be summed.

    Shapes: x [n, dim], each row in one piece; weight [dim]; the result [n, dim].
    Source: arXiv 1910.07467.
    """

    def __init__(self, dtype: torch.dtype, machine: Machine) -> None:
        lanes = Lanes(dtype, machine.vector_bytes // dtype.itemsize)
        self._program = Program("norm", 7, _Body(lanes))

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        n, dim = x.shape
        assert x.stride(1) == 1 and x.dtype == weight.dtype
        assert weight.is_contiguous() and weight.shape == (dim,)
        y = x.new_empty(n, dim)
        (bits,) = struct.unpack("<q", struct.pack("<d", eps))
        addresses = (x.data_ptr(), x.stride(0), weight.data_ptr(), y.data_ptr())
        self._program(worthwhile_threads(n * dim), *addresses, n, dim, bits)
        return y


@cache
def make_norm(dtype: torch.dtype, device: torch.device) -> Norm | None:
    """The kernel for this type and place; None where torch has to do."""
    return Norm(dtype, this_machine()) if computes(dtype, device) else None


class _Body:
    """Builds the kernel: arguments x, its row stride, weight, y, n, dim, the bits of eps."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes

    def __call__(
        self, b: ir.IRBuilder, arguments: Sequence[ir.Value], thread: ir.Value, n_threads: ir.Value
    ) -> None:
        x, stride, weight, y, n, dim, bits = arguments
        x, weight, y = (b.inttoptr(address, self.lanes.pointer) for address in (x, weight, y))
        with loop(b, *part_of(b, n, thread, n_threads)) as row:
            line = at(b, x, b.mul(row.index, stride))
            scale = self._inverse_rms(b, line, dim, b.bitcast(bits, F64))
            self._scaled(b, line, scale, weight, at(b, y, b.mul(row.index, dim)), dim)

    def _inverse_rms(
        self, b: ir.IRBuilder, line: ir.Value, dim: ir.Value, eps: ir.Value
    ) -> ir.Value:
        lanes = self.lanes
        with loop(b, I64(0), dim, lanes.width, [lanes.every(0)]) as i:
            mask = lanes.first(b, b.sub(dim, i.index))
            value = lanes.load_some(b, at(b, line, i.index), mask)
            i.next = [lanes.fma(b, value, value, i.values[0])]
        total = lanes.sum(b, i.results[0])
        if lanes.bits < 64:
            total = b.fpext(total, F64)
        mean = b.fadd(b.fdiv(total, b.sitofp(dim, F64)), eps)
        root = b.call(declared(b.module, "llvm.sqrt.f64", F64, [F64]), [mean])
        # Nothing is added, but for an infinite mean: divided by that, the row would become zeros.
        inverse = b.fadd(b.fdiv(F64(1), root), b.fmul(F64(0), mean))
        if lanes.bits < 64:
            inverse = b.fptrunc(inverse, lanes.scalar)
        return lanes.broadcast(b, inverse)

    def _scaled(
        self,
        b: ir.IRBuilder,
        line: ir.Value,
        scale: ir.Value,
        weight: ir.Value,
        y: ir.Value,
        dim: ir.Value,
    ) -> None:
        lanes = self.lanes
        with loop(b, I64(0), dim, lanes.width) as i:
            mask = lanes.first(b, b.sub(dim, i.index))
            value, factor = (lanes.load_some(b, at(b, p, i.index), mask) for p in (line, weight))
            result = b.fmul(b.fmul(value, scale), factor)
            lanes.store_some(b, result, at(b, y, i.index), mask)
