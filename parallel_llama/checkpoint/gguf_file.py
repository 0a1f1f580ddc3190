"""Reads GGUF files: plain values in their dtype, quantised blocks as stored or in float32.

Only the blocks that overlap a slice are read. The gguf package decodes blocks to float32.

Source: ggml's docs/gguf.md.
"""

import math
from concurrent.futures import Executor
from functools import partial

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import (
    ByteRanges,
    Empty,
    MatrixBlock,
    as_blocks,
    new_memory,
    sliced_shape,
)
from parallel_llama.checkpoint.prefetch import workers
from parallel_llama.checkpoint.quantised import decode_gguf
from parallel_llama.checkpoint.tensor_files import TensorFiles
from parallel_llama.dtypes import GGUF_QUANTS, STORED, QuantFormat
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.stored_slices import StoredSlice
from parallel_llama.families.weights import Param
from parallel_llama.files.gguf_header import read_split_header
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.files.safetensors_header import FileTensor
from parallel_llama.ops.quant import QuantMatrix, joined

# Values that a thread decodes at once: they and the decoder's intermediate results fit into the
# cache of a core. With fewer, the overhead of calls grows.
DECODED_AT_ONCE = 1 << 17


class GGUFFile(TensorFiles):
    """The tensors of a GGUF file.

    Raises: CheckpointError if the file is damaged.
    """

    layout = "gguf"

    def __init__(self, files: ModelFiles, args: ModelArgs, empty: Empty = new_memory) -> None:
        header = read_split_header(files.weights)
        held = {name: (header.files[name], tensor) for name, tensor in header.tensors.items()}
        super().__init__(files, args, empty, held)
        # The threads start at the first decoding, and run outside the GIL.
        self._decoders = workers()

    def close(self) -> None:
        self._decoders.shutdown()
        super().close()

    def stored_rows(self, param: Param, rows: range) -> Tensor:
        """The bytes of rows of a weight as they are stored; only after `check`.

        Returns: uint8 [len(rows), bytes of a row]; the rows of a vector are its values.

        Raises: DamagedWeights if the file changed.
        """
        file, tensor = self._held(param)
        stored_slice = self._slices[param.name]
        row_bytes = tensor.n_bytes // stored_slice.n_rows
        whole = range(row_bytes)
        runs = stored_slice.runs(rows)
        return torch.cat([file.matrix(tensor.offset, row_bytes, run, whole) for run in runs])

    def _fits(self, file_shape: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        return file_shape in (shape, gguf_shape(shape))

    def _stored(self, param: Param, rows: range) -> Tensor:
        file, tensor = self._held(param)
        if tensor.dtype in STORED:
            values = super()._stored(param, rows)
        else:
            stored_slice = self._slices[param.name]
            values = _decoded(file, tensor, param, stored_slice, rows, self._decoders)
        if param.name.endswith("norm.weight") and self.args.norm_offset:
            values -= self.args.norm_offset  # llama.cpp stores the weight plus the offset
        return values

    def _stored_quant(self, param: Param, rows: range, form: QuantFormat) -> QuantMatrix | None:
        file, tensor = self._held(param)
        if GGUF_QUANTS.get(tensor.dtype) != form:
            return None
        size, n_bytes = _sizes(tensor)
        parts = []
        for block in as_blocks(param, self._slices[param.name], rows):
            columns = block.columns
            blocks = _touched(columns, size)
            byte_columns = range(blocks.start * n_bytes, blocks.stop * n_bytes)
            row_bytes = block.n_columns // size * n_bytes
            data = file.matrix(tensor.offset, row_bytes, block.rows, byte_columns)
            whole = decode_gguf(tensor.dtype, data.view(len(data), len(blocks), n_bytes))
            first = blocks.start * size
            part = whole.columns(range(columns.start - first, columns.stop - first))
            parts.append(part.map_tensors(Tensor.contiguous))
        return joined(parts, dim=0)


def gguf_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a stored tensor as it is written: a matrix of one row is a vector.

    ggml does not tell the two apart. transformers reads the gate of a shared expert as a vector.
    """
    return shape[1:] if len(shape) == 2 and shape[0] == 1 else shape


def _decoded(
    file: ByteRanges,
    tensor: FileTensor,
    param: Param,
    stored_slice: StoredSlice,
    rows: range,
    threads: Executor,
) -> Tensor:
    """A slice of a quantised weight in float32, decoded in pieces of rows."""
    out = torch.empty(sliced_shape(param, rows), dtype=torch.float32)
    remaining_out = out.view(-1)
    for block in as_blocks(param, stored_slice, rows):
        shape = len(block.rows), len(block.columns)
        block_out = remaining_out[: math.prod(shape)].view(shape)
        size, _ = _sizes(tensor)
        row_values = len(_touched(block.columns, size)) * size
        step = max(1, DECODED_AT_ONCE // max(1, row_values))
        # Waits for every piece, and raises its exception.
        list(threads.map(partial(_decode, file, tensor), *_pieces(block, block_out, step)))
        remaining_out = remaining_out[math.prod(shape) :]
    return out


def _pieces(block: MatrixBlock, out: Tensor, step: int) -> tuple[list[MatrixBlock], list[Tensor]]:
    """Pieces of `step` rows of a block, and the rows of `out` that they are decoded into."""
    starts = range(0, len(block.rows) if out.numel() else 0, step)
    rows = [block.rows[start : start + step] for start in starts]
    blocks = [MatrixBlock(block.n_columns, piece, block.columns) for piece in rows]
    return blocks, [out[start : start + step] for start in starts]


def _decode(file: ByteRanges, tensor: FileTensor, block: MatrixBlock, out: Tensor) -> None:
    """Decode a block of a quantised tensor into `out`, a tensor of the block's shape."""
    columns = block.columns
    size, n_bytes = _sizes(tensor)
    blocks = _touched(columns, size)
    byte_columns = range(blocks.start * n_bytes, blocks.stop * n_bytes)
    skipped = columns.start - blocks.start * size  # decoded columns before the slice
    row_bytes = block.n_columns // size * n_bytes
    data = file.matrix(tensor.offset, row_bytes, block.rows, byte_columns)
    # Decoded as one long row: blocks are independent, and the decoder is slow on short rows.
    with np.errstate(all="ignore"):  # infinite scales are refused later
        values = dequantize(data.view(1, -1).numpy(), GGMLQuantizationType[tensor.dtype])
    decoded = torch.from_numpy(values).view(len(block.rows), -1)
    out.copy_(decoded[:, skipped : skipped + len(columns)])


def _sizes(tensor: FileTensor) -> tuple[int, int]:
    """Values and bytes of a block of a quantised tensor."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[tensor.dtype]]


def _touched(columns: range, size: int) -> range:
    """The blocks of a row that overlap a range of columns."""
    return range(columns.start // size, -(-columns.stop // size))
