"""silu(gate) * up in one pass over memory."""

from collections.abc import Sequence
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.kernels.builder import I64, Lanes, at, declared, loop, part_of
from parallel_llama.kernels.exponential import exp
from parallel_llama.kernels.program import (
    Machine,
    Program,
    computes,
    this_machine,
    worthwhile_threads,
)


class SwiGLU:
    """silu(gate) * up, with silu(x) = x / (1 + exp(-x)).

    Shapes: both [n, 2 * channels], the gate in the first half of a row and up in the second, rows
    in one piece; the result [n, channels].
    Source: arXiv 2002.05202.
    """

    def __init__(self, dtype: torch.dtype, machine: Machine) -> None:
        lanes = Lanes(dtype, machine.vector_bytes // dtype.itemsize)
        self._program = Program("swiglu", 4, _Body(lanes))

    def __call__(self, both: Tensor) -> Tensor:
        n, channels = len(both), both.shape[1] // 2
        assert both.is_contiguous() and both.shape[1] % 2 == 0
        y = both.new_empty(n, channels)
        n_threads = worthwhile_threads(n * channels)
        self._program(n_threads, both.data_ptr(), y.data_ptr(), n, channels)
        return y


@cache
def make_swiglu(dtype: torch.dtype, device: torch.device) -> SwiGLU | None:
    """The kernel for this type and place; None where torch has to do."""
    return SwiGLU(dtype, this_machine()) if computes(dtype, device) else None


class _Body:
    """Builds the kernel: arguments both, y, n, channels."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes

    def __call__(
        self, b: ir.IRBuilder, arguments: Sequence[ir.Value], thread: ir.Value, n_threads: ir.Value
    ) -> None:
        lanes = self.lanes
        both, y, n, channels = arguments
        both, y = (b.inttoptr(address, lanes.pointer) for address in (both, y))
        with loop(b, *part_of(b, n, thread, n_threads)) as row:
            gates = at(b, both, b.mul(row.index, b.mul(channels, I64(2))))
            ups, line = at(b, gates, channels), at(b, y, b.mul(row.index, channels))
            with loop(b, I64(0), channels, lanes.width) as i:
                mask = lanes.first(b, b.sub(channels, i.index))
                gate, up = (lanes.load_some(b, at(b, p, i.index), mask) for p in (gates, ups))
                value = b.fmul(self._silu(b, gate), up)
                lanes.store_some(b, value, at(b, line, i.index), mask)

    def _silu(self, b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        """x / (1 + exp(-x)), written with exp(-|x|), which cannot overflow."""
        lanes = self.lanes
        fabs = declared(b.module, f"llvm.fabs.{lanes.mangled}", lanes.vector, [lanes.vector])
        e = exp(b, lanes, b.fneg(b.call(fabs, [x])))
        share = b.select(b.fcmp_ordered("<", x, lanes.every(0)), e, lanes.every(1))
        return b.fmul(x, b.fdiv(share, b.fadd(lanes.every(1), e)))
