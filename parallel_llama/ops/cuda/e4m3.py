"""Conversion of e4m3 floats in software, since only GPUs from sm_89 on have the type.

Source: e4m3, FP8 formats for deep learning, arXiv 2209.05433.
"""

import triton
import triton.language as tl


# Two functions that agree on finite numbers; only the second one handles NaN. Which one is faster
# in a kernel depends on the kernel's use of registers.
@triton.jit
def from_e4m3(bytes_):
    """Bytes of finite e4m3 numbers as float32: shifts the bits and rescales the exponent."""
    bits = (bytes_.to(tl.int8, bitcast=True).to(tl.int32) << 20) & ~0x78000000
    return bits.to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def from_e4m3_or_nan(bytes_):
    """Any bytes as float32, NaN included."""
    bits = bytes_.to(tl.int32)
    rest = bits & 0x7F
    size = (rest << 20).to(tl.float32, bitcast=True) * 2.0**120
    signed = tl.where(bits == rest, size, -size)
    return tl.where(rest == 0x7F, float("nan"), signed)


@triton.jit
def to_e4m3(x):
    """float32 numbers up to 448, rounded to nearest even, as bytes."""
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    # Rounds the mantissa from 23 to 3 bits and changes the exponent's bias from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Numbers below 2 ** -6 are multiples of 2 ** -9.
    small = ((tl.abs(x) * 512 + 12582912.0) - 12582912.0).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(tl.abs(x) < 0.015625, small, normal) | sign).to(tl.uint8)
