"""Native folders, in which any range of units of a weight is one range of bytes.

A unit is the smallest part of a weight that a rank can hold: a head, or a block of channels or rows
of the vocabulary.

Weights that ranks cut by rows have this property in row-major order. Weights that ranks cut by
columns (wo and w2) are stored in unit-major order: the columns of unit 0, row by row, then the
columns of unit 1, and so on. The last unit may be short.

    row-major   a0 a1 | b0 b1 | c0        unit-major   a0 a1 a2 a3 | b0 b1 b2 b3 | c0 c1
                a2 a3 | b2 b3 | c1

The tensors of a quantised matrix are those of `QuantMatrix`, in the same order:

    NAME.integers   [out, in] int8, or [out, in / 8 * n_bits] uint8 for less than 8 bits
    NAME.floats     [out, in] e4m3, instead of integers in fp8
    NAME.scales     [out, n_blocks] float16
    NAME.mins       [out, n_blocks] float16, in formats with minima
    NAME.factors    [out, in / 32 * n_factors] int8, in formats with factors

The tensors of a matrix that is decoded while loading (`ScaledFormat`) are those of `ScaledBlock`:

    NAME.integers   [out, in] int8
    NAME.floats     [out, in] e4m3; or [out, in / 2] uint8 with two e2m1 floats, the first in the
                    low bits
    NAME.scales     [row blocks, column blocks]
    NAME.zeros      shaped as the scales, in the dtype of the numbers, in formats with zero points
    NAME.divisor    [1] float32, in formats with a divisor

A unit of columns may be smaller than a block of inputs with one scale. Scales and minima are then
stored block by block, and every rank with a part of a block reads its scale.

Integers of less than 8 bits are packed group by group, in the planes of `ops.quant.planes_of`. In
each plane, neighbours share a byte, the first in its lowest bits. Symmetric formats add their zero
point, so that the least integer is stored as 0. Version 1 stores 5-bit integers as int8.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch
from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import Empty, new_memory
from parallel_llama.checkpoint.scaled import ScaledBlock
from parallel_llama.checkpoint.tensor_files import TensorFiles, decoded
from parallel_llama.config.native import native_units, native_version
from parallel_llama.config.quantised import native_formats, scaled_of
from parallel_llama.dtypes import (
    QUANT_GROUP_SIZE,
    STORED,
    QuantFormat,
    ScaledFormat,
    StoredFormat,
)
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.stored_slices import StoredSlice, whole
from parallel_llama.families.weights import Param
from parallel_llama.files.fields import naming, read_json_object
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.ops.formats import torch_dtype
from parallel_llama.ops.quant import QuantMatrix, planes_of
from parallel_llama.plan import unit_size

# Bytes of one block of units when writing: large writes, and memory that is reused.
BLOCK_BYTES = 8 << 20

# Suffixes of the tensors of a quantised weight, and their dtypes by the names in the files.
_SUFFIXES = ".integers", ".floats", ".scales", ".mins", ".factors", ".zeros", ".divisor"
_BYTE, _PACKED, _FLOAT, _HALF, _WIDE = "I8", "U8", "F8_E4M3", "F16", "F32"
BYTE_DTYPES = {_BYTE: torch.int8, _PACKED: torch.uint8, _FLOAT: torch.float8_e4m3fn}


@dataclass(frozen=True)
class Part:
    """A tensor of a native folder: a plain weight, or one tensor of a quantised weight.

    The tensor has `n` values for each block of `height` outputs and `per` inputs of the weight.

    Args:
        param: The name and the shape of the tensor.
        unit: The rows or columns of a unit of the tensor.
        dtype: The dtype in the file; None for plain weights, which may have any dtype.
        is_packed: Whether integers of less than 8 bits share bytes.
    """

    param: Param
    unit: int
    per: int = 1
    n: int = 1
    dtype: str | None = None
    height: int = 1
    is_packed: bool = False

    @classmethod
    def of(
        cls,
        weight: Param,
        unit: int,
        suffix: str,
        per: int,
        n: int,
        dtype: str,
        height: int = 1,
        is_packed: bool = False,
    ) -> "Part":
        """The tensor with `n` values for each block of `height` outputs and `per` inputs.

        Units of the weight that share a block form one unit of the tensor.
        """
        n_rows, n_columns = weight.shape
        shape = -(-n_rows // height), -(-n_columns // per) * n
        tensor_unit = max(1, unit // per) * n if weight.dim == 1 else max(1, unit // height)
        param = replace(weight, name=weight.name + suffix, shape=shape)
        return cls(param, tensor_unit, per, n, dtype, height, is_packed)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        return stored_shape(self.param, self.unit)

    def rows(self, of_weight: range, dim: int) -> range:
        """Converts rows (dim 0) or columns (dim 1) of the weight to the tensor's."""
        per, n = (self.per, self.n) if dim else (self.height, 1)
        return range(of_weight.start // per * n, -(-of_weight.stop // per) * n)

    @property
    def n_units(self) -> int:
        return -(-self.param.shape[self.param.dim] // self.unit)

    def unit_spans(self, span: range) -> list[range]:
        """The byte range of each unit, in order; the tensor has the byte range `span`."""
        size, n_bytes = self.param.shape[self.param.dim], len(span)
        return [
            span[start * n_bytes // size : min(start + self.unit, size) * n_bytes // size]
            for start in range(0, size, self.unit)
        ]


@dataclass(frozen=True)
class NativeStorage:
    """How a native folder stores weights.

    Args:
        units: Rows or columns per unit of each axis.
        formats: The formats of quantised weights.
        version: The version of native.json.
    """

    units: Mapping[str, int]
    formats: Mapping[str, StoredFormat]
    version: int = 3

    def parts_of(self, param: Param) -> list[Part]:
        """The tensors of a weight, in the order of `tensors` of `QuantMatrix` or `ScaledBlock`."""
        # A replicated weight is one unit.
        unit = param.shape[param.dim] if param.axis is None else self.units[param.axis]
        form = self.formats.get(param.name)
        if form is None:
            return [Part(param, unit)]
        if isinstance(form, ScaledFormat):
            return _scaled_parts(param, unit, form)
        integers, floats, scales, mins, factors, *_ = _SUFFIXES
        first = Part.of(param, unit, integers, QUANT_GROUP_SIZE, QUANT_GROUP_SIZE, _BYTE)
        if form.is_float:
            first = Part.of(param, unit, floats, 1, 1, _FLOAT)
        elif form.n_bits < 8 and (self.version > 1 or form.n_bits != 5):
            n_bytes = _group_bytes(form)
            first = Part.of(
                param, unit, integers, QUANT_GROUP_SIZE, n_bytes, _PACKED, is_packed=True
            )
        parts = [(suffix, form.block, 1, _HALF) for suffix in (scales, mins)[: 1 + form.has_min]]
        if form.n_factors:
            parts.append((factors, QUANT_GROUP_SIZE, form.n_factors, _BYTE))
        return [first, *(Part.of(param, unit, *part) for part in parts)]


def _scaled_parts(param: Param, unit: int, form: ScaledFormat) -> list[Part]:
    """The tensors of a weight in the order of `ScaledBlock.tensors`."""
    height, width = (side or size for side, size in zip(form.block, param.shape, strict=True))
    integers, floats, scales, _, _, zeros, divisor = _SUFFIXES
    name, number = (integers, _BYTE) if form.numbers == "int8" else (floats, _FLOAT)
    parts = [Part.of(param, unit, name, 1, 1, number)]
    if form.numbers == "e2m1":
        parts = [Part.of(param, unit, floats, 2, 1, _PACKED)]
    parts.append(Part.of(param, unit, scales, width, 1, form.scales, height))
    if form.has_zeros:
        parts.append(Part.of(param, unit, zeros, width, 1, number, height))
    if form.has_divisor:
        divisor_param = Param(param.name + divisor, (1,))
        parts.append(Part(divisor_param, 1, dtype=_WIDE))
    return parts


def read_storage(files: ModelFiles, args: ModelArgs) -> NativeStorage:
    """The storage that native.json describes.

    Raises: CheckpointError if native.json is damaged.
    """
    values = read_json_object(files.config)
    with naming(files.config, CheckpointError):
        units = native_units(values, axis_units(args))
        quantised, scaled = native_formats(values, args), scaled_of(values, args)
        if quantised:
            _require_whole_quant_groups(units)
        return NativeStorage(units, {**quantised, **scaled}, native_version(values))


class NativeFolder(TensorFiles):
    """The tensors of a native folder.

    Raises: CheckpointError if a file or native.json is damaged.
    """

    readable = f"supported: {', '.join(STORED)}, and the quantised weights of native.json"

    def __init__(self, files: ModelFiles, args: ModelArgs, empty: Empty = new_memory) -> None:
        self._storage = read_storage(files, args)
        super().__init__(files, args, empty)

    def _slices_of(self, args: ModelArgs) -> Mapping[str, StoredSlice]:
        params = parameters(args)
        self._parts = {param.name: self._storage.parts_of(param) for param in params}
        parts = [part for parts in self._parts.values() for part in parts]
        self._dtype_of = {part.param.name: part.dtype for part in parts}
        return {part.param.name: whole(part.param.name, part.shape) for part in parts}

    def _dtypes(self, name: str) -> Collection[str]:
        dtype = self._dtype_of[name]
        return STORED if dtype is None else (dtype,)

    def _stored(self, param: Param, rows: range) -> Tensor:
        form = self._storage.formats.get(param.name)
        if form is None:
            (part,) = self._parts[param.name]
            return self._values(part, rows, param.dim)
        if isinstance(form, ScaledFormat):
            return self._scaled_block(param, rows, form).values()
        return decoded(param, rows, partial(self._groups, param, form=form))

    def _stored_quant(self, param: Param, rows: range, form: QuantFormat) -> QuantMatrix | None:
        is_stored = self._storage.formats.get(param.name) == form
        return self._groups(param, rows, form) if is_stored else None

    def _stored_scaled(self, param: Param, rows: range, form: ScaledFormat) -> ScaledBlock | None:
        is_stored = self._storage.formats.get(param.name) == form
        return self._scaled_block(param, rows, form) if is_stored else None

    def _scaled_block(self, param: Param, rows: range, form: ScaledFormat) -> ScaledBlock:
        parts, (n_outputs, n_inputs) = self._parts[param.name], param.shape
        outputs, inputs = (range(n_outputs), rows) if param.dim else (rows, range(n_inputs))
        numbers, scales, *others = (
            self._values(part, rows, param.dim) for part in parts if len(part.param.shape) == 2
        )
        divisor = self._values(parts[-1], range(1), 0) if form.has_divisor else None
        names = parts[1].param.name, parts[-1].param.name
        zeros = others[0] if others else None
        return ScaledBlock(form.block, outputs, inputs, numbers, scales, names, zeros, divisor)

    def _groups(self, param: Param, rows: range, form: QuantFormat) -> QuantMatrix:
        """A slice of a quantised weight; slices of columns must be whole groups."""
        parts = self._parts[param.name]
        integers, scales, *others = (self._values(part, rows, param.dim) for part in parts)
        if parts[0].is_packed:
            integers = unpacked(integers, form)
        mins = others.pop(0) if form.has_min else None
        factors = others.pop(0) if form.n_factors else None
        n_before = rows.start % form.block // QUANT_GROUP_SIZE if param.dim else 0
        return QuantMatrix(form, integers.view(torch.int8), scales, mins, factors, n_before)

    def _values(self, part: Part, rows: range, dim: int) -> Tensor:
        """The part of a tensor for these rows (dim 0) or columns (dim 1) of the weight."""
        rows = part.rows(rows, dim)
        if is_unit_major(part.param):
            return self._rows(part, rows) if dim == 0 else self._columns(part, rows)
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
            byte_range = range(rows.start * n_bytes, rows.stop * n_bytes)
            return file.matrix(offset, n_rows * n_bytes, units, byte_range).view(-1).view(dtype)

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
        in_units = range(units.start * unit, min(units.stop * unit, n_columns))
        column_bytes = n_rows * dtype.itemsize
        data = file.matrix(tensor.offset, column_bytes, in_units, range(column_bytes))
        columns = from_unit_major(data.view(-1).view(dtype), n_rows, unit)
        if in_units == rows:
            return columns
        return columns[:, rows.start - in_units.start : rows.stop - in_units.start].contiguous()


def axis_units(args: ModelArgs, quant_group_size: int = 1) -> dict[str, int]:
    """The rows or columns in one unit of each axis; independent of the number of ranks.

    Units of channels are multiples of `quant_group_size`. Axes that the model lacks are left out.
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


def dtype_of(in_file: str) -> torch.dtype:
    """The torch dtype for a name in the files."""
    return BYTE_DTYPES.get(in_file) or torch_dtype(STORED[in_file])


def weight_of(tensor: str) -> str:
    """The name of the weight that a tensor of a native folder belongs to."""
    for suffix in _SUFFIXES:
        tensor = tensor.removesuffix(suffix)
    return tensor


def _group_bytes(form: QuantFormat) -> int:
    """Bytes of a packed group."""
    return QUANT_GROUP_SIZE * form.n_bits // 8


def packed(integers: Tensor, form: QuantFormat) -> Tensor:
    """Packs integers of less than 8 bits. Shapes: [out, in] int8 -> [out, in / 8 * n_bits] uint8.

    >>> packed(torch.arange(-8, 8, dtype=torch.int8).repeat(1, 2), QuantFormat(4))[0, :3].tolist()
    [16, 50, 84]
    """
    n_rows, n_columns = integers.shape
    unsigned = (integers + form.zero).view(torch.uint8)
    groups = unsigned.reshape(n_rows, n_columns // QUANT_GROUP_SIZE, QUANT_GROUP_SIZE)
    planes = []
    for plane in planes_of(form.n_bits):
        n_in_byte = 8 // plane.width
        bits = (groups >> plane.first) & plane.mask
        columns = (bits[..., n::n_in_byte] << n * plane.width for n in range(n_in_byte))
        planes.append(reduce(torch.bitwise_or, columns))
    return torch.cat(planes, -1).flatten(1)


def unpacked(bytes_: Tensor, form: QuantFormat) -> Tensor:
    """The inverse of `packed`."""
    n_rows, n_columns = bytes_.shape
    groups = bytes_.view(n_rows, n_columns // _group_bytes(form), _group_bytes(form))
    bit_bytes = QUANT_GROUP_SIZE // 8  # for one bit of every integer of a group
    unsigned = []
    for plane in planes_of(form.n_bits):
        plane_bytes = groups[..., plane.first * bit_bytes :][..., : plane.width * bit_bytes]
        bits = [
            ((plane_bytes >> at) & plane.mask) << plane.first for at in range(0, 8, plane.width)
        ]
        unsigned.append(torch.stack(bits, -1).flatten(2))
    return reduce(torch.bitwise_or, unsigned).flatten(1).view(torch.int8) - form.zero


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
