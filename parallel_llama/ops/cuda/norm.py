"""RMSNorm in one launch, a row a program; also of a sum, which is kept."""

import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.ops.cuda.launch import launch, tile, warps


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, y: Tensor) -> None:
    """y = x / rms(x) * (weight + offset); nan for a row whose squares are too large to be summed.

    y may be x.

    Shapes: x, y [n, dim], or [n, m, dim] with the m rows in one piece; weight [dim].
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
    """x += y. Returns: `rms_norm` of x then. Shapes: x, y [n, dim]; weight [dim]."""
    n, dim = x.shape
    assert x.stride(1) == y.stride(1) == 1 and x.shape == y.shape
    assert weight.is_contiguous() and weight.shape == (dim,)
    normed = x.new_empty(n, dim)
    numbers = (x.stride(0), y.stride(0), dim, eps)
    size = {"SIZE": tile(dim), "num_warps": warps(dim)}
    launch(_add_norm, (n,), x, y, weight, normed, *numbers, OFFSET=offset, **size)
    return normed


@triton.jit
def _norm(x, y, weight, m, x_stride, y_stride, dim, eps, OFFSET: tl.constexpr, SIZE: tl.constexpr):
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
    """A row, whose missing numbers are zeros, divided by its rms, and multiplied by its weight."""
    mean = tl.sum(row * row, 0) / dim + eps
    # Nothing is added, but for an infinite mean: divided by that, the row would become zeros.
    normed = row * (tl.rsqrt(mean) + mean * 0)
    factor = tl.load(weight, is_there, 0).to(tl.float32)
    if OFFSET == 0:
        normed = normed.to(DTYPE).to(tl.float32)  # a number of the dtype, as the weight is
    else:
        factor += OFFSET
    return (normed * factor).to(DTYPE)
