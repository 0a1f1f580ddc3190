"""RMSNorm of the queries (or keys) of all heads of all ranks together, in two kernels.

The first kernel writes the sum of squares of each head of this rank. After an all_reduce every rank
has the sums of all heads. The second kernel adds them in the order of the heads, and scales the
heads of this rank.

Source: OLMo 2, arXiv 2501.00656; RMSNorm, arXiv 1910.07467.
"""

from dataclasses import dataclass
from functools import cache, partial
from operator import add
from typing import Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Float64, Integer, Numbers, T
from parallel_llama.ops.cpu.ir import F64, Lanes, Thread, Value, Variable, fma, loop
from parallel_llama.ops.cpu.jit import (
    CompiledKernel,
    CPUFeatures,
    Launcher,
    at_once,
    this_machine,
    threads_for,
)


@dataclass(slots=True, kw_only=True)
class _SquaresArguments(Generic[T]):
    x: Numbers[T]
    x_stride: Integer[T]
    squares: Numbers[T]
    squares_stride: Integer[T]
    start: Integer[T]
    stop: Integer[T]
    first: Integer[T]
    n: Integer[T]
    n_heads: Integer[T]
    head_dim: Integer[T]


class HeadSquaresKernel:
    """Writes the sum of squares of head i of x to column first + i, and 0 to the other `columns`.

    Shapes: x [n, n_heads, head_dim], heads contiguous; squares [n, m].
    """

    def __init__(self, dtype: torch.dtype, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        self._program = CompiledKernel(
            _SquaresArguments[float], partial(_head_squares, lanes), numbers=lanes.pointer
        )

    def __call__(
        self, x: Tensor, squares: Tensor, columns: range, first: int, run: Launcher = at_once
    ) -> None:
        n, n_heads, head_dim = x.shape
        assert x.stride(2) == squares.stride(1) == 1 and x.stride(1) == head_dim
        assert x.dtype == squares.dtype and len(squares) == n
        assert columns.start <= first <= first + n_heads <= columns.stop <= squares.shape[1]
        arguments = _SquaresArguments(
            x=x.data_ptr(), x_stride=x.stride(0), squares=squares.data_ptr(),
            squares_stride=squares.stride(0), start=columns.start, stop=columns.stop, first=first,
            n=n, n_heads=n_heads, head_dim=head_dim,
        )  # fmt: skip
        run(self._program, threads_for(x.numel()), arguments)


@cache
def make_head_squares(dtype: torch.dtype) -> HeadSquaresKernel:
    return HeadSquaresKernel(dtype, this_machine())


def _head_squares(
    lanes: Lanes, b: ir.IRBuilder, thread: Thread, args: _SquaresArguments[Value]
) -> None:
    """
    for row in this thread's rows:
        squares[row, start:stop] = 0
        squares[row, first + head] = sum(x[row, head] ** 2) for each head
    """
    zero = Value(b, lanes.vector.element(0))
    with loop(b, *thread.part_of(args.n)) as row:
        x, out = args.x + row * args.x_stride, args.squares + row * args.squares_stride
        with loop(b, args.start, args.stop) as column:
            out[column] = zero
        with loop(b, 0, args.n_heads) as head:
            x_head, total = x + head * args.head_dim, Variable(lanes.constant(b, 0))
            with loop(b, 0, args.head_dim, lanes.width) as i:
                value = lanes.load(x_head + i, lanes.first(args.head_dim - i))
                total.value = fma(value, value, total.value)
            out[args.first + head] = lanes.reduce(add, total.value)


@dataclass(slots=True, kw_only=True)
class _NormArguments(Generic[T]):
    x: Numbers[T]
    x_stride: Integer[T]
    squares: Numbers[T]
    squares_stride: Integer[T]
    weight: Numbers[T]
    start: Integer[T]
    stop: Integer[T]
    n: Integer[T]
    n_heads: Integer[T]
    head_dim: Integer[T]
    eps: Float64[T]


class NormHeadsKernel:
    """x = x / sqrt(mean of squares of all heads + eps) * weight, in place.

    The `columns` of `squares` are the sums of squares of all heads, this rank's among them. A row
    becomes NaN if its sum overflows.

    Shapes: x [n, n_heads, head_dim], heads contiguous; squares [n, m]; weight [n_heads * head_dim].
    """

    def __init__(self, dtype: torch.dtype, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        self._program = CompiledKernel(
            _NormArguments[float], partial(_norm_heads, lanes), numbers=lanes.pointer
        )

    def __call__(
        self,
        x: Tensor,
        squares: Tensor,
        columns: range,
        weight: Tensor,
        eps: float,
        run: Launcher = at_once,
    ) -> None:
        n, n_heads, head_dim = x.shape
        assert x.stride(2) == squares.stride(1) == 1 and x.stride(1) == head_dim
        assert x.dtype == squares.dtype == weight.dtype and len(squares) == n
        assert weight.is_contiguous() and weight.shape == (n_heads * head_dim,)
        arguments = _NormArguments(
            x=x.data_ptr(), x_stride=x.stride(0), squares=squares.data_ptr(),
            squares_stride=squares.stride(0), weight=weight.data_ptr(), start=columns.start,
            stop=columns.stop, n=n, n_heads=n_heads, head_dim=head_dim, eps=eps,
        )  # fmt: skip
        run(self._program, threads_for(x.numel()), arguments)


@cache
def make_norm_heads(dtype: torch.dtype) -> NormHeadsKernel:
    return NormHeadsKernel(dtype, this_machine())


def _norm_heads(lanes: Lanes, b: ir.IRBuilder, thread: Thread, args: _NormArguments[Value]) -> None:
    """
    for row in this thread's rows:
        mean = sum(squares[row, start:stop]) / ((stop - start) * head_dim)
        x[row] *= 1 / sqrt(mean + eps) * weight
    """
    n_values = args.n_heads * args.head_dim
    count = ((args.stop - args.start) * args.head_dim).to(F64)
    with loop(b, *thread.part_of(args.n)) as row:
        x, squares = args.x + row * args.x_stride, args.squares + row * args.squares_stride
        total = Variable(count * 0)
        with loop(b, args.start, args.stop) as column:
            total.value += squares[column].to(F64)
        mean = total.value / count + args.eps
        inverse = 1 / mean.sqrt() + mean * 0  # NaN if the mean is infinite
        scale = lanes.splat(inverse.to(lanes.vector.element))
        with loop(b, 0, n_values, lanes.width) as i:
            mask = lanes.first(n_values - i)
            value, factor = lanes.load(x + i, mask), lanes.load(args.weight + i, mask)
            lanes.store(x + i, value * scale * factor, mask)
