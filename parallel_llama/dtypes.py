"""The dtypes that weights may have, and the formats of weights and of the KV cache.

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


# What keys and values may be kept in, by vLLM's names; auto is the model's own dtype.
KV_DTYPES = "auto", "bfloat16", "int8", "fp8"

# Of the float32 that the numbers of one key or value are multiplied by.
KV_SCALE_BYTES = 4


@dataclass(frozen=True)
class DenseFormat:
    """Weights as plain values of one dtype."""

    dtype: str

    def n_bytes(self, n_values: int) -> int:
        """The bytes of so many values of a weight."""
        return n_values * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class KVFormat:
    """Keys and values in one of `DTYPES`, or in int8 or fp8 (e4m3) with a scale for each of them.

    Source: e4m3, FP8 formats for deep learning, arXiv 2209.05433.
    """

    dtype: str

    def n_bytes(self, head_dim: int) -> int:
        """The bytes of one key or one value."""
        if self.dtype in ("int8", "fp8"):
            return head_dim + KV_SCALE_BYTES
        return head_dim * ITEM_BYTES[self.dtype]
