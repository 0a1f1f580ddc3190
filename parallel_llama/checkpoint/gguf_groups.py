"""GGUF's blocks of 32 values as they are: integers, scales and minima, which are not multiplied.

Source: the structures block_q8_0, block_q5_0, block_q4_0 and block_q4_1 of ggml's ggml-common.h.
"""

import torch
from torch import Tensor

from parallel_llama.dtypes import GGUF_GROUPS, GROUP_SIZE
from parallel_llama.ops.groups import Groups

_HALF = GROUP_SIZE // 2


def groups_of(type_name: str, blocks: Tensor) -> Groups:
    """The matrix in some rows of blocks of a type that `GGUF_GROUPS` has.

    Shapes: blocks [out, n_groups, bytes of a block] uint8.
    """
    form = GGUF_GROUPS[type_name]
    scales = _float16(blocks[..., :2])
    mins = _float16(blocks[..., 2:4]) if form.has_min else None
    if type_name == "Q8_0":
        integers = blocks[..., 2:].contiguous().view(torch.int8)
    else:
        bits = blocks[..., -_HALF:]
        integers = torch.cat((bits & 15, bits >> 4), -1).to(torch.int8)
        if type_name == "Q5_0":
            integers += _fifth_bits(blocks[..., 2:6])
        if not form.has_min:
            integers -= 16 if type_name == "Q5_0" else 8
    return Groups(form, integers.flatten(1), scales, mins)


def _float16(pairs: Tensor) -> Tensor:
    return pairs.contiguous().view(torch.float16)[..., 0]


def _fifth_bits(four_bytes: Tensor) -> Tensor:
    """16 where the value's bit is set. Shapes: [..., 4] -> [..., 32]."""
    bits = four_bytes[..., None] >> torch.arange(8, dtype=torch.uint8)
    return ((bits & 1) << 4).flatten(-2).to(torch.int8)
