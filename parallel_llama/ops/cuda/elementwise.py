"""Fused kernels for rows, each in one launch: lookups, weighted sums, gates, biases and RMSNorm."""

from math import pi, sqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.ops.cuda.launch import await_inputs, launch, tile, warps
from parallel_llama.ops.cuda.linear import load_row, source_of
from parallel_llama.ops.part_sums import Product

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


def weighted_sum(parts: Product, routing_weights: Tensor) -> Tensor:
    """`TorchOps.weighted_sum`, in the same order. Shapes: [T * n, dim], [T, n] -> [T, dim]."""
    (n, n_weights), (n_rows, dim) = routing_weights.shape, parts.shape
    values, bias, stride, n_parts = source_of(parts)
    assert values.is_contiguous() and routing_weights.is_contiguous() and n_rows == n * n_weights
    y = values.new_empty(n, dim, dtype=parts.dtype)
    grid = (triton.cdiv(dim, _SIZE), n)
    constants = {"N_WEIGHTS": n_weights, "N_PARTS": n_parts, "SIZE": _SIZE}
    launch(_weighted, grid, values, bias, routing_weights, y, n_rows, stride, **constants)
    return y


def add_gated(y: Tensor, x: Tensor, scores: Tensor) -> None:
    """`TorchOps.add_gated_`. Shapes: y, x [T, dim], scores [T, 1]."""
    n, dim = y.shape
    assert y.shape == x.shape and scores.shape == (n, 1)
    assert y.is_contiguous() and x.is_contiguous() and scores.is_contiguous()
    launch(_add_gated, (triton.cdiv(dim, _SIZE), n), y, x, scores, dim, SIZE=_SIZE)


def silu_and_mul(x: Product) -> Tensor:
    """silu(gate) * up, the two halves of each row. Shapes: [T, 2 * channels] -> [T, channels]."""
    return _gated(x, "silu")


def gelu_and_mul(x: Product, *, is_tanh: bool) -> Tensor:
    """gelu(gate) * up, the two halves of each row. Shapes: [T, 2 * channels] -> [T, channels]."""
    return _gated(x, "gelu_tanh" if is_tanh else "gelu")


def clamped_swiglu(x: Product, alpha: float, limit: float) -> Tensor:
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


def _gated(x: Product, kind: str, alpha: float = 1.0, limit: float = 0.0) -> Tensor:
    (values, bias, stride, n_parts), (n, n_columns) = source_of(x), x.shape
    channels = n_columns // 2
    assert values.stride(-1) == 1
    y = values.new_empty(n, channels, dtype=x.dtype)
    grid = (triton.cdiv(channels, _SIZE), n)
    numbers = (n, stride, channels, alpha, limit)
    launch(_gate, grid, values, bias, y, *numbers, KIND=kind, N_PARTS=n_parts, SIZE=_SIZE)
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


def add_rms_norm(
    x: Tensor, y: Product, weight: Tensor, eps: float, offset: float, post_weight: Tensor | None
) -> Tensor:
    """`TorchOps.add_rms_norm`. Shapes: x, y [n, dim]; weight and post_weight [dim]."""
    (values, bias, stride, n_parts), (n, dim) = source_of(y), x.shape
    assert x.stride(1) == values.stride(-1) == 1 and x.shape == y.shape and x.dtype == y.dtype
    for each in (weight, weight if post_weight is None else post_weight):
        assert each.is_contiguous() and each.shape == (dim,)
    normed = x.new_empty(n, dim)
    numbers = (n, x.stride(0), stride, dim, eps)
    constants = {"OFFSET": offset, "N_PARTS": n_parts, "SIZE": tile(dim), "num_warps": warps(dim)}
    launch(_add_norm, (n,), x, values, bias, post_weight, weight, normed, *numbers, **constants)
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


@triton.jit(do_not_specialize=["n"])
def _weighted(
    parts, bias, routing_weights, y, n, dim,
    N_WEIGHTS: tl.constexpr, N_PARTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    await_inputs()
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_there = columns < dim
    dtype: tl.constexpr = y.dtype.element_ty
    total = tl.zeros((SIZE,), tl.float32)
    for number in tl.static_range(N_WEIGHTS):
        at = row * N_WEIGHTS + number
        part = load_row(parts, bias, at, n, dim, columns, is_there, N_PARTS, dtype)
        total += part * tl.load(routing_weights + at)
    tl.store(y + row * dim + columns, total.to(dtype), is_there)


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


@triton.jit(do_not_specialize=["n"])
def _gate(
    x, bias, y, n, x_stride, channels, alpha, limit,
    KIND: tl.constexpr, N_PARTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    await_inputs()
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_there = columns < channels
    dtype: tl.constexpr = y.dtype.element_ty
    gate = load_row(x, bias, row, n, x_stride, columns, is_there, N_PARTS, dtype)
    up = load_row(x, bias, row, n, x_stride, columns + channels, is_there, N_PARTS, dtype)
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
    product = active.to(dtype).to(tl.float32) * up
    tl.store(y + row * channels + columns, product.to(dtype), is_there)


@triton.jit
def _norm(x, y, weight, m, x_stride, y_stride, dim, eps, OFFSET: tl.constexpr, SIZE: tl.constexpr):
    await_inputs()
    row = tl.program_id(0)
    group, within = (row // m).to(tl.int64), row % m * dim
    columns = tl.arange(0, SIZE)
    is_there = columns < dim
    own = tl.load(x + group * x_stride + within + columns, is_there, 0).to(tl.float32)
    normed = normalised(own, weight + columns, is_there, dim, eps, OFFSET, y.dtype.element_ty)
    tl.store(y + group * y_stride + within + columns, normed, is_there)


@triton.jit(do_not_specialize=["n"])
def _add_norm(
    x, y, bias, post_weight, weight, normed, n, x_stride, y_stride, dim, eps,
    OFFSET: tl.constexpr, N_PARTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    await_inputs()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)
    is_there = columns < dim
    own_x = x + row * x_stride + columns
    dtype: tl.constexpr = x.dtype.element_ty
    added = load_row(y, bias, row, n, y_stride, columns, is_there, N_PARTS, dtype)
    if post_weight is not None:
        added = normalised(added, post_weight + columns, is_there, dim, eps, OFFSET, dtype)
    total = tl.load(own_x, is_there, 0).to(tl.float32) + added
    rounded = total.to(dtype)
    tl.store(own_x, rounded, is_there)
    own = rounded.to(tl.float32)
    result = normalised(own, weight + columns, is_there, dim, eps, OFFSET, dtype)
    tl.store(normed + row * dim + columns, result, is_there)


@triton.jit
def normalised(row, weight, is_there, dim, eps, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """A row / its rms * (weight + OFFSET), rounded to DTYPE and returned in float32.

    The row is in float32 and padded with zeros.
    """
    mean = tl.sum(row * row) / dim + eps
    # mean * 0 is NaN for an infinite mean, which would make the row zeros.
    normed = row * (tl.rsqrt(mean) + mean * 0)
    factor = tl.load(weight, is_there, 0).to(tl.float32)
    if OFFSET == 0:
        normed = normed.to(DTYPE).to(tl.float32)  # rounded, as in torch
    else:
        factor += OFFSET
    return (normed * factor).to(DTYPE).to(tl.float32)
