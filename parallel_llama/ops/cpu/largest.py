"""The largest number of each row and where it is, in one pass; torch needs a dozen calls."""

import math
from functools import cache, partial
from operator import add

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.builder import (
    F64,
    I32,
    I64,
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


class LargestKernel:
    """The largest number of each row, and the first place where it is, counted from `first`.

    It is NaN where a row has one, and -inf where it has nothing else.

    Shapes: x [n, m], each row in one piece; the result [n, 2] float64.
    """

    def __init__(self, dtype: torch.dtype, machine: Machine) -> None:
        lanes = machine.lanes(dtype)
        types = [lanes.pointer, I64, F64.as_pointer(), I64, I64, I64]
        self._program = Program("largest", types, partial(_largest, lanes))

    def __call__(self, x: Tensor, first: int, run: Run = at_once) -> Tensor:
        n, m = x.shape
        assert x.stride(1) == 1
        y = x.new_empty((n, 2), dtype=torch.float64)
        addresses = (x.data_ptr(), x.stride(0), y.data_ptr())
        run(self._program, threads_for(n * m), *addresses, n, m, first)
        return y


@cache
def make_largest(dtype: torch.dtype) -> LargestKernel:
    """The kernel for this machine; `computes` says for which types."""
    return LargestKernel(dtype, this_machine())


def _largest(lanes: Lanes, b: ir.IRBuilder, thread: Thread, arguments: list[Value]) -> None:
    """The kernel.

    for row in this thread's rows:
        in each lane, the largest number, the first vector that has it, and what is no number
        y[row] = the largest of all lanes, the first of its places
    """
    x, x_stride, y, n, m, first = arguments
    least, most, zeros = (lanes.constant(b, number) for number in (-math.inf, math.inf, 0))
    with loop(b, *thread.part_of(n)) as row:
        own, result = x + row * x_stride, y + row * 2
        largest, at = Variable(least), Variable(lanes.splat(m.like(0)))
        rest = Variable(zeros)  # a NaN is never larger than anything
        with loop(b, 0, m, lanes.width) as i:
            mask = lanes.first(m - i)
            value = where(mask, lanes.load(own + i, mask), least)
            grows = largest.value < value
            largest.value = where(grows, value, largest.value)
            at.value = where(grows, lanes.splat(i), at.value)
            rest.value += where(value < most, zeros, value)
        value, place = _first_largest(lanes, largest.value, at.value)
        result[0] = (value + lanes.reduce(add, rest.value)).to(F64)
        result[1] = (place + first).to(F64)


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
