"""A kernel that rounds the inputs of a matrix in one pass, with the bits of `ops.inputs`."""

import math
from dataclasses import dataclass
from functools import cache, partial
from operator import add
from typing import Generic, Literal

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.dtypes import InputFormat
from parallel_llama.ops.cpu.arguments import Float64, Integer, Numbers, T
from parallel_llama.ops.cpu.ir import (
    F32,
    I8,
    Lanes,
    Thread,
    Value,
    Variable,
    fma,
    larger,
    loop,
    smaller,
    where,
)
from parallel_llama.ops.cpu.jit import (
    CompiledKernel,
    CPUFeatures,
    Launcher,
    at_once,
    this_machine,
    threads_for,
)
from parallel_llama.ops.cpu.vector_math import from_e4m3, to_e4m3
from parallel_llama.ops.inputs import RANGE

# Adding and subtracting it rounds to an integer: the last bit of the sum's mantissa is worth 1.
_ROUNDING = {torch.float32: 1.5 * 2.0**23, torch.float64: 1.5 * 2.0**52}


@dataclass(slots=True, kw_only=True)
class _Arguments(Generic[T]):
    x: Numbers[T]
    x_stride: Integer[T]
    y: Numbers[T]
    n: Integer[T]
    m: Integer[T]
    group: Integer[T]
    n_groups: Integer[T]
    most: Float64[T]
    scale: Float64[T]
    zero: Float64[T]


@dataclass(frozen=True)
class _Kind:
    """The fields of an `InputFormat` that a kernel is compiled for; the others are arguments."""

    numbers: Literal["e4m3", "int8"]
    has_zeros: bool
    is_static: bool


class RoundInputsKernel:
    """`ops.inputs.round_inputs` for formats of one kind.

    Shapes: x [n, m], rows contiguous; the result [n, m].
    """

    def __init__(self, dtype: torch.dtype, kind: _Kind, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        self._program = CompiledKernel(
            _Arguments[float], partial(_round, lanes, kind), numbers=lanes.pointer
        )

    def __call__(self, x: Tensor, form: InputFormat, run: Launcher = at_once) -> Tensor:
        n, m = x.shape
        assert x.stride(1) == 1
        y = x.new_empty(n, m)
        group = m if form.scale is not None else min(form.group or m, m)
        arguments = _Arguments(
            x=x.data_ptr(), x_stride=x.stride(0), y=y.data_ptr(), n=n, m=m, group=group,
            n_groups=-(-m // max(group, 1)), most=form.most or math.inf, scale=form.scale or 0.0,
            zero=float(form.zero),
        )  # fmt: skip
        run(self._program, threads_for(n * m), arguments)
        return y


def make_round_inputs(dtype: torch.dtype, form: InputFormat) -> RoundInputsKernel:
    return _make(dtype, _Kind(form.numbers, form.has_zeros, form.scale is not None))


@cache
def _make(dtype: torch.dtype, kind: _Kind) -> RoundInputsKernel:
    return RoundInputsKernel(dtype, kind, this_machine())


def _round(
    lanes: Lanes, kind: _Kind, b: ir.IRBuilder, thread: Thread, args: _Arguments[Value]
) -> None:
    """
    for row in this thread's rows:
        for each group of the row:
            scale, zero = the group's scale and zero point
            for each input:
                y = (clamp(x / scale + zero) rounded - zero) * scale
    """
    with loop(b, *thread.part_of(args.n)) as row:
        x, y = args.x + row * args.x_stride, args.y + row * args.m
        with loop(b, 0, args.n_groups) as number:
            start = number * args.group
            stop = smaller(start + args.group, args.m)
            factors = _static if kind.is_static else _asymmetric if kind.has_zeros else _symmetric
            scale, zero = (lanes.splat(each) for each in factors(lanes, kind, args, x, start, stop))
            with loop(b, start, stop, lanes.width) as i:
                mask = lanes.first(stop - i)
                rounded = _nearest(lanes, kind, lanes.load(x + i, mask) / scale + zero)
                lanes.store(y + i, (rounded - zero) * scale, mask)


def _nearest(lanes: Lanes, kind: _Kind, x: Value) -> Value:
    """The nearest number of a format, ties to even; NaN stays NaN."""
    least, most = (lanes.constant(x.b, bound) for bound in RANGE[kind.numbers])
    x = where(most < x, most, x)
    x = where(x < least, least, x)
    if kind.numbers == "int8":
        return x + _ROUNDING[lanes.computed] - _ROUNDING[lanes.computed]
    single = x.to(ir.VectorType(F32, lanes.width))
    bits = to_e4m3(single).resized(ir.VectorType(I8, lanes.width))
    return fma(x, 0, from_e4m3(bits, lanes.vector))


def _static(
    lanes: Lanes, _: _Kind, args: _Arguments[Value], __: Value, ___: Value, ____: Value
) -> tuple[Value, Value]:
    element = lanes.vector.element
    return args.scale.to(element), args.zero.to(element)


def _symmetric(
    lanes: Lanes, kind: _Kind, args: _Arguments[Value], x: Value, start: Value, stop: Value
) -> tuple[Value, Value]:
    low, high, nan_or_0 = _extremes(lanes, x, start, stop)
    largest, least = larger(high, -low), RANGE[kind.numbers][0]
    bound = args.most.to(lanes.vector.element)
    scale = where(bound < largest, bound, largest) / ((RANGE[kind.numbers][1] - least) / 2)
    return _divisor(scale) + nan_or_0, scale.like(0)


def _asymmetric(
    lanes: Lanes, kind: _Kind, _: _Arguments[Value], x: Value, start: Value, stop: Value
) -> tuple[Value, Value]:
    low, high, nan_or_0 = _extremes(lanes, x, start, stop)
    least, most = RANGE[kind.numbers]
    scale = _divisor((high - low) / (most - least))
    zero = scale.like(least) - low / scale
    zero = smaller(where(zero < least, zero.like(least), zero), zero.like(most))
    zero = zero + _ROUNDING[lanes.computed] - _ROUNDING[lanes.computed]
    return scale + nan_or_0, zero


def _divisor(scale: Value) -> Value:
    return where(scale > 0, scale, 1)


def _extremes(lanes: Lanes, x: Value, start: Value, stop: Value) -> tuple[Value, Value, Value]:
    """The minimum and maximum of 0 and a group's numbers; and NaN if a number is NaN, else 0."""
    zeros = lanes.constant(x.b, 0)
    low, high, nan_or_0 = Variable(zeros), Variable(zeros), Variable(zeros)
    with loop(x.b, start, stop, lanes.width) as i:
        value = lanes.load(x + i, lanes.first(stop - i))
        low.value = smaller(value, low.value)
        high.value = larger(high.value, value)
        is_number = (value < 0) | (value > -1)
        nan_or_0.value += where(is_number, zeros, value)
    return (
        lanes.reduce(smaller, low.value),
        lanes.reduce(larger, high.value),
        lanes.reduce(add, nan_or_0.value),
    )
