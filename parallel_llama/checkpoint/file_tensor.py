"""Where a tensor lies in its file, whichever format the file has."""

from dataclasses import dataclass

import torch

# The dtypes that a model may have, under safetensors' names.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class FileTensor:
    """One tensor's place in its file, row by row; `dtype` may be one that no model has.

    Units: `offset` is in bytes from the start of the file, `n_bytes` in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
