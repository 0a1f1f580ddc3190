"""Writes HF and native folders: the safetensors file and offset of each tensor."""

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from parallel_llama.checkpoint.canonical import Piece
from parallel_llama.checkpoint.checkpoint import is_rotary, reordered
from parallel_llama.checkpoint.native_folder import (
    BYTE_DTYPES,
    NativeStorage,
    Part,
    axis_units,
    dtype_of,
    is_unit_major,
    packed,
    unit_major_blocks,
)
from parallel_llama.config.generation import GenerationDefaults
from parallel_llama.config.hf import hf_config
from parallel_llama.config.native import native_config
from parallel_llama.dtypes import (
    QUANT_GROUP_SIZE,
    STORED_NAMES,
    InputFormat,
    QuantFormat,
    StoredFormat,
)
from parallel_llama.errors import UsageError
from parallel_llama.families import family_of, parameters, stored_slices
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.stored_slices import StoredSlice, whole
from parallel_llama.families.weights import Param
from parallel_llama.files.safetensors_header import MAX_HEADER_BYTES, MAX_TENSORS
from parallel_llama.ops.formats import dtype_name
from parallel_llama.reshard.layout import Layout, TargetFile, json_text
from parallel_llama.reshard.target_folder import TargetKind

# Tensor data begins at a page boundary; with common shapes, so does every tensor.
HEADER_ALIGNMENT = 4096
# A model of many experts has tens of millions of units. Each hash takes 71 bytes of the manifest.
MAX_UNIT_HASHES = 500_000


@dataclass(frozen=True)
class StoredTensor:
    """A tensor with its name and shape in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsLayout(Layout):
    """The tensors of a model distributed over files of about equal size.

    Args:
        dtypes: the dtypes of the weights, by Meta's names.

    Attributes:
        stored: the tensors, by their names in the files.
        locations: the file name and byte offset of each tensor, by its name in the files.

    Raises: UsageError if there are more files than tensors, a file would have more tensors than can
    be read, or a stored tensor holds weights of several dtypes.
    """

    def __init__(
        self,
        args: ModelArgs,
        dtypes: Mapping[str, torch.dtype],
        names: Sequence[str],
        slices: Mapping[str, StoredSlice],
    ) -> None:
        self.args, self.slices = args, slices
        self.stored = _stored(slices, dtypes)
        if len(names) > len(self.stored):
            raise UsageError(
                f"{len(names)} files and {len(self.stored)} tensors: a file needs at least one; "
                f"use --tp 1 to {len(self.stored)}"
            )
        files: list[TargetFile] = []
        self.locations: dict[str, tuple[str, int]] = {}
        for name, tensors in zip(
            names, _distributed([*self.stored.values()], len(names)), strict=True
        ):
            # Wide dtypes come first, so that every tensor is aligned to its itemsize. A tensor of
            # single bytes comes among those of two bytes if its size is even, and otherwise last.
            ordered = sorted(tensors, key=lambda t: -max(2 - t.n_bytes % 2, t.dtype.itemsize))
            header = _header(ordered)
            if len(ordered) > MAX_TENSORS or len(header) > MAX_HEADER_BYTES:
                raise UsageError(
                    f"{name} would have {len(ordered)} tensors with a header of {len(header)} "
                    f"bytes; a file has at most {MAX_TENSORS} tensors and {MAX_HEADER_BYTES} bytes "
                    f"of header; use a --tp larger than {len(names)}"
                )
            offset = len(header)
            for tensor in ordered:
                self.locations[tensor.name] = name, offset
                offset += tensor.n_bytes
            files.append(TargetFile(name, offset, ((0, header),)))
        self.files = tuple(files)


class HFLayout(SafetensorsLayout):
    """An HF folder: HF's names, an index, config.json.

    Raises: UsageError if there are more files than tensors, or config.json cannot express the
    model.
    """

    kind: TargetKind = "hf"

    def __init__(
        self,
        args: ModelArgs,
        dtypes: Mapping[str, torch.dtype],
        n_parts: int,
        defaults: GenerationDefaults | None = None,
    ) -> None:
        self._config = hf_config(args, defaults)
        names = [f"model-{n:05}-of-{n_parts:05}.safetensors" for n in range(1, n_parts + 1)]
        names = names if n_parts > 1 else ["model.safetensors"]
        super().__init__(args, dtypes, names, stored_slices(args, "hf"))
        # Several weights of an expert can be stored in one matrix. `_last` has the last weight of
        # each such matrix, and `_waiting` the values of the weights before it.
        self._last = {
            _expert_rows(stored_slice): name
            for name, stored_slice in self.slices.items()
            if stored_slice.count is not None
        }
        self._waiting: list[Tensor] = []

    def written_with(self, param: Param) -> str:
        stored_slice = self.slices[param.name]
        return param.name if stored_slice.count is None else self._last[_expert_rows(stored_slice)]

    def parts(self, param: Param, pieces: Iterable[Piece]) -> Iterator[tuple[str, int, Tensor]]:
        stored_slice = self.slices[param.name]
        file, offset = self.locations[stored_slice.name]
        if stored_slice.count is not None:
            value = torch.cat([piece for (piece,) in pieces])
            offset += _expert_rows(stored_slice)[1] * (value.nbytes // len(value))
            self._waiting.append(value)
            if self.written_with(param) == param.name:
                whole = torch.cat(self._waiting)
                if stored_slice.step > 1:  # the rows of the weights alternate
                    whole = torch.stack(self._waiting, 1).flatten(0, 1)
                self._waiting = []
                yield file, offset, whole.t().contiguous() if stored_slice.is_transposed else whole
            else:
                yield file, offset, value[:0]
            return
        order = family_of(self.args).rotary_order["hf"]
        start = 0  # rows that are written
        for (piece,) in pieces:
            if order != "half" and is_rotary(param.name):
                piece = reordered(piece, self.args.head_dim, order, self.args.rotary_dim)
            rows = range(start, start + piece.shape[0])
            row_bytes = piece.nbytes // len(rows)
            for run in stored_slice.runs(rows):
                part = piece[start - rows.start :][: len(run)]
                yield file, offset + run.start * row_bytes, part
                start += len(run)

    def metadata(self) -> dict[str, bytes]:
        files = {"config.json": json_text(self._config)}
        if len(self.files) > 1:
            n_bytes = sum(tensor.n_bytes for tensor in self.stored.values())
            weight_map = {name: file for name, (file, _) in self.locations.items()}
            index = {"metadata": {"total_size": n_bytes}, "weight_map": weight_map}
            files["model.safetensors.index.json"] = json_text(index)
        return files


class NativeLayout(SafetensorsLayout):
    """A native folder (see `checkpoint.native_folder`).

    `formats` has the formats of quantised weights, `inputs` the formats to which matrices round
    their inputs.

    Raises: UsageError if there are more files than tensors, or a file would have more tensors than
    can be read.
    """

    kind: TargetKind = "native"

    def __init__(
        self,
        args: ModelArgs,
        dtypes: Mapping[str, torch.dtype],
        n_parts: int,
        formats: Mapping[str, StoredFormat] | None = None,
        inputs: Mapping[str, InputFormat] | None = None,
    ) -> None:
        formats, self._inputs = formats or {}, inputs
        has_groups = any(isinstance(form, QuantFormat) for form in formats.values())
        units = axis_units(args, QUANT_GROUP_SIZE if has_groups else 1)
        self._storage = NativeStorage(units, formats)
        names = [f"weights-{n:05}-of-{n_parts:05}.safetensors" for n in range(1, n_parts + 1)]
        slices: dict[str, StoredSlice] = {}
        stored_dtypes: dict[str, torch.dtype] = {}
        n_units = 0
        for weight in parameters(args):
            for part in self._storage.parts_of(weight):
                name = part.param.name
                slices[name] = whole(name, part.shape)
                stored_dtypes[name] = dtypes[name] if part.dtype is None else dtype_of(part.dtype)
                n_units += part.n_units
        self._has_unit_hashes = n_units <= MAX_UNIT_HASHES
        super().__init__(args, stored_dtypes, names, slices)

    def parts(self, param: Param, pieces: Iterable[Piece]) -> Iterator[tuple[str, int, Tensor]]:
        first, *others = self._storage.parts_of(param)
        others_by_piece: list[Piece] = []  # scales, minima and so on, stored after all integers
        form = self._storage.formats.get(param.name)

        def values() -> Iterator[Tensor]:
            for value, *rest in pieces:
                others_by_piece.append(tuple(rest))
                if first.is_packed and isinstance(form, QuantFormat):
                    yield packed(value, form)
                else:
                    yield value

        yield from self._located(first, values())
        for part, rest in zip(others, zip(*others_by_piece, strict=True), strict=True):
            yield from self._located(part, rest)

    def metadata(self) -> dict[str, bytes]:
        storage = self._storage
        config = native_config(self.args, storage.units, storage.formats, self._inputs)
        return {"native.json": json_text(config)}

    def unit_bytes(self, param: Param) -> dict[str, list[int]]:
        if not self._has_unit_hashes:
            return {}
        return {
            part.param.name: [
                len(span) for span in part.unit_spans(range(self.stored[part.param.name].n_bytes))
            ]
            for part in self._storage.parts_of(param)
        }

    def _located(self, part: Part, values: Iterable[Tensor]) -> Iterator[tuple[str, int, Tensor]]:
        """The values of one stored tensor, with their locations."""
        if is_unit_major(part.param):
            (matrix,) = values
            values = unit_major_blocks(matrix, part.unit)
        file, offset = self.locations[part.param.name]
        for value in values:
            yield file, offset, value
            offset += value.nbytes


def _expert_rows(stored_slice: StoredSlice) -> tuple[str, int]:
    """The stored tensor of an expert's weights, and the expert's first row in it."""
    n_rows = stored_slice.shape[-1]
    return stored_slice.name, stored_slice.first // n_rows * n_rows


def _stored(
    slices: Mapping[str, StoredSlice], dtypes: Mapping[str, torch.dtype]
) -> dict[str, StoredTensor]:
    """The stored tensors of the weights, in the order of the model."""
    stored: dict[str, StoredTensor] = {}
    for name, stored_slice in slices.items():
        tensor = StoredTensor(stored_slice.name, dtypes[name], stored_slice.shape)
        if stored.setdefault(stored_slice.name, tensor) != tensor:
            raise UsageError(
                f"{stored_slice.name}: has weights of "
                f"{dtype_name(stored[stored_slice.name].dtype)} and of "
                f"{dtype_name(tensor.dtype)}, but a tensor has one dtype; use --dtype, or --format "
                "native"
            )
    return stored


def _distributed(tensors: Sequence[StoredTensor], n_files: int) -> list[Sequence[StoredTensor]]:
    """Cut the list of tensors into parts of about equal bytes, with at least one tensor each."""
    ends = list(accumulate(tensor.n_bytes for tensor in tensors))
    cuts = [0]
    for number in range(1, n_files):
        wanted = bisect_left(ends, ends[-1] * number / n_files) + 1
        cuts.append(max(cuts[-1] + 1, min(wanted, len(tensors) - (n_files - number))))
    cuts.append(len(tensors))
    return [tensors[start:stop] for start, stop in pairwise(cuts)]


def _header(tensors: Sequence[StoredTensor]) -> bytes:
    # Other readers require this entry to load the file as torch tensors.
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": _file_dtype(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.n_bytes],
        }
        offset += tensor.n_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _file_dtype(dtype: torch.dtype) -> str:
    byte_names = (name for name, byte_dtype in BYTE_DTYPES.items() if byte_dtype == dtype)
    return next(byte_names, None) or STORED_NAMES[dtype_name(dtype)]
