"""Whole tensors in the order of the model, in pieces of rows: read, converted and hashed."""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from parallel_llama.checkpoint.canonical import row_pieces
from parallel_llama.checkpoint.manifest import DTypeName, TensorEntry, tensor_bytes
from parallel_llama.checkpoint.reading import Checkpoint
from parallel_llama.errors import DamagedWeights
from parallel_llama.plan import Param


class CanonicalTensor:
    """A tensor in canonical form and in the target's dtype, of which pieces are taken in order.

    Its hashes are known with the last piece.
    """

    def __init__(self, param: Param, dtype: torch.dtype) -> None:
        self.param, self.dtype = param, dtype
        self._hasher, self._source = blake3(), blake3()
        self._is_converted = False

    @property
    def entry(self) -> TensorEntry:
        return TensorEntry(dtype_name(self.dtype), self.param.shape, self._hasher.hexdigest())

    @property
    def source(self) -> str | None:
        """The hash before a change of dtype, None where there was none."""
        return self._source.hexdigest() if self._is_converted else None

    def take(self, stored: Tensor) -> Tensor:
        """The next rows as they were read; returns them in the target's dtype.

        Raises: DamagedWeights if a value does not fit into it.
        """
        value = stored
        if stored.dtype != self.dtype:
            value, self._is_converted = _converted(self.param, stored, self.dtype), True
            self._source.update(tensor_bytes(stored))
        self._hasher.update(tensor_bytes(value))
        return value


@dataclass(frozen=True)
class Piece:
    """Some rows of a tensor."""

    tensor: CanonicalTensor
    value: Tensor


def dtype_name(dtype: torch.dtype) -> DTypeName:
    name: DTypeName = msgspec.convert(str(dtype).removeprefix("torch."), DTypeName)
    return name


def canonical_pieces(
    checkpoint: Checkpoint, params: Sequence[Param], dtypes: Mapping[str, torch.dtype]
) -> Generator[Piece, None, None]:
    """The pieces of each tensor in turn.

    Raises: DamagedWeights if one cannot be read, or does not fit into its dtype.
    """
    for param in params:
        tensor = CanonicalTensor(param, dtypes[param.name])
        for rows in row_pieces(param):
            yield Piece(tensor, tensor.take(checkpoint.read(param, rows)))


def _converted(param: Param, stored: Tensor, dtype: torch.dtype) -> Tensor:
    value = stored.to(dtype)
    if _has_infinity(value) and not _has_infinity(stored):
        raise DamagedWeights(
            f"{param.name}: a value of {stored.abs().max().item():g} does not fit into "
            f"{dtype_name(dtype)}; use bfloat16 or float32"
        )
    return value


def _has_infinity(tensor: Tensor) -> bool:
    """In one pass and without a copy; NaN hides infinities, and such weights are lost anyway."""
    return tensor.numel() > 0 and any(map(math.isinf, (b.item() for b in torch.aminmax(tensor))))
