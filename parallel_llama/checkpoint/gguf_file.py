"""Reading a GGUF file: plain values as they are stored, quantised blocks as float32.

Only the blocks that a slice touches are read. Decoding is the gguf package's.

Source: ggml's docs/gguf.md.
"""

from pathlib import Path

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import (
    ByteRanges,
    Empty,
    as_block,
    new_memory,
    sliced_shape,
)
from parallel_llama.checkpoint.tensor_files import TensorFiles
from parallel_llama.config import ModelArgs
from parallel_llama.dtypes import STORED
from parallel_llama.errors import CheckpointError
from parallel_llama.families.weights import Param
from parallel_llama.files.gguf_header import read_gguf_header
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.files.safetensors_header import FileTensor

# Values decoded at once, in some 10 MB beside the result. With twice as many the system often takes
# the memory back after each piece, and gives it anew page by page; with half, calls cost more.
DECODED_AT_ONCE = 1 << 19


class GGUFFile(TensorFiles):
    """The tensors of a GGUF file, or of the parts that it was split into.

    Raises: CheckpointError if a file is damaged or a tensor is in two of them.
    """

    layout = "gguf"

    def __init__(self, files: ModelFiles, args: ModelArgs, empty: Empty = new_memory) -> None:
        tensors: dict[str, tuple[Path, FileTensor]] = {}
        for path in files.weights:
            for name, t in read_gguf_header(path).tensors.items():
                if name in tensors:
                    raise CheckpointError(f"{path}: tensor {name!r} is in an earlier part as well")
                tensors[name] = path, FileTensor(name, t.type_name, t.shape, t.offset, t.n_bytes)
        super().__init__(files, args, tensors, empty)

    def _stored(self, param: Param, rows: range) -> Tensor:
        file, tensor = self._held(param)
        if tensor.dtype in STORED:
            return super()._stored(param, rows)
        return _decoded(file, tensor, param, rows)


def _decoded(file: ByteRanges, tensor: FileTensor, param: Param, rows: range) -> Tensor:
    """A slice of a quantised tensor in float32, decoded some rows at a time."""
    quantization = GGMLQuantizationType[tensor.dtype]
    block, block_bytes = GGML_QUANT_SIZES[quantization]
    n_columns, row_range, columns = as_block(param, rows)
    blocks = range(columns.start // block, -(-columns.stop // block))
    byte_columns = range(blocks.start * block_bytes, blocks.stop * block_bytes)
    skipped = columns.start - blocks.start * block  # columns of the first block left of the slice
    out = torch.empty((len(row_range), len(columns)), dtype=torch.float32)
    step = max(1, DECODED_AT_ONCE // max(1, len(blocks) * block))
    for start in range(0, out.shape[0] if out.numel() else 0, step):
        chunk = row_range[start : start + step]
        data = file.matrix(tensor.offset, n_columns // block * block_bytes, chunk, byte_columns)
        # As one long row: blocks do not know their rows, and the decoder is slow on short ones.
        values = dequantize(data.view(1, -1).numpy(), quantization)
        decoded = torch.from_numpy(values).view(len(chunk), -1)
        out[start : start + len(chunk)] = decoded[:, skipped : skipped + len(columns)]
    return out.view(sliced_shape(param, rows))
