"""The largest number of each row and where it is, in one pass; torch needs a dozen calls."""

import math
from dataclasses import dataclass
from functools import cache, partial
from operator import add
from typing import Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Doubles, Integer, Numbers, T
from parallel_llama.ops.cpu.builder import (
    F64,
    I32,
    Lanes,
    Thread,
    Value,
    Variable,
    loop,
    smaller,
    where,
)
from parallel_llama.ops.cpu.program import (
    Machine,
    Program,
    Run,
    at_once,
    this_machine,
    threads_for,
)


@dataclass(slots=True, kw_only=True)
class _LargestArguments(Generic[T]):
    x: Numbers[T]
    x_stride: Integer[T]
    y: Doubles[T]
    n: Integer[T]
    m: Integer[T]
    first: Integer[T]


class LargestKernel:
    """The largest number of each row, and the first place where it is, counted from `first`.

    It is NaN where a row has one, and -inf where it has nothing else.

    Shapes: x [n, m], each row in one piece; the result [n, 2] float64.
    """

    def __init__(self, dtype: torch.dtype, machine: Machine) -> None:
        lanes = machine.lanes(dtype)
        body = partial(_largest, lanes)
        self._program = Program("largest", _LargestArguments[float], body, numbers=lanes.pointer)

    def __call__(self, x: Tensor, first: int, run: Run = at_once) -> Tensor:
        n, m = x.shape
        assert x.stride(1) == 1
        y = x.new_empty((n, 2), dtype=torch.float64)
        arguments = _LargestArguments(
            x=x.data_ptr(), x_stride=x.stride(0), y=y.data_ptr(), n=n, m=m, first=first
        )
        run(self._program, threads_for(n * m), arguments)
        return y


@cache
def make_largest(dtype: torch.dtype) -> LargestKernel:
    """The kernel for this machine; `computes` says for which types."""
    return LargestKernel(dtype, this_machine())


def _largest(lanes: Lanes, b: ir.IRBuilder, thread: Thread, args: _LargestArguments[Value]) -> None:
    """The kernel.

    for row in this thread's rows:
        in each lane, the largest number, the first vector that has it, and what is no number
        y[row] = the largest of all lanes, the first of its places
    """
    m = args.m
    least, most, zeros = (lanes.constant(b, number) for number in (-math.inf, math.inf, 0))
    with loop(b, *thread.part_of(args.n)) as row:
        x, y = args.x + row * args.x_stride, args.y + row * 2
        largest, at = Variable(least), Variable(lanes.splat(m.like(0)))
        rest = Variable(zeros)  # a NaN is never larger than anything
        with loop(b, 0, m, lanes.width) as i:
            mask = lanes.first(m - i)
            value = where(mask, lanes.load(x + i, mask), least)
            grows = largest.value < value
            largest.value = where(grows, value, largest.value)
            at.value = where(grows, lanes.splat(i), at.value)
            rest.value += where(value < most, zeros, value)
        value, place = _first_largest(lanes, largest.value, at.value)
        y[0] = (value + lanes.reduce(add, rest.value)).to(F64)
        y[1] = (place + args.first).to(F64)


def _first_largest(lanes: Lanes, values: Value, starts: Value) -> tuple[Value, Value]:
    """The largest of all lanes and its place, the first of equal ones."""
    b = values.b

    def lane(vector: Value, number: int) -> Value:
        return Value(b, b.extract_element(vector.raw, I32(number)))

    value, place = lane(values, 0), lane(starts, 0)
    for number in range(1, lanes.width):
        other, its_place = lane(values, number), lane(starts, number) + number
        first = smaller(place, its_place)
        place = where(value < other, its_place, where(other < value, place, first))
        value = where(value < other, other, value)
    return value, place
