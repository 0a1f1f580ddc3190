"""Writing HF and native folders: which tensor in which safetensors file, at which byte."""

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from parallel_llama.checkpoint.native_folder import (
    axis_units,
    is_unit_major,
    stored_shape,
    unit_major_blocks,
    unit_of,
    unit_spans,
)
from parallel_llama.checkpoint.rotary import is_rotary, reordered
from parallel_llama.config import GenerationDefaults, ModelArgs
from parallel_llama.config.hf import hf_config
from parallel_llama.config.native import native_config
from parallel_llama.dtypes import STORED_NAMES
from parallel_llama.errors import UsageError
from parallel_llama.families import family_of, parameters, stored_places
from parallel_llama.families.places import Place, whole
from parallel_llama.families.weights import Param
from parallel_llama.ops.formats import dtype_name
from parallel_llama.reshard.layout import Layout, TargetFile, json_text
from parallel_llama.reshard.target_folder import TargetKind

# Data begins where a page does, and so does every tensor of a usual shape.
HEADER_ALIGNMENT = 4096


@dataclass(frozen=True)
class StoredTensor:
    """A tensor under the name and in the shape that a file gives it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsLayout(Layout):
    """The model's tensors dealt to the named files, about the same number of bytes to each.

    `dtypes` are by Meta's names and `places` where each weight lies, by Meta's names too;
    `stored` are the tensors as the files have them, and `locations` file name and byte offset of
    each, by the files' names.

    Raises: UsageError if there are more files than tensors, or weights of several dtypes in one.
    """

    def __init__(
        self,
        args: ModelArgs,
        dtypes: Mapping[str, torch.dtype],
        names: Sequence[str],
        places: Mapping[str, Place],
    ) -> None:
        self.args, self.places = args, places
        self.stored = _stored(places, dtypes)
        if len(names) > len(self.stored):
            raise UsageError(
                f"{len(names)} files and {len(self.stored)} tensors: a file holds at least one; "
                f"use --tp 1 to {len(self.stored)}"
            )
        files: list[TargetFile] = []
        self.locations: dict[str, tuple[str, int]] = {}
        for name, dealt in zip(names, _dealt([*self.stored.values()], len(names)), strict=True):
            # Wide dtypes first, so that none begins at a byte that its width does not divide.
            ordered = sorted(dealt, key=lambda tensor: -tensor.dtype.itemsize)
            header = _header(ordered)
            offset = len(header)
            for tensor in ordered:
                self.locations[tensor.name] = name, offset
                offset += tensor.n_bytes
            files.append(TargetFile(name, offset, ((0, header),)))
        self.files = tuple(files)


class HFLayout(SafetensorsLayout):
    """A HF folder: HF's names, their index, config.json.

    Raises: UsageError if there are more files than tensors, or config.json cannot say what the
    model is.
    """

    kind: TargetKind = "hf"

    def __init__(
        self,
        args: ModelArgs,
        dtypes: Mapping[str, torch.dtype],
        n_parts: int,
        ids: GenerationDefaults | None = None,
    ) -> None:
        self._config = hf_config(args, ids)
        names = [f"model-{n:05}-of-{n_parts:05}.safetensors" for n in range(1, n_parts + 1)]
        names = names if n_parts > 1 else ["model.safetensors"]
        super().__init__(args, dtypes, names, stored_places(args, "hf"))

    def parts(self, param: Param, pieces: Iterable[Tensor]) -> Iterator[tuple[str, int, Tensor]]:
        place = self.places[param.name]
        file, offset = self.locations[place.name]
        order = family_of(self.args).rotary_order["hf"]
        start = 0  # rows that are done
        for piece in pieces:
            if order != "half" and is_rotary(param.name):
                piece = reordered(piece, self.args.head_dim, order, self.args.rotary_dim)
            rows = range(start, start + piece.shape[0])
            row_bytes = piece.nbytes // len(rows)
            for run in place.runs(rows):
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

    Raises: UsageError if there are more files than tensors.
    """

    kind: TargetKind = "native"

    def __init__(self, args: ModelArgs, dtypes: Mapping[str, torch.dtype], n_parts: int) -> None:
        self._units = axis_units(args)
        names = [f"weights-{n:05}-of-{n_parts:05}.safetensors" for n in range(1, n_parts + 1)]
        places = {
            param.name: whole(param.name, stored_shape(param, unit_of(param, self._units)))
            for param in parameters(args)
        }
        super().__init__(args, dtypes, names, places)

    def parts(self, param: Param, pieces: Iterable[Tensor]) -> Iterator[tuple[str, int, Tensor]]:
        if is_unit_major(param):
            (tensor,) = pieces
            pieces = unit_major_blocks(tensor, unit_of(param, self._units))
        file, offset = self.locations[param.name]
        for piece in pieces:
            yield file, offset, piece
            offset += piece.nbytes

    def metadata(self) -> dict[str, bytes]:
        return {"native.json": json_text(native_config(self.args, self._units))}

    def unit_bytes(self, param: Param) -> list[int]:
        held = range(self.stored[param.name].n_bytes)
        return [len(span) for span in unit_spans(held, param, self._units)]


def _stored(
    places: Mapping[str, Place], dtypes: Mapping[str, torch.dtype]
) -> dict[str, StoredTensor]:
    """The stored tensors in which the weights lie, in the order of the model."""
    stored: dict[str, StoredTensor] = {}
    for name, place in places.items():
        tensor = StoredTensor(place.name, dtypes[name], place.shape)
        if stored.setdefault(place.name, tensor) != tensor:
            raise UsageError(
                f"{place.name}: holds weights of {dtype_name(stored[place.name].dtype)} and of "
                f"{dtype_name(tensor.dtype)}, and a tensor has one dtype; use --dtype, or --format "
                "native"
            )
    return stored


def _dealt(tensors: Sequence[StoredTensor], n_files: int) -> list[Sequence[StoredTensor]]:
    """Cut where the running sum comes nearest to equal parts, at least one tensor to a file."""
    ends = list(accumulate(tensor.n_bytes for tensor in tensors))
    cuts = [0]
    for number in range(1, n_files):
        wanted = bisect_left(ends, ends[-1] * number / n_files) + 1
        cuts.append(max(cuts[-1] + 1, min(wanted, len(tensors) - (n_files - number))))
    cuts.append(len(tensors))
    return [tensors[start:stop] for start, stop in pairwise(cuts)]


def _header(tensors: Sequence[StoredTensor]) -> bytes:
    # Readers of other projects look for this format before they take a file as torch's.
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": STORED_NAMES[dtype_name(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.n_bytes],
        }
        offset += tensor.n_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
