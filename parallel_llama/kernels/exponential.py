"""exp for a vector, in a kernel's own code.

Source: Cody and Waite, Software Manual for the Elementary Functions, chapter 6.
"""

import math

import torch
from llvmlite import ir

from parallel_llama.kernels.builder import Lanes

_LN2, _LN2_REST = math.log(2), 2.3190468138462996e-17  # what float64 leaves over of ln 2
_DEGREE = {torch.float32: 7, torch.float64: 13}


def exp(b: ir.IRBuilder, lanes: Lanes, x: ir.Value) -> ir.Value:
    """exp(x) for x <= 0: exactly 0 about where normal numbers end, NaN for NaN.

    x = n ln 2 + r with a whole n and |r| <= ln 2 / 2, so exp(x) = 2^n (1 + r + r^2 / 2! + ...).
    """
    numbers, degree = torch.finfo(lanes.dtype), _DEGREE[lanes.dtype]
    n_mantissa = round(-math.log2(numbers.eps))
    # A number so large that its last bit counts ones: adding it rounds, and leaves n in low bits.
    shift = lanes.every(1.5 * 2**n_mantissa)
    shifted = lanes.fma(b, x, lanes.every(1 / _LN2), shift)
    n = b.fsub(shifted, shift)
    ln2 = torch.tensor(_LN2, dtype=lanes.dtype).item()
    r = lanes.fma(b, n, lanes.every(-ln2), x)
    r = lanes.fma(b, n, lanes.every(-(_LN2 - ln2 + _LN2_REST)), r)
    series = lanes.every(1 / math.factorial(degree))
    for power in reversed(range(degree)):
        series = lanes.fma(b, series, r, lanes.every(1 / math.factorial(power)))
    integers = ir.VectorType(ir.IntType(lanes.bits), lanes.width)
    places = ir.Constant(integers, [n_mantissa] * lanes.width)
    n_in_exponent = b.shl(b.bitcast(shifted, integers), places)
    two_to_n = b.bitcast(b.add(n_in_exponent, b.bitcast(lanes.every(1.0), integers)), lanes.vector)
    too_small = b.fcmp_ordered("<", x, lanes.every(math.ceil(math.log(numbers.tiny))))
    return b.select(too_small, lanes.every(0.0), b.fmul(series, two_to_n))
