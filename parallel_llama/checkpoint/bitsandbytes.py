"""Decodes matrices of HF folders that bitsandbytes quantised.

A matrix [out, in] in int8 is stored as

    weight                    signed integers: [out, in]
    SCB                       the largest absolute value of each row: [out] float32
    weight_format             optional; 0 means that rows are not reordered

and a matrix in 4 bits, row by row without padding, as

    weight                    two values in a byte, the first in the high bits: [bytes, 1] of any
                              dtype
    weight.absmax             a scale for each block of consecutive values: [blocks] float32
    weight.quant_map          what the 16 codes stand for: [16] float32
    weight.quant_state.bitsandbytes__nf4 (or fp4): `config.bitsandbytes.QuantState` as JSON

Double quantisation stores the scales as codes of 8 bits, which stand for
nested_quant_map[code] * nested_absmax[block] + offset:

    weight.absmax             [blocks] uint8
    weight.nested_absmax      a scale for each block of scales: [blocks of blocks] float32
    weight.nested_quant_map   [256] float32

Values are products in float32, so they do not depend on how the matrix is cut.

Source: bitsandbytes 0.50, dequantize_4bit, dequantize_blockwise and int8_vectorwise_dequant.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import MatrixBlock
from parallel_llama.checkpoint.scaled import WantedTensors, finite_scales
from parallel_llama.config.bitsandbytes import CODES, QUANT_STATE, QuantState
from parallel_llama.errors import CheckpointError
from parallel_llama.families.stored_slices import StoredSlice

# Reads a block of one of a matrix's tensors, viewed as a matrix of bytes. The arguments are the
# suffix of the tensor's name, the bytes of a row, and the rows and byte columns of the block.
# Returns: uint8 [rows, columns].
ReadBytes = Callable[[str, int, range, range], Tensor]

# The dtypes in which bitsandbytes may store the bytes of 4-bit values, with their item sizes.
_STORAGE = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}

_INT8_UNIT = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it

# Values of whole rows that are decoded at once, which bounds the memory of their scales.
_DECODED_AT_ONCE = 1 << 20

_MAP_TOLERANCE = 1e-4  # the backends of bitsandbytes round the values of fp4 differently


@dataclass(frozen=True)
class Int8Matrix:
    """A matrix [out, in] in int8; `stored_slice` is the slice of the plain matrix."""

    stored_slice: StoredSlice
    has_format: bool  # whether weight_format is stored

    @property
    def base(self) -> str:
        """The common prefix of the names of its tensors."""
        return self.stored_slice.name.removesuffix("weight")

    @property
    def tensors(self) -> WantedTensors:
        """The dtypes and possible shapes of its tensors, by the suffixes of their names."""
        shape = self.stored_slice.shape
        expected: WantedTensors = {"weight": (("I8",), [shape]), "SCB": (("F32",), [shape[:1]])}
        if self.has_format:
            expected["weight_format"] = ("U8",), [()]
        return expected

    def check(self, read: ReadBytes) -> None:
        """Raises: CheckpointError if rows are stored in another order."""
        if self.has_format and (form := int(read("weight_format", 1, range(1), range(1)))):
            raise CheckpointError(
                f"{self.base + 'weight_format'!r:.200} is {form}, expected 0: reordered rows are "
                "not supported; save the model again with bitsandbytes 0.45 or later"
            )

    def values(self, block: MatrixBlock, read: ReadBytes) -> Tensor:
        """Decodes a block of the matrix.

        Returns: [rows, columns] float32.

        Raises: DamagedWeights if a scale is NaN or Inf.
        """
        n_inputs = self.stored_slice.shape[1]
        integers = read("weight", n_inputs, block.rows, block.columns).view(torch.int8)
        scales = finite_scales(_vector(read, "SCB", torch.float32, block.rows), self.base + "SCB")
        return integers.float().mul_(scales[:, None]).mul_(_INT8_UNIT)


@dataclass(frozen=True)
class FourBitMatrix:
    """A matrix [out, in] in 4 bits; `stored_slice` is the slice of the plain matrix.

    Args:
        dtype: the dtype in which the bytes of the weight are stored.
    """

    stored_slice: StoredSlice
    state: QuantState
    dtype: str

    @property
    def base(self) -> str:
        """The common prefix of the names of its tensors."""
        return self.stored_slice.name.removesuffix("weight")

    @property
    def tensors(self) -> WantedTensors:
        """The dtypes and possible shapes of its tensors, by the suffixes of their names."""
        n_values, nested = math.prod(self.stored_slice.shape), self.state.nested_block
        n_blocks = -(-n_values // self.state.block)
        n_items = -(-n_values // (2 * _STORAGE.get(self.dtype, 1)))
        expected: WantedTensors = {
            "weight": (_STORAGE, [(n_items, 1)]),
            "weight.absmax": (("U8" if nested else "F32",), [(n_blocks,)]),
            "weight.quant_map": (("F32",), [(16,)]),
        }
        if nested:
            expected["weight.nested_absmax"] = ("F32",), [(-(-n_blocks // nested),)]
            expected["weight.nested_quant_map"] = ("F32",), [(256,)]
        return expected

    @property
    def quant_state(self) -> str:
        """The name of the tensor that `state` was read from."""
        return self.base + QUANT_STATE + self.state.code

    def check(self, read: ReadBytes) -> None:
        """Raises: CheckpointError if quant_map differs from `CODES`, which decoding uses."""
        quant_map = _vector(read, "weight.quant_map", torch.float32, range(16))
        difference = (quant_map - torch.tensor(CODES[self.state.code])).abs().max()
        if not difference <= _MAP_TOLERANCE:  # also NaN
            raise CheckpointError(
                f"{self.base + 'weight.quant_map'!r:.200} differs from the values of "
                f"{self.state.code}; the weights are damaged: fetch them again"
            )

    def values(self, block: MatrixBlock, read: ReadBytes) -> Tensor:
        """Decodes a block of the matrix.

        Returns: [rows, columns] float32.

        Raises: DamagedWeights if a scale is NaN or Inf.
        """
        out = torch.empty(len(block.rows), len(block.columns))
        step = max(1, _DECODED_AT_ONCE // self.stored_slice.shape[1])
        for start in range(0, len(block.rows) if out.numel() else 0, step):
            rows = block.rows[start : start + step]
            units = self._units(rows, block.columns, read)
            torch.mul(units, self._scales(rows, block.columns, read), out=out[start : start + step])
        return out

    def _units(self, rows: range, columns: range, read: ReadBytes) -> Tensor:
        """The values of the codes of a block, before scaling. Shapes: [rows, columns] float32."""
        byte_columns = range(columns.start // 2, -(-columns.stop // 2))
        pairs = read("weight", self.stored_slice.shape[1] // 2, rows, byte_columns)
        units = _table(self.state.code).index_select(0, pairs.flatten().int())
        return units.view(len(rows), -1)[:, columns.start - 2 * byte_columns.start :][
            :, : len(columns)
        ]

    def _scales(self, rows: range, columns: range, read: ReadBytes) -> Tensor:
        """Shapes: [rows, columns] float32."""
        n_inputs, size = self.stored_slice.shape[1], self.state.block
        start, stop = rows.start * n_inputs, rows.stop * n_inputs
        blocks = range(start // size, -(-stop // size))
        by_value = self._absmax(blocks, read)[:, None].expand(-1, size).flatten()
        by_row = by_value[start - blocks.start * size :][: stop - start].view(len(rows), n_inputs)
        return by_row[:, columns.start : columns.stop]

    def _absmax(self, blocks: range, read: ReadBytes) -> Tensor:
        """The scales of some blocks of values. Shapes: [blocks] float32."""
        suffix, size = "weight.absmax", self.state.nested_block
        if size is None:
            scales = _vector(read, suffix, torch.float32, blocks)
        else:
            codes = _vector(read, suffix, torch.uint8, blocks)
            outer_blocks = range(blocks.start // size, -(-blocks.stop // size))
            suffix = "weight.nested_absmax"
            outer = _vector(read, suffix, torch.float32, outer_blocks)
            outer = outer[torch.arange(blocks.start, blocks.stop) // size - outer_blocks.start]
            quant_map = _vector(read, "weight.nested_quant_map", torch.float32, range(256))
            scales = quant_map[codes.long()] * outer + self.state.offset
        return finite_scales(scales, self.base + suffix)


@cache
def _table(code: str) -> Tensor:
    """The two values of every possible byte. Shapes: [256, 2] float32."""
    values = torch.tensor(CODES[code])
    return torch.stack((values.repeat_interleave(16), values.repeat(16)), 1)


def _vector(read: ReadBytes, suffix: str, dtype: torch.dtype, part: range) -> Tensor:
    """A part of a tensor with one dimension."""
    width = dtype.itemsize
    byte_range = range(part.start * width, part.stop * width)
    return read(suffix, len(byte_range), range(1), byte_range).view(-1).view(dtype)
