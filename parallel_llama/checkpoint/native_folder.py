"""Native folders: every unit of every weight is one range of bytes, for any number of ranks.

Weights that ranks cut by rows are that as they are. Those that they cut by columns (wo and w2) are
in unit-major order: all columns of unit 0 come first, row by row, then those of unit 1; a last unit
may be short. So any range of units is one range of bytes, whoever owns it:

    row-major   a0 a1 | b0 b1 | c0        unit-major   a0 a1 a2 a3 | b0 b1 b2 b3 | c0 c1
                a2 a3 | b2 b3 | c1
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import Empty, new_memory
from parallel_llama.checkpoint.tensor_files import TensorFiles, merged
from parallel_llama.config import ModelArgs
from parallel_llama.config.native import native_units
from parallel_llama.dtypes import STORED
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.families.weights import Param
from parallel_llama.files.json_text import read_json_object
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.files.safetensors_header import read_safetensors_header
from parallel_llama.ops.formats import torch_dtype
from parallel_llama.plan import unit_size

# Bytes of one block of units on the way out: large writes, and memory that is used again.
BLOCK_BYTES = 8 << 20


class NativeFolder(TensorFiles):
    """The tensors of a native folder.

    Raises: CheckpointError if a file is damaged or native.json does not say how it was written.
    """

    readable = f"a native folder has {', '.join(STORED)}"

    def __init__(self, files: ModelFiles, args: ModelArgs, empty: Empty = new_memory) -> None:
        try:
            self._units = native_units(read_json_object(files.config))
        except UsageError as error:
            raise CheckpointError(f"{files.config}: {error}") from error
        headers = {path: read_safetensors_header(path) for path in files.weights}
        super().__init__(files, args, merged(files.path, headers), empty)

    def _stored_shape(self, param: Param) -> tuple[int, ...]:
        return stored_shape(param, unit_of(param, self._units))

    def _stored(self, param: Param, rows: range) -> Tensor:
        return (self._columns if is_unit_major(param) else super()._stored)(param, rows)

    def _columns(self, param: Param, rows: range) -> Tensor:
        """Some columns of a weight in unit-major order; the units that hold them are read."""
        file, tensor = self._held(param)
        n_rows, n_columns = param.shape
        unit, dtype = unit_of(param, self._units), torch_dtype(STORED[tensor.dtype])
        units = range(rows.start // unit, -(-rows.stop // unit) if rows else rows.start // unit)
        held = range(units.start * unit, min(units.stop * unit, n_columns))
        column_bytes = n_rows * dtype.itemsize
        data = file.matrix(tensor.offset, column_bytes, held, range(column_bytes))
        columns = from_unit_major(data.view(-1).view(dtype), n_rows, unit)
        if held == rows:
            return columns
        return columns[:, rows.start - held.start : rows.stop - held.start].contiguous()


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


def unit_spans(held: range, param: Param, units: Mapping[str, int]) -> list[range]:
    """The bytes of each unit of a weight whose bytes are `held`, in the order of the file."""
    size, unit = param.shape[param.dim], unit_of(param, units)
    per_row = len(held) // size
    return [
        held[start * per_row : min(start + unit, size) * per_row] for start in range(0, size, unit)
    ]


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


def unit_major_blocks(value: Tensor, unit: int) -> Iterator[Tensor]:
    """A matrix in unit-major order, some units at a time, each block as one row."""
    n_rows, n_columns = value.shape
    step = max(1, BLOCK_BYTES // max(1, n_rows * unit * value.itemsize)) * unit
    whole = n_columns // unit * unit
    for start in range(0, whole, step):
        block = value[:, start : min(start + step, whole)].view(n_rows, -1, unit)
        yield block.transpose(0, 1).reshape(-1)
    if whole < n_columns:
        yield value[:, whole:].reshape(-1)


def from_unit_major(data: Tensor, n_rows: int, unit: int) -> Tensor:
    """The matrix of some units that lie behind each other, row by row; a new tensor.

    Shapes: data [n_rows * n_columns]; only the last unit may be short.
    """
    n_columns = data.numel() // n_rows
    whole = n_columns // unit * unit
    out = torch.empty((n_rows, n_columns), dtype=data.dtype)
    units = data[: whole * n_rows].view(-1, n_rows, unit)
    out[:, :whole].view(n_rows, -1, unit).copy_(units.transpose(0, 1))
    out[:, whole:] = data[whole * n_rows :].view(n_rows, n_columns - whole)
    return out
