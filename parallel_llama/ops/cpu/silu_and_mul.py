"""silu(gate) * up in one pass over memory."""

from dataclasses import dataclass
from functools import cache, partial
from typing import Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Integer, Numbers, T
from parallel_llama.ops.cpu.builder import Lanes, Thread, Value, loop, where
from parallel_llama.ops.cpu.exponential import exp
from parallel_llama.ops.cpu.program import (
    Machine,
    Program,
    Run,
    at_once,
    this_machine,
    threads_for,
)


@dataclass(slots=True, kw_only=True)
class _SiluAndMulArguments(Generic[T]):
    both: Numbers[T]
    y: Numbers[T]
    n: Integer[T]
    channels: Integer[T]


class SiluAndMulKernel:
    """silu(gate) * up, with silu(x) = x / (1 + exp(-x)).

    Shapes: both [n, 2 * channels], the gate in the first half of a row and up in the second, rows
    in one piece; the result [n, channels].
    Source: arXiv 2002.05202.
    """

    def __init__(self, dtype: torch.dtype, machine: Machine) -> None:
        lanes = machine.lanes(dtype)
        body = partial(_silu_and_mul, lanes)
        self._program = Program(
            "silu_and_mul", _SiluAndMulArguments[float], body, numbers=lanes.pointer
        )

    def __call__(self, both: Tensor, run: Run = at_once) -> Tensor:
        n, channels = len(both), both.shape[1] // 2
        assert both.is_contiguous() and both.shape[1] % 2 == 0
        y = both.new_empty(n, channels)
        arguments = _SiluAndMulArguments(
            both=both.data_ptr(), y=y.data_ptr(), n=n, channels=channels
        )
        run(self._program, threads_for(n * channels), arguments)
        return y


@cache
def make_silu_and_mul(dtype: torch.dtype) -> SiluAndMulKernel:
    """The kernel for this machine; `computes` says for which types."""
    return SiluAndMulKernel(dtype, this_machine())


def _silu_and_mul(
    lanes: Lanes, b: ir.IRBuilder, thread: Thread, args: _SiluAndMulArguments[Value]
) -> None:
    """The kernel.

    for row in this thread's rows:
        y[row] = silu(both[row, :channels]) * both[row, channels:]
    """
    channels = args.channels
    with loop(b, *thread.part_of(args.n)) as row:
        gates = args.both + row * channels * 2
        ups, y = gates + channels, args.y + row * channels
        with loop(b, 0, channels, lanes.width) as i:
            mask = lanes.first(channels - i)
            gate, up = lanes.load(gates + i, mask), lanes.load(ups + i, mask)
            lanes.store(y + i, _silu(lanes, gate) * up, mask)


def _silu(lanes: Lanes, x: Value) -> Value:
    """x / (1 + exp(-x)), written with exp(-|x|), which cannot overflow."""
    e = exp(lanes, -abs(x))
    return x * (where(x < 0, e, 1) / (e + 1))
