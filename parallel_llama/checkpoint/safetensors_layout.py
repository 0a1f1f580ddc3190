"""Placing tensors in safetensors files: which file, at which byte, under which header."""

import json
import math
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from parallel_llama.checkpoint.file_tensor import DTYPE_NAMES
from parallel_llama.checkpoint.layout import TargetFile
from parallel_llama.errors import UsageError

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


@dataclass(frozen=True)
class SafetensorsFiles:
    """Files with their headers, and the place of every tensor: file name and byte offset."""

    headers: Mapping[str, bytes]
    files: tuple[TargetFile, ...]
    places: Mapping[str, tuple[str, int]]

    def create(self, folder: Path) -> None:
        """Make every file at its full size with its header; data that is there stays."""
        for file in self.files:
            descriptor = os.open(folder / file.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.truncate(descriptor, file.n_bytes)
                os.pwrite(descriptor, self.headers[file.name], 0)
            finally:
                os.close(descriptor)

    def parts(self, name: str, pieces: Iterable[Tensor]) -> Iterator[tuple[str, int, Tensor]]:
        """File name, byte offset and contents of what a tensor consists of, piece behind piece."""
        file, offset = self.places[name]
        for piece in pieces:
            yield file, offset, piece
            offset += piece.nbytes


def place(tensors: Sequence[StoredTensor], names: Sequence[str]) -> SafetensorsFiles:
    """Deal tensors to the named files, in order and about the same number of bytes to each.

    Raises: UsageError if there are more files than tensors.
    """
    if len(names) > len(tensors):
        raise UsageError(
            f"{len(names)} files and {len(tensors)} tensors: a file holds at least one; "
            f"use --tp 1 to {len(tensors)}"
        )
    headers: dict[str, bytes] = {}
    files: list[TargetFile] = []
    places: dict[str, tuple[str, int]] = {}
    for name, dealt in zip(names, _dealt(tensors, len(names)), strict=True):
        # Wide dtypes first, so that none begins at a byte that its width does not divide.
        ordered = sorted(dealt, key=lambda tensor: -tensor.dtype.itemsize)
        header = _header(ordered)
        offset = len(header)
        for tensor in ordered:
            places[tensor.name] = name, offset
            offset += tensor.n_bytes
        headers[name] = header
        files.append(TargetFile(name, offset))
    return SafetensorsFiles(headers, tuple(files), places)


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
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.n_bytes],
        }
        offset += tensor.n_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
