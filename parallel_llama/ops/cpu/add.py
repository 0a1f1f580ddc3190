"""x += y, which torch takes longer to begin than to do where rows are few."""

from dataclasses import dataclass
from functools import cache, partial
from typing import Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Integer, Numbers, T
from parallel_llama.ops.cpu.builder import Lanes, Thread, Value, loop
from parallel_llama.ops.cpu.program import (
    Machine,
    Program,
    Run,
    at_once,
    this_machine,
    threads_for,
)


@dataclass(slots=True, kw_only=True)
class _AddArguments(Generic[T]):
    x: Numbers[T]
    x_stride: Integer[T]
    y: Numbers[T]
    y_stride: Integer[T]
    n: Integer[T]
    m: Integer[T]


class AddKernel:
    """x += y, in place, with a row for each of x, or one for all.

    Shapes: x [n, m], y [n, m] or [m], each row in one piece.
    """

    def __init__(self, dtype: torch.dtype, machine: Machine) -> None:
        lanes = machine.lanes(dtype)
        body = partial(_add, lanes)
        self._program = Program("add", _AddArguments[float], body, numbers=lanes.pointer)

    def __call__(self, x: Tensor, y: Tensor, run: Run = at_once) -> None:
        n, m = x.shape
        assert y.shape in ((n, m), (m,)) and x.dtype == y.dtype
        assert x.stride(1) == y.stride(-1) == 1
        arguments = _AddArguments(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            y=y.data_ptr(),
            y_stride=y.stride(0) if y.dim() == 2 else 0,
            n=n,
            m=m,
        )
        run(self._program, threads_for(n * m), arguments)


@cache
def make_add(dtype: torch.dtype) -> AddKernel:
    """The kernel for this machine; `computes` says for which types."""
    return AddKernel(dtype, this_machine())


def _add(lanes: Lanes, b: ir.IRBuilder, thread: Thread, args: _AddArguments[Value]) -> None:
    """The kernel.

    for row in this thread's rows:
        x[row] += y[row]
    """
    with loop(b, *thread.part_of(args.n)) as row:
        x, y = args.x + row * args.x_stride, args.y + row * args.y_stride
        with loop(b, 0, args.m, lanes.width) as i:
            mask = lanes.first(args.m - i)
            total = lanes.load(x + i, mask) + lanes.load(y + i, mask)
            lanes.store(x + i, total, mask)
