"""Floats of 16 and 8 bits as their bits, which a CPU need not compute with.

Source: e4m3, FP8 formats for deep learning, arXiv 2209.05433.
"""

from llvmlite import ir

from parallel_llama.ops.cpu.builder import F16, I16, I32, Value, where

# Where numbers of a byte are given a float16's bits, their exponents mean this much less.
_E4M3_IN_F16 = 2.0**8
_LEAST_NORMAL = 2.0**-6  # of e4m3; below it lie the multiples of 2^-9


def to_bfloat16(numbers: Value) -> Value:
    """The bits of float32 numbers as bfloat16, in integers of 32 bits."""
    bits = _bits(numbers)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return where(is_nan, bits.like(0x7FC0), _without_last(bits, 16))


def from_e4m3(stored: Value, vector: ir.VectorType) -> Value:
    """Bytes of finite e4m3 numbers as these numbers in a vector of wider ones."""
    # The sign stays in front; the other bits move to those of a float16 with the same value but for
    # the bias of the exponent.
    bits = (stored.resized(ir.VectorType(I16, vector.count)) << 7) & ~(1 << 14)
    return bits.bits_as(ir.VectorType(F16, vector.count)).to(vector) * _E4M3_IN_F16


def to_e4m3(numbers: Value) -> Value:
    """The bits of float32 numbers of at most 448 as e4m3, in integers of 32 bits."""
    size = abs(numbers)
    # Of exponents that begin at 2^-127 and at 2^-7.
    normal = _without_last(_bits(size), 20) - (120 << 3)
    # Added to a number whose last bit counts 2^-9, the others are rounded to that.
    small = _bits(size + 2.0**14) & 0xF
    sign = (_bits(numbers) >> 24) & 0x80
    return where(size < _LEAST_NORMAL, small, normal) | sign


def _without_last(bits: Value, n: int) -> Value:
    """Integers without their last n bits, rounded to the nearest, else to the even one."""
    last = (bits >> n) & 1
    rounded: Value = (bits + last + ((1 << (n - 1)) - 1)) >> n
    return rounded


def _bits(numbers: Value) -> Value:
    return numbers.bits_as(ir.VectorType(I32, numbers.raw.type.count))
