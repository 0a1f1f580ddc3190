"""Floats of 8 bits as their bits, for GPUs without that type: the hardware has it from sm_89 on.

Source: e4m3, FP8 formats for deep learning, arXiv 2209.05433.
"""

import triton
import triton.language as tl


# Two ways with the same results for numbers: each leaves its users the registers that they need.
@triton.jit
def from_e4m3(bytes_):
    """Bytes of finite numbers as float32: the same bits, with an exponent from elsewhere."""
    bits = (bytes_.to(tl.int8, bitcast=True).to(tl.int32) << 20) & ~0x78000000
    return bits.to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def from_e4m3_or_nan(bytes_):
    """The same of any bytes."""
    bits = bytes_.to(tl.int32)
    rest = bits & 0x7F
    size = (rest << 20).to(tl.float32, bitcast=True) * 2.0**120
    signed = tl.where(bits == rest, size, -size)
    return tl.where(rest == 0x7F, float("nan"), signed)


@triton.jit
def to_e4m3(x):
    """Numbers of no more than 448 in float32, rounded, as bytes."""
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    # 3 bits of a mantissa stay of 23, the nearest, of two the even one; and the exponent's bias of
    # 127 becomes 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2 ** -6 they are multiples of 2 ** -9.
    small = ((tl.abs(x) * 512 + 12582912.0) - 12582912.0).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(tl.abs(x) < 0.015625, small, normal) | sign).to(tl.uint8)
