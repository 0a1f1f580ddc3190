"""Reads a tensor of one number from a safetensors file, without torch."""

import math
import struct
from pathlib import Path

from parallel_llama.errors import CheckpointError, listed
from parallel_llama.files.bounded_files import open_file
from parallel_llama.files.safetensors_header import FileTensor

# By dtype; a BF16 is the upper half of an F32.
_FORMATS = {"F32": "<f", "F16": "<e", "BF16": "<f", "F64": "<d", "I8": "<b", "I32": "<i"}


def read_scalar(path: Path, tensor: FileTensor) -> float:
    """The number in a tensor with one number.

    Raises: CheckpointError for another shape, an unknown dtype, or a file that was cut.
    """
    if math.prod(tensor.shape) != 1 or tensor.dtype not in _FORMATS:
        raise CheckpointError(
            f"{path}: {tensor.name!r:.200} is {[*tensor.shape]} of {tensor.dtype}, expected one "
            f"number of {listed([*_FORMATS])}; use the config.json that belongs to the weights"
        )
    with open_file(path) as file:
        file.seek(tensor.offset)
        data = file.read(tensor.n_bytes)
    if tensor.dtype == "BF16":
        data = b"\0\0" + data
    try:
        return float(struct.unpack(_FORMATS[tensor.dtype], data)[0])
    except struct.error as error:
        raise CheckpointError(
            f"{path}: truncated: {tensor.name!r:.200} is missing; fetch the file again"
        ) from error
