"""x += y, which torch takes longer to begin than to do where rows are few."""

from functools import cache, partial

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.builder import I64, Lanes, Thread, Value, loop
from parallel_llama.ops.cpu.program import (
    Machine,
    Program,
    Run,
    at_once,
    this_machine,
    threads_for,
)


class AddKernel:
    """x += y, in place, with a row for each of x, or one for all.

    Shapes: x [n, m], y [n, m] or [m], each row in one piece.
    """

    def __init__(self, dtype: torch.dtype, machine: Machine) -> None:
        lanes = machine.lanes(dtype)
        types = [*[lanes.pointer, I64] * 2, I64, I64]
        self._program = Program("add", types, partial(_add, lanes))

    def __call__(self, x: Tensor, y: Tensor, run: Run = at_once) -> None:
        n, m = x.shape
        assert y.shape in ((n, m), (m,)) and x.dtype == y.dtype
        assert x.stride(1) == y.stride(-1) == 1
        y_stride = y.stride(0) if y.dim() == 2 else 0
        addresses = (x.data_ptr(), x.stride(0), y.data_ptr(), y_stride)
        run(self._program, threads_for(n * m), *addresses, n, m)


@cache
def make_add(dtype: torch.dtype) -> AddKernel:
    """The kernel for this machine; `computes` says for which types."""
    return AddKernel(dtype, this_machine())


def _add(lanes: Lanes, b: ir.IRBuilder, thread: Thread, arguments: list[Value]) -> None:
    """The kernel.

    for row in this thread's rows:
        x[row] += y[row]
    """
    x, x_stride, y, y_stride, n, m = arguments
    with loop(b, *thread.part_of(n)) as row:
        own_x, own_y = x + row * x_stride, y + row * y_stride
        with loop(b, 0, m, lanes.width) as i:
            mask = lanes.first(m - i)
            total = lanes.load(own_x + i, mask) + lanes.load(own_y + i, mask)
            lanes.store(own_x + i, total, mask)
