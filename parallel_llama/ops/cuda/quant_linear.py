"""Products of rows with matrices in int4, int8 or fp8 whose panels have one row.

In a panel of one row the numbers of a quantisation group are contiguous, at most 32 bytes, and the
groups follow each other: a program reads 64 such rows at once.

Integer formats round the inputs to int8, so a group's product is exact and only the sum over groups
rounds. fp8 converts the weight to the dtype of the inputs, which is exact, and sums a group in
float32. The matrix's shape alone decides how the groups are split into parts, which are added in
order, in the same program or by a second launch. So a row's result does not depend on the number of
rows (with fp8, up to MAX_ROWS rows).

Source: `ops.quant` defines the products and the panel layout.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.dtypes import QUANT_GROUP_SIZE, QuantFormat
from parallel_llama.ops.cuda.e4m3 import from_e4m3
from parallel_llama.ops.cuda.launch import launch
from parallel_llama.ops.cuda.linear import MAX_ROWS, add_parts, parts_of
from parallel_llama.ops.quant import LEAST_INPUT, PanelShape, planes_of

PANEL_ROWS = 1

_OUTPUTS = 64  # per program
_MANY_ROWS = 32  # per program, for more than MAX_ROWS rows
_MANY_FP8_ROWS = 64
_ROUNDED_GROUPS = 8  # per program that rounds inputs

_GROUP = tl.constexpr(QUANT_GROUP_SIZE)
_LEAST = tl.constexpr(LEAST_INPUT)
_ROUNDING = tl.constexpr(1.5 * 2.0**23)  # adding and subtracting it rounds to integers


def quant_gemm(x: Tensor, panels: Tensor, shape: PanelShape, out: Tensor) -> None:
    """out = X A with inputs rounded to int8, summed in float32.

    Shapes: x [T, in]; panels [n_outputs, n_bytes] uint8; out [T, n_outputs], perhaps a view of some
    columns.
    """
    n, n_outputs = out.shape
    assert shape.n_rows == PANEL_ROWS and panels.is_contiguous()
    assert x.shape == (n, shape.n_inputs) and x.stride(1) == out.stride(1) == 1
    if not shape.n_inputs:  # a rank may have no channels
        out.zero_()
        return
    inputs = _rounded(x, shape.form)
    n_blocks = triton.cdiv(n_outputs, _OUTPUTS)
    n_parts = parts_of(n_blocks, shape.n_inputs)
    is_split = n_parts > 1 and n <= MAX_ROWS
    y = x.new_empty(n_parts, n, n_outputs, dtype=torch.float32) if is_split else out
    rows, n_warps = (MAX_ROWS, 4) if n <= MAX_ROWS else (_MANY_ROWS, 8)
    launch(
        _product, (n_blocks, triton.cdiv(n, rows), n_parts if is_split else 1),
        *inputs, panels, panels.view(torch.float16), panels.view(torch.int8), y,
        n, n_outputs, shape.n_groups, shape.n_before, y.stride(-2), shape.n_bytes,
        shape.scale_bytes // 2, shape.factors_at, shape.integers_at,
        triton.cdiv(shape.n_groups, n_parts), 1 if is_split else n_parts,
        **_constants(shape.form), ROWS=rows, OUTPUTS=_OUTPUTS,
        num_warps=n_warps, num_stages=6,
    )  # fmt: skip
    if is_split:
        add_parts(y, None, out)


def fp8_linear(x: Tensor, panels: Tensor, shape: PanelShape, out: Tensor) -> None:
    """out = X A with A in fp8, summed in float32. Shapes: as in `quant_gemm`."""
    n, n_outputs = out.shape
    assert shape.form.is_float and shape.n_rows == PANEL_ROWS and panels.is_contiguous()
    assert x.shape == (n, shape.n_inputs) and x.stride(1) == out.stride(1) == 1
    if not shape.n_inputs:  # a rank may have no channels
        out.zero_()
        return
    n_blocks = triton.cdiv(n_outputs, _OUTPUTS)
    n_parts = parts_of(n_blocks, shape.n_inputs)
    is_split = n_parts > 1 and n <= MAX_ROWS
    y = x.new_empty(n_parts, n, n_outputs, dtype=torch.float32) if is_split else out
    rows, n_warps, n_stages = (MAX_ROWS, 4, 5) if n <= MAX_ROWS else (_MANY_FP8_ROWS, 8, 3)
    launch(
        _fp8_product, (n_blocks, triton.cdiv(n, rows), n_parts if is_split else 1),
        x, panels, panels.view(torch.float16), y,
        n, n_outputs, shape.n_groups, x.stride(0), y.stride(-2), shape.n_bytes, shape.integers_at,
        triton.cdiv(shape.n_groups, n_parts), 1 if is_split else n_parts,
        ROWS=rows, OUTPUTS=_OUTPUTS,
        num_warps=n_warps, num_stages=n_stages,
    )  # fmt: skip
    if is_split:
        add_parts(y, None, out)


def _rounded(x: Tensor, form: QuantFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs in int8, their scales, and the sum of each part of a group.

    Shapes: [T, in] -> [T, in] int8, [T, n_groups] and [T, n_groups * n_parts] float32.
    """
    n, n_groups = len(x), x.shape[1] // QUANT_GROUP_SIZE
    integers = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = x.new_empty(n, n_groups, dtype=torch.float32)
    sums = x.new_empty(n, n_groups * form.n_parts, dtype=torch.float32)
    grid = (triton.cdiv(n_groups, _ROUNDED_GROUPS), n)
    launch(
        _round, grid, x, integers, scales, sums, x.stride(0), n_groups,
        N_PARTS=form.n_parts, GROUPS=_ROUNDED_GROUPS,
    )  # fmt: skip
    return integers, scales, sums


def _constants(form: QuantFormat) -> dict[str, int | bool]:
    """A kernel's constants. A format has one plane, or two, the wider one first."""
    wide, narrow = [*planes_of(form.n_bits), None][:2]
    assert wide is not None
    return {
        "N_BITS": form.n_bits,
        "WIDE": wide.width,
        "NARROW": 0 if narrow is None else narrow.width,
        "ZERO": form.zero,
        "N_SHARED": form.n_shared,
        "N_PARTS": form.n_parts,
        "N_FACTORS": form.n_factors,
        "HAS_MIN": form.has_min,
        "SCALE_FACTORS": form.scale_factors,
        "MIN_FACTORS": form.min_factors,
    }


@triton.jit
def _round(
    x, integers, scales, sums, stride, n_groups, N_PARTS: tl.constexpr, GROUPS: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    is_group = groups < n_groups
    inputs = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    own = tl.load(x + row * stride + inputs, is_group[:, None], 0).to(tl.float32)
    largest = tl.max(tl.abs(own), 1)
    # NaN for a group with an infinity or NaN.
    scale = tl.div_rn(largest, tl.full((GROUPS,), 127, tl.float32)) + tl.sum(own * 0, 1)
    inverse = tl.div_rn(tl.full((GROUPS,), 127, tl.float32), largest)
    inverse = tl.where(largest < _LEAST, 0, inverse)
    rounded = ((own * inverse[:, None] + _ROUNDING) - _ROUNDING).to(tl.int8)
    tl.store(integers + row * n_groups * _GROUP + inputs, rounded, is_group[:, None])
    tl.store(scales + row * n_groups + groups, scale, is_group)
    parts = tl.arange(0, GROUPS * N_PARTS)
    of_parts = tl.reshape(rounded.to(tl.int32), (GROUPS * N_PARTS, _GROUP // N_PARTS))
    first = tl.program_id(0) * GROUPS * N_PARTS
    own_sums = sums + row * n_groups * N_PARTS + first + parts
    tl.store(own_sums, tl.sum(of_parts, 1).to(tl.float32), first + parts < n_groups * N_PARTS)


@triton.jit(do_not_specialize=["n"])
def _product(
    integers, scales, sums, panels, halves, factors, y,
    n, n_outputs, n_groups, n_before, y_stride, n_bytes, mins_at, factors_at, integers_at,
    part_groups, n_own_parts,
    N_BITS: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, ZERO: tl.constexpr,
    N_SHARED: tl.constexpr, N_PARTS: tl.constexpr, N_FACTORS: tl.constexpr,
    HAS_MIN: tl.constexpr, SCALE_FACTORS: tl.constexpr, MIN_FACTORS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    number = tl.program_id(2)
    is_output, is_row = outputs < n_outputs, rows < n
    inputs = tl.arange(0, _GROUP)
    of_output = outputs.to(tl.int64) * n_bytes
    own_integers = panels + integers_at + of_output[:, None]
    own_halves, own_factors = halves + of_output // 2, factors + factors_at + of_output
    own_rows = rows.to(tl.int64)
    own_x = integers + own_rows[None, :] * (n_groups * _GROUP) + inputs[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for part in range(number * n_own_parts, (number + 1) * n_own_parts):
        of_part = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for group in range(part * part_groups, min((part + 1) * part_groups, n_groups)):
            words = own_integers + group * (_GROUP // 8 * N_BITS)
            weight = _plane(words, inputs, is_output, WIDE)
            if NARROW:
                weight |= _plane(words + 4 * WIDE, inputs, is_output, NARROW) << WIDE
            values = (weight - ZERO).to(tl.int8)
            x_scale = tl.load(scales + own_rows * n_groups + group, is_row, 0)
            block = (n_before + group) // N_SHARED
            scale = tl.load(own_halves + block, is_output, 0).to(tl.float32)
            if HAS_MIN:
                least = tl.load(own_halves + mins_at + block, is_output, 0).to(tl.float32)
            for half in tl.static_range(N_PARTS):
                is_own = (inputs // (_GROUP // N_PARTS) == half)[:, None] & is_row[None, :]
                x = tl.load(own_x + group * _GROUP, is_own, 0)
                own_scale = scale
                if SCALE_FACTORS:
                    factor = tl.load(own_factors + group * N_FACTORS + half, is_output, 0)
                    own_scale = scale * factor.to(tl.float32)
                term = tl.dot(values, x, out_dtype=tl.int32).to(tl.float32) * own_scale[:, None]
                if HAS_MIN:
                    own_least = least
                    if MIN_FACTORS:
                        at = group * N_FACTORS + N_FACTORS - N_PARTS + half
                        factor = tl.load(own_factors + at, is_output, 0)
                        own_least = least * factor.to(tl.float32)
                    at_sum = own_rows * (n_groups * N_PARTS) + group * N_PARTS + half
                    x_sum = tl.load(sums + at_sum, is_row, 0)
                    term += x_sum[None, :] * own_least[:, None]
                of_part += term * x_scale[None, :]
        total += of_part
    own_y = y + (number * n + own_rows[None, :]) * y_stride + outputs[:, None]
    tl.store(own_y, total.to(y.dtype.element_ty), is_output[:, None] & is_row[None, :])


@triton.jit
def _plane(words, inputs, is_output, WIDTH: tl.constexpr):
    """`WIDTH` bits of each integer of a group. Shapes: words [outputs, 1] -> [outputs, inputs]."""
    byte = tl.load(words + (inputs % (4 * WIDTH))[None, :], is_output[:, None], 0).to(tl.int32)
    shift = inputs // (4 * WIDTH) * WIDTH
    return (byte >> shift[None, :]) & ((1 << WIDTH) - 1)


@triton.jit(do_not_specialize=["n"])
def _fp8_product(
    x, panels, halves, y,
    n, n_outputs, n_groups, x_stride, y_stride, n_bytes, floats_at, part_groups, n_own_parts,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    number = tl.program_id(2)
    is_output, is_row = outputs < n_outputs, rows < n
    inputs = tl.arange(0, _GROUP)
    of_output = outputs.to(tl.int64) * n_bytes
    own_floats = panels + floats_at + of_output[:, None] + inputs[None, :]
    own_scales = halves + of_output // 2
    own_x = x + rows[None, :] * x_stride + inputs[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for part in range(number * n_own_parts, (number + 1) * n_own_parts):
        of_part = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for group in range(part * part_groups, min((part + 1) * part_groups, n_groups)):
            bytes_ = tl.load(own_floats + group * _GROUP, is_output[:, None], 0)
            factors = tl.load(own_x + group * _GROUP, is_row[None, :], 0)
            scale = tl.load(own_scales + group, is_output, 0).to(tl.float32)
            values = from_e4m3(bytes_).to(x.dtype.element_ty)
            of_part += tl.dot(values, factors, input_precision="ieee") * scale[:, None]
        total += of_part
    own_y = y + (number * n + rows[None, :]) * y_stride + outputs[:, None]
    tl.store(own_y, total.to(y.dtype.element_ty), is_output[:, None] & is_row[None, :])
