"""silu(gate) * up in one pass over memory."""

from functools import cache, partial

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.builder import I64, Lanes, Thread, Value, loop, where
from parallel_llama.ops.cpu.exponential import exp
from parallel_llama.ops.cpu.program import (
    Machine,
    Program,
    Run,
    at_once,
    this_machine,
    threads_for,
)


class SiluAndMulKernel:
    """silu(gate) * up, with silu(x) = x / (1 + exp(-x)).

    Shapes: both [n, 2 * channels], the gate in the first half of a row and up in the second, rows
    in one piece; the result [n, channels].
    Source: arXiv 2002.05202.
    """

    def __init__(self, dtype: torch.dtype, machine: Machine) -> None:
        lanes = machine.lanes(dtype)
        types = [lanes.pointer, lanes.pointer, I64, I64]
        self._program = Program("silu_and_mul", types, partial(_silu_and_mul, lanes))

    def __call__(self, both: Tensor, run: Run = at_once) -> Tensor:
        n, channels = len(both), both.shape[1] // 2
        assert both.is_contiguous() and both.shape[1] % 2 == 0
        y = both.new_empty(n, channels)
        n_threads = threads_for(n * channels)
        run(self._program, n_threads, both.data_ptr(), y.data_ptr(), n, channels)
        return y


@cache
def make_silu_and_mul(dtype: torch.dtype) -> SiluAndMulKernel:
    """The kernel for this machine; `computes` says for which types."""
    return SiluAndMulKernel(dtype, this_machine())


def _silu_and_mul(lanes: Lanes, b: ir.IRBuilder, thread: Thread, arguments: list[Value]) -> None:
    """The kernel.

    for row in this thread's rows:
        y[row] = silu(both[row, :channels]) * both[row, channels:]
    """
    both, y, n, channels = arguments
    with loop(b, *thread.part_of(n)) as row:
        gates = both + row * channels * 2
        ups, own_y = gates + channels, y + row * channels
        with loop(b, 0, channels, lanes.width) as i:
            mask = lanes.first(channels - i)
            gate, up = lanes.load(gates + i, mask), lanes.load(ups + i, mask)
            lanes.store(own_y + i, _silu(lanes, gate) * up, mask)


def _silu(lanes: Lanes, x: Value) -> Value:
    """x / (1 + exp(-x)), written with exp(-|x|), which cannot overflow."""
    e = exp(lanes, -abs(x))
    return x * (where(x < 0, e, 1) / (e + 1))
