"""Kernels that process rows in one pass: additions, norms, activations, sums, maxima.

For few rows, the overhead of torch's operations is larger than their work. Some of these kernels
replace several torch operations.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from operator import add
from typing import Generic, Literal

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Doubles, Float64, Integer, Integers, Numbers, T
from parallel_llama.ops.cpu.ir import (
    F64,
    Lanes,
    Thread,
    Value,
    Variable,
    fma,
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
from parallel_llama.ops.cpu.vector_math import erfc, sigmoid

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]


@dataclass(slots=True, kw_only=True)
class _AddArguments(Generic[T]):
    x: Numbers[T]
    x_stride: Integer[T]
    y: Numbers[T]
    y_stride: Integer[T]
    n: Integer[T]
    m: Integer[T]


class AddKernel:
    """x += y, in place.

    Shapes: x [n, m], y [n, m] or [m], rows contiguous.
    """

    def __init__(self, dtype: torch.dtype, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        self._program = CompiledKernel(
            _AddArguments[float], partial(_add, lanes), numbers=lanes.pointer
        )

    def __call__(self, x: Tensor, y: Tensor, run: Launcher = at_once) -> None:
        n, m = x.shape
        assert y.shape in ((n, m), (m,)) and x.dtype == y.dtype
        assert x.stride(1) == y.stride(-1) == 1
        arguments = _AddArguments(
            x=x.data_ptr(), x_stride=x.stride(0), y=y.data_ptr(),
            y_stride=y.stride(0) if y.dim() == 2 else 0, n=n, m=m,
        )  # fmt: skip
        run(self._program, threads_for(n * m), arguments)


@cache
def make_add(dtype: torch.dtype) -> AddKernel:
    return AddKernel(dtype, this_machine())


def _add(lanes: Lanes, b: ir.IRBuilder, thread: Thread, args: _AddArguments[Value]) -> None:
    """
    for row in this thread's rows:
        x[row] += y[row]
    """
    with loop(b, *thread.part_of(args.n)) as row:
        x, y = args.x + row * args.x_stride, args.y + row * args.y_stride
        with loop(b, 0, args.m, lanes.width) as i:
            mask = lanes.first(args.m - i)
            total = lanes.load(x + i, mask) + lanes.load(y + i, mask)
            lanes.store(x + i, total, mask)


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
    """y = x / rms(x) * (weight + offset), or NaN for a row whose sum of squares overflows.

    Shapes: x [n, dim], or [n, m, dim] with the m rows contiguous; weight [dim]; y has the shape of
    x, and is a new tensor if the argument is None.
    Source: arXiv 1910.07467.
    """

    def __init__(self, dtype: torch.dtype, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        self._program = CompiledKernel(
            _NormArguments[float], partial(_norm, lanes), numbers=lanes.pointer
        )

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        offset: float,
        y: Tensor | None = None,
        run: Launcher = at_once,
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
    return NormKernel(dtype, this_machine())


def _norm(lanes: Lanes, b: ir.IRBuilder, thread: Thread, args: _NormArguments[Value]) -> None:
    """
    for row in this thread's rows:
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
        # Adds 0, or NaN if the mean is infinite: a division by infinity would make the row zeros.
        inverse = 1 / mean.sqrt() + mean * 0
        scale = lanes.splat(inverse.to(lanes.vector.element))
        with loop(b, 0, dim, lanes.width) as i:
            mask = lanes.first(dim - i)
            value, factor = lanes.load(x + i, mask), lanes.load(args.weight + i, mask)
            lanes.store(y + i, value * scale * (factor + shift), mask)


@dataclass(slots=True, kw_only=True)
class _ActivationArguments(Generic[T]):
    both: Numbers[T]
    y: Numbers[T]
    n: Integer[T]
    channels: Integer[T]


class ActivationKernel:
    """f(gate) * up, or f(x) if not gated.

    torch's functions are not used: their result for an element depends on its index in the tensor.

    Args:
        kind: silu, gelu, gelu_tanh for its tanh approximation, or relu2 for the squared ReLU.

    Shapes: [n, 2 * channels], contiguous, a row being gate and up, or [n, channels]; the result
    [n, channels].
    Sources: SwiGLU and GEGLU, arXiv 2002.05202; GELU, arXiv 1606.08415; squared ReLU, Primer, arXiv
        2109.08668.
    """

    def __init__(
        self, dtype: torch.dtype, kind: Activation, machine: CPUFeatures, *, gated: bool
    ) -> None:
        lanes, self._n_halves = machine.lanes(dtype), 2 if gated else 1
        self._program = CompiledKernel(
            _ActivationArguments[float],
            partial(_activate, lanes, kind, self._n_halves),
            numbers=lanes.pointer,
        )

    def __call__(self, both: Tensor, run: Launcher = at_once) -> Tensor:
        n, channels = len(both), both.shape[1] // self._n_halves
        assert both.is_contiguous() and both.shape[1] % self._n_halves == 0
        y = both.new_empty(n, channels)
        arguments = _ActivationArguments(
            both=both.data_ptr(), y=y.data_ptr(), n=n, channels=channels
        )
        run(self._program, threads_for(n * channels), arguments)
        return y


@cache
def make_activation(
    dtype: torch.dtype, kind: Activation, *, gated: bool = True
) -> ActivationKernel:
    return ActivationKernel(dtype, kind, this_machine(), gated=gated)


def _activate(
    lanes: Lanes,
    kind: Activation,
    n_halves: int,
    b: ir.IRBuilder,
    thread: Thread,
    args: _ActivationArguments[Value],
) -> None:
    """
    for row in this thread's rows:
        y[row] = f(both[row, :channels]), multiplied by both[row, channels:] if it is there
    """
    channels = args.channels
    with loop(b, *thread.part_of(args.n)) as row:
        gates = args.both + row * channels * n_halves
        ups, y = gates + channels, args.y + row * channels
        with loop(b, 0, channels, lanes.width) as i:
            mask = lanes.first(channels - i)
            gate = lanes.load(gates + i, mask)
            up = lanes.load(ups + i, mask) if n_halves > 1 else None
            active = _ACTIVATIONS[kind](lanes, gate)
            lanes.store(y + i, active if up is None else active * up, mask)


@dataclass(slots=True, kw_only=True)
class _ClampedArguments(Generic[T]):
    both: Numbers[T]
    y: Numbers[T]
    n: Integer[T]
    channels: Integer[T]
    alpha: Float64[T]
    limit: Float64[T]


class ClampedSwiGLUKernel:
    """gate * sigmoid(alpha gate) * (up + 1) of bounded numbers: see `TorchOps.clamped_swiglu`.

    Shapes: [n, 2 * channels], contiguous, a row being gate and up; the result [n, channels].
    """

    def __init__(self, dtype: torch.dtype, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        self._program = CompiledKernel(
            _ClampedArguments[float], partial(_clamped_swiglu, lanes), numbers=lanes.pointer
        )

    def __call__(self, both: Tensor, alpha: float, limit: float, run: Launcher = at_once) -> Tensor:
        n, channels = len(both), both.shape[1] // 2
        assert both.is_contiguous() and both.shape[1] % 2 == 0
        y = both.new_empty(n, channels)
        arguments = _ClampedArguments(
            both=both.data_ptr(), y=y.data_ptr(), n=n, channels=channels, alpha=alpha, limit=limit
        )
        run(self._program, threads_for(n * channels), arguments)
        return y


@cache
def make_clamped_swiglu(dtype: torch.dtype) -> ClampedSwiGLUKernel:
    return ClampedSwiGLUKernel(dtype, this_machine())


def _clamped_swiglu(
    lanes: Lanes, b: ir.IRBuilder, thread: Thread, args: _ClampedArguments[Value]
) -> None:
    """
    for row in this thread's rows:
        gate = min(both[row, :channels], limit)
        up = max(min(both[row, channels:], limit), -limit)
        y[row] = (up + 1) * (gate * sigmoid(alpha * gate))
    """
    channels = args.channels
    alpha, limit = (lanes.splat(x.to(lanes.vector.element)) for x in (args.alpha, args.limit))
    with loop(b, *thread.part_of(args.n)) as row:
        gates = args.both + row * channels * 2
        ups, y = gates + channels, args.y + row * channels
        with loop(b, 0, channels, lanes.width) as i:
            mask = lanes.first(channels - i)
            gate, up = lanes.load(gates + i, mask), lanes.load(ups + i, mask)
            # Comparisons with NaN are false, so NaN stays NaN.
            gate, up = where(limit < gate, limit, gate), where(limit < up, limit, up)
            up = where(up < -limit, -limit, up)
            lanes.store(y + i, (up + 1) * (gate * sigmoid(lanes, gate * alpha)), mask)


@dataclass(slots=True, kw_only=True)
class _ExpertBiasArguments(Generic[T]):
    y: Numbers[T]
    bias: Numbers[T]
    starts: Integers[T]
    n_experts: Integer[T]
    n_columns: Integer[T]


class ExpertBiasKernel:
    """Adds to each row of y the bias of its expert: see `TorchOps.add_expert_bias_`.

    Shapes: y [P, n] and bias [n_experts, n], contiguous; starts [n_experts + 1] int64.
    """

    def __init__(self, dtype: torch.dtype, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        self._program = CompiledKernel(
            _ExpertBiasArguments[float], partial(_add_expert_bias, lanes), numbers=lanes.pointer
        )

    def __call__(self, y: Tensor, bias: Tensor, starts: Tensor, run: Launcher = at_once) -> None:
        n_experts, n_columns = bias.shape
        assert y.shape[1:] == (n_columns,) and starts.shape == (n_experts + 1,)
        assert y.dtype == bias.dtype and y.is_contiguous() and bias.is_contiguous()
        arguments = _ExpertBiasArguments(
            y=y.data_ptr(), bias=bias.data_ptr(), starts=starts.data_ptr(), n_experts=n_experts,
            n_columns=n_columns,
        )  # fmt: skip
        run(self._program, threads_for(y.numel()), arguments)


@cache
def make_expert_bias(dtype: torch.dtype) -> ExpertBiasKernel:
    return ExpertBiasKernel(dtype, this_machine())


def _add_expert_bias(
    lanes: Lanes, b: ir.IRBuilder, thread: Thread, args: _ExpertBiasArguments[Value]
) -> None:
    """
    for expert in this thread's experts:
        for row in starts[expert] to starts[expert + 1] - 1:
            y[row] += bias[expert]
    """
    n_columns = args.n_columns
    with loop(b, *thread.part_of(args.n_experts)) as expert:
        expert_bias = args.bias + expert * n_columns
        with loop(b, args.starts[expert], args.starts[expert + 1]) as row:
            y = args.y + row * n_columns
            with loop(b, 0, n_columns, lanes.width) as i:
                mask = lanes.first(n_columns - i)
                lanes.store(
                    y + i, lanes.load(y + i, mask) + lanes.load(expert_bias + i, mask), mask
                )


def _silu(lanes: Lanes, x: Value) -> Value:
    return x * sigmoid(lanes, x)


def _gelu_tanh(lanes: Lanes, x: Value) -> Value:
    """x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3); the factor is sigmoid(2 u)."""
    cubic = x * fma(x * x, 0.044715, 1)
    return x * sigmoid(lanes, cubic * math.sqrt(8 / math.pi))


def _gelu(lanes: Lanes, x: Value) -> Value:
    """x Phi(x), with the smaller of Phi(x) and 1 - Phi(x) as erfc(|x| / sqrt(2)) / 2."""
    tail = erfc(lanes, abs(x) * math.sqrt(0.5)) * 0.5
    return x * where(x < 0, tail, 1 - tail)


def _relu2(lanes: Lanes, x: Value) -> Value:
    """max(x, 0)^2; NaN stays NaN."""
    positive = where(x < 0, lanes.constant(x.b, 0), x)
    return positive * positive


_ACTIVATIONS: dict[Activation, Callable[[Lanes, Value], Value]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
}


@dataclass(slots=True, kw_only=True)
class _WeightedSumArguments(Generic[T]):
    parts: Numbers[T]
    routing_weights: Numbers[T]
    y: Numbers[T]
    n_tokens: Integer[T]
    n: Integer[T]
    dim: Integer[T]


class WeightedSumKernel:
    """y[t] = the sum of parts[t * n + i] * routing_weights[t, i] over the experts i of token t.

    Shapes: parts [T * n, dim] and routing_weights [T, n], contiguous; the result [T, dim].
    """

    def __init__(self, dtype: torch.dtype, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        self._program = CompiledKernel(
            _WeightedSumArguments[float], partial(_weighted_sum, lanes), numbers=lanes.pointer
        )

    def __call__(self, parts: Tensor, routing_weights: Tensor, run: Launcher = at_once) -> Tensor:
        n_tokens, n = routing_weights.shape
        assert (
            parts.is_contiguous()
            and routing_weights.is_contiguous()
            and parts.dtype == routing_weights.dtype
        )
        assert len(parts) == n_tokens * n
        dim = parts.shape[1]
        y = parts.new_empty(n_tokens, dim)
        arguments = _WeightedSumArguments(
            parts=parts.data_ptr(), routing_weights=routing_weights.data_ptr(), y=y.data_ptr(),
            n_tokens=n_tokens, n=n, dim=dim,
        )  # fmt: skip
        run(self._program, threads_for(parts.numel()), arguments)
        return y


@cache
def make_weighted_sum(dtype: torch.dtype) -> WeightedSumKernel:
    return WeightedSumKernel(dtype, this_machine())


def _weighted_sum(
    lanes: Lanes, b: ir.IRBuilder, thread: Thread, args: _WeightedSumArguments[Value]
) -> None:
    """
    for token in this thread's tokens:
        y[token] = sum of parts[token * n + i] * routing_weights[token, i]
    """
    n, dim = args.n, args.dim
    with loop(b, *thread.part_of(args.n_tokens)) as token:
        parts, weights = args.parts + token * n * dim, args.routing_weights + token * n
        with loop(b, 0, dim, lanes.width) as i:
            mask = lanes.first(dim - i)
            total = Variable(lanes.constant(b, 0))
            with loop(b, 0, n) as part:
                value = lanes.load(parts + part * dim + i, mask)
                total.value = fma(value, lanes.splat(weights[part]), total.value)
            lanes.store(args.y + token * dim + i, total.value, mask)


@dataclass(slots=True, kw_only=True)
class _AddGatedArguments(Generic[T]):
    y: Numbers[T]
    x: Numbers[T]
    scores: Numbers[T]
    n_tokens: Integer[T]
    dim: Integer[T]


class AddGatedKernel:
    """y[t] += sigmoid(scores[t]) * x[t]: a shared expert with a gate.

    Shapes: y and x [T, dim] and scores [T, 1], contiguous.
    """

    def __init__(self, dtype: torch.dtype, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        self._program = CompiledKernel(
            _AddGatedArguments[float], partial(_add_gated, lanes), numbers=lanes.pointer
        )

    def __call__(self, y: Tensor, x: Tensor, scores: Tensor, run: Launcher = at_once) -> None:
        n_tokens, dim = y.shape
        assert y.shape == x.shape and scores.shape == (n_tokens, 1)
        assert y.dtype == x.dtype == scores.dtype
        assert y.is_contiguous() and x.is_contiguous() and scores.is_contiguous()
        arguments = _AddGatedArguments(
            y=y.data_ptr(), x=x.data_ptr(), scores=scores.data_ptr(), n_tokens=n_tokens, dim=dim
        )
        run(self._program, threads_for(y.numel()), arguments)


@cache
def make_add_gated(dtype: torch.dtype) -> AddGatedKernel:
    return AddGatedKernel(dtype, this_machine())


def _add_gated(
    lanes: Lanes, b: ir.IRBuilder, thread: Thread, args: _AddGatedArguments[Value]
) -> None:
    """
    for token in this thread's tokens:
        y[token] += sigmoid(scores[token]) * x[token]
    """
    with loop(b, *thread.part_of(args.n_tokens)) as token:
        y, x = args.y + token * args.dim, args.x + token * args.dim
        gate = sigmoid(lanes, lanes.splat(args.scores[token]))
        with loop(b, 0, args.dim, lanes.width) as i:
            mask = lanes.first(args.dim - i)
            total = fma(lanes.load(x + i, mask), gate, lanes.load(y + i, mask))
            lanes.store(y + i, total, mask)


@dataclass(slots=True, kw_only=True)
class _LargestArguments(Generic[T]):
    x: Numbers[T]
    x_stride: Integer[T]
    y: Doubles[T]
    n: Integer[T]
    m: Integer[T]
    first: Integer[T]


class LargestKernel:
    """Each row's largest number, or NaN if the row has a NaN, and its first index plus `first`.

    Shapes: x [n, m], rows contiguous; the result [n, 2] float64.
    """

    def __init__(self, dtype: torch.dtype, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        self._program = CompiledKernel(
            _LargestArguments[float], partial(_largest, lanes), numbers=lanes.pointer
        )

    def __call__(self, x: Tensor, first: int, run: Launcher = at_once) -> Tensor:
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
    return LargestKernel(dtype, this_machine())


def _largest(lanes: Lanes, b: ir.IRBuilder, thread: Thread, args: _LargestArguments[Value]) -> None:
    """
    for row in this thread's rows:
        for each lane: the largest number, the first vector that contains it, and any NaN
        y[row] = the largest number of all lanes, its first index
    """
    m = args.m
    least, most, zeros = (lanes.constant(b, number) for number in (-math.inf, math.inf, 0))
    with loop(b, *thread.part_of(args.n)) as row:
        x, y = args.x + row * args.x_stride, args.y + row * 2
        largest, at = Variable(least), Variable(lanes.splat(m.like(0)))
        non_finite = Variable(zeros)  # NaN and infinity; comparisons with NaN are false
        with loop(b, 0, m, lanes.width) as i:
            mask = lanes.first(m - i)
            value = where(mask, lanes.load(x + i, mask), least)
            grows = largest.value < value
            largest.value = where(grows, value, largest.value)
            at.value = where(grows, lanes.splat(i), at.value)
            non_finite.value += where(value < most, zeros, value)
        value, index = _first_largest(lanes, largest.value, at.value)
        y[0] = (value + lanes.reduce(add, non_finite.value)).to(F64)
        y[1] = (index + args.first).to(F64)


def _first_largest(lanes: Lanes, values: Value, starts: Value) -> tuple[Value, Value]:
    """The largest number of all lanes and its first index."""
    value, index = values.lane(0), starts.lane(0)
    for number in range(1, lanes.width):
        other, other_index = values.lane(number), starts.lane(number) + number
        smaller_index = smaller(index, other_index)
        index = where(value < other, other_index, where(other < value, index, smaller_index))
        value = where(value < other, other, value)
    return value, index
