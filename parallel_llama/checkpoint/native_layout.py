"""Writing a native folder: every unit of every weight is one range of bytes.

Weights that ranks cut by rows are that as they are; those cut by columns (wo and w2) are stored
unit-major. So a rank of any tensor-parallel size reads its share of a weight at once.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from parallel_llama.checkpoint.layout import TargetFile
from parallel_llama.checkpoint.safetensors_layout import StoredTensor, place
from parallel_llama.checkpoint.unit_major import unit_major_blocks
from parallel_llama.config import ModelArgs
from parallel_llama.config.native_config import native_config
from parallel_llama.plan import Param, parameters, unit_size


class NativeLayout:
    """A native folder of `n_parts` files; `dtypes` are the tensors' by Meta's names.

    Raises: UsageError if there are more files than tensors.
    """

    kind: Literal["native"] = "native"

    def __init__(self, args: ModelArgs, dtypes: Mapping[str, torch.dtype], n_parts: int) -> None:
        self._args = args
        self._dtypes = dtypes
        self._units = axis_units(args)
        names = [f"weights-{n:05}-of-{n_parts:05}.safetensors" for n in range(1, n_parts + 1)]
        stored = [
            StoredTensor(
                param.name, dtypes[param.name], stored_shape(param, unit_of(param, self._units))
            )
            for param in parameters(args)
        ]
        self._placed = place(stored, names)

    @property
    def files(self) -> tuple[TargetFile, ...]:
        return self._placed.files

    def create(self, folder: Path) -> None:
        self._placed.create(folder)

    def parts(self, param: Param, pieces: Iterable[Tensor]) -> Iterator[tuple[str, int, Tensor]]:
        if is_unit_major(param):
            (whole,) = pieces
            pieces = unit_major_blocks(whole, unit_of(param, self._units))
        return self._placed.parts(param.name, pieces)

    def finish(self, folder: Path) -> None:
        """Nothing is left to do."""

    def metadata(self) -> dict[str, bytes]:
        config = native_config(self._args, self._units)
        return {"native.json": json.dumps(config, indent=2).encode() + b"\n"}

    def unit_bytes(self, param: Param) -> list[int]:
        """The bytes of each unit of a weight, in the order of the file; one unit if replicated."""
        size, unit = param.shape[param.dim], unit_of(param, self._units)
        per_row = math.prod(param.shape) // size * self._dtypes[param.name].itemsize
        return [min(unit, size - start) * per_row for start in range(0, size, unit)]


def axis_units(args: ModelArgs) -> dict[str, int]:
    """The rows or columns in one unit of each axis: a matter of the model alone."""
    return {
        "heads": args.head_dim,
        "kv_heads": args.head_dim,
        "ffn": unit_size(args.ffn_dim, args.n_heads),
        "vocab": unit_size(args.vocab_size, args.n_heads),
    }


def unit_of(param: Param, units: Mapping[str, int]) -> int:
    """The rows or columns of one unit of a weight; all of them where it is replicated."""
    return param.shape[param.dim] if param.axis is None else units[param.axis]


def is_unit_major(param: Param) -> bool:
    """Whether a native folder stores this weight in unit-major order."""
    return param.axis is not None and param.dim == 1


def stored_shape(param: Param, unit: int) -> tuple[int, ...]:
    """The shape of a weight in its file: [n_units, rows, unit] in unit-major order.

    With a short last unit there is no such shape, and the values are one row.
    """
    if not is_unit_major(param):
        return param.shape
    n_rows, n_columns = param.shape
    if n_columns % unit:
        return (n_rows * n_columns,)
    return (n_columns // unit, n_rows, unit)
