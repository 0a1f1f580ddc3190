"""Gated activations in one launch; torch takes two, and writes what lies between them."""

from math import pi, sqrt

import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.ops.cuda.launch import launch

_SIZE = 1024


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up, which lie side by side. Shapes: [T, 2 * channels] -> [T, channels]."""
    return _gated(x, "silu")


def gelu_and_mul(x: Tensor, *, is_tanh: bool) -> Tensor:
    """gelu(gate) * up, which lie side by side. Shapes: [T, 2 * channels] -> [T, channels]."""
    return _gated(x, "gelu_tanh" if is_tanh else "gelu")


def _gated(x: Tensor, kind: str) -> Tensor:
    assert x.stride(1) == 1
    n, channels = len(x), x.shape[1] // 2
    y = x.new_empty(n, channels)
    grid = (triton.cdiv(channels, _SIZE), n)
    launch(_gate, grid, x, y, x.stride(0), channels, KIND=kind, SIZE=_SIZE)
    return y


_ROOT_HALF = tl.constexpr(sqrt(0.5))
_SLOPE = tl.constexpr(-sqrt(8 / pi))


@triton.jit
def _gate(x, y, x_stride, channels, KIND: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_there = columns < channels
    own = x + row * x_stride + columns
    gate = tl.load(own, is_there, 0).to(tl.float32)
    up = tl.load(own + channels, is_there, 0).to(tl.float32)
    if KIND == "silu":
        active = gate / (1 + tl.exp(-gate))
    elif KIND == "gelu":
        active = gate * 0.5 * (1 + tl.erf(gate * _ROOT_HALF))
    else:  # (1 + tanh(z)) / 2 is 1 / (1 + exp(-2 z))
        active = gate / (1 + tl.exp((gate + gate * gate * gate * 0.044715) * _SLOPE))
    # Rounded between, as torch does.
    product = active.to(y.dtype.element_ty).to(tl.float32) * up
    tl.store(y + row * channels + columns, product.to(y.dtype.element_ty), is_there)
