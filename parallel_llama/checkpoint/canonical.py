"""Reads the tensors of a checkpoint in canonical form, which has the same hash in every layout.

Canonical form: Meta's name; the whole tensor, row-major; wq and wk in half-split rotary order; the
stored dtype (float32 if quantised) or a requested one. Tensors are read in pieces of rows.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence

import torch
from blake3 import blake3
from torch import Tensor

from parallel_llama.checkpoint.checkpoint import Checkpoint
from parallel_llama.checkpoint.manifest import TensorEntry, tensor_bytes
from parallel_llama.checkpoint.reading import pieces_of, quantised
from parallel_llama.dtypes import QuantFormat, ScaledFormat, StoredFormat
from parallel_llama.errors import DamagedWeights
from parallel_llama.families.weights import Param
from parallel_llama.ops.formats import dtype_name
from parallel_llama.ops.quant import QuantMatrix

# Values per piece: few enough that a piece is still in the CPU cache when it is hashed. The next
# piece can reuse its memory.
ROW_PIECE_VALUES = 1 << 22


class CanonicalTensor:
    """A tensor in canonical form and in the dtype of the target, converted piece by piece.

    Its hashes are complete after the last piece.
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
        """The hash before conversion to another dtype, or None without conversion."""
        return self._source.hexdigest() if self._is_converted else None

    def update(self, stored: Tensor) -> Tensor:
        """Convert and hash the next rows. Returns: the rows in the dtype of the target.

        Raises: DamagedWeights if a value does not fit into that dtype.
        """
        value = stored
        if stored.dtype != self.dtype:
            value, self._is_converted = _converted(self.param, stored, self.dtype), True
            self._source.update(tensor_bytes(stored))
        self._hasher.update(tensor_bytes(value))
        return value


class CanonicalQuant(CanonicalTensor):
    """A quantised weight, whose canonical form is its dequantised values in float32."""

    def __init__(self, param: Param, form: QuantFormat) -> None:
        super().__init__(param, torch.float32)
        self.form = form

    def read_rows(self, checkpoint: Checkpoint, rows: range) -> QuantMatrix:
        """Read and hash the next rows, and quantise them unless they are stored in this format.

        Raises: DamagedWeights if they cannot be read, or are NaN or Inf.
        """
        groups = checkpoint.groups(self.param, rows, self.form)
        if groups is None:
            values = checkpoint.read(self.param, rows)
            self._is_converted = True
            self._source.update(tensor_bytes(values))
            groups = quantised(self.param, values, self.form)
        step = max(1, ROW_PIECE_VALUES // groups.shape[1])
        for start in range(0, groups.shape[0], step):
            part = groups.select_rows(slice(start, start + step))
            self._hasher.update(tensor_bytes(part.values()))
        return groups


class CanonicalScaled(CanonicalTensor):
    """A weight with numbers and scales as stored; its canonical form is its values in float32."""

    def __init__(self, param: Param, form: ScaledFormat) -> None:
        super().__init__(param, torch.float32)
        self.form = form

    def read_rows(self, checkpoint: Checkpoint, rows: range) -> tuple[Tensor, ...]:
        """Read and hash the next rows.

        Raises: DamagedWeights if they cannot be read, or a scale is NaN or Inf.
        """
        block = checkpoint.scaled(self.param, rows, self.form)
        assert block is not None  # the checkpoint has this format
        step = max(1, ROW_PIECE_VALUES // self.param.shape[1])
        for start in range(0, len(block.rows), step):
            self._hasher.update(tensor_bytes(block.select_rows(start, start + step).values()))
        return block.tensors


# Some rows of a tensor: their values, or the tensors of a `QuantMatrix` or a `ScaledBlock`.
Piece = tuple[Tensor, ...]


def canonical_pieces(
    checkpoint: Checkpoint,
    params: Sequence[Param],
    dtypes: Mapping[str, torch.dtype],
    formats: Mapping[str, StoredFormat],
) -> Generator[tuple[CanonicalTensor, Piece], None, None]:
    """Yields the pieces of one tensor after another. Tensors in `formats` are quantised, or yielded
    as they are stored if their format is a `ScaledFormat`.

    Raises: DamagedWeights if a tensor cannot be read, or does not fit into its dtype.
    """
    for param in params:
        form = formats.get(param.name)
        if form is None:
            tensor = CanonicalTensor(param, dtypes[param.name])
            for rows in _row_pieces(param):
                yield tensor, (tensor.update(checkpoint.read(param, rows)),)
        elif isinstance(form, ScaledFormat):
            scaled_tensor = CanonicalScaled(param, form)
            for rows in _row_pieces(param):
                yield scaled_tensor, scaled_tensor.read_rows(checkpoint, rows)
        else:
            quantised_tensor = CanonicalQuant(param, form)
            for rows in _row_pieces(param):
                yield quantised_tensor, quantised_tensor.read_rows(checkpoint, rows).tensors


def canonical_entry(
    checkpoint: Checkpoint, param: Param, on_bytes: Callable[[int], None] = lambda _: None
) -> TensorEntry:
    """The shape, dtype and hash of a tensor, read in bounded pieces (at once if cut along dim 1).

    Raises: CheckpointError if the tensor cannot be read.
    """
    hasher = blake3(max_threads=blake3.AUTO)
    dtypes = set()
    for rows in _row_pieces(param):
        piece = checkpoint.read(param, rows)
        dtypes.add(piece.dtype)
        on_bytes(piece.nbytes)
        hasher.update(tensor_bytes(piece))
    (dtype,) = dtypes
    return TensorEntry(dtype_name(dtype), param.shape, hasher.hexdigest())


def _row_pieces(param: Param) -> list[range]:
    """Ranges that cut a tensor into pieces that are contiguous in row-major order.

    Pieces of columns are not contiguous, so a tensor that is sharded by columns is one piece.
    """
    whole = range(param.shape[param.dim])
    return pieces_of(param, whole, ROW_PIECE_VALUES) if param.dim == 0 else [whole]


def _converted(param: Param, stored: Tensor, dtype: torch.dtype) -> Tensor:
    value = stored.to(dtype)
    if _has_infinity(value) and not _has_infinity(stored):
        raise DamagedWeights(
            f"{param.name}: a value of {stored.abs().max().item():g} does not fit into "
            f"{dtype_name(dtype)}; use a dtype of a larger range (the order is float16, bfloat16, "
            "float32, float64)"
        )
    return value


def _has_infinity(tensor: Tensor) -> bool:
    """Checks in one pass without a copy. NaN hides infinities, but is damage in any case."""
    return tensor.numel() > 0 and any(map(math.isinf, (b.item() for b in torch.aminmax(tensor))))
