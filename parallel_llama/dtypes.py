"""The dtypes that weights may have, one table of them, and the formats that they are kept in.

Pure data: who needs torch's own objects asks `ops.formats`, which stores and applies weights.
"""

from dataclasses import dataclass
from typing import Literal, get_args

DTypeName = Literal["float32", "bfloat16", "float16", "float64"]

DTYPES: tuple[DTypeName, ...] = get_args(DTypeName)

# Bytes of one value.
ITEM_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

# The names of safetensors files; GGUF has the last three of them.
STORED: dict[str, DTypeName] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
}
STORED_NAMES = {dtype: name for name, dtype in STORED.items()}


@dataclass(frozen=True)
class DenseFormat:
    """Weights as plain values of one dtype."""

    dtype: str

    def n_bytes(self, n_values: int) -> int:
        """The bytes of so many values of a weight."""
        return n_values * ITEM_BYTES[self.dtype]
