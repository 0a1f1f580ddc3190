"""GPTQ's and AWQ's tensors as they are: words of eight integers, zeros and scales of groups.

    qweight   integers: [in / 8, out] in GPTQ, [in, out / 8] in AWQ
    qzeros    the integers that stand for zero: [groups, out / 8]
    scales    [groups, out] float16
    g_idx     of GPTQ, each input's group: [in]

The eight integers of a word are side by side, the first in its lowest bits; but in AWQ come first
the four of even number, then those of odd.

Source: the layers of AutoGPTQ 0.7 and AutoAWQ 0.2.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import Block
from parallel_llama.config.hf_groups import PER_WORD, Packing
from parallel_llama.dtypes import GROUP_SIZE
from parallel_llama.families.places import Place
from parallel_llama.ops.groups import Groups

# Some rows and columns of the tensor that ends so: uint8 [rows, columns * bytes of a value].
Read = Callable[[str, range, range], Tensor]

# The dtypes of these tensors, as the files call them.
PACKED_DTYPES = {"qweight": ("I32",), "qzeros": ("I32",), "g_idx": ("I32",), "scales": ("F16",)}


@dataclass(frozen=True)
class PackedMatrix:
    """A quantised matrix [out, in]; `place` is where it would lie as plain values."""

    packing: Packing
    place: Place

    @property
    def base(self) -> str:
        """How the names of all its tensors begin."""
        return self.place.name.removesuffix("weight")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of the tensors that it needs, by the ends of their names."""
        n_outputs, n_inputs = self.place.shape
        n_groups, n_words = -(-n_inputs // self.packing.form.block), n_outputs // PER_WORD
        is_gptq = self.packing.method == "gptq"
        integers = (n_inputs // PER_WORD, n_outputs) if is_gptq else (n_inputs, n_words)
        return {"qweight": integers, "qzeros": (n_groups, n_words), "scales": (n_groups, n_outputs)}

    @property
    def more_shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of the tensors that it may have beside them, in which nothing more may be said."""
        n_outputs, n_inputs = self.place.shape
        return {"g_idx": (n_inputs,), "bias": (n_outputs,)}


def read_groups(packing: Packing, block: Block, read: Read) -> Groups:
    """Some outputs of a quantised matrix, and of those some inputs, whole groups of 32."""
    form, outputs, inputs = packing.form, block.rows, block.columns
    groups = range(inputs.start // form.block, -(-inputs.stop // form.block))
    words = range(outputs.start // PER_WORD, -(-outputs.stop // PER_WORD))
    own = slice(outputs.start - words.start * PER_WORD, outputs.stop - words.start * PER_WORD)
    if packing.method == "gptq":
        held = range(inputs.start // PER_WORD, inputs.stop // PER_WORD)
        integers = _halves(read("qweight", held, outputs)).transpose(0, 1)  # [out, in / 8, 8]
        zeros = _halves(read("qzeros", groups, words))
    else:
        integers = _in_order(_halves(read("qweight", inputs, words)))
        integers = integers.flatten(1)[:, own].transpose(0, 1)  # [out, in]
        zeros = _in_order(_halves(read("qzeros", groups, words)))
    zeros = (zeros.flatten(1)[:, own] + packing.lowered) & 15  # 0 is stored as 15 where lowered
    n_before = inputs.start % form.block // GROUP_SIZE
    factors = zeros.transpose(0, 1).repeat_interleave(form.n_shared, 1)
    factors = factors[:, n_before:][:, : len(inputs) // GROUP_SIZE]
    halves = read("scales", groups, outputs).view(-1).view(torch.float16)
    scales = halves.view(len(groups), len(outputs)).transpose(0, 1).contiguous()
    return Groups(
        form,
        integers.reshape(len(outputs), len(inputs)).view(torch.int8),
        scales,
        -scales,
        factors.contiguous().view(torch.int8),
        n_before,
    )


def _halves(words: Tensor) -> Tensor:
    """The integers of words, the lowest bits first. Shapes: [n, m * 4] uint8 -> [n, m, 8]."""
    of_bytes = words.view(len(words), words.shape[1] // 4, 4)
    return torch.stack((of_bytes & 15, of_bytes >> 4), -1).flatten(2)


def _in_order(integers: Tensor) -> Tensor:
    """AWQ's integers side by side. Shapes: [n, m, 8] -> the same."""
    return integers.view(*integers.shape[:2], 2, 4).transpose(2, 3).flatten(2)
