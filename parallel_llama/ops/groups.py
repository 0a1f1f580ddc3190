"""Matrices as small integers with a scale for every group of inputs, in torch.

    y[o] = sum over groups g of  x_scale[g] * (scale[o, g] * (q[o, g] . x_q[g])
                                               + min[o, g] * sum(x_q[g]))

The inputs of a product are rounded to 8 bits group by group as well, so what a group adds up to is
an integer, the same on every machine; only the sum over groups rounds.

A kernel reads rows together, as many as a vector has lanes of 32 bits: a panel. In it lie, one
behind the other, the scales of all groups, [n_groups, rows] float16, perhaps the minima alike, and
the integers of all groups four inputs at a time, [n_groups, 8, rows, 4]; in int4 those of the
second half of a group are the upper halves of the bytes of the first. The last panel is made up
with zeros.

Source: the blocks of GGUF's Q8_0, Q4_0 and Q4_1, ggml's docs/gguf.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_llama.dtypes import GROUP_SIZE, GroupFormat

# What products of groups are summed in.
_COMPUTED = torch.float32

# A panel begins where a line of the cache does.
_LINE_BYTES = 64

# Parts of a group's range that its integers of 4 bits are tried over. What many values gain by
# finer steps can be more than what few lose by being cut off.
_TRIED = (1.0, 0.93, 0.86)

# Inputs whose largest is below it count as zeros: its inverse would be infinite.
LEAST_INPUT = 1e-30

_SCALE_LIMIT = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Groups:
    """A matrix [out, in], quantised.

    Shapes: integers [out, in] int8; scales, and minima where the format has them, [out, in /
    GROUP_SIZE] float16.
    """

    form: GroupFormat
    integers: Tensor
    scales: Tensor
    mins: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.integers.shape

    @property
    def device(self) -> torch.device:
        return self.integers.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Integers, scales, and minima where there are any."""
        return tuple(each for each in (self.integers, self.scales, self.mins) if each is not None)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Groups":
        """The same matrix with its rows changed, those of integers, scales and minima alike."""
        mins = None if self.mins is None else change(self.mins)
        return Groups(self.form, change(self.integers), change(self.scales), mins)

    def some(self, rows: slice) -> "Groups":
        """Some outputs of the same matrix."""
        return self.each(lambda of_rows: of_rows[rows])

    def values(self) -> Tensor:
        """The matrix that is meant, in float32."""
        values = _in_groups(self.integers).to(_COMPUTED) * self.scales.to(_COMPUTED)[..., None]
        if self.mins is not None:
            values += self.mins.to(_COMPUTED)[..., None]
        return values.flatten(1)


def quantise(values: Tensor, form: GroupFormat) -> Groups:
    """The nearest matrix in int8, or in int4 with minima; every group by itself.

    Shapes: [out, in], whole groups of inputs.
    """
    groups = _in_groups(values.to(_COMPUTED))
    if form.has_min:
        return _with_minima(groups, form)
    assert form.n_bits == 8
    scales = _rounded(groups.abs().amax(-1) / 127)
    integers = _integers(groups, scales, -127, 127)
    return Groups(form, integers.to(torch.int8).flatten(1), scales.to(torch.float16))


def joined(parts: Sequence[Groups], dim: int) -> Groups:
    """Parts of a matrix in one: their outputs (dim 0) or their inputs (1) side by side."""
    mins = [part.mins for part in parts if part.mins is not None]
    return Groups(
        parts[0].form,
        torch.cat([part.integers for part in parts], dim),
        torch.cat([part.scales for part in parts], dim),
        torch.cat(mins, dim) if mins else None,
    )


def _in_groups(rows: Tensor) -> Tensor:
    """Shapes: [n, in] -> [n, n_groups, GROUP_SIZE]."""
    return rows.view(len(rows), rows.shape[1] // GROUP_SIZE, GROUP_SIZE)


def _with_minima(groups: Tensor, form: GroupFormat) -> Groups:
    """For each group the line, of those tried, that leaves the least squared error."""
    scales, mins = _line(groups, _TRIED[0])
    least = _error(groups, scales, mins)
    for part in _TRIED[1:]:
        others = _line(groups, part)
        error = _error(groups, *others)
        better = error < least
        scales, mins = (
            torch.where(better, new, old) for new, old in zip(others, (scales, mins), strict=True)
        )
        least = torch.where(better, error, least)
    integers = _integers(groups - mins[..., None], scales, 0, 15)
    halves = scales.to(torch.float16), mins.to(torch.float16)
    return Groups(form, integers.to(torch.int8).flatten(1), *halves)


def _line(groups: Tensor, part: float) -> tuple[Tensor, Tensor]:
    """Scales and minima that fit best to integers over the middle part of each group's range."""
    low, high = groups.aminmax(dim=-1)
    cut = (high - low) * (1 - part) / 2
    integers = _integers(groups - (low + cut)[..., None], (high - low - 2 * cut) / 15, 0, 15)
    # Least squares: the values' slope over the integers, through the mean of both.
    mean = integers.mean(-1, keepdim=True)
    apart = integers.sub_(mean)
    scales = (apart * groups).sum(-1) / apart.square().sum(-1).clamp(min=1)
    scales = _rounded(scales)
    return scales, _rounded(groups.mean(-1) - scales * mean[..., 0])


def _error(groups: Tensor, scales: Tensor, mins: Tensor) -> Tensor:
    """What is left of each group's squares."""
    lifted = groups - mins[..., None]
    kept = _integers(lifted, scales, 0, 15).mul_(scales[..., None])
    return kept.sub_(lifted).square_().sum(-1)


def _rounded(numbers: Tensor) -> Tensor:
    """As float16 keeps them, so that integers are chosen for what they will be multiplied by."""
    return numbers.clamp(-_SCALE_LIMIT, _SCALE_LIMIT).to(torch.float16).to(_COMPUTED)


def _integers(groups: Tensor, scales: Tensor, least: int, most: int) -> Tensor:
    inverse = torch.where(scales == 0, 0, 1 / scales)
    return (groups * inverse[..., None]).round_().clamp_(least, most)


def rounded_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs of a product in 8 bits; a group with an infinity or nan has the scale nan.

    Shapes: x [T, in] -> integers [T, in / GROUP_SIZE, GROUP_SIZE] int8, scales [T, in /
    GROUP_SIZE], in at least float32.
    """
    groups = _in_groups(x.to(_COMPUTED))
    largest = groups.abs().amax(-1)
    scales = largest / 127 + largest * 0
    # A quotient of tensors, for torch makes 127 times a rounded inverse of a number's.
    inverse = torch.where(largest < LEAST_INPUT, 0, torch.full_like(largest, 127) / largest)
    return (groups * inverse[..., None]).round_().nan_to_num_(0).to(torch.int8), scales


def group_linear(x: Tensor, weight: Groups) -> Tensor:
    """Y = X A with rounded inputs. Shapes: [T, in], [out, in] -> [T, out]."""
    inputs, x_scales = rounded_inputs(x)
    integers = _in_groups(weight.integers)
    # Exact: these integers have fewer than the 24 bits of a float32.
    dots = torch.einsum("tgi,ogi->tog", inputs.to(_COMPUTED), integers.to(_COMPUTED))
    parts = dots * weight.scales.to(_COMPUTED)  # [T, out, n_groups]
    if weight.mins is not None:
        parts += inputs.to(_COMPUTED).sum(-1)[:, None] * weight.mins.to(_COMPUTED)
    return (parts * x_scales[:, None]).sum(-1).to(x.dtype)


@dataclass(frozen=True)
class PanelShape:
    """Where things lie in the panels of a matrix of so many inputs, for vectors of so many rows."""

    form: GroupFormat
    n_inputs: int
    n_rows: int

    @property
    def n_groups(self) -> int:
        return self.n_inputs // GROUP_SIZE

    @property
    def group_bytes(self) -> int:
        """Bytes of the integers of a group, of all rows of a panel."""
        return GROUP_SIZE * self.form.n_bits // 8 * self.n_rows

    @property
    def n_halves(self) -> int:
        """Numbers in float16 that belong to a group: a scale, and perhaps a minimum."""
        return 1 + self.form.has_min

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of all groups, and of the minima."""
        return 2 * self.n_groups * self.n_rows

    @property
    def integers_at(self) -> int:
        return -(-self.scale_bytes * self.n_halves // _LINE_BYTES) * _LINE_BYTES

    @property
    def n_bytes(self) -> int:
        end = self.integers_at + self.n_groups * self.group_bytes
        return -(-end // _LINE_BYTES) * _LINE_BYTES

    def pack(self, weight: Groups) -> Tensor:
        """Shapes: [out, in] -> [n_panels, n_bytes] uint8."""
        n_panels = -(-weight.shape[0] // self.n_rows)
        panels = torch.zeros(n_panels, self.n_bytes, dtype=torch.uint8)
        for number, numbers in enumerate((weight.scales, weight.mins)):
            if numbers is not None:
                whole = self._in_panels(numbers).transpose(1, 2).flatten(1)
                own = slice(number * self.scale_bytes, (number + 1) * self.scale_bytes)
                panels[:, own] = whole.contiguous().view(torch.uint8)
        integers = self._in_panels(weight.integers).view(n_panels, self.n_rows, self.n_groups, 8, 4)
        integers = integers.permute(0, 2, 3, 1, 4)  # [n_panels, n_groups, 8, rows, 4]
        if self.form.n_bits == 4:
            low, high = (integers + self.form.zero).to(torch.uint8).chunk(2, dim=2)
            integers = low | (high << 4)
        own = slice(self.integers_at, self.integers_at + self.n_groups * self.group_bytes)
        panels[:, own] = integers.flatten(1).view(torch.uint8)
        return panels

    def unpack(self, panels: Tensor, n_outputs: int) -> Groups:
        """The inverse of `pack`, for some panels and the outputs that they have."""
        n_panels, n = len(panels), self.n_groups
        own = panels[:, self.integers_at :][:, : n * self.group_bytes].contiguous()
        if self.form.n_bits == 4:
            own = own.view(n_panels, n, 4, self.n_rows, 4)
            integers = torch.cat((own & 15, own >> 4), dim=2).to(torch.int8) - self.form.zero
        else:
            integers = own.view(torch.int8).view(n_panels, n, 8, self.n_rows, 4)
        integers = integers.permute(0, 3, 1, 2, 4).reshape(-1, self.n_inputs)
        halves = [self._halves(panels, number)[:n_outputs] for number in range(self.n_halves)]
        return Groups(self.form, integers[:n_outputs], *halves)

    def _halves(self, panels: Tensor, number: int) -> Tensor:
        """The scales (0) or minima (1). Shapes: [n_panels, n_bytes] -> [out, n_groups]."""
        own = slice(number * self.scale_bytes, (number + 1) * self.scale_bytes)
        halves = panels[:, own].contiguous().view(torch.float16)
        return halves.view(len(panels), self.n_groups, self.n_rows).transpose(1, 2).flatten(0, 1)

    def _in_panels(self, rows: Tensor) -> Tensor:
        """Shapes: [out, n] -> [n_panels, rows, n]."""
        n_missing = -len(rows) % self.n_rows
        whole = torch.cat((rows, rows.new_zeros(n_missing, rows.shape[1])))
        return whole.view(len(whole) // self.n_rows, self.n_rows, rows.shape[1])
