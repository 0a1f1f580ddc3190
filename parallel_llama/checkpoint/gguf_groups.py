"""GGUF's blocks as they are: integers, scales, minima and factors, which are not multiplied.

Source: the structures block_q8_0 to block_q2_K of ggml's ggml-common.h.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_llama.dtypes import GGUF_GROUPS, GroupFormat
from parallel_llama.ops.groups import Groups


@dataclass(frozen=True)
class _Bits:
    """Where a block has some bits of each integer: `n_bytes` from byte `start` on.

    Of a run of so many bytes the lowest bits come first, those of all bytes, then the next.
    """

    n_bits: int
    start: int
    n_bytes: int
    run: int

    def of(self, blocks: Tensor) -> Tensor:
        """Shapes: [..., bytes of a block] -> [..., values] uint8."""
        runs = blocks[..., self.start : self.start + self.n_bytes]
        runs = _in_runs(runs, 1, self.run)
        shifts = torch.arange(0, 8, self.n_bits, dtype=torch.uint8)[:, None]
        bits: Tensor = (runs >> shifts) & ((1 << self.n_bits) - 1)
        return bits.flatten(-3)


@dataclass(frozen=True)
class _Block:
    """Where a block has its scale, behind which its minimum is, and its integers' bits."""

    scale: int
    bits: tuple[_Bits, ...]  # the lowest first


_BLOCKS = {
    "Q8_0": _Block(0, (_Bits(8, 2, 32, 32),)),
    "Q5_0": _Block(0, (_Bits(4, 6, 16, 16), _Bits(1, 2, 4, 1))),
    "Q5_1": _Block(0, (_Bits(4, 8, 16, 16), _Bits(1, 4, 4, 1))),
    "Q4_0": _Block(0, (_Bits(4, 2, 16, 16),)),
    "Q4_1": _Block(0, (_Bits(4, 4, 16, 16),)),
    "Q6_K": _Block(208, (_Bits(4, 0, 128, 64), _Bits(2, 128, 64, 32))),
    "Q5_K": _Block(0, (_Bits(4, 48, 128, 32), _Bits(1, 16, 32, 32))),
    "Q4_K": _Block(0, (_Bits(4, 16, 128, 32),)),
    "Q3_K": _Block(108, (_Bits(2, 32, 64, 32), _Bits(1, 0, 32, 32))),
    "Q2_K": _Block(80, (_Bits(2, 16, 64, 32),)),
}


def groups_of(type_name: str, blocks: Tensor) -> Groups:
    """The matrix in some rows of blocks of a type that `GGUF_GROUPS` has.

    Shapes: blocks [out, n_blocks, bytes of a block] uint8.
    """
    form, block = GGUF_GROUPS[type_name], _BLOCKS[type_name]
    integers, n_bits = torch.zeros((), dtype=torch.uint8), 0
    for bits in block.bits:
        integers = integers | (bits.of(blocks) << n_bits)
        n_bits += bits.n_bits
    if type_name != "Q8_0":  # whose bytes have signs
        integers = integers - form.zero
    scales, mins = _float16(blocks, block.scale), None
    if form.has_min:
        mins = _float16(blocks, block.scale + 2)
        mins = -mins if form.min_factors else mins  # with factors they are taken away
    factors = _factors(type_name, form, blocks).flatten(1) if form.n_factors else None
    return Groups(form, integers.view(torch.int8).flatten(1), scales, mins, factors)


def _float16(blocks: Tensor, at: int) -> Tensor:
    """Shapes: [..., bytes of a block] -> [...]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _in_runs(values: Tensor, *run: int) -> Tensor:
    """Shapes: [..., n] -> [..., n / values of a run, *run]."""
    *others, n = values.shape  # not left to torch, which cannot tell them where there are none
    return values.reshape(*others, n // math.prod(run), *run)


def _factors(type_name: str, form: GroupFormat, blocks: Tensor) -> Tensor:
    """Shapes: [..., bytes of a block] -> [..., groups, n_factors] int8."""
    if type_name == "Q6_K":
        parts = [blocks[..., 192:208]]
    elif type_name == "Q3_K":
        parts = [(_Bits(4, 96, 8, 8).of(blocks) | (_Bits(2, 104, 4, 4).of(blocks) << 4)) - 32]
    elif type_name == "Q2_K":
        parts = [_Bits(4, 0, 16, 1).of(blocks)[..., first::2] for first in (0, 1)]
    else:
        parts = _six_bits(blocks[..., 4:16])
    by_group = [_in_runs(part, form.n_parts) for part in parts]
    return torch.cat(by_group, -1).view(torch.int8)


def _six_bits(packed: Tensor) -> list[Tensor]:
    """The factors of scales, and those of minima, of 8 groups.

    The first four of either are the lower bits of 4 bytes, whose upper bits belong to the others.

    Shapes: [..., 12] -> [..., 8] each.
    """
    lowest = _Bits(4, 8, 4, 4).of(packed)
    return [
        torch.cat((own & 63, lowest[..., at : at + 4] | ((own >> 6) << 4)), -1)
        for at, own in ((0, packed[..., :4]), (4, packed[..., 4:8]))
    ]
