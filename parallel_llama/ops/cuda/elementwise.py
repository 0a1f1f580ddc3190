"""Fused kernels for rows, each in one launch: lookups, weighted sums, gates, biases and RMSNorm."""

from math import pi, sqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.ops.cuda.launch import await_inputs, launch, tile, warps

_SIZE = 1024  # columns per program

_ROOT_HALF = tl.constexpr(sqrt(0.5))
_SLOPE = tl.constexpr(-sqrt(8 / pi))


def lookup(tokens: Tensor, weight: Tensor, first: int, dtype: torch.dtype) -> Tensor:
    """`TorchOps.lookup`. Shapes: tokens [T] int64, weight [n, dim] -> [T, dim]."""
    assert tokens.is_contiguous() and weight.stride(1) == 1
    (n_rows, dim), n = weight.shape, len(tokens)
    rows = weight.new_empty(n, dim, dtype=dtype)
    grid = (triton.cdiv(dim, _SIZE), n)
    launch(_lookup, grid, tokens, weight, rows, first, n_rows, weight.stride(0), dim, SIZE=_SIZE)
    return rows


def weighted_sum(parts: Tensor, routing_weights: Tensor) -> Tensor:
    """`TorchOps.weighted_sum`, in the same order. Shapes: [T * n, dim], [T, n] -> [T, dim]."""
    (n, n_parts), dim = routing_weights.shape, parts.shape[1]
    assert parts.is_contiguous() and routing_weights.is_contiguous() and len(parts) == n * n_parts
    y = parts.new_empty(n, dim)
    grid = (triton.cdiv(dim, _SIZE), n)
    launch(_weighted, grid, parts, routing_weights, y, dim, N_PARTS=n_parts, SIZE=_SIZE)
    return y


def add_gated(y: Tensor, x: Tensor, scores: Tensor) -> None:
    """`TorchOps.add_gated_`. Shapes: y, x [T, dim], scores [T, 1]."""
    n, dim = y.shape
    assert y.shape == x.shape and scores.shape == (n, 1)
    assert y.is_contiguous() and x.is_contiguous() and scores.is_contiguous()
    launch(_add_gated, (triton.cdiv(dim, _SIZE), n), y, x, scores, dim, SIZE=_SIZE)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up, the two halves of each row. Shapes: [T, 2 * channels] -> [T, channels]."""
    return _gated(x, "silu")


def gelu_and_mul(x: Tensor, *, is_tanh: bool) -> Tensor:
    """gelu(gate) * up, the two halves of each row. Shapes: [T, 2 * channels] -> [T, channels]."""
    return _gated(x, "gelu_tanh" if is_tanh else "gelu")


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """`TorchOps.clamped_swiglu`. Shapes: [T, 2 * channels] -> [T, channels]."""
    return _gated(x, "clamped_swiglu", alpha, limit)


def add_expert_bias(y: Tensor, bias: Tensor, starts: Tensor) -> None:
    """`TorchOps.add_expert_bias_`.

    Shapes: y [P, n], bias [n_experts, n], starts [n_experts + 1].
    """
    (n_rows, n_columns), n_experts = y.shape, len(bias)
    assert bias.shape == (n_experts, n_columns) and starts.shape == (n_experts + 1,)
    assert y.is_contiguous() and bias.is_contiguous()
    grid = (triton.cdiv(n_columns, _SIZE), n_rows)
    experts = {"EXPERTS": tile(n_experts), "SIZE": _SIZE}
    launch(_add_expert_bias, grid, y, bias, starts, n_columns, n_experts, **experts)


def _gated(x: Tensor, kind: str, alpha: float = 1.0, limit: float = 0.0) -> Tensor:
    assert x.stride(1) == 1
    n, channels = len(x), x.shape[1] // 2
    y = x.new_empty(n, channels)
    grid = (triton.cdiv(channels, _SIZE), n)
    launch(_gate, grid, x, y, x.stride(0), channels, alpha, limit, KIND=kind, SIZE=_SIZE)
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, y: Tensor) -> None:
    """y = x / rms(x) * (weight + offset); a row whose sum of squares overflows becomes NaN.

    y may be x.

    Shapes: x, y [n, dim], or [n, m, dim] with contiguous [m, dim]; weight [dim].
    Source: arXiv 1910.07467.
    """
    n, dim = len(x), x.shape[-1]
    m = x.shape[1] if x.dim() == 3 else 1
    for each in (x, y):
        assert each.stride(-1) == 1 and (each.dim() == 2 or each.stride(1) == dim)
    assert x.shape == y.shape and weight.is_contiguous() and weight.shape == (dim,)
    numbers = (m, x.stride(0), y.stride(0), dim, eps)
    size = {"SIZE": tile(dim), "num_warps": warps(dim)}
    launch(_norm, (n * m,), x, y, weight, *numbers, OFFSET=offset, **size)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Adds y to x in place. Returns: `rms_norm` of x. Shapes: x, y [n, dim]; weight [dim]."""
    n, dim = x.shape
    assert x.stride(1) == y.stride(1) == 1 and x.shape == y.shape
    assert weight.is_contiguous() and weight.shape == (dim,)
    normed = x.new_empty(n, dim)
    numbers = (x.stride(0), y.stride(0), dim, eps)
    size = {"SIZE": tile(dim), "num_warps": warps(dim)}
    launch(_add_norm, (n,), x, y, weight, normed, *numbers, OFFSET=offset, **size)
    return normed


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def _lookup(tokens, weight, rows, first, n_rows, stride, dim, SIZE: tl.constexpr):
    await_inputs()
    place = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    own = tl.load(tokens + place) - first
    n_own = tl.where((own >= 0) & (own < n_rows), dim, 0)
    row = tl.load(weight + own * stride + columns, columns < n_own, -0.0)
    tl.store(rows + place * dim + columns, row.to(rows.dtype.element_ty), columns < dim)


@triton.jit
def _weighted(parts, routing_weights, y, dim, N_PARTS: tl.constexpr, SIZE: tl.constexpr):
    await_inputs()
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), tl.float32)
    for part in tl.static_range(N_PARTS):
        at = row * N_PARTS + part
        own = tl.load(parts + at * dim + columns, columns < dim, 0).to(tl.float32)
        total += own * tl.load(routing_weights + at)
    tl.store(y + row * dim + columns, total.to(y.dtype.element_ty), columns < dim)


@triton.jit
def _add_gated(y, x, scores, dim, SIZE: tl.constexpr):
    await_inputs()
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    at, is_there = row * dim + columns, columns < dim
    gate = 1 / (1 + tl.exp(-tl.load(scores + row).to(tl.float32)))
    total = tl.load(y + at, is_there, 0).to(tl.float32)
    total += gate * tl.load(x + at, is_there, 0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), is_there)


@triton.jit(do_not_specialize_on_alignment=["starts"])
def _add_expert_bias(
    y, bias, starts, n_columns, n_experts, EXPERTS: tl.constexpr, SIZE: tl.constexpr
):
    await_inputs()
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    numbers = tl.arange(0, EXPERTS)
    ends = tl.load(starts + 1 + numbers, numbers < n_experts, row + 1)
    expert = tl.sum((ends <= row).to(tl.int64), 0)  # the number of experts that end before this row
    n_own = tl.where(expert < n_experts, n_columns, 0)
    is_there = columns < n_own
    total = tl.load(y + row * n_columns + columns, is_there, 0).to(tl.float32)
    total += tl.load(bias + expert * n_columns + columns, is_there, 0).to(tl.float32)
    tl.store(y + row * n_columns + columns, total.to(y.dtype.element_ty), is_there)


@triton.jit
def _gate(x, y, x_stride, channels, alpha, limit, KIND: tl.constexpr, SIZE: tl.constexpr):
    await_inputs()
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_there = columns < channels
    own = x + row * x_stride + columns
    gate = tl.load(own, is_there, 0).to(tl.float32)
    up = tl.load(own + channels, is_there, 0).to(tl.float32)
    if KIND == "silu":
        active = gate / (1 + tl.exp(-gate))
    elif KIND == "clamped_swiglu":
        # Comparisons with NaN are false, so NaN stays NaN.
        gate, up = tl.where(gate > limit, limit, gate), tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up) + 1
        active = gate / (1 + tl.exp(gate * -alpha))
    elif KIND == "gelu":
        active = gate * 0.5 * (1 + tl.erf(gate * _ROOT_HALF))
    else:  # (1 + tanh(z)) / 2 is 1 / (1 + exp(-2 z))
        active = gate / (1 + tl.exp((gate + gate * gate * gate * 0.044715) * _SLOPE))
    # Rounded to the dtype before the product, as in torch.
    product = active.to(y.dtype.element_ty).to(tl.float32) * up
    tl.store(y + row * channels + columns, product.to(y.dtype.element_ty), is_there)


@triton.jit
def _norm(x, y, weight, m, x_stride, y_stride, dim, eps, OFFSET: tl.constexpr, SIZE: tl.constexpr):
    await_inputs()
    row = tl.program_id(0)
    group, within = (row // m).to(tl.int64), row % m * dim
    columns = tl.arange(0, SIZE)
    is_there = columns < dim
    own = tl.load(x + group * x_stride + within + columns, is_there, 0).to(tl.float32)
    normed = _normalised(own, weight + columns, is_there, dim, eps, OFFSET, y.dtype.element_ty)
    tl.store(y + group * y_stride + within + columns, normed, is_there)


@triton.jit
def _add_norm(
    x, y, weight, normed, x_stride, y_stride, dim, eps, OFFSET: tl.constexpr, SIZE: tl.constexpr
):
    await_inputs()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)
    is_there = columns < dim
    own_x = x + row * x_stride + columns
    total = tl.load(own_x, is_there, 0).to(tl.float32)
    total += tl.load(y + row * y_stride + columns, is_there, 0).to(tl.float32)
    rounded = total.to(x.dtype.element_ty)
    tl.store(own_x, rounded, is_there)
    own = rounded.to(tl.float32)
    result = _normalised(own, weight + columns, is_there, dim, eps, OFFSET, normed.dtype.element_ty)
    tl.store(normed + row * dim + columns, result, is_there)


@triton.jit
def _normalised(row, weight, is_there, dim, eps, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """A row, padded with zeros, divided by its rms and multiplied by its weight."""
    mean = tl.sum(row * row, 0) / dim + eps
    # mean * 0 is NaN for an infinite mean, which would make the row zeros.
    normed = row * (tl.rsqrt(mean) + mean * 0)
    factor = tl.load(weight, is_there, 0).to(tl.float32)
    if OFFSET == 0:
        normed = normed.to(DTYPE).to(tl.float32)  # rounded, as in torch
    else:
        factor += OFFSET
    return (normed * factor).to(DTYPE)
