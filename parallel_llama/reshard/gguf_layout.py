"""Writes one GGUF file: its header, and the type and offset of each tensor.

Source: ggml's docs/gguf.md.
"""

import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from torch import Tensor

from parallel_llama.checkpoint.canonical import Piece
from parallel_llama.checkpoint.checkpoint import is_rotary, reordered
from parallel_llama.checkpoint.gguf_file import gguf_shape
from parallel_llama.checkpoint.quantised import encode_gguf
from parallel_llama.config.gguf import args_from_gguf
from parallel_llama.config.gguf_fields import require_equal, written_scaling
from parallel_llama.dtypes import GGUF_QUANTS, STORED
from parallel_llama.errors import DamagedWeights, WriteError
from parallel_llama.families import family_of, parameters, stored_slices
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.weights import Param
from parallel_llama.files.gguf_header import read_gguf_header
from parallel_llama.ops.quant import QuantMatrix
from parallel_llama.reshard.layout import Layout, TargetFile
from parallel_llama.reshard.target_folder import TargetKind

ALIGNMENT = gguf.GGUF_DEFAULT_ALIGNMENT
_ROPE_FACTORS = "rope_freqs.weight"
# The only field with an array of bytes.
_BYTES_FIELD = "tokenizer.ggml.precompiled_charsmap"


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor with its type and shape (row-major) in the file."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        n_values, n_bytes = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // n_values * n_bytes


class GGUFLayout(Layout):
    """One GGUF file.

    Args:
        name: the name of the file.
        types: the types of the tensors, by Meta's names of the weights.
        fields: all fields of the header.

    Raises: UsageError if a header cannot describe the model.
    """

    kind: TargetKind = "gguf"

    def __init__(
        self, name: str, args: ModelArgs, types: Mapping[str, str], fields: Mapping[str, Any]
    ) -> None:
        self.args, self.types, self.slices = args, types, stored_slices(args, "gguf")
        tensors: dict[str, GGUFTensor] = {}
        scaling, factors = written_scaling(args), b""
        if scaling is not None and scaling.kind == "factors":
            factors = np.array(scaling.factors, dtype="<f4").tobytes()
            shape = (len(scaling.factors),)
            tensors[_ROPE_FACTORS] = GGUFTensor(_ROPE_FACTORS, GGMLQuantizationType.F32, shape)
        for param in parameters(args):
            stored_slice = self.slices[param.name]
            kind = GGMLQuantizationType[types[param.name]]
            tensors.setdefault(
                stored_slice.name,
                GGUFTensor(stored_slice.name, kind, gguf_shape(stored_slice.shape)),
            )
        header = _header(fields, [*tensors.values()])
        offset = len(header)
        self.offsets: dict[str, int] = {}
        for tensor in tensors.values():
            self.offsets[tensor.name] = offset
            offset += -(-tensor.n_bytes // ALIGNMENT) * ALIGNMENT
        pieces = [(0, header)]
        if factors:
            pieces.append((self.offsets[_ROPE_FACTORS], factors))
        self.files = (TargetFile(name, offset, tuple(pieces)),)
        self._check()

    def _check(self) -> None:
        """Read the arguments back from a file that has no tensor data."""
        with _temporary_folder() as folder:
            self.create(folder)
            path = folder / self.files[0].name
            require_equal(self.args, args_from_gguf(read_gguf_header(path)))

    def parts(self, param: Param, pieces: Iterable[Piece]) -> Iterator[tuple[str, int, Tensor]]:
        """As `Layout.parts`; pieces of uint8 are rows as a GGUF file stores them."""
        stored_slice = self.slices[param.name]
        offset = self.offsets[stored_slice.name]
        start = 0  # rows that are written
        for piece in pieces:
            data = piece[0] if piece[0].dtype == torch.uint8 else self._encoded(param, piece)
            first, row_bytes = start, data.shape[1]
            for run in stored_slice.runs(range(first, first + len(data))):
                part = data[start - first :][: len(run)]
                yield self.files[0].name, offset + run.start * row_bytes, part
                start += len(run)

    def metadata(self) -> dict[str, bytes]:
        return {}

    def _encoded(self, param: Param, piece: Piece) -> Tensor:
        """Shapes: [n_rows, ...] -> [n_rows, bytes of a row] uint8."""
        order = family_of(self.args).rotary_order["gguf"]
        if order != "half" and is_rotary(param.name):
            head_dim, rotary_dim = self.args.head_dim, self.args.rotary_dim
            piece = tuple(reordered(part, head_dim, order, rotary_dim) for part in piece)
        kind, values = self.types[param.name], piece[0]
        if len(piece) > 1:
            return _encoded_blocks(param, kind, piece)
        if self.args.norm_offset and param.name.endswith("norm.weight"):
            values = values + self.args.norm_offset  # llama.cpp stores the sum
        if kind in STORED:
            return values.reshape(len(values), -1).contiguous().view(torch.uint8)
        bounds = torch.aminmax(values)
        if not all(math.isfinite(bound.item()) for bound in bounds):
            raise DamagedWeights(
                f"{param.name}: has values that are NaN or Inf; the weights are damaged: fetch "
                "them again"
            )
        array = np.ascontiguousarray(values.numpy(), dtype=np.float32)
        return torch.from_numpy(gguf.quants.quantize(array, GGMLQuantizationType[kind]))


def _encoded_blocks(param: Param, kind: str, piece: Piece) -> Tensor:
    """Quantised rows as blocks of a type in `GGUF_QUANTS`. Shapes: -> [n_rows, bytes] uint8."""
    form = GGUF_QUANTS[kind]
    integers, scales, *others = piece
    mins = others.pop(0) if form.has_min else None
    factors = others.pop(0) if form.n_factors else None
    try:
        return encode_gguf(kind, QuantMatrix(form, integers, scales, mins, factors))
    except ValueError as error:
        raise DamagedWeights(
            f"{param.name}: {error}, as {kind} stores it; the weights are damaged: fetch them again"
        ) from error


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A folder for a header. Raises: WriteError if it cannot be written."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    except OSError as error:
        raise WriteError(
            f"the header of a GGUF file cannot be written to the folder of temporary files: "
            f"{error.strerror}; free space there, or set TMPDIR to another folder"
        ) from error


def _header(fields: Mapping[str, Any], tensors: Sequence[GGUFTensor]) -> bytes:
    """All bytes before the data, which begins at a multiple of the alignment."""
    remaining_fields = dict(fields)
    with _temporary_folder() as folder:  # the gguf package writes headers to files only
        path = folder / "header"
        writer = gguf.GGUFWriter(path, remaining_fields.pop("general.architecture"))
        for key, value in remaining_fields.items():
            writer.add_key_value(key, value, *_value_types(key, value))
        for tensor in tensors:
            size, dtype = tensor.n_bytes, np.dtype(np.float32)
            writer.add_tensor_info(tensor.name, tensor.shape, dtype, size, raw_dtype=tensor.type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        header = path.read_bytes()
    return header + bytes(-len(header) % ALIGNMENT)


def _value_types(key: str, value: Any) -> tuple[GGUFValueType, GGUFValueType | None]:
    """The type of a field, and of the items of an array."""
    if isinstance(value, list):
        item_type = _value_types(key, value[0])[0]
        if key == _BYTES_FIELD:
            return GGUFValueType.ARRAY, GGUFValueType.UINT8
        is_number = item_type is GGUFValueType.UINT32
        return GGUFValueType.ARRAY, GGUFValueType.INT32 if is_number else item_type
    if isinstance(value, int) and not isinstance(value, bool):
        kinds = GGUFValueType.UINT32, GGUFValueType.INT64
        return kinds[not 0 <= value < 1 << 32], None
    return GGUFValueType.get_type(value), None
