"""Quantised matrices: small integers or fp8 with a scale for every group of inputs, in torch.

    y[o] = sum over groups g of  x_scale[g] * (scale[o, g] * (q[o, g] . x_q[g])
                                               + min[o, g] * sum(x_q[g]))

The inputs of a product are quantised to int8 group by group, so the dot product of a group is an
integer, the same on every machine; only the sum over groups rounds. Some formats have a scale and a
minimum per block of several groups, and integer factors per group, or per half of a group, that
multiply them.

In fp8 the integers are replaced by e4m3 numbers, and inputs are not quantised:

    y[o] = sum over groups g of  scale[o, g] * (value[o, g] . x[g])

A panel holds rows that are read together: as many as a CPU vector has 32-bit lanes, one on a GPU,
and 16 for torch's operators. It contains, in this order:

    scales      [n_blocks, rows] float16
    minima      [n_blocks, rows] float16, if the format has minima
    factors     [n_groups, n_factors, rows] int8, if the format has factors
    integers    [n_groups, n_bits, rows, 4] bytes, with the bits where `planes_of` puts them

The last panel is padded with zeros.

Source: the blocks of GGUF's Q8_0, Q4_0 and Q4_1, ggml's docs/gguf.md; e4m3, arXiv 2209.05433.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_llama.dtypes import QUANT_GROUP_SIZE, QuantFormat

_COMPUTED = torch.float32  # the dtype of sums over groups
_LINE_BYTES = 64  # per cache line of a CPU; panels are aligned to cache lines
_PACKED_AT_ONCE = 1 << 20  # integers; while they are packed, each takes several bytes
_TERMS_AT_ONCE = 1 << 24  # of sums over groups; while they are computed, each takes 12 bytes

# Fractions of a group's range that int4 quantisation tries. Clipping a few values allows finer
# steps for the others.
_TRIED_FRACTIONS = (1.0, 0.93, 0.86)

# A group with only smaller inputs is rounded to zeros: 127 / largest would overflow.
LEAST_INPUT = 1e-30

_SCALE_LIMIT = torch.finfo(torch.float16).max

_E4M3 = torch.float8_e4m3fn
_LARGEST_E4M3 = torch.finfo(_E4M3).max


@dataclass(frozen=True)
class QuantMatrix:
    """A quantised matrix [out, in].

    Args:
        form: The format.
        integers: [out, in] int8; for fp8 the bits of the floats.
        scales: [out, n_blocks] float16.
        mins: [out, n_blocks] float16, for formats with minima.
        factors: [out, n_groups * n_factors] int8, for formats with factors.
        n_before: The number of groups of the first block that precede the matrix: above 0 if the
            matrix is a slice that begins within a block.
    """

    form: QuantFormat
    integers: Tensor
    scales: Tensor
    mins: Tensor | None = None
    factors: Tensor | None = None
    n_before: int = 0

    @property
    def shape(self) -> torch.Size:
        return self.integers.shape

    @property
    def device(self) -> torch.device:
        return self.integers.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Integers and scales, and the minima and factors of formats that have them."""
        tensors = self.integers, self.scales, *self._optional
        return tuple(tensor for tensor in tensors if tensor is not None)

    def panel_shape(self, n_rows: int) -> "PanelShape":
        """The shape of panels of `n_rows` rows that hold the matrix."""
        return PanelShape(self.form, self.shape[1], n_rows, self.n_before)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "QuantMatrix":
        """The matrix with a function applied to each of its tensors; all tensors have its rows."""
        mins, factors = (None if part is None else change(part) for part in self._optional)
        integers, scales = change(self.integers), change(self.scales)
        return QuantMatrix(self.form, integers, scales, mins, factors, self.n_before)

    def to(self, device: torch.device) -> "QuantMatrix":
        return self.map_tensors(lambda tensor: tensor.to(device))

    def columns(self, inputs: range) -> "QuantMatrix":
        """The columns of some inputs, which must be whole groups."""
        start, stop = (at // QUANT_GROUP_SIZE for at in (inputs.start, inputs.stop))
        first, n_shared = self.n_before + start, self.form.n_shared
        blocks = slice(first // n_shared, -(-(self.n_before + stop) // n_shared))
        n_factors, (mins, factors) = self.form.n_factors, self._optional
        return QuantMatrix(
            self.form,
            self.integers[:, inputs.start : inputs.stop],
            self.scales[:, blocks],
            None if mins is None else mins[:, blocks],
            None if factors is None else factors[:, start * n_factors : stop * n_factors],
            first % n_shared,
        )

    def select_rows(self, rows: slice) -> "QuantMatrix":
        """The rows of some outputs."""
        return self.map_tensors(lambda tensor: tensor[rows])

    def values(self) -> Tensor:
        """The dequantised matrix, in float32."""
        values = self.part_numbers() * self.part_scales()[..., None]
        mins = self.part_mins()
        return (values if mins is None else values + mins[..., None]).flatten(1)

    def part_numbers(self) -> Tensor:
        """The integers, or the fp8 numbers.

        Shapes: [out, n_groups * n_parts, inputs per part] float32.
        """
        stored = self.integers.view(_E4M3) if self.form.is_float else self.integers
        return _in_groups(stored.to(_COMPUTED), QUANT_GROUP_SIZE // self.form.n_parts)

    def part_scales(self) -> Tensor:
        """The scale of every part of a group. Shapes: [out, n_groups * n_parts] float32."""
        return self._per_part(self.scales, 0 if self.form.scale_factors else None)

    def part_mins(self) -> Tensor | None:
        """The minimum of every part of a group, or None. Shapes: as `part_scales`."""
        if self.mins is None:
            return None
        first = self.form.n_factors - self.form.n_parts
        return self._per_part(self.mins, first if self.form.min_factors else None)

    def _per_part(self, per_block: Tensor, first_factor: int | None) -> Tensor:
        """Expands the scales or minima of blocks to every part of a group, times factors if any.

        Exact in float32: the product of a float16 and an int8 factor has at most 24 bits.
        """
        n_groups, n_parts = self.shape[1] // QUANT_GROUP_SIZE, self.form.n_parts
        per_group = _repeated(per_block.to(_COMPUTED), self.form.n_shared)
        per_group = per_group[:, self.n_before :][:, :n_groups]
        per_part = per_group[..., None].expand(-1, -1, n_parts)
        if first_factor is not None:
            assert self.factors is not None
            factors = _in_groups(self.factors, self.form.n_factors)
            per_part = per_part * factors[..., first_factor:][..., :n_parts]
        return per_part.flatten(1)

    @property
    def _optional(self) -> tuple[Tensor | None, Tensor | None]:
        return self.mins, self.factors


def quantise(values: Tensor, form: QuantFormat) -> QuantMatrix:
    """Quantise a matrix to int8, fp8, or int4 with minima, group by group.

    Shapes: [out, in], with `in` a multiple of QUANT_GROUP_SIZE.
    """
    groups = _in_groups(values.to(_COMPUTED))
    if form.has_min:
        return _with_minima(groups, form)
    assert form.n_bits == 8
    largest = groups.abs().amax(-1)
    if form.is_float:
        scales = _as_stored(largest / _LARGEST_E4M3)
        return QuantMatrix(form, _e4m3_bits(groups, scales).flatten(1), scales.to(torch.float16))
    scales = _as_stored(largest / 127)
    integers = _integers(groups, scales, -127, 127)
    return QuantMatrix(form, integers.to(torch.int8).flatten(1), scales.to(torch.float16))


def joined(parts: Sequence[QuantMatrix], dim: int) -> QuantMatrix:
    """Concatenate matrices along their outputs (dim 0) or their inputs (dim 1).

    Along inputs, each matrix but the first must begin at the start of a block. A single matrix is
    returned without a copy.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    assert all(part.n_before == (0 if dim else first.n_before) for part in parts[1:])

    def cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present, dim) if present else None

    return QuantMatrix(
        first.form,
        torch.cat([part.integers for part in parts], dim),
        torch.cat([part.scales for part in parts], dim),
        cat([part.mins for part in parts]),
        cat([part.factors for part in parts]),
        first.n_before,
    )


def _in_groups(rows: Tensor, size: int = QUANT_GROUP_SIZE) -> Tensor:
    """Shapes: [n, in] -> [n, in / size, size]."""
    return rows.reshape(len(rows), rows.shape[1] // size, size)


def _repeated(rows: Tensor, n: int) -> Tensor:
    """Repeats each number n times. Shapes: [rows, m] -> [rows, m * n].

    Not `repeat_interleave`, with which a step cannot be captured in a CUDA graph.
    """
    return rows[..., None].expand(-1, -1, n).flatten(1)


def _with_minima(groups: Tensor, form: QuantFormat) -> QuantMatrix:
    """Quantise each group with the scale and minimum of least squared error among those tried."""
    # Not aminmax, which takes several times as long for short rows.
    low, high, mean = groups.amin(-1), groups.amax(-1), groups.mean(-1)
    scales, mins = _fitted(groups, low, high, mean, _TRIED_FRACTIONS[0])
    least = _error(groups, scales, mins)
    for fraction in _TRIED_FRACTIONS[1:]:
        tried = _fitted(groups, low, high, mean, fraction)
        error = _error(groups, *tried)
        is_better = error < least
        scales, mins = (
            torch.where(is_better, new, old) for new, old in zip(tried, (scales, mins), strict=True)
        )
        least = torch.where(is_better, error, least)
    integers = _integers(groups - mins[..., None], scales, 0, 15)
    halves = scales.to(torch.float16), mins.to(torch.float16)
    return QuantMatrix(form, integers.to(torch.int8).flatten(1), *halves)


def _fitted(
    groups: Tensor, low: Tensor, high: Tensor, mean: Tensor, fraction: float
) -> tuple[Tensor, Tensor]:
    """Least-squares scales and minima, with integers for the middle `fraction` of each range."""
    clipped = (high - low) * (1 - fraction) / 2
    integers = _integers(
        groups - (low + clipped)[..., None], (high - low - 2 * clipped) / 15, 0, 15
    )
    # Linear regression of the values on the integers.
    mean_integer = integers.mean(-1, keepdim=True)
    deviations = integers.sub_(mean_integer)
    scales = (deviations * groups).sum(-1) / (deviations * deviations).sum(-1).clamp(min=1)
    scales = _as_stored(scales)
    return scales, _as_stored(mean - scales * mean_integer[..., 0])


def _error(groups: Tensor, scales: Tensor, mins: Tensor) -> Tensor:
    """The squared error of each group."""
    shifted = groups - mins[..., None]
    residuals = _integers(shifted, scales, 0, 15).mul_(scales[..., None]).sub_(shifted)
    return residuals.mul_(residuals).sum(-1)


def _as_stored(numbers: Tensor) -> Tensor:
    """Rounds scales to float16, in which they are stored, before integers are chosen."""
    return numbers.clamp(-_SCALE_LIMIT, _SCALE_LIMIT).to(torch.float16).to(_COMPUTED)


def _integers(groups: Tensor, scales: Tensor, least: int, most: int) -> Tensor:
    inverse = torch.where(scales == 0, 0, 1 / scales)
    return (groups * inverse[..., None]).round_().clamp_(least, most)


def _e4m3_bits(groups: Tensor, scales: Tensor) -> Tensor:
    numbers = torch.where(scales[..., None] == 0, 0, groups / scales[..., None])
    # Scales rounded down give numbers above 448, which some torch versions turn into NaN.
    return numbers.clamp_(-_LARGEST_E4M3, _LARGEST_E4M3).to(_E4M3).view(torch.int8)


def quantise_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise the inputs of a product to int8; a group with an infinity or NaN has a NaN scale.

    Shapes: x [T, in] -> integers [T, in / QUANT_GROUP_SIZE, QUANT_GROUP_SIZE] int8, scales
    [T, in / QUANT_GROUP_SIZE] float32.
    """
    groups = _in_groups(x.to(_COMPUTED))
    largest = groups.abs().amax(-1)
    scales = largest / 127 + largest * 0
    # Not 127 / largest, which torch computes as 127 * (1 / largest): it rounds twice.
    inverse = torch.where(largest < LEAST_INPUT, 0, torch.full_like(largest, 127) / largest)
    return (groups * inverse[..., None]).round_().nan_to_num_(0).to(torch.int8), scales


def quant_gemm(x: Tensor, weight: QuantMatrix) -> Tensor:
    """Y = X A, with int8 inputs if A is in integers. Shapes: [T, in], [out, in] -> [T, out]."""
    if weight.form.is_float:
        wide = torch.promote_types(x.dtype, _COMPUTED)
        return F.linear(x.to(wide), weight.values().to(wide)).to(x.dtype)
    integers, scales, mins = weight.part_numbers(), weight.part_scales(), weight.part_mins()
    n_at_once = max(1, _TERMS_AT_ONCE // max(1, scales.numel()))
    return torch.cat(
        [_integer_gemm(rows, integers, scales, mins) for rows in torch.split(x, n_at_once)]
    )


def _integer_gemm(x: Tensor, integers: Tensor, scales: Tensor, mins: Tensor | None) -> Tensor:
    """`quant_gemm` with a matrix in integers; a row's bits do not depend on the other rows.

    Shapes: x [T, in]; integers, scales and mins as `part_numbers`, `part_scales` and `part_mins`.
    """
    rounded, x_scales = quantise_inputs(x)
    inputs = _in_groups(rounded.flatten(1), integers.shape[2]).to(_COMPUTED)
    # Exact: these sums of integers fit in the 24 bits of a float32.
    dots = torch.einsum("tpi,opi->top", inputs, integers)
    # With other strides, torch's order of summation would depend on the number of rows.
    terms = dots.contiguous().mul_(scales)  # [T, out, n_groups * n_parts]
    if mins is not None:
        terms += inputs.sum(-1)[:, None] * mins
    part_scales = _repeated(x_scales, QUANT_GROUP_SIZE // integers.shape[2])
    return terms.mul_(part_scales[:, None]).sum(-1).to(x.dtype)


@dataclass(frozen=True)
class Plane:
    """A bit plane: of all integers of a group, the `width` bits from bit `first` on.

    The integers of a group are 8 columns of 4 inputs; a column is a 32-bit word with one byte per
    input. The group is stored in as many words as an integer has bits. The plane is in `width` of
    these words, from word `first` on; each word has the plane's bits of 8 / `width` columns.
    """

    width: int
    first: int

    @property
    def mask(self) -> int:
        return (1 << self.width) - 1

    def word_of(self, column: int) -> int:
        return self.first + column % self.width

    def shift_of(self, column: int) -> int:
        """The first bit of a column in each byte of its word."""
        return column // self.width * self.width

    def of_columns(self, columns: Tensor) -> Tensor:
        """Packs columns. Shapes: [panels, groups, 8, rows] int32 -> [.., width, rows]."""
        bits = (columns >> self.first) & (self.mask * 0x01010101)  # in each byte
        parts = (bits[:, :, at : at + self.width] << at for at in range(0, 8, self.width))
        return reduce(torch.bitwise_or, parts)

    def in_columns(self, words: Tensor) -> Tensor:
        """Unpacks this plane from the words of all planes; bits of other planes are 0."""
        plane = words[:, :, self.first : self.first + self.width, None].transpose(2, 3)
        bits = ((plane >> self._shifts(words.device)) & self.mask) << self.first
        return bits.flatten(2, 3)

    def _shifts(self, device: torch.device) -> Tensor:
        """The shifts of the columns of each word. Shapes: [8 / width, 1, 1, 1]."""
        shifts = torch.arange(0, 8, self.width, dtype=torch.uint8, device=device)
        return shifts.view(-1, 1, 1, 1)


def planes_of(n_bits: int) -> list[Plane]:
    """The planes that integers of `n_bits` are split into, so that no bit of a word is unused.

    >>> planes_of(6)
    [Plane(width=4, first=0), Plane(width=2, first=4)]
    """
    planes: list[Plane] = []
    for width in (8, 4, 2, 1):
        if n_bits & width:
            planes.append(Plane(width, sum(plane.width for plane in planes)))
    return planes


@dataclass(frozen=True)
class PanelShape:
    """The layout of the panels of a matrix.

    Args:
        form: The format.
        n_inputs: The number of inputs.
        n_rows: Rows per panel.
        n_before: As in `QuantMatrix`.
    """

    form: QuantFormat
    n_inputs: int
    n_rows: int
    n_before: int = 0

    @property
    def n_groups(self) -> int:
        return self.n_inputs // QUANT_GROUP_SIZE

    @property
    def n_blocks(self) -> int:
        return -(-(self.n_before + self.n_groups) // self.form.n_shared)

    @property
    def group_bytes(self) -> int:
        """Bytes of the integers of a group, for all rows of a panel."""
        return QUANT_GROUP_SIZE * self.form.n_bits // 8 * self.n_rows

    @property
    def n_halves(self) -> int:
        """float16 numbers per block and row: a scale, and a minimum if the format has minima."""
        return 1 + self.form.has_min

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of all blocks; the minima take as many."""
        return 2 * self.n_blocks * self.n_rows

    @property
    def factors_at(self) -> int:
        return self.scale_bytes * self.n_halves

    @property
    def factor_bytes(self) -> int:
        return self.n_groups * self.form.n_factors * self.n_rows

    @property
    def integers_at(self) -> int:
        return -(-(self.factors_at + self.factor_bytes) // _LINE_BYTES) * _LINE_BYTES

    @property
    def n_bytes(self) -> int:
        end = self.integers_at + self.n_groups * self.group_bytes
        return -(-end // _LINE_BYTES) * _LINE_BYTES

    def pack(self, *parts: "QuantRows", out: Tensor | None = None) -> Tensor:
        """Pack a matrix that is given as parts in the order of rows.

        Packed rows that fill whole panels are copied without unpacking where that is possible.

        Shapes: each part [its out, in] -> [n_panels, n_bytes] uint8, in `out` if it is given.
        """
        if out is None:
            n_panels = -(-sum(part.shape[0] for part in parts) // self.n_rows)
            out = torch.empty(n_panels, self.n_bytes, dtype=torch.uint8, device=parts[0].device)
        if not self.n_inputs:  # a rank without channels
            return out
        panels = out
        pending: list[QuantMatrix] = []  # rows that follow the first `n_done` panels
        n_done = n_pending = 0
        for part in parts:
            rest = part
            if isinstance(part, PackedRows):
                whole = part.whole_panels(self) if n_pending % self.n_rows == 0 else panels[:0]
                if len(whole):
                    n_done = self._pack_matrices(pending, panels, n_done)
                    panels[n_done : n_done + len(whole)] = whole
                    pending, n_pending, n_done = [], 0, n_done + len(whole)
                rest = part.after(len(whole) * self.n_rows)
            if rest.shape[0]:
                pending.append(rest.unpacked() if isinstance(rest, PackedRows) else rest)
                assert pending[-1].n_before == self.n_before
                n_pending += rest.shape[0]
        self._pack_matrices(pending, panels, n_done)
        return panels

    def _pack_matrices(self, matrices: Sequence[QuantMatrix], panels: Tensor, first: int) -> int:
        """Pack rows into the panels from `first` on. Returns: the first panel after the rows."""
        if not matrices:
            return first
        weight = joined(matrices, dim=0)
        stop = first + -(-weight.shape[0] // self.n_rows)
        n_at_once = max(1, _PACKED_AT_ONCE // max(1, self.n_rows * self.n_inputs))
        for start in range(first, stop, n_at_once):
            row = (start - first) * self.n_rows
            rows = weight.select_rows(slice(row, row + n_at_once * self.n_rows))
            self._pack(rows, panels[start : min(start + n_at_once, stop)])
        return stop

    def _pack(self, weight: QuantMatrix, panels: Tensor) -> None:
        """Shapes: [out, in], [n_panels, n_bytes]."""
        n_panels, at = len(panels), 0
        for numbers in (weight.scales, weight.mins, weight.factors):
            if numbers is not None:
                whole = self._in_panels(numbers).transpose(1, 2).flatten(1)
                bytes_ = whole.contiguous().view(torch.uint8)
                panels[:, at : at + bytes_.shape[1]] = bytes_
                at += bytes_.shape[1]
        panels[:, at : self.integers_at] = 0
        end = self.integers_at + self.n_groups * self.group_bytes
        panels[:, end:] = 0
        unsigned = weight.integers.view(torch.uint8)
        if self.form.zero:
            unsigned = unsigned + self.form.zero
        # Words of 4 bytes are 4 times as fast to reorder as bytes.
        columns = self._in_panels(unsigned).view(torch.int32)
        columns = columns.view(n_panels, self.n_rows, self.n_groups, 8).permute(0, 2, 3, 1)
        words = panels[:, self.integers_at : end].view(torch.int32)
        words = words.view(n_panels, self.n_groups, self.form.n_bits, self.n_rows)
        planes = planes_of(self.form.n_bits)
        if self.form.n_bits == 8:
            words.copy_(columns)
            return
        columns = columns.contiguous()  # [n_panels, n_groups, 8, rows]
        for plane in planes:
            words[:, :, plane.first :][:, :, : plane.width] = plane.of_columns(columns)

    def unpack(self, panels: Tensor, n_outputs: int) -> QuantMatrix:
        """The inverse of `pack`, for panels with `n_outputs` rows."""
        form, n_panels, n = self.form, len(panels), self.n_groups
        words = panels[:, self.integers_at :][:, : n * self.group_bytes]
        words = words.reshape(n_panels, n, form.n_bits, self.n_rows, 4)
        first, *others = (plane.in_columns(words) for plane in planes_of(form.n_bits))
        unsigned = reduce(torch.bitwise_or, others, first).permute(0, 3, 1, 2, 4)
        integers = (unsigned - form.zero).view(torch.int8).reshape(-1, self.n_inputs)
        halves = panels[:, : self.factors_at].contiguous().view(torch.float16)
        scales, *mins = map(self._by_output, halves.chunk(self.n_halves, 1))
        factors = panels[:, self.factors_at :][:, : self.factor_bytes].view(torch.int8)
        whole = QuantMatrix(
            form,
            integers,
            scales,
            mins[0] if mins else None,
            self._by_output(factors) if form.n_factors else None,
            self.n_before,
        )
        return whole.select_rows(slice(n_outputs))

    def unpack_rows(self, panels: Tensor, outputs: Tensor) -> QuantMatrix:
        """Unpack the rows of some outputs, in any order, and read no other rows.

        Shapes: panels [n_panels, n_bytes], outputs [n] int64 -> a matrix [n, in].
        """
        row_shape = PanelShape(self.form, self.n_inputs, 1, self.n_before)
        rows = panels.new_zeros(len(outputs), row_shape.n_bytes)
        panel, number = outputs // self.n_rows, outputs % self.n_rows
        halves, factors = self.n_halves * self.n_blocks, self.n_groups * self.form.n_factors
        for start, to, n, n_bytes in (
            (0, 0, halves, 2),
            (self.factors_at, row_shape.factors_at, factors, 1),
            (self.integers_at, row_shape.integers_at, self.n_groups * self.form.n_bits, 4),
        ):
            region = panels[:, start : start + n * self.n_rows * n_bytes]
            selected = region.view(len(panels), n, self.n_rows, n_bytes)[panel, :, number]
            rows[:, to : to + n * n_bytes] = selected.flatten(1)
        return row_shape.unpack(rows, len(outputs))

    def _by_output(self, numbers: Tensor) -> Tensor:
        """Shapes: [n_panels, n * rows] -> [out, n]."""
        n = numbers.shape[1] // self.n_rows
        return numbers.reshape(len(numbers), n, self.n_rows).transpose(1, 2).flatten(0, 1)

    def _in_panels(self, rows: Tensor) -> Tensor:
        """Shapes: [out, n] -> [n_panels, rows, n]."""
        n_missing = -len(rows) % self.n_rows
        whole = torch.cat((rows, rows.new_zeros(n_missing, rows.shape[1])))
        return whole.view(len(whole) // self.n_rows, self.n_rows, rows.shape[1])


@dataclass(frozen=True)
class PackedRows:
    """Some rows of a packed matrix.

    Args:
        layout: The layout of the matrix.
        panels: The matrix, [n_panels, n_bytes] uint8.
        rows: The indices of the rows.
    """

    layout: PanelShape
    panels: Tensor
    rows: range

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.rows), self.layout.n_inputs))

    @property
    def device(self) -> torch.device:
        return self.panels.device

    def panel_shape(self, n_rows: int) -> PanelShape:
        """As `QuantMatrix.panel_shape`."""
        return replace(self.layout, n_rows=n_rows)

    def whole_panels(self, layout: PanelShape) -> Tensor:
        """The panels that these rows fill; none for another layout or a start within a panel."""
        n = layout.n_rows
        if self.layout != layout or self.rows.start % n:
            return self.panels[:0]
        return self.panels[self.rows.start // n : max(self.rows.start, self.rows.stop) // n]

    def after(self, n_rows: int) -> "PackedRows":
        """The rows after the first `n_rows`."""
        return PackedRows(self.layout, self.panels, self.rows[n_rows:])

    def unpacked(self) -> QuantMatrix:
        n, rows = self.layout.n_rows, self.rows
        start, stop = rows.start // n, -(-rows.stop // n)
        part = self.layout.unpack(self.panels[start:stop], (stop - start) * n)
        return part.select_rows(slice(rows.start - start * n, rows.stop - start * n))


QuantRows = QuantMatrix | PackedRows
