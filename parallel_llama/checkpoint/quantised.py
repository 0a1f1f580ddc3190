"""Decodes quantised weights of GPTQ, AWQ and GGUF files, and encodes GGUF blocks, both exactly.

GPTQ and AWQ store a matrix [out, in] as several tensors, here for 4-bit integers:

    qweight   integers: [in / 8, out] in GPTQ, [in, out / 8] in AWQ
    qzeros    zero points: [groups, out / 8]
    scales    [groups, out] float16
    g_idx     the group of each input: [in], in GPTQ

Eight 4-bit integers share a 32-bit word, the first in the lowest bits; AWQ stores the even-numbered
ones first. GPTQ also has integers of 2 and 8 bits. GGUF stores a matrix as blocks, each with
integers, scales and perhaps minima and factors.

Source: the layers of AutoGPTQ 0.7 and AutoAWQ 0.2; the structures block_q8_0 to block_q2_K of
ggml's ggml-common.h.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import MatrixBlock
from parallel_llama.checkpoint.scaled import finite_scales
from parallel_llama.config.quantised import Packing
from parallel_llama.dtypes import GGUF_QUANTS, QUANT_GROUP_SIZE, QuantFormat
from parallel_llama.errors import DamagedWeights
from parallel_llama.families.stored_slices import StoredSlice
from parallel_llama.ops.quant import QuantMatrix

# Reads some rows and columns of the tensor with a name suffix: uint8 [rows, columns * itemsize].
Read = Callable[[str, range, range], Tensor]

# The dtypes of these tensors, by their names in safetensors files.
PACKED_DTYPES = {"qweight": ("I32",), "qzeros": ("I32",), "g_idx": ("I32",), "scales": ("F16",)}

_ENCODED_AT_ONCE = 1 << 22  # integers; while they are encoded, each takes several bytes

# For each of the eight outputs of a word: which four bits hold it, counted from the lowest.
_ORDER = {"gptq": (0, 1, 2, 3, 4, 5, 6, 7), "awq": (0, 4, 1, 5, 2, 6, 3, 7)}


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [out, in] of GPTQ or AWQ; `stored_slice` is the slice of the plain matrix."""

    packing: Packing
    stored_slice: StoredSlice

    @property
    def base(self) -> str:
        """The common prefix of the names of its tensors."""
        return self.stored_slice.name.removesuffix("weight")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the required tensors, by the suffixes of their names."""
        (n_outputs, n_inputs), packing = self.stored_slice.shape, self.packing
        n_words, is_gptq = n_outputs // packing.per_word, packing.method == "gptq"
        shapes: dict[str, tuple[int, ...]] = {
            "qweight": (n_inputs // packing.per_word, n_outputs)
            if is_gptq
            else (n_inputs, n_words),
            "qzeros": (self.n_groups, n_words),
            "scales": (self.n_groups, n_outputs),
        }
        return {**shapes, "g_idx": (n_inputs,)} if packing.any_order else shapes

    @property
    def optional_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the optional tensors: g_idx, if groups are in order, and a bias of zeros."""
        n_outputs, n_inputs = self.stored_slice.shape
        ordered: dict[str, tuple[int, ...]] = (
            {} if self.packing.any_order else {"g_idx": (n_inputs,)}
        )
        return {**ordered, "bias": (n_outputs,)}

    @property
    def group_size(self) -> int:
        """The inputs of a group."""
        return self.packing.group_size or self.stored_slice.shape[1]

    @property
    def n_groups(self) -> int:
        return -(-self.stored_slice.shape[1] // self.group_size)

    def values(self, block: MatrixBlock, read: Read) -> Tensor:
        """Decodes a block of a GPTQ matrix. Groups may have any size and any inputs.

        Returns: [rows, columns] float32.

        Raises: DamagedWeights if a scale is NaN or Inf, or g_idx names a group that does not exist.
        """
        packing, outputs, inputs = self.packing, block.rows, block.columns
        per_word, groups = packing.per_word, range(self.n_groups)
        covering = range(inputs.start // per_word, -(-inputs.stop // per_word))
        words = read("qweight", covering, outputs).view(len(covering), len(outputs), 4)
        integers = _integers_of(words, packing.n_bits).transpose(1, 2).flatten(0, 1)
        integers = integers[inputs.start - covering.start * per_word :][: len(inputs)]  # [in, out]
        covering = range(outputs.start // per_word, -(-outputs.stop // per_word))
        words = read("qzeros", groups, covering).view(len(groups), len(covering), 4)
        zeros = _integers_of(words, packing.n_bits).flatten(1)
        zeros = zeros[:, outputs.start - covering.start * per_word :][:, : len(outputs)]
        mask = (1 << packing.n_bits) - 1
        zeros = (zeros + packing.zero_offset) & mask  # wraps around, as in read_packed
        halves = read("scales", groups, outputs).view(-1).view(torch.float16)
        scales = finite_scales(halves.float(), self.base + "scales")
        scales, group = scales.view(len(groups), len(outputs)), self._groups_of(inputs, read)
        values = integers.float().sub_(zeros.float()[group]).mul_(scales[group])
        return values.transpose(0, 1).contiguous()

    def _groups_of(self, inputs: range, read: Read) -> Tensor:
        """The group of each input. Shapes: [inputs] int64."""
        if not self.packing.any_order:
            return torch.arange(inputs.start, inputs.stop) // self.group_size
        groups = read("g_idx", range(1), inputs).view(-1).view(torch.int32).long()
        if (wrong := ((groups < 0) | (groups >= self.n_groups)).nonzero()).numel():
            at = int(wrong[0])
            raise DamagedWeights(
                f"{self.base + 'g_idx'!r:.200} has input {inputs[at]} in group {int(groups[at])} "
                f"of {self.n_groups}; the weights are damaged: fetch them again"
            )
        return groups


def read_packed(packing: Packing, form: QuantFormat, block: MatrixBlock, read: Read) -> QuantMatrix:
    """Reads a block of a GPTQ or AWQ matrix as a `QuantMatrix`, without changing its integers.

    The columns of the block must be whole groups of 32 inputs.
    """
    outputs, inputs, per_word = block.rows, block.columns, packing.per_word
    groups = range(inputs.start // form.block, -(-inputs.stop // form.block))
    words = range(outputs.start // per_word, -(-outputs.stop // per_word))
    selected = slice(outputs.start - words.start * per_word, outputs.stop - words.start * per_word)
    order = _ORDER[packing.method]
    if packing.method == "gptq":
        input_words = range(inputs.start // per_word, inputs.stop // per_word)
        integers = _words_of_inputs(read("qweight", input_words, outputs))
    else:
        integers = _words_of_outputs(read("qweight", inputs, words), order)[selected]
    zeros = _words_of_outputs(read("qzeros", groups, words), order)[selected]
    zeros = (zeros + packing.zero_offset) & 15  # a zero point of 0 is stored as -1, which is 15
    n_before = inputs.start % form.block // QUANT_GROUP_SIZE
    factors = zeros.repeat_interleave(form.n_shared, 1)
    factors = factors[:, n_before:][:, : len(inputs) // QUANT_GROUP_SIZE]
    halves = read("scales", groups, outputs).view(-1).view(torch.float16)
    scales = halves.view(len(groups), len(outputs)).transpose(0, 1).contiguous()
    return QuantMatrix(
        form,
        integers.view(torch.int8),
        scales,
        -scales,
        factors.contiguous().view(torch.int8),
        n_before,
    )


def _integers_of(words: Tensor, n_bits: int) -> Tensor:
    """The integers of little-endian words, the first in the lowest bits.

    Shapes: bytes [..., 4] -> [..., 32 / n_bits] uint8.
    """
    shifts = torch.arange(0, 8, n_bits, dtype=torch.uint8)
    integers: Tensor = (words[..., None] >> shifts) & ((1 << n_bits) - 1)
    return integers.flatten(-2)


def _words_of_inputs(words: Tensor) -> Tensor:
    """Shapes: bytes [in / 8, out * 4] -> [out, in]."""
    # Words are transposed before they are unpacked, because they are fewer than integers.
    bytes_ = _transposed(words).flatten(1)  # [out, in / 2]
    return torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(1)


def _words_of_outputs(words: Tensor, order: Sequence[int]) -> Tensor:
    """Shapes: bytes [n, out / 8 * 4] -> [out, n]."""
    bytes_ = _transposed(words).transpose(1, 2).contiguous()  # [out / 8, 4, n]
    integers = torch.stack((bytes_ & 15, bytes_ >> 4), 2).flatten(1, 2)  # [out / 8, 8, n]
    return integers[:, order].flatten(0, 1)


def _transposed(words: Tensor) -> Tensor:
    """Shapes: bytes [n, m * 4] -> [m, n, 4]."""
    n, m = len(words), words.shape[1] // 4
    whole = words.view(-1).view(torch.int32).view(n, m)
    return whole.transpose(0, 1).reshape(-1).view(torch.uint8).view(m, n, 4)


@dataclass(frozen=True)
class _BitField:
    """Where a GGUF block stores `n_bits` of each integer: in `n_bytes` from byte `start` on.

    The bytes form runs of `run` bytes. The first integers of a run are in the lowest bits of all
    its bytes, the next integers in the next higher bits, and so on.
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

    def put(self, values: Tensor, blocks: Tensor) -> None:
        """Adds the lowest `n_bits` of each value to blocks, in which these bits are 0.

        Shapes: values [..., values] uint8, blocks [..., bytes of a block].
        """
        shifts = range(0, 8, self.n_bits)
        runs = _in_runs(values & ((1 << self.n_bits) - 1), len(shifts), self.run)
        bytes_ = reduce(torch.bitwise_or, (runs[..., n, :] << at for n, at in enumerate(shifts)))
        blocks[..., self.start : self.start + self.n_bytes] |= bytes_.flatten(-2)


@dataclass(frozen=True)
class _Block:
    """Where a GGUF block stores its scale, followed by its minimum, and its integers' bits."""

    scale: int
    bits: tuple[_BitField, ...]  # the lowest first

    def n_bytes(self, form: QuantFormat) -> int:
        """Bytes of a block, which ends with its scale and minimum or with integers."""
        ends = (bits.start + bits.n_bytes for bits in self.bits)
        return max(self.scale + 2 * (1 + form.has_min), *ends)


_BLOCKS = {
    "Q8_0": _Block(0, (_BitField(8, 2, 32, 32),)),
    "Q5_0": _Block(0, (_BitField(4, 6, 16, 16), _BitField(1, 2, 4, 1))),
    "Q5_1": _Block(0, (_BitField(4, 8, 16, 16), _BitField(1, 4, 4, 1))),
    "Q4_0": _Block(0, (_BitField(4, 2, 16, 16),)),
    "Q4_1": _Block(0, (_BitField(4, 4, 16, 16),)),
    "Q6_K": _Block(208, (_BitField(4, 0, 128, 64), _BitField(2, 128, 64, 32))),
    "Q5_K": _Block(0, (_BitField(4, 48, 128, 32), _BitField(1, 16, 32, 32))),
    "Q4_K": _Block(0, (_BitField(4, 16, 128, 32),)),
    "Q3_K": _Block(108, (_BitField(2, 32, 64, 32), _BitField(1, 0, 32, 32))),
    "Q2_K": _Block(80, (_BitField(2, 16, 64, 32),)),
}


def decode_gguf(type_name: str, blocks: Tensor) -> QuantMatrix:
    """Reads rows of GGUF blocks of a type in `GGUF_QUANTS` as a `QuantMatrix`, without rounding.

    Shapes: blocks [out, n_blocks, bytes of a block] uint8.
    """
    form, block = GGUF_QUANTS[type_name], _BLOCKS[type_name]
    integers, n_bits = torch.zeros((), dtype=torch.uint8), 0
    for bits in block.bits:
        integers = integers | (bits.of(blocks) << n_bits)
        n_bits += bits.n_bits
    if type_name != "Q8_0":  # Q8_0 has signed bytes
        integers = integers - form.zero
    scales, mins = _float16(blocks, block.scale), None
    if form.has_min:
        mins = _float16(blocks, block.scale + 2)
        mins = _negated(mins) if form.min_factors else mins  # minima with factors are subtracted
    factors = _factors(type_name, form, blocks).flatten(1) if form.n_factors else None
    return QuantMatrix(form, integers.view(torch.int8).flatten(1), scales, mins, factors)


def encode_gguf(type_name: str, matrix: QuantMatrix) -> Tensor:
    """The inverse of `decode_gguf`, for a matrix of whole blocks.

    Shapes: matrix [out, in] -> [out, bytes of a row] uint8.

    Raises: ValueError if a number does not fit into the bits that a block has for it.
    """
    form, block = GGUF_QUANTS[type_name], _BLOCKS[type_name]
    assert matrix.form == form and not matrix.n_before
    n_rows, n_blocks = matrix.scales.shape
    blocks = torch.zeros(n_rows, n_blocks, block.n_bytes(form), dtype=torch.uint8)
    step = max(1, _ENCODED_AT_ONCE // matrix.shape[1])
    for start in range(0, n_rows, step):
        rows = slice(start, start + step)
        _encode(type_name, block, matrix.select_rows(rows), blocks[rows])
    return blocks.flatten(1)


def _encode(type_name: str, block: _Block, matrix: QuantMatrix, blocks: Tensor) -> None:
    """Encodes rows into blocks of zeros."""
    form = matrix.form
    integers = _in_runs(matrix.integers.view(torch.uint8), form.block)
    if type_name != "Q8_0":
        integers = integers + form.zero
    _require_bits("an integer", integers, form.n_bits)
    for bits in block.bits:
        bits.put(integers, blocks)
        integers = integers >> bits.n_bits
    _put_float16(blocks, block.scale, matrix.scales)
    if matrix.mins is not None:
        mins = _negated(matrix.mins) if form.min_factors else matrix.mins
        _put_float16(blocks, block.scale + 2, mins)
    if matrix.factors is not None:
        _put_factors(type_name, form, matrix.factors, blocks)


def _require_bits(what: str, numbers: Tensor, n_bits: int) -> None:
    """Raises: ValueError if an unsigned number has more than `n_bits` bits."""
    if n_bits < 8 and numbers.numel() and int(numbers.max()) >> n_bits:
        raise ValueError(f"{what} does not fit into {n_bits} bits")


def _put_float16(blocks: Tensor, at: int, halves: Tensor) -> None:
    """The inverse of `_float16`."""
    blocks[..., at : at + 2] = halves.contiguous().view(torch.uint8).view(*halves.shape, 2)


def _float16(blocks: Tensor, at: int) -> Tensor:
    """Shapes: [..., bytes of a block] -> [...]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _negated(halves: Tensor) -> Tensor:
    """Flips the signs of float16 numbers and no other bit, not even of a NaN."""
    return (halves.view(torch.int16) ^ -(1 << 15)).view(torch.float16)


def _in_runs(values: Tensor, *run: int) -> Tensor:
    """Shapes: [..., n] -> [..., n / values of a run, *run]."""
    *others, n = values.shape  # torch cannot infer -1 in the shape of an empty tensor
    return values.reshape(*others, n // math.prod(run), *run)


def _factors(type_name: str, form: QuantFormat, blocks: Tensor) -> Tensor:
    """Shapes: [..., bytes of a block] -> [..., groups, n_factors] int8."""
    if type_name == "Q6_K":
        parts = [blocks[..., 192:208]]
    elif type_name == "Q3_K":
        parts = [
            (_BitField(4, 96, 8, 8).of(blocks) | (_BitField(2, 104, 4, 4).of(blocks) << 4)) - 32
        ]
    elif type_name == "Q2_K":
        parts = [_BitField(4, 0, 16, 1).of(blocks)[..., first::2] for first in (0, 1)]
    else:
        parts = _six_bits(blocks[..., 4:16])
    by_group = [_in_runs(part, form.n_parts) for part in parts]
    return torch.cat(by_group, -1).view(torch.int8)


def _put_factors(type_name: str, form: QuantFormat, factors: Tensor, blocks: Tensor) -> None:
    """The inverse of `_factors`. Shapes: factors [out, n], blocks [out, n_blocks, bytes]."""
    by_group = _in_runs(factors.view(torch.uint8), form.n_shared, form.n_factors)
    starts = range(0, form.n_factors, form.n_parts)
    parts = [by_group[..., at : at + form.n_parts].flatten(-2) for at in starts]
    if type_name == "Q6_K":
        blocks[..., 192:208] = parts[0]
    elif type_name == "Q3_K":
        factors = parts[0] + 32
        _require_bits("a factor", factors, 6)
        _BitField(4, 96, 8, 8).put(factors, blocks)
        _BitField(2, 104, 4, 4).put(factors >> 4, blocks)
    elif type_name == "Q2_K":
        both = torch.stack(parts, -1).flatten(-2)
        _require_bits("a factor", both, 4)
        _BitField(4, 0, 16, 1).put(both, blocks)
    else:
        _require_bits("a factor", torch.cat(parts), 6)
        blocks[..., 4:16] = _in_six_bits(*parts)


def _six_bits(packed: Tensor) -> list[Tensor]:
    """The 6-bit factors of the scales and of the minima of 8 groups.

    Bytes hold factors 0-3 of each kind in their low 6 bits, and the high 2 bits of factors 4-7
    above them.

    Shapes: [..., 12] -> [..., 8] each.
    """
    lowest = _BitField(4, 8, 4, 4).of(packed)
    return [
        torch.cat((own & 63, lowest[..., at : at + 4] | ((own >> 6) << 4)), -1)
        for at, own in ((0, packed[..., :4]), (4, packed[..., 4:8]))
    ]


def _in_six_bits(scales: Tensor, mins: Tensor) -> Tensor:
    """The inverse of `_six_bits`."""
    own = [part[..., :4] | ((part[..., 4:] >> 4) << 6) for part in (scales, mins)]
    return torch.cat((*own, (scales[..., 4:] & 15) | (mins[..., 4:] << 4)), -1)
