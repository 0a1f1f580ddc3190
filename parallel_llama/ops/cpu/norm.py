"""RMSNorm in one pass; torch needs several, and for few rows each takes longer than the work."""

from dataclasses import dataclass
from functools import cache, partial
from operator import add
from typing import Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Float64, Integer, Numbers, T
from parallel_llama.ops.cpu.builder import F64, Lanes, Thread, Value, Variable, fma, loop
from parallel_llama.ops.cpu.program import (
    Machine,
    Program,
    Run,
    at_once,
    this_machine,
    threads_for,
)


@dataclass(slots=True, kw_only=True)
class _NormArguments(Generic[T]):
    x: Numbers[T]
    x_stride: Integer[T]
    y: Numbers[T]
    y_stride: Integer[T]
    weight: Numbers[T]
    n: Integer[T]
    m: Integer[T]
    dim: Integer[T]
    eps: Float64[T]
    offset: Float64[T]


class NormKernel:
    """x / rms(x) * (weight + offset), and nan for a row whose squares are too large to be summed.

    Shapes: x [n, dim], or [n, m, dim] with the m rows in one piece; weight [dim]; y as x, where the
    result goes, and if it is not given a new tensor.
    Source: arXiv 1910.07467.
    """

    def __init__(self, dtype: torch.dtype, machine: Machine) -> None:
        lanes = machine.lanes(dtype)
        body = partial(_norm, lanes)
        self._program = Program("norm", _NormArguments[float], body, numbers=lanes.pointer)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        offset: float,
        y: Tensor | None = None,
        run: Run = at_once,
    ) -> Tensor:
        y = x.new_empty(x.shape) if y is None else y
        n, dim = len(x), x.shape[-1]
        m = x.shape[1] if x.dim() == 3 else 1
        for each in (x, y):
            assert each.stride(-1) == 1 and (each.dim() == 2 or each.stride(1) == dim)
        assert x.shape == y.shape and x.dtype == y.dtype == weight.dtype
        assert weight.is_contiguous() and weight.shape == (dim,)
        arguments = _NormArguments(
            x=x.data_ptr(), x_stride=x.stride(0), y=y.data_ptr(), y_stride=y.stride(0),
            weight=weight.data_ptr(), n=n * m, m=m, dim=dim, eps=eps, offset=offset,
        )  # fmt: skip
        run(self._program, threads_for(n * m * dim), arguments)
        return y


@cache
def make_norm(dtype: torch.dtype) -> NormKernel:
    """The kernel for this machine; `computes` says for which types."""
    return NormKernel(dtype, this_machine())


def _norm(lanes: Lanes, b: ir.IRBuilder, thread: Thread, args: _NormArguments[Value]) -> None:
    """The kernel.

    for row in this thread's rows, m of them behind one another:
        y[row] = x[row] * (1 / sqrt(mean(x[row] ** 2) + eps)) * (weight + offset)
    """
    dim, shift = args.dim, lanes.splat(args.offset.to(lanes.vector.element))
    with loop(b, *thread.part_of(args.n)) as row:
        outer, within = row // args.m, row % args.m * dim
        x, y = args.x + outer * args.x_stride + within, args.y + outer * args.y_stride + within
        squares = Variable(lanes.constant(b, 0))
        with loop(b, 0, dim, lanes.width) as i:
            value = lanes.load(x + i, lanes.first(dim - i))
            squares.value = fma(value, value, squares.value)
        mean = lanes.reduce(add, squares.value).to(F64) / dim.to(F64) + args.eps
        # Nothing is added, but for an infinite mean: divided by that, the row would become zeros.
        inverse = 1 / mean.sqrt() + mean * 0
        scale = lanes.splat(inverse.to(lanes.vector.element))
        with loop(b, 0, dim, lanes.width) as i:
            mask = lanes.first(dim - i)
            value, factor = lanes.load(x + i, mask), lanes.load(args.weight + i, mask)
            lanes.store(y + i, value * scale * (factor + shift), mask)
