"""A bounded reader of safetensors headers: location, dtype and shape of each tensor.

Every number is checked against the file before it is used. Tensors must cover the data exactly,
without gaps or overlaps. Tensor data is never read.

Source: the safetensors format description (an 8-byte length, a JSON object, the data).
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_llama.errors import CheckpointError
from parallel_llama.files.bounded_files import open_file
from parallel_llama.files.fields import without_repeats

MAX_HEADER_BYTES = 100_000_000
# A mixture of experts in 4 bits has several tensors for each matrix of each expert in one file.
MAX_TENSORS = 500_000
MAX_DIMS = 8

# Bits per value of each dtype of the format; `dtypes.STORED` has the dtypes of models.
DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class FileTensor:
    """The location of a row-major tensor in a safetensors, GGUF or .pth file.

    `dtype` is the name in the file, such as BF16 or Q4_K; `offset` counts from the file's start.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


# The tensors of several files by name, each with its file.
HeldTensors = Mapping[str, tuple[Path, FileTensor]]


def read_safetensors_header(path: Path) -> dict[str, FileTensor]:
    """The locations of all tensors of a safetensors file, by name.

    Raises: CheckpointError unless the file is complete and well-formed.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise CheckpointError(
                f"{path}: truncated: has {size} bytes, expected 8 for the header length; fetch it "
                "again"
            )
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path}: claims a header of {length} bytes; at most {MAX_HEADER_BYTES} are "
                "allowed: not a safetensors file, or damaged"
            )
        if 8 + length > size:
            raise CheckpointError(
                f"{path}: truncated: has {size} bytes, expected {8 + length} for the header "
                "alone; fetch it again"
            )
        entries = _parsed(path, file.read(length))
    entries.pop("__metadata__", None)
    data_start = 8 + length
    tensors = [_tensor(path, name, entry, data_start) for name, entry in entries.items()]
    _require_cover(path, tensors, data_start, size)
    return {tensor.name: tensor for tensor in tensors}


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    # Counted before parsing, to bound the memory that a hostile header takes.
    if text.count(b'"data_offsets"') > MAX_TENSORS:
        raise CheckpointError(f"{path}: claims more than {MAX_TENSORS} tensors")
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON ({error})") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    if len(entries) > MAX_TENSORS + 1:
        raise CheckpointError(f"{path}: claims {len(entries)} tensors, at most {MAX_TENSORS}")
    return entries


def _tensor(path: Path, name: str, entry: object, data_start: int) -> FileTensor:
    def refuse(why: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name!r:.200} {why}; the file is damaged")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise refuse("needs exactly dtype, shape and data_offsets in the header")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise refuse(f"has the unknown dtype {dtype!r:.200}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        raise refuse(f"has the shape {shape!r:.200}, not a list of at most {MAX_DIMS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse(f"has the data_offsets {offsets!r:.200}, not two ascending numbers")
    start, stop = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != (stop - start) * 8:
        raise refuse(f"of shape {shape!s:.200} and dtype {dtype} claims {stop - start} bytes")
    return FileTensor(name, dtype, tuple(shape), data_start + start, stop - start)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        type(number) is int and 0 <= number < 1 << 63 for number in value
    )


def _require_cover(path: Path, tensors: list[FileTensor], data_start: int, size: int) -> None:
    """Check that the tensors cover the bytes from `data_start` to the end of the file."""
    position = data_start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.n_bytes)):
        if tensor.offset != position:
            fault = "overlaps the tensor before it" if tensor.offset < position else "leaves a gap"
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r:.200} begins at byte {tensor.offset}, expected "
                f"{position}: it {fault}; the file is damaged"
            )
        position += tensor.n_bytes
    if position > size:
        raise CheckpointError(
            f"{path}: truncated: has {size} bytes, expected {position}; fetch it again"
        )
    if position < size:
        raise CheckpointError(
            f"{path}: has {size} bytes, expected {position}: there are bytes after the last "
            "tensor; the file is damaged"
        )


def merged(
    where: Path, headers: Mapping[Path, Mapping[str, FileTensor]]
) -> dict[str, tuple[Path, FileTensor]]:
    """All tensors of several files by name, each with its file.

    Raises: CheckpointError if two files hold the same tensor.
    """
    tensors: dict[str, tuple[Path, FileTensor]] = {}
    for path, header in headers.items():
        for name, tensor in header.items():
            if name in tensors:
                raise CheckpointError(
                    f"{where}: tensor {name!r:.200} is in {tensors[name][0].name} and in "
                    f"{path.name}; remove the file that does not belong to this checkpoint"
                )
            tensors[name] = path, tensor
    return tensors
