"""Reading a GGUF file: plain values as they are stored, quantised blocks as float32.

The rows of wq and wk are in the interleaved rotary order, as in Meta's files, and are reordered
here. Only the blocks that a slice touches are read. Decoding is the gguf package's.

Source: ggml's docs/gguf.md.
"""

import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import (
    ByteRanges,
    Empty,
    as_block,
    new_memory,
    sliced_shape,
)
from parallel_llama.checkpoint.names import is_skipped, renamed
from parallel_llama.checkpoint.rotary import is_rotary, to_half, whole_heads
from parallel_llama.checkpoint.structure import require_structure
from parallel_llama.config import ModelArgs
from parallel_llama.errors import CheckpointError
from parallel_llama.gguf_header import GGML_TYPES, GGUFTensor, read_gguf_header
from parallel_llama.model_files import ModelFiles
from parallel_llama.plan import Param, parameters

# Values decoded at once, in some 20 MB beside the result; pieces that fit into the cache take a
# third more time.
DECODED_AT_ONCE = 1 << 20

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFFile:
    """The tensors of a GGUF file, or of the parts that it was split into.

    Raises: CheckpointError if a file is damaged or a tensor is in two of them.
    """

    def __init__(self, files: ModelFiles, args: ModelArgs, empty: Empty = new_memory) -> None:
        self.path, self.args = files.path, args
        self._tensors: dict[str, tuple[int, GGUFTensor]] = {}
        for number, path in enumerate(files.weights):
            for name, tensor in read_gguf_header(path).tensors.items():
                if name in self._tensors:
                    raise CheckpointError(f"{path}: tensor {name!r} is in an earlier part as well")
                self._tensors[name] = number, tensor
        self._files = [ByteRanges(path, empty) for path in files.weights]

    def check(self, args: ModelArgs) -> None:
        require_structure(
            self.path,
            {name: tensor.shape for name, (_, tensor) in self._tensors.items()},
            {renamed(param.name, "meta", "gguf"): param.shape for param in parameters(args)},
            lambda name: is_skipped(name, "gguf", args),
        )

    def read(self, param: Param, rows: range) -> Tensor:
        if not is_rotary(param):
            return self._stored(param, rows)
        heads = whole_heads(rows, self.args.head_dim)
        reordered = to_half(self._stored(param, heads), self.args.head_dim)
        return reordered[rows.start - heads.start : rows.stop - heads.start]

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _stored(self, param: Param, rows: range) -> Tensor:
        """A slice with its rows in the order of the file."""
        number, tensor = self._tensors[renamed(param.name, "meta", "gguf")]
        file = self._files[number]
        if tensor.type_name in PLAIN:
            return file.values(tensor.offset, PLAIN[tensor.type_name], param, rows)
        return _decoded(file, tensor, param, rows)


def _decoded(file: ByteRanges, tensor: GGUFTensor, param: Param, rows: range) -> Tensor:
    """A slice of a quantised tensor in float32, decoded some rows at a time."""
    _, block, block_bytes = GGML_TYPES[tensor.type_number]
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
        values = dequantize(data.view(1, -1).numpy(), GGMLQuantizationType(tensor.type_number))
        decoded = torch.from_numpy(values).view(len(chunk), -1)
        out[start : start + len(chunk)] = decoded[:, skipped : skipped + len(columns)]
    return out.view(sliced_shape(param, rows))
