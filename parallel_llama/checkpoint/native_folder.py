"""Native folders, in which any range of units of a weight is one range of bytes.

Weights that ranks cut by rows have this property in row-major order. Weights that they cut by
columns (wo and w2) are stored in unit-major order: the columns of unit 0, row by row, then the
columns of unit 1, and so on. The last unit may be short.

    row-major   a0 a1 | b0 b1 | c0        unit-major   a0 a1 a2 a3 | b0 b1 b2 b3 | c0 c1
                a2 a3 | b2 b3 | c1

A quantised matrix is stored as two or three tensors in the same order:

    NAME.integers   [out, in] int8, or [out, in / 2] uint8 for 4-bit integers
    NAME.floats     [out, in] e4m3, instead of integers in fp8
    NAME.scales     [out, in / 32] float16
    NAME.mins       [out, in / 32] float16, in asymmetric formats

4-bit integers are packed in pairs, the first in the low half of the byte; symmetric formats add 8,
so that -8 is stored as 0.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import Empty, new_memory
from parallel_llama.checkpoint.tensor_files import TensorFiles, decoded
from parallel_llama.config.native import native_units
from parallel_llama.config.quantised import native_formats
from parallel_llama.dtypes import QUANT_GROUP_SIZE, STORED, QuantFormat
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.stored_slices import StoredSlice, whole
from parallel_llama.families.weights import Param
from parallel_llama.files.fields import naming, read_json_object
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.ops.formats import torch_dtype
from parallel_llama.ops.quant import QuantMatrix
from parallel_llama.plan import unit_size

# Bytes of one block of units when writing: large writes, and memory that is reused.
BLOCK_BYTES = 8 << 20

# Suffixes of the tensors of a quantised weight, and their dtypes by the names in the files.
_SUFFIXES = ".integers", ".floats", ".scales", ".mins"
_INTEGERS = {8: "I8", 5: "I8", 4: "U8"}  # 5-bit integers take a byte
_FLOAT = "F8_E4M3"
_HALF = "F16"
BYTE_DTYPES = {"I8": torch.int8, "U8": torch.uint8, _FLOAT: torch.float8_e4m3fn}


@dataclass(frozen=True)
class Part:
    """A tensor of a native folder: a plain weight, or one tensor of a quantised weight.

    `param` names the tensor and has its shape, `unit` is its rows or columns per unit, and each
    value stands for `per` inputs of the weight. Plain weights have any dtype, so `dtype` is None.
    """

    param: Param
    unit: int
    per: int = 1
    dtype: str | None = None

    @classmethod
    def of(cls, weight: Param, unit: int, suffix: str, per: int, dtype: str) -> "Part":
        """The tensor with one value for every `per` inputs of a matrix."""
        n_rows, n_columns = weight.shape
        param = replace(weight, name=weight.name + suffix, shape=(n_rows, n_columns // per))
        return cls(param, unit // per if weight.dim == 1 else unit, per, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        return stored_shape(self.param, self.unit)

    def rows(self, of_weight: range) -> range:
        """Converts rows or columns of the weight, in whole groups, to those of the tensor."""
        if self.param.dim == 0:
            return of_weight
        return range(of_weight.start // self.per, of_weight.stop // self.per)


class NativeFolder(TensorFiles):
    """The tensors of a native folder.

    Raises: CheckpointError if a file or native.json is damaged.
    """

    readable = f"supported: {', '.join(STORED)}, and the quantised weights of native.json"

    def __init__(self, files: ModelFiles, args: ModelArgs, empty: Empty = new_memory) -> None:
        values = read_json_object(files.config)
        with naming(files.config, CheckpointError):
            self._units = native_units(values, axis_units(args))
            self._formats = native_formats(values, args)
            if self._formats:
                _require_whole_quant_groups(self._units)
        super().__init__(files, args, empty)

    def _slices_of(self, args: ModelArgs) -> Mapping[str, StoredSlice]:
        self._in_file = {param.name: param for param in parameters(args)}
        parts = [part for name in self._in_file for part in self._parts(name)]
        self._dtype_of = {part.param.name: part.dtype for part in parts}
        return {part.param.name: whole(part.param.name, part.shape) for part in parts}

    def _dtypes(self, name: str) -> Collection[str]:
        dtype = self._dtype_of[name]
        return STORED if dtype is None else (dtype,)

    def _parts(self, name: str) -> list[Part]:
        return parts_of(self._in_file[name], self._units, self._quant_format(name))

    def _quant_format(self, name: str) -> QuantFormat | None:
        form = self._formats.get(name)
        return form if isinstance(form, QuantFormat) else None

    def _stored(self, param: Param, rows: range) -> Tensor:
        form = self._quant_format(param.name)
        if form is None:
            (part,) = self._parts(param.name)
            return self._values(part, rows, param.dim)
        return decoded(param, rows, partial(self._groups, param, form=form))

    def _stored_quant(self, param: Param, rows: range, form: QuantFormat) -> QuantMatrix | None:
        return self._groups(param, rows, form) if self._quant_format(param.name) == form else None

    def _groups(self, param: Param, rows: range, form: QuantFormat) -> QuantMatrix:
        """A slice of a quantised weight; slices of columns must be whole groups."""
        parts = (self._values(part, rows, param.dim) for part in self._parts(param.name))
        integers, scales, *mins = parts
        if form.n_bits == 4:
            integers = unpacked(integers, form)
        return QuantMatrix(form, integers.view(torch.int8), scales, mins[0] if mins else None)

    def _values(self, part: Part, rows: range, dim: int) -> Tensor:
        """The part of a tensor for these rows (dim 0) or columns (dim 1) of the weight."""
        if is_unit_major(part.param):
            return self._rows(part, rows) if dim == 0 else self._columns(part, part.rows(rows))
        file, tensor = self._held(part.param)
        stored_slice = self._slices[part.param.name]
        return file.values(tensor.offset, dtype_of(tensor.dtype), part.param, stored_slice, rows)

    def _rows(self, part: Part, rows: range) -> Tensor:
        """Rows of a tensor in unit-major order, gathered from every unit."""
        file, tensor = self._held(part.param)
        (n_rows, n_columns), dtype = part.param.shape, dtype_of(tensor.dtype)
        if not rows:
            return torch.empty((0, n_columns), dtype=dtype)
        n_units, n_left = divmod(n_columns, part.unit)

        def read(offset: int, units: range, n_bytes: int) -> Tensor:
            """Reads these rows of consecutive units; a row of a unit has `n_bytes`."""
            wanted = range(rows.start * n_bytes, rows.stop * n_bytes)
            return file.matrix(offset, n_rows * n_bytes, units, wanted).view(-1).view(dtype)

        whole = read(tensor.offset, range(n_units), part.unit * dtype.itemsize)
        offset = tensor.offset + n_units * part.unit * n_rows * dtype.itemsize
        last = read(offset, range(bool(n_left)), n_left * dtype.itemsize)
        return from_unit_major(torch.cat((whole, last)), len(rows), part.unit)

    def _columns(self, part: Part, rows: range) -> Tensor:
        """Columns of a tensor in unit-major order; reads the units that overlap them."""
        file, tensor = self._held(part.param)
        n_rows, n_columns = part.param.shape
        unit, dtype = part.unit, dtype_of(tensor.dtype)
        units = range(rows.start // unit, -(-rows.stop // unit) if rows else rows.start // unit)
        held = range(units.start * unit, min(units.stop * unit, n_columns))
        column_bytes = n_rows * dtype.itemsize
        data = file.matrix(tensor.offset, column_bytes, held, range(column_bytes))
        columns = from_unit_major(data.view(-1).view(dtype), n_rows, unit)
        if held == rows:
            return columns
        return columns[:, rows.start - held.start : rows.stop - held.start].contiguous()


def axis_units(args: ModelArgs, quant_group_size: int = 1) -> dict[str, int]:
    """The rows or columns in one unit of each axis; independent of the number of ranks.

    Units are multiples of `quant_group_size` inputs. Axes that the model lacks have none.
    """
    channels = {
        "ffn": args.ffn_dim,
        "shared_ffn": args.shared_ffn_dim,
        "dense_ffn": args.dense_ffn_dim,
    }
    return {
        "heads": args.head_dim,
        "kv_heads": args.head_dim,
        **{
            axis: unit_size(size, args.n_heads, quant_group_size)
            for axis, size in channels.items()
            if size
        },
        "vocab": unit_size(args.vocab_size, args.n_heads),
    }


def unit_of(param: Param, units: Mapping[str, int]) -> int:
    """The rows or columns of one unit of a weight; all if the weight is replicated."""
    return param.shape[param.dim] if param.axis is None else units[param.axis]


def parts_of(param: Param, units: Mapping[str, int], form: QuantFormat | None = None) -> list[Part]:
    """The tensors of a weight; if quantised: integers or floats, scales, and perhaps minima."""
    unit = unit_of(param, units)
    if form is None:
        return [Part(param, unit)]
    integers, floats, scales, mins = _SUFFIXES
    per_byte, stored = (2 if form.n_bits == 4 else 1), _INTEGERS[form.n_bits]
    first = (floats, 1, _FLOAT) if form.is_float else (integers, per_byte, stored)
    halves = [scales, mins] if form.has_min else [scales]
    return [
        Part.of(param, unit, *first),
        *(Part.of(param, unit, half, QUANT_GROUP_SIZE, _HALF) for half in halves),
    ]


def dtype_of(in_file: str) -> torch.dtype:
    """The torch dtype for a name in the files."""
    return BYTE_DTYPES.get(in_file) or torch_dtype(STORED[in_file])


def weight_of(tensor: str) -> str:
    """The name of the weight that a tensor of a native folder belongs to."""
    for suffix in _SUFFIXES:
        tensor = tensor.removesuffix(suffix)
    return tensor


def packed(integers: Tensor, form: QuantFormat) -> Tensor:
    """Pack 4-bit integers in pairs. Shapes: [out, in] int8 -> [out, in / 2] uint8."""
    pairs = (integers + form.zero).view(torch.uint8)
    pairs = pairs.view(len(pairs), pairs.shape[1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpacked(pairs: Tensor, form: QuantFormat) -> Tensor:
    """The inverse of `packed`."""
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1).view(torch.int8) - form.zero


def unit_spans(held: range, param: Param, units: Mapping[str, int]) -> list[range]:
    """The byte range of each unit, in order, of a tensor stored in the byte range `held`."""
    size, unit, n_bytes = param.shape[param.dim], unit_of(param, units), len(held)
    return [
        held[start * n_bytes // size : min(start + unit, size) * n_bytes // size]
        for start in range(0, size, unit)
    ]


def is_unit_major(param: Param) -> bool:
    """Whether a native folder stores this weight in unit-major order."""
    return param.axis is not None and param.dim == 1


def stored_shape(param: Param, unit: int) -> tuple[int, ...]:
    """The shape of a weight in its file: [n_units, rows, unit] in unit-major order.

    With a short last unit the values are stored flat.
    """
    if not is_unit_major(param):
        return param.shape
    n_rows, n_columns = param.shape
    if n_columns % unit:
        return (n_rows * n_columns,)
    return (n_columns // unit, n_rows, unit)


def unit_major_blocks(value: Tensor, unit: int) -> Iterator[Tensor]:
    """Yields a matrix in unit-major order, in flat blocks of several units."""
    n_rows, n_columns = value.shape
    step = max(1, BLOCK_BYTES // max(1, n_rows * unit * value.itemsize)) * unit
    whole = n_columns // unit * unit
    for start in range(0, whole, step):
        block = value[:, start : min(start + step, whole)].view(n_rows, -1, unit)
        yield block.transpose(0, 1).reshape(-1)
    if whole < n_columns:
        yield value[:, whole:].reshape(-1)


def from_unit_major(data: Tensor, n_rows: int, unit: int) -> Tensor:
    """The row-major matrix of consecutive units, as a copy.

    Shapes: data [n_rows * n_columns]; only the last unit may be short.
    """
    n_columns = data.numel() // n_rows
    whole = n_columns // unit * unit
    out = torch.empty((n_rows, n_columns), dtype=data.dtype)
    units = data[: whole * n_rows].view(-1, n_rows, unit)
    out[:, :whole].view(n_rows, -1, unit).copy_(units.transpose(0, 1))
    out[:, whole:] = data[whole * n_rows :].view(n_rows, n_columns - whole)
    return out


def _require_whole_quant_groups(units: Mapping[str, int]) -> None:
    """Raises: UsageError if a group of inputs would be in two units."""
    for axis in units.keys() - {"kv_heads", "vocab"}:  # axes along which inputs are cut
        if units[axis] % QUANT_GROUP_SIZE:
            raise UsageError(
                f"units of {axis} have size {units[axis]}, not a multiple of the "
                f"{QUANT_GROUP_SIZE} inputs that share a scale"
            )
