"""Reads the matrices of compressed-tensors and fp8 folders: low-bit numbers with scales.

A matrix [out, in] is stored as several tensors:

    weight             e4m3 floats or signed integers of 8 bits: [out, in]
    weight_packed      integers in 32-bit words, the first in the lowest bits: [out, words]; or
                       e2m1 floats of 4 bits, two in a byte, the first in the low bits
    weight_scale       for the matrix, each row, each group of a row, or each block; fp8 folders
                       call it weight_scale_inv. nvfp4 has e4m3 floats, to be divided by
                       weight_global_scale, and mxfp4 the exponents of powers of two, plus 127
    weight_zero_point  as the scale; packed along the outputs if the integers are packed
    weight_shape       [2], if the integers are packed
    weight_g_idx       the group of each input: [in]

A value is (stored - zero point) * scale, one product in float32, so it does not depend on how the
matrix is cut.

Source: the pack_quantized, naive_quantized, nvfp4 and mxfp4 compressors of compressed-tensors 0.20,
and its release 0.12 for weight_g_idx; transformers 5.24, Fp8Dequantize.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import MatrixBlock
from parallel_llama.config.quantised import stored_form
from parallel_llama.config.scaled import Scheme
from parallel_llama.dtypes import QUANT_GROUP_SIZE, QuantFormat
from parallel_llama.errors import DamagedWeights
from parallel_llama.families.stored_slices import StoredSlice
from parallel_llama.ops.quant import QuantMatrix

# Reads some rows and columns of the tensor with a name suffix, as a matrix of this many columns.
Read = Callable[[str, int, range, range], Tensor]

# The dtypes and possible shapes of a matrix's tensors, by the suffixes of their names.
WantedTensors = dict[str, tuple[Collection[str], list[tuple[int, ...]]]]

SCALE_DTYPES = "F32", "BF16", "F16"

TYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,  # the exponents
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}

# The value of each 4-bit code of e2m1.
_E2M1 = torch.tensor([sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])
# The two values in each byte. Shapes: [256, 2].
_E2M1_PAIRS = torch.stack((_E2M1.repeat(16), _E2M1.repeat_interleave(16)), 1)


@dataclass(frozen=True)
class ScaledBlock:
    """A block of a matrix, with numbers, scales and zero points as they are stored.

    Args:
        block: the rows and columns of the matrix that share a scale; 0 stands for all.
        rows: the rows of the matrix in this block.
        columns: the columns of the matrix in this block.
        numbers: e4m3 floats or int8, [rows, columns]; or e2m1 floats of 4 bits in uint8, two in a
            byte, [rows, bytes with these columns].
        scales: floats, or exponents of powers of two plus 127 in uint8, [row blocks, column
            blocks]: those that overlap the rows and columns.
        names: the names of the tensors with the scales and with the divisor, for errors.
        zeros: zero points, in the dtype of the numbers; shapes as `scales`.
        divisor: of all scales, [1] float32.
    """

    block: tuple[int, int]
    rows: range
    columns: range
    numbers: Tensor
    scales: Tensor
    names: tuple[str, str]
    zeros: Tensor | None = None
    divisor: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The numbers of this block, and the scales, zero points and divisor that begin in it.

        So concatenating the tensors of consecutive blocks of rows gives the tensors of the matrix,
        without repeating scales that two blocks share.
        """
        height = self.block[0] or len(self.rows) + self.rows.start + 1
        skipped = -(-self.rows.start // height) - self.rows.start // height
        parts = [self.numbers, self.scales[skipped:]]
        parts += [] if self.zeros is None else [self.zeros[skipped:]]
        parts += [] if self.divisor is None else [self.divisor[self.rows.start :]]
        return tuple(parts)

    def select_rows(self, start: int, stop: int) -> "ScaledBlock":
        """The rows from `start` to `stop`, counted within this block."""
        rows, height = self.rows[start:stop], self.block[0]
        row_blocks = slice(None)
        if height:
            first = self.rows.start // height
            row_blocks = slice(rows.start // height - first, -(-rows.stop // height) - first)
        return replace(
            self,
            rows=rows,
            numbers=self.numbers[start:stop],
            scales=self.scales[row_blocks],
            zeros=None if self.zeros is None else self.zeros[row_blocks],
        )

    def by_row(self) -> "ScaledBlock":
        """The same values with scales and zero points for each row."""
        height, width = self.block
        if height < 2:
            return self
        block_of_rows = self._block_of_rows()
        scales, zeros = (
            None if numbers is None else _selected(numbers, block_of_rows)
            for numbers in (self.scales, self.zeros)
        )
        assert scales is not None
        return replace(self, block=(1, width), scales=scales, zeros=zeros)

    def map_rows(self, rows: range, change: Callable[[Tensor], Tensor]) -> "ScaledBlock":
        """The block with `change`, a selection or a reordering of rows, applied to its tensors.

        `rows` are the rows of the result.
        """
        assert self.block[0] < 2
        if not self.block[0]:
            return replace(self, rows=rows, numbers=change(self.numbers))
        zeros = None if self.zeros is None else change(self.zeros)
        numbers, scales = change(self.numbers), change(self.scales)
        return replace(self, rows=rows, numbers=numbers, scales=scales, zeros=zeros)

    def values(self) -> Tensor:
        """Decodes the block.

        Returns: [rows, columns] float32.

        Raises: DamagedWeights if a scale is NaN or Inf.
        """
        if self.numbers.dtype == torch.uint8:
            values = e2m1_values(self.numbers)
            values = values[:, self.columns.start % 2 :][:, : len(self.columns)].contiguous()
        else:
            values = self.numbers.float()
        if self.zeros is not None:
            values -= self._spread(self.zeros.float())
        scales, width = self._wide_scales(), self.block[1]
        if self.block[0] == 1 and width and not self.columns.start % width:
            # Whole blocks of columns broadcast their scales: half the time of repeating the scales.
            n_whole = len(self.columns) // width
            whole = values[:, : n_whole * width]
            whole.view(len(values), n_whole, width).mul_(scales[:, :n_whole, None])
            values[:, n_whole * width :].mul_(scales[:, n_whole:])
            return values
        return values.mul_(self._spread(scales))

    def _wide_scales(self) -> Tensor:
        """The scales in float32."""
        name, divisor_name = self.names
        scales = (
            self.scales.float()
            if self.scales.is_floating_point()
            else powers_of_two(self.scales, name)
        )
        if (divisor := self.divisor) is not None:
            if not torch.isfinite(1 / divisor).all() or not torch.isfinite(divisor).all():
                raise DamagedWeights(
                    f"{divisor_name!r:.200} is {divisor.item():g}, which cannot divide scales; the "
                    "weights are damaged: fetch them again"
                )
            scales = scales / divisor
        return finite_scales(scales, name)

    def _spread(self, numbers: Tensor) -> Tensor:
        """Repeats scales or zero points for the values of the block.

        Returns: [rows, columns]; a dimension along which they do not differ has size 1.
        """
        height, width = self.block
        if height:
            numbers = numbers[self._block_of_rows()]
        if not width:
            return numbers
        columns = torch.arange(self.columns.start, self.columns.stop)
        return numbers[:, columns // width - self.columns.start // width]

    def _block_of_rows(self) -> Tensor:
        """For each row, the index of its row of scales in `scales`."""
        height = self.block[0]
        return torch.arange(self.rows.start, self.rows.stop) // height - self.rows.start // height


def joined_rows(parts: Sequence[ScaledBlock], rows: range) -> ScaledBlock:
    """Concatenates blocks with scales by row or for all rows; `rows` are the result's rows."""
    first = parts[0]
    if len(parts) == 1:
        return replace(first, rows=rows) if first.block[0] < 2 else first
    numbers = torch.cat([part.numbers for part in parts])
    if not first.block[0]:
        return replace(first, rows=rows, numbers=numbers)
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(
        first,
        rows=rows,
        numbers=numbers,
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat(zeros) if zeros else None,
    )


def _selected(numbers: Tensor, rows: Tensor) -> Tensor:
    """Some rows of a matrix, also in dtypes for which torch has no indexing."""
    bytes_ = numbers.contiguous().view(torch.uint8)
    return bytes_[rows].view(numbers.dtype)


@dataclass(frozen=True)
class ScaledMatrix:
    """A matrix [out, in] in a scheme of config.json, with the slice of the plain matrix."""

    scheme: Scheme
    stored_slice: StoredSlice

    @property
    def base(self) -> str:
        """The common prefix of the names of its tensors."""
        return self.stored_slice.name.removesuffix("weight")

    @property
    def grid(self) -> tuple[int, int]:
        """The numbers of blocks with a scale along the outputs and along the inputs."""
        n_outputs, n_inputs = (
            -(-size // side) if side else 1
            for size, side in zip(self.stored_slice.shape, self.scheme.block, strict=True)
        )
        return n_outputs, n_inputs

    @property
    def tensors(self) -> WantedTensors:
        """The dtypes and possible shapes of its tensors, by the suffixes of their names."""
        scheme, grid, shape = self.scheme, self.grid, self.stored_slice.shape
        if scheme.is_fp4:
            scale_dtypes = ("F8_E4M3",) if scheme.has_global_scale else ("U8", "F8_E8M0")
            floats: WantedTensors = {
                "weight_packed": (("U8",), [(shape[0], -(-shape[1] // 2))]),
                scheme.scale: (scale_dtypes, [grid]),
            }
            if scheme.has_global_scale:
                floats["weight_global_scale"] = ("F32",), [(1,), ()]
            return floats
        number_dtypes = ("F8_E4M3",) if scheme.is_float else ("I8",)
        scale_shapes: list[tuple[int, ...]] = [grid]
        scale_shapes += [grid[:1]] if grid[1] == 1 else []
        scale_shapes += [()] if grid == (1, 1) else []
        expected: WantedTensors = {scheme.scale: (SCALE_DTYPES, scale_shapes)}
        if scheme.is_packed:
            per_word = 32 // scheme.n_bits
            expected["weight_packed"] = ("I32",), [(shape[0], -(-shape[1] // per_word))]
            expected["weight_shape"] = ("I64", "I32"), [(2,)]
            scale_shapes, number_dtypes = [(-(-shape[0] // per_word), grid[1])], ("I32",)
        else:
            expected["weight"] = number_dtypes, [shape]
        if scheme.has_zeros:
            expected["weight_zero_point"] = number_dtypes, scale_shapes
        return expected

    @property
    def optional_tensors(self) -> WantedTensors:
        """The optional tensor: the group of each input."""
        if not self.scheme.has_groups:
            return {}
        return {"weight_g_idx": (("I32",), [self.stored_slice.shape[1:]])}

    def values(self, block: MatrixBlock, read: Read) -> Tensor:
        """Decodes a block of the matrix.

        Returns: [rows, columns] float32.

        Raises: DamagedWeights if a scale is NaN or Inf.
        """
        if not self.scheme.is_packed and not self.scheme.any_order:
            return self.stored(block, read).values()
        scales, groups = self._scales(block, read), self._groups(block, read)
        if self.scheme.is_packed:
            values = self._integers(block, read).float()
            values -= self._spread(block, self._packed_zeros(block, read).float(), groups)
        else:
            n_inputs = self.stored_slice.shape[1]
            values = read("weight", n_inputs, block.rows, block.columns).float()
            if self.scheme.has_zeros:
                zeros = self._by_block(block, "weight_zero_point", read)
                values -= self._spread(block, zeros.float(), groups)
        values.mul_(self._spread(block, scales, groups))
        # A QuantMatrix decodes to scale * integer - scale * zero point, +0 if both are equal. Here
        # a negative scale makes such a value -0; adding 0.0 makes it +0.
        form = stored_form(self.scheme, self.stored_slice.shape[1])
        return values.add_(0.0) if form is not None and form.has_min else values

    def stored(self, block: MatrixBlock, read: Read) -> ScaledBlock:
        """A block as stored; only if integers are not packed in words, and groups are in order."""
        scheme, n_inputs, columns = self.scheme, self.stored_slice.shape[1], block.columns
        if scheme.is_fp4:
            pairs = range(columns.start // 2, -(-columns.stop // 2))
            numbers = read("weight_packed", -(-n_inputs // 2), block.rows, pairs)
        else:
            numbers = read("weight", n_inputs, block.rows, columns)
        zeros = self._by_block(block, "weight_zero_point", read) if scheme.has_zeros else None
        divisor = None
        if scheme.has_global_scale:
            divisor = read("weight_global_scale", 1, range(1), range(1))[0]
        return ScaledBlock(
            scheme.block,
            block.rows,
            columns,
            numbers,
            self._by_block(block, scheme.scale, read),
            (self.base + scheme.scale, self.base + "weight_global_scale"),
            zeros,
            divisor,
        )

    def quantised(self, form: QuantFormat, block: MatrixBlock, read: Read) -> QuantMatrix:
        """A block of the matrix with its integers as stored, in the format that `stored_form` gave.

        The columns of the block must be whole groups of 32 inputs.

        Raises: DamagedWeights if a scale is NaN or Inf, or float16 cannot hold it.
        """
        wide = self._scales(block, read)
        scales = wide.half()
        if (lost := (scales.float() != wide).nonzero()).numel():
            row, column = lost[0].tolist()
            raise DamagedWeights(
                f"{self.base + self.scheme.scale!r:.200} has the scale {wide[row, column]:g}, "
                "which float16 cannot hold exactly; decode the weights with --quant none"
            )
        if not form.has_min:
            n_groups = len(block.columns) // QUANT_GROUP_SIZE
            by_group = self._spread(block, scales, self._groups(block, read))
            by_group = by_group[:, ::QUANT_GROUP_SIZE]
            by_group = by_group.expand(len(block.rows), n_groups).contiguous()
            return QuantMatrix(form, self._signed(block, read), by_group)
        n_before = block.columns.start % form.block // QUANT_GROUP_SIZE
        factors = self._packed_zeros(block, read).repeat_interleave(form.n_shared, 1)
        factors = factors[:, n_before:][:, : len(block.columns) // QUANT_GROUP_SIZE]
        return QuantMatrix(
            form,
            self._integers(block, read).contiguous().view(torch.int8),
            scales,
            -scales,
            factors.contiguous().view(torch.int8),
            n_before,
        )

    def _scales(self, block: MatrixBlock, read: Read) -> Tensor:
        """The scales of a block of the matrix. Shapes: [row blocks, column blocks] float32."""
        scales = self._by_block(block, self.scheme.scale, read).float()
        return finite_scales(scales, self.base + self.scheme.scale)

    def _by_block(self, block: MatrixBlock, suffix: str, read: Read) -> Tensor:
        rows, columns = self._blocks(block)
        return read(suffix, self.grid[1], rows, columns)

    def _blocks(self, block: MatrixBlock) -> tuple[range, range]:
        """The blocks with a scale that a block of the matrix touches."""
        rows, columns = (
            range(part.start // side, -(-part.stop // side)) if side else range(1)
            for part, side in zip((block.rows, block.columns), self.scheme.block, strict=True)
        )
        return rows, range(self.grid[1]) if self.scheme.any_order else columns

    def _groups(self, block: MatrixBlock, read: Read) -> Tensor | None:
        """For each input, the index of its scale among the columns that `_blocks` returns.

        Returns: [columns] int64; None if all inputs share a scale.
        """
        columns, width = block.columns, self.scheme.block[1]
        if self.scheme.any_order:
            return read("weight_g_idx", self.stored_slice.shape[1], range(1), columns)[0].long()
        if not width:
            return None
        return torch.arange(columns.start, columns.stop) // width - columns.start // width

    def _spread(self, block: MatrixBlock, numbers: Tensor, groups: Tensor | None) -> Tensor:
        """Repeats scales or zero points for the values of a block of the matrix.

        Returns: [rows, columns]; a dimension along which they do not differ has size 1.
        """
        height = self.scheme.block[0]
        if height:
            first = block.rows.start // height
            numbers = numbers[torch.arange(block.rows.start, block.rows.stop) // height - first]
        return numbers if groups is None else numbers[:, groups]

    def _integers(self, block: MatrixBlock, read: Read) -> Tensor:
        """The packed integers of a block of the matrix, unsigned. Shapes: [rows, columns] uint8."""
        per_word, columns = 32 // self.scheme.n_bits, block.columns
        words = range(columns.start // per_word, -(-columns.stop // per_word))
        n_words = -(-self.stored_slice.shape[1] // per_word)
        integers = self._unpacked(read("weight_packed", n_words, block.rows, words))
        return integers[:, columns.start - words.start * per_word :][:, : len(columns)]

    def _signed(self, block: MatrixBlock, read: Read) -> Tensor:
        """The integers of a block of a matrix without zero points. Shapes: [rows, columns] int8."""
        if not self.scheme.is_packed:
            return read("weight", self.stored_slice.shape[1], block.rows, block.columns)
        middle = 1 << (self.scheme.n_bits - 1)
        return (self._integers(block, read) - middle).view(torch.int8)

    def _packed_zeros(self, block: MatrixBlock, read: Read) -> Tensor:
        """The zero points of packed integers. Shapes: [row blocks, column blocks] uint8."""
        rows, columns = self._blocks(block)
        if not self.scheme.has_zeros:
            middle = 1 << (self.scheme.n_bits - 1)
            return torch.full((len(rows), len(columns)), middle, dtype=torch.uint8)
        per_word = 32 // self.scheme.n_bits
        words = range(rows.start // per_word, -(-rows.stop // per_word))
        packed = read("weight_zero_point", self.grid[1], words, columns)
        zeros = self._unpacked(packed.transpose(0, 1).contiguous())
        return zeros[:, rows.start - words.start * per_word :][:, : len(rows)].transpose(0, 1)

    def _unpacked(self, words: Tensor) -> Tensor:
        """Shapes: [n, words] int32 -> [n, integers] uint8."""
        bytes_ = words.view(-1).view(torch.uint8).view(len(words), 4 * words.shape[1])
        if self.scheme.n_bits == 8:
            return bytes_
        return torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(1)


def e2m1_values(pairs: Tensor) -> Tensor:
    """Floats of 4 bits, two in a byte. Shapes: uint8 [n, m] -> [n, 2 m] float32."""
    return _E2M1_PAIRS.index_select(0, pairs.flatten().int()).view(len(pairs), 2 * pairs.shape[1])


def powers_of_two(exponents: Tensor, name: str) -> Tensor:
    """2 ** (exponent - 127) in float32, for the tensor with this name.

    Shapes: uint8 [...] -> [...].

    Raises: DamagedWeights for 255, which stands for NaN.
    """
    if (exponents == 255).any():
        raise _damaged_scale(name)
    bits = exponents.int() << 23
    bits[exponents == 0] = 1 << 22  # 2 ** -127 is subnormal
    return bits.view(torch.float32)


def finite_scales(scales: Tensor, name: str) -> Tensor:
    """The scales of the tensor with this name.

    Raises: DamagedWeights if a scale is NaN or Inf.
    """
    if not torch.isfinite(scales).all():
        raise _damaged_scale(name)
    return scales


def _damaged_scale(name: str) -> DamagedWeights:
    """The error for a tensor of scales with this name that holds NaN or Inf."""
    return DamagedWeights(
        f"{name!r:.200} has a scale that is NaN or Inf; the weights are damaged: fetch them again"
    )
