"""Sums of four products of bytes in every lane of 32 bits, as the CPU at hand does them best.

All ways give the same integers.

Source: Intel 64 and IA-32 architectures, software developer's manual, volume 2: VPDPBUSD, VPMADDWD;
Arm A64 instruction set architecture: USDOT.
"""

from typing import Literal

from llvmlite import ir

from parallel_llama.ops.cpu.builder import I8, I16, I32, Value, intrinsic

# vnni, usdot: one instruction, of Intel or of Arm; madd: two products of 16 bits at a time; plain:
# what every CPU has.
ByteDots = Literal["vnni", "usdot", "madd", "plain"]

_MADD = {64: "x86.avx512.pmaddw.d.512", 32: "x86.avx2.pmadd.wd"}


def add_byte_dots(how: ByteDots, total: Value, unsigned: Value, signed: Value) -> Value:
    """total + unsigned . signed, in each lane its own four bytes.

    Shapes: all vectors of as many integers of 32 bits, two of them read as four bytes each.
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
    for shift in (24, 16, 8, 0):  # the byte moves to the front, and to the end with its sign
        total += ((unsigned >> (24 - shift)) & 0xFF) * (signed << shift).signed_shift(24)
    return total


def _madd(one: Value, other: Value, n: int) -> Value:
    """Sums of two products of neighbours. Shapes: vectors of 2 n I16 -> n I32."""
    return intrinsic(_MADD[4 * n], ir.VectorType(I32, n), one, other)
