"""Vector arithmetic for kernels: exp, tanh, erfc, 16- and 8-bit floats, and dot products of bytes.

Sources: exp, Cody and Waite, Software Manual for the Elementary Functions, chapter 6; e4m3, FP8
formats for deep learning, arXiv 2209.05433; dot products, Intel 64 and IA-32 architectures software
developer's manual, volume 2: VPDPBUSD, VPMADDWD; Arm A64 instruction set architecture: USDOT.
"""

import math
from typing import Literal

import torch
from llvmlite import ir

from parallel_llama.ops.cpu.ir import F16, I8, I16, I32, Lanes, Value, fma, intrinsic, where

_LN2, _LN2_REST = math.log(2), 2.3190468138462996e-17  # ln 2 in float64, and its rounding error
_DEGREE = {torch.float32: 7, torch.float64: 13}
# Rounded here, since a kernel may be built while a step is recorded, which must not call torch.
_ROUNDED_LN2 = {dtype: torch.tensor(_LN2, dtype=dtype).item() for dtype in _DEGREE}


def exp(lanes: Lanes, x: Value) -> Value:
    """exp(x) for x <= 0; 0 if exp(x) is near or below the smallest normal number, NaN for NaN.

    x = n ln 2 + r with an integer n and |r| <= ln 2 / 2: exp(x) = 2^n (1 + r + r^2 / 2! + ...).
    """
    numbers, degree = torch.finfo(lanes.computed), _DEGREE[lanes.computed]
    n_mantissa = round(-math.log2(numbers.eps))
    # The last mantissa bit of `shift` is worth 1. So a sum with it is rounded to an integer, and
    # the low bits of the sum are n.
    shift = 1.5 * 2**n_mantissa
    shifted = fma(x, 1 / _LN2, shift)
    n = shifted - shift
    ln2 = _ROUNDED_LN2[lanes.computed]
    r = fma(n, -ln2, x)
    r = fma(n, -(_LN2 - ln2 + _LN2_REST), r)
    series = x.like(1 / math.factorial(degree))
    for power in reversed(range(degree)):
        series = fma(series, r, 1 / math.factorial(power))
    integers = ir.VectorType(ir.IntType(numbers.bits), lanes.width)
    # The exponent is above the mantissa; adding n to the exponent of 1 gives 2^n.
    one = lanes.constant(x.b, 1).bits_as(integers)
    two_to_n = (one + (shifted.bits_as(integers) << n_mantissa)).bits_as(lanes.vector)
    too_small = x < math.ceil(math.log(numbers.tiny))
    return where(too_small, x.like(0), series * two_to_n)


def sigmoid(lanes: Lanes, x: Value) -> Value:
    """1 / (1 + exp(-x)), computed with exp(-|x|), which cannot overflow."""
    e = exp(lanes, -abs(x))
    return where(x < 0, e, 1) / (e + 1)


def tanh(lanes: Lanes, x: Value) -> Value:
    """tanh(x), with an absolute error of a few units in the last place of 1; NaN for NaN."""
    e = exp(lanes, abs(x) * -2)
    size = (1 - e) / (e + 1)
    return where(x < 0, -size, size)


# Chebyshev coefficients of log(erfc(z) exp(z^2) / t) in 2 t - 1, where t = 2 / (2 + z), computed
# with 40 digits; the first is halved. The function is smooth from z = 0 to infinity.
_ERFC = (
    -0.6513268598908547171, 0.6419697923564902603, 0.019476473204185836312,
    -0.0095615147868086316419, -0.0009465953444820368663, 0.00036683949785276145187,
    4.2523324806907771645e-5, -2.0278578112534243154e-5, -1.6242900046470255135e-6,
    1.3036558355805232018e-6, 1.5626441722066143178e-8, -8.5238095914926542525e-8,
    6.5290544390988514964e-9, 5.0593434955514689418e-9, -9.9136415649303308674e-10,
    -2.2736512229318358557e-10, 9.646791102015526802e-11, 2.3940380830391147447e-12,
    -6.8860275264975533984e-12, 8.9448792730907257167e-13, 3.1309213993429580783e-13,
    -1.1270822361367252366e-13, 3.8109052551892320552e-16, 7.1060976136092369878e-15,
    -1.5230282014571043043e-15, -9.4574945712912340005e-17, 1.2102371892242789923e-16,
)  # fmt: skip
_N_ERFC = {torch.float32: 15, torch.float64: len(_ERFC)}


def erfc(lanes: Lanes, z: Value) -> Value:
    """1 - erf(z) for z >= 0; NaN for NaN."""
    t = 2 / (z + 2)
    y = fma(t, 2, -1)
    last, before = z.like(0), z.like(0)  # of Clenshaw's recurrence
    for coefficient in reversed(_ERFC[1 : _N_ERFC[lanes.computed]]):
        last, before = fma(y * 2, last, coefficient - before), last
    logarithm = fma(y, last, _ERFC[0] - before)
    return t * exp(lanes, fma(-z, z, logarithm))


# The factor between an e4m3 number and a float16 with the same exponent bits: their biases differ.
_E4M3_IN_F16 = 2.0**8
_LEAST_NORMAL = 2.0**-6  # of e4m3; subnormal numbers are multiples of 2^-9


def to_bfloat16(numbers: Value) -> Value:
    """Rounds float32 numbers to bfloat16. Returns: their bits in 32-bit integers."""
    bits = _bits(numbers)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return where(is_nan, bits.like(0x7FC0), _without_last(bits, 16))


def from_e4m3(stored: Value, vector: ir.VectorType) -> Value:
    """Converts bytes of finite e4m3 numbers to a vector of a wider type."""
    # Shifted by 7, the bits are a float16 of the same value, except for the exponent's bias.
    bits = (stored.resized(ir.VectorType(I16, vector.count)) << 7) & ~(1 << 14)
    return bits.bits_as(ir.VectorType(F16, vector.count)).to(vector) * _E4M3_IN_F16


def to_e4m3(numbers: Value) -> Value:
    """Rounds float32 numbers of at most 448 to e4m3. Returns: their bits in 32-bit integers."""
    size = abs(numbers)
    # The exponents' biases are 127 and 7.
    normal = _without_last(_bits(size), 20) - (120 << 3)
    # The last bit of 2^14 is worth 2^-9, so the sum is a multiple of that.
    small = _bits(size + 2.0**14) & 0xF
    sign = (_bits(numbers) >> 24) & 0x80
    return where(size < _LEAST_NORMAL, small, normal) | sign


def _without_last(bits: Value, n: int) -> Value:
    """Shifts integers right by n bits, rounding to nearest, ties to even."""
    last = (bits >> n) & 1
    rounded: Value = (bits + last + ((1 << (n - 1)) - 1)) >> n
    return rounded


def _bits(numbers: Value) -> Value:
    return numbers.bits_as(ir.VectorType(I32, numbers.raw.type.count))


# How a CPU computes dot products of bytes. vnni, usdot: one instruction, of Intel or Arm; madd: two
# products of 16 bits at a time; plain: with instructions that every CPU has.
ByteDots = Literal["vnni", "usdot", "madd", "plain"]

_MADD = {64: "x86.avx512.pmaddw.d.512", 32: "x86.avx2.pmadd.wd"}


def add_byte_dots(how: ByteDots, total: Value, unsigned: Value, signed: Value) -> Value:
    """total + unsigned . signed over the four bytes of each lane; exact, however it is computed.

    Shapes: vectors of n 32-bit integers; `unsigned` and `signed` are read as 4 n bytes.
    """
    n = total.raw.type.count
    if how in ("vnni", "usdot"):
        bytes_ = (each.bits_as(ir.VectorType(I8, 4 * n)) for each in (unsigned, signed))
        of_arm = f"aarch64.neon.usdot.v{n}i32.v{4 * n}i8"
        name = of_arm if how == "usdot" else f"x86.avx512.vpdpbusd.{32 * n}"
        return intrinsic(name, total.raw.type, total, *bytes_)
    if how == "madd":
        words = ir.VectorType(I16, 2 * n)
        one, other = unsigned.bits_as(words), signed.bits_as(words)
        even = _madd(one & 0xFF, (other << 8).signed_shift(8), n)
        return total + even + _madd(one >> 8, other.signed_shift(8), n)
    for shift in (24, 16, 8, 0):  # shifts a byte to the top, and down again with its sign
        total += ((unsigned >> (24 - shift)) & 0xFF) * (signed << shift).signed_shift(24)
    return total


def _madd(one: Value, other: Value, n: int) -> Value:
    """Multiplies two vectors and adds adjacent products in pairs. Shapes: 2 n I16 -> n I32."""
    return intrinsic(_MADD[4 * n], ir.VectorType(I32, n), one, other)
