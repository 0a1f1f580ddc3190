"""GPTQ's and AWQ's tensors as they are: words of eight integers, zeros and scales of groups.

    qweight   integers: [in / 8, out] in GPTQ, [in, out / 8] in AWQ
    qzeros    the integers that stand for zero: [groups, out / 8]
    scales    [groups, out] float16
    g_idx     of GPTQ, each input's group: [in]

The eight integers of a word are side by side, the first in its lowest bits; but in AWQ come first
the four of even number, then those of odd.

Source: the layers of AutoGPTQ 0.7 and AutoAWQ 0.2.
"""

from collections.abc import Callable, Sequence
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


# Which four bits of a word of eight outputs, counted from the lowest, belong to each of them.
_ORDER = {"gptq": (0, 1, 2, 3, 4, 5, 6, 7), "awq": (0, 4, 1, 5, 2, 6, 3, 7)}


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
        """Those of the tensors that it may have beside them: groups in order, a bias of zeros."""
        n_outputs, n_inputs = self.place.shape
        return {"g_idx": (n_inputs,), "bias": (n_outputs,)}


def read_groups(packing: Packing, block: Block, read: Read) -> Groups:
    """Some outputs of a quantised matrix, and of those some inputs, whole groups of 32."""
    form, outputs, inputs = packing.form, block.rows, block.columns
    groups = range(inputs.start // form.block, -(-inputs.stop // form.block))
    words = range(outputs.start // PER_WORD, -(-outputs.stop // PER_WORD))
    own = slice(outputs.start - words.start * PER_WORD, outputs.stop - words.start * PER_WORD)
    order = _ORDER[packing.method]
    if packing.method == "gptq":
        held = range(inputs.start // PER_WORD, inputs.stop // PER_WORD)
        integers = _along(read("qweight", held, outputs))
    else:
        integers = _across(read("qweight", inputs, words), order)[own]
    zeros = _across(read("qzeros", groups, words), order)[own]
    zeros = (zeros + packing.lowered) & 15  # 0 is stored as 15 where lowered
    n_before = inputs.start % form.block // GROUP_SIZE
    factors = zeros.repeat_interleave(form.n_shared, 1)
    factors = factors[:, n_before:][:, : len(inputs) // GROUP_SIZE]
    halves = read("scales", groups, outputs).view(-1).view(torch.float16)
    scales = halves.view(len(groups), len(outputs)).transpose(0, 1).contiguous()
    return Groups(
        form,
        integers.view(torch.int8),
        scales,
        -scales,
        factors.contiguous().view(torch.int8),
        n_before,
    )


def _along(words: Tensor) -> Tensor:
    """Words of eight inputs. Shapes: bytes [in / 8, out * 4] -> [out, in]."""
    # Words are turned round before they are taken apart: there are fewer of them.
    bytes_ = _turned(words).flatten(1)  # [out, in / 2]
    return torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(1)


def _across(words: Tensor, order: Sequence[int]) -> Tensor:
    """Words of eight outputs. Shapes: bytes [n, out / 8 * 4] -> [out, n]."""
    bytes_ = _turned(words).transpose(1, 2).contiguous()  # [out / 8, 4, n]
    integers = torch.stack((bytes_ & 15, bytes_ >> 4), 2).flatten(1, 2)  # [out / 8, 8, n]
    return integers[:, order].flatten(0, 1)


def _turned(words: Tensor) -> Tensor:
    """Shapes: bytes [n, m * 4] -> [m, n, 4]."""
    n, m = len(words), words.shape[1] // 4
    whole = words.view(-1).view(torch.int32).view(n, m)
    return whole.transpose(0, 1).reshape(-1).view(torch.uint8).view(m, n, 4)
