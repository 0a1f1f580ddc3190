"""Reads the tensors of a GGUF file as bytes, which are copied to another GGUF file unchanged."""

import math
from collections.abc import Generator, Sequence

import torch

from parallel_llama.checkpoint.canonical import ROW_PIECE_VALUES, CanonicalTensor, Piece
from parallel_llama.checkpoint.checkpoint import Checkpoint
from parallel_llama.checkpoint.gguf_file import GGUFFile
from parallel_llama.checkpoint.manifest import TensorEntry
from parallel_llama.families.weights import Param


class CopiedTensor(CanonicalTensor):
    """The bytes of a tensor. `entry` has the dtype of decoded values and the hash of the bytes."""

    def __init__(self, param: Param) -> None:
        super().__init__(param, torch.uint8)

    @property
    def entry(self) -> TensorEntry:
        return TensorEntry("float32", self.param.shape, self._hasher.hexdigest())


def copied_pieces(
    checkpoint: Checkpoint, params: Sequence[Param]
) -> Generator[tuple[CanonicalTensor, Piece], None, None]:
    """Yields the stored bytes of one tensor of a GGUF file after another, in pieces of rows.

    Raises: DamagedWeights if a tensor cannot be read.
    """
    assert isinstance(checkpoint, GGUFFile)
    for param in params:
        tensor = CopiedTensor(param)
        n_rows = param.shape[0]
        step = max(1, ROW_PIECE_VALUES * n_rows // math.prod(param.shape))
        for start in range(0, n_rows, step):
            rows = range(start, min(start + step, n_rows))
            yield tensor, (tensor.update(checkpoint.stored_rows(param, rows)),)
