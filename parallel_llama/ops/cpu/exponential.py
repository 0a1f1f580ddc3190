"""exp and tanh for a vector, in a kernel's own code.

Source: Cody and Waite, Software Manual for the Elementary Functions, chapter 6.
"""

import math

import torch
from llvmlite import ir

from parallel_llama.ops.cpu.builder import Lanes, Value, fma, where

_LN2, _LN2_REST = math.log(2), 2.3190468138462996e-17  # what float64 leaves over of ln 2
_DEGREE = {torch.float32: 7, torch.float64: 13}


def exp(lanes: Lanes, x: Value) -> Value:
    """exp(x) for x <= 0: exactly 0 about where normal numbers end, NaN for NaN.

    x = n ln 2 + r with a whole n and |r| <= ln 2 / 2, so exp(x) = 2^n (1 + r + r^2 / 2! + ...).
    """
    numbers, degree = torch.finfo(lanes.computed), _DEGREE[lanes.computed]
    n_mantissa = round(-math.log2(numbers.eps))
    # A number so large that its last bit counts ones: adding it rounds, and leaves n in low bits.
    shift = 1.5 * 2**n_mantissa
    shifted = fma(x, 1 / _LN2, shift)
    n = shifted - shift
    ln2 = torch.tensor(_LN2, dtype=lanes.computed).item()
    r = fma(n, -ln2, x)
    r = fma(n, -(_LN2 - ln2 + _LN2_REST), r)
    series = x.like(1 / math.factorial(degree))
    for power in reversed(range(degree)):
        series = fma(series, r, 1 / math.factorial(power))
    integers = ir.VectorType(ir.IntType(numbers.bits), lanes.width)
    # An exponent begins after the mantissa; added to that of 1, n makes it that of 2^n.
    one = lanes.constant(x.b, 1).bits_as(integers)
    two_to_n = (one + (shifted.bits_as(integers) << n_mantissa)).bits_as(lanes.vector)
    too_small = x < math.ceil(math.log(numbers.tiny))
    return where(too_small, x.like(0), series * two_to_n)


def tanh(lanes: Lanes, x: Value) -> Value:
    """tanh(x), with an error of a few last places of 1 however small it is; NaN for NaN."""
    e = exp(lanes, abs(x) * -2)
    size = (1 - e) / (e + 1)
    return where(x < 0, -size, size)
