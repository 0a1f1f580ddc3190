"""Products of rows with quantised matrices: integers of 2 to 8 bits, or fp8.

The panels of these matrices have one row. The words of a quantisation group are contiguous, at most
32 bytes, and the groups follow each other.

Integer formats round the inputs to int8, so a group's product is exact and only the sum over groups
rounds. A program sums in LANES lanes: lane i adds the groups i, i + LANES, i + 2 LANES and so on.
The lanes are added at the end. fp8 weights are converted to the inputs' dtype, which is exact, and
summed in float32 within a group; groups are split into parts, which are added in order. Both orders
depend on the matrix's shape alone, so a row's result does not depend on the number of rows up to
MAX_ROWS.

More rows are multiplied by cuBLAS, with the matrix in the dtype of the inputs, which are not
rounded to int8: converting the matrix then costs less than multiplying that many rows here.

Source: `ops.quant` defines the products and the panel layout.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.dtypes import QUANT_GROUP_SIZE, QuantFormat
from parallel_llama.ops.cuda.e4m3 import from_e4m3, from_e4m3_or_nan
from parallel_llama.ops.cuda.launch import await_inputs, launch, tile
from parallel_llama.ops.cuda.linear import MAX_ROWS, add_parts, parts_of
from parallel_llama.ops.quant import LEAST_INPUT, PanelShape, planes_of

PANEL_ROWS = 1

_SIDE_BY_SIDE = 512  # outputs times groups of a program
_LANES = (16, 128)  # the fewest and the most groups side by side
_ROWS = (1, 4)  # per program, for a product of one row and of more rows
_FP8_OUTPUTS = 64  # per program
_ROUNDED_GROUPS = 8  # per program that rounds inputs
_DEQUANTISED = (16, 8)  # outputs and groups of a program

_GROUP = tl.constexpr(QUANT_GROUP_SIZE)
_COLUMNS = tl.constexpr(8)  # words of a group of int8 inputs
_VECTOR = tl.constexpr(4)  # words per load
_LEAST = tl.constexpr(LEAST_INPUT)
_ROUNDING = tl.constexpr(1.5 * 2.0**23)  # adding and subtracting it rounds to integers
_HAS_DP4A = tl.constexpr(not triton.knobs.runtime.interpret)


def quant_gemm(x: Tensor, panels: Tensor, shape: PanelShape, out: Tensor) -> None:
    """out = X A; if A has integers and X at most MAX_ROWS rows, X is rounded to int8.

    Shapes: x [T, in]; panels [n_outputs, n_bytes] uint8; out [T, n_outputs], perhaps a view of some
    columns.
    """
    n = len(out)
    assert shape.n_rows == PANEL_ROWS and panels.is_contiguous()
    assert x.shape == (n, shape.n_inputs) and x.stride(1) == out.stride(1) == 1
    if not shape.n_inputs:  # a rank may have no channels
        out.zero_()
    elif n > MAX_ROWS:
        torch.mm(x, dequantised(panels, shape, x.dtype).T, out=out)
    elif shape.form.is_float:
        _fp8_linear(x, panels, shape, out)
    else:
        _integer_gemm(x, panels, shape, out)


def _integer_gemm(x: Tensor, panels: Tensor, shape: PanelShape, out: Tensor) -> None:
    n, n_outputs = out.shape
    inputs, scales, sums = _rounded(x, shape.form)
    lanes = min(max(tile(shape.n_groups), _LANES[0]), _LANES[1])
    outputs = _SIDE_BY_SIDE // lanes
    rows = _ROWS[n > 1]
    n_row_blocks = triton.cdiv(n, rows)
    launch(
        _product, (triton.cdiv(n_outputs, outputs) * n_row_blocks,),
        inputs.view(torch.int32), scales, sums,
        panels.view(torch.int32), panels.view(torch.float16), panels.view(torch.int8), out,
        n, n_row_blocks, n_outputs, shape.n_groups, shape.n_before, out.stride(0), shape.n_bytes,
        shape.scale_bytes // 2, shape.factors_at, shape.integers_at // 4,
        **_constants(shape.form), ROWS=rows, OUTPUTS=outputs, LANES=lanes, num_warps=4,
    )  # fmt: skip


def _fp8_linear(x: Tensor, panels: Tensor, shape: PanelShape, out: Tensor) -> None:
    n, n_outputs = out.shape
    n_blocks = triton.cdiv(n_outputs, _FP8_OUTPUTS)
    n_parts = parts_of(n_blocks, shape.n_inputs)
    y = x.new_empty(n_parts, n, n_outputs, dtype=torch.float32) if n_parts > 1 else out
    launch(
        _fp8_product, (n_blocks, triton.cdiv(n, MAX_ROWS), n_parts),
        x, panels, panels.view(torch.float16), y,
        n, n_outputs, shape.n_groups, x.stride(0), y.stride(-2), shape.n_bytes, shape.integers_at,
        triton.cdiv(shape.n_groups, n_parts),
        ROWS=MAX_ROWS, OUTPUTS=_FP8_OUTPUTS, num_warps=4, num_stages=5 if x.itemsize == 2 else 3,
    )  # fmt: skip
    if n_parts > 1:
        add_parts(y, None, out)


def dequantised(panels: Tensor, shape: PanelShape, dtype: torch.dtype) -> Tensor:
    """The matrix, rounded to a dtype. Shapes: [n_outputs, n_bytes] uint8 -> [n_outputs, in]."""
    y = torch.empty(len(panels), shape.n_inputs, dtype=dtype, device=panels.device)
    outputs, groups = _DEQUANTISED
    launch(
        _dequantise, (triton.cdiv(shape.n_groups, groups), triton.cdiv(len(panels), outputs)),
        panels, panels.view(torch.float16), panels.view(torch.int8), y,
        len(panels), shape.n_groups, shape.n_before, shape.n_bytes,
        shape.scale_bytes // 2, shape.factors_at, shape.integers_at,
        **_constants(shape.form), IS_FLOAT=shape.form.is_float, OUTPUTS=outputs, GROUPS=groups,
    )  # fmt: skip
    return y


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
    await_inputs()
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


@triton.jit(do_not_specialize=["n", "n_row_blocks"])
def _product(
    inputs, scales, sums, words, halves, factors, y,
    n, n_row_blocks, n_outputs, n_groups, n_before, y_stride, n_bytes, mins_at, factors_at,
    words_at,
    N_BITS: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, ZERO: tl.constexpr,
    N_SHARED: tl.constexpr, N_PARTS: tl.constexpr, N_FACTORS: tl.constexpr,
    HAS_MIN: tl.constexpr, SCALE_FACTORS: tl.constexpr, MIN_FACTORS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    await_inputs()
    # Neighbouring programs multiply the same outputs by other rows.
    outputs = tl.program_id(0) // n_row_blocks * OUTPUTS + tl.arange(0, OUTPUTS)
    first_row = (tl.program_id(0) % n_row_blocks).to(tl.int64) * ROWS
    is_output = outputs < n_outputs
    of_output = outputs.to(tl.int64) * n_bytes
    own_words = words + words_at + (of_output // 4)[None, :, None]
    own_halves = halves + (of_output // 2)[None, :]
    own_factors = factors + factors_at + of_output[None, :]
    totals = _zeros(tl.float32, LANES, OUTPUTS, ROWS)
    for start in range(0, n_groups, LANES):
        groups = start + tl.arange(0, LANES)
        is_value = (groups < n_groups)[:, None] & is_output[None, :]
        at = own_words + (groups * N_BITS)[:, None, None]
        own_x = inputs + (first_row * n_groups + groups)[:, None, None] * _COLUMNS
        dots = _zeros(tl.int32, LANES, OUTPUTS, ROWS * N_PARTS)
        dots = _add_plane(dots, at, own_x, is_value, groups, first_row, n, n_groups,
                          0, WIDE, N_PARTS)  # fmt: skip
        if NARROW:
            dots = _add_plane(dots, at + WIDE, own_x, is_value, groups, first_row, n, n_groups,
                              WIDE, NARROW, N_PARTS)  # fmt: skip
        # With this hint each thread loads one number, so the layout equals that of the other
        # tensors. A vectorised load would need a layout conversion between threads.
        block = tl.max_contiguous(((n_before + groups) // N_SHARED)[:, None], (1, 1))
        scale = tl.load(own_halves + block, is_value, 0).to(tl.float32)
        if HAS_MIN:
            least = tl.load(own_halves + mins_at + block, is_value, 0).to(tl.float32)
        for part in tl.static_range(N_PARTS):
            own_scale = scale
            of_group = own_factors + tl.max_contiguous((groups * N_FACTORS)[:, None], (1, 1))
            if SCALE_FACTORS:
                own_scale = scale * tl.load(of_group + part, is_value, 0).to(tl.float32)
            if HAS_MIN:
                own_least = least
                if MIN_FACTORS:
                    factor = tl.load(of_group + N_FACTORS - N_PARTS + part, is_value, 0)
                    own_least = least * factor.to(tl.float32)
            added = ()
            for row in tl.static_range(ROWS):
                of_row = (first_row + row) * n_groups + groups
                is_own = groups < tl.where(first_row + row < n, n_groups, 0)
                x_scale = tl.load(scales + of_row, is_own, 0)
                dot = dots[row * N_PARTS + part]
                if ZERO or HAS_MIN:
                    x_sum = tl.load(sums + of_row * N_PARTS + part, is_own, 0)
                if ZERO:
                    dot -= ZERO * x_sum.to(tl.int32)[:, None]
                term = dot.to(tl.float32) * own_scale
                if HAS_MIN:
                    term += x_sum[:, None] * own_least
                total = totals[row] + term * x_scale[:, None]
                added = added + (total,)  # type: ignore[assignment]  # noqa: RUF005
            totals = added
    for row in tl.static_range(ROWS):
        own_y = y + (first_row + row) * y_stride + outputs
        total = tl.sum(totals[row], 0).to(y.dtype.element_ty)
        tl.store(own_y, total, outputs < tl.where(first_row + row < n, n_outputs, 0))


@triton.jit
def _zeros(DTYPE: tl.constexpr, LANES: tl.constexpr, OUTPUTS: tl.constexpr, N: tl.constexpr):
    """N tensors of zeros. (Triton extends tuples by +, not by stars.)"""
    found = ()
    for _ in tl.static_range(N):
        zeros = tl.zeros((LANES, OUTPUTS), DTYPE)
        found = found + (zeros,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _add_plane(
    dots, words, own_x, is_value, groups, first_row, n, n_groups,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, N_PARTS: tl.constexpr,
):  # fmt: skip
    """Adds a plane's products to the dots of each row and part. FIRST is the plane's first bit.

    Shapes: dots, ROWS * N_PARTS of [groups, outputs] int32; pointers to int32, words [groups,
    outputs, 1] and own_x [groups, 1, 1].
    """
    N_WORDS: tl.constexpr = min(WIDTH, _VECTOR)
    places = tl.arange(0, N_WORDS)[None, None, :]
    for chunk in tl.static_range(WIDTH // N_WORDS):
        own = tl.load(words + chunk * N_WORDS + places, is_value[:, :, None], 0)
        for shift in tl.static_range(_COLUMNS // WIDTH):
            column = shift * WIDTH + chunk * N_WORDS
            bits = own
            if WIDTH < 8:
                bits = (own >> (shift * WIDTH)) & (((1 << WIDTH) - 1) * 0x01010101)
            added = ()
            for i in tl.static_range(len(dots)):
                dot = dots[i]
                # The part of the column.
                if i % N_PARTS == (shift * WIDTH + chunk * N_WORDS) * N_PARTS // _COLUMNS:
                    row = i // N_PARTS
                    of_row = own_x + row * n_groups * _COLUMNS + column + places
                    is_own = groups < tl.where(first_row + row < n, n_groups, 0)
                    x = tl.load(of_row, is_own[:, None, None], 0)
                    dot += tl.sum(_dot4(*tl.broadcast(bits, x)), 2) << FIRST
                added = added + (dot,)  # type: ignore[assignment]  # noqa: RUF005
            dots = added
    return dots


@triton.jit
def _dot4(unsigned, signed):
    """The dot products of 4 unsigned and 4 signed bytes, each in one int32."""
    if _HAS_DP4A:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, 0;", "=r,r,r", [unsigned, signed],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    total = tl.zeros_like(signed)
    for place in tl.static_range(4):
        byte = (unsigned >> (8 * place)) & 255
        total += byte * ((signed << (24 - 8 * place)) >> 24)
    return total


@triton.jit
def _dequantise(
    panels, halves, factors, y,
    n_outputs, n_groups, n_before, n_bytes, mins_at, factors_at, integers_at,
    N_BITS: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, ZERO: tl.constexpr,
    N_SHARED: tl.constexpr, N_PARTS: tl.constexpr, N_FACTORS: tl.constexpr,
    HAS_MIN: tl.constexpr, SCALE_FACTORS: tl.constexpr, MIN_FACTORS: tl.constexpr,
    IS_FLOAT: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    await_inputs()
    groups = (tl.program_id(0) * GROUPS + tl.arange(0, GROUPS))[None, :, None]
    outputs = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS))[:, None, None].to(tl.int64)
    inputs = tl.arange(0, _GROUP)[None, None, :]
    is_value = (outputs < n_outputs) & (groups < n_groups)
    words = panels + integers_at + outputs * n_bytes + groups * (_GROUP // 8 * N_BITS)
    weight = _plane(words, inputs, is_value, WIDE)
    if NARROW:
        weight |= _plane(words + 4 * WIDE, inputs, is_value, NARROW) << WIDE
    own_halves = halves + outputs * n_bytes // 2 + (n_before + groups) // N_SHARED
    scale = tl.load(own_halves, is_value, 0).to(tl.float32)
    of_part = factors + factors_at + outputs * n_bytes + groups * N_FACTORS
    of_part += inputs // (_GROUP // N_PARTS)
    if SCALE_FACTORS:
        scale = scale * tl.load(of_part, is_value, 0).to(tl.float32)
    if IS_FLOAT:
        values = from_e4m3_or_nan(weight) * scale
    else:
        values = (weight - ZERO).to(tl.float32) * scale
    if HAS_MIN:
        least = tl.load(own_halves + mins_at, is_value, 0).to(tl.float32)
        if MIN_FACTORS:
            factor = tl.load(of_part + N_FACTORS - N_PARTS, is_value, 0)
            least = least * factor.to(tl.float32)
        values += least
    at = outputs * n_groups * _GROUP + groups * _GROUP + inputs
    tl.store(y + at, values.to(y.dtype.element_ty), is_value)


@triton.jit
def _plane(words, inputs, is_value, WIDTH: tl.constexpr):
    """WIDTH bits of each integer of a group. Shapes: words [.., 1] -> [.., inputs] int32."""
    byte = tl.load(words + inputs % (4 * WIDTH), is_value, 0).to(tl.int32)
    return (byte >> (inputs // (4 * WIDTH) * WIDTH)) & ((1 << WIDTH) - 1)


@triton.jit(do_not_specialize=["n"])
def _fp8_product(
    x, panels, halves, y,
    n, n_outputs, n_groups, x_stride, y_stride, n_bytes, floats_at, part_groups,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    await_inputs()
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    is_output, is_row = outputs < n_outputs, rows < n
    inputs = tl.arange(0, _GROUP)
    of_output = outputs.to(tl.int64) * n_bytes
    own_floats = panels + floats_at + of_output[:, None] + inputs[None, :]
    own_scales = halves + of_output // 2
    own_x = x + rows[None, :] * x_stride + inputs[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for group in range(part * part_groups, min((part + 1) * part_groups, n_groups)):
        bytes_ = tl.load(own_floats + group * _GROUP, is_output[:, None], 0)
        factors = tl.load(own_x + group * _GROUP, is_row[None, :], 0)
        scale = tl.load(own_scales + group, is_output, 0).to(tl.float32)
        values = from_e4m3(bytes_).to(x.dtype.element_ty)
        total += tl.dot(values, factors, input_precision="ieee") * scale[:, None]
    own_y = y + (part * n + rows[None, :]) * y_stride + outputs[:, None]
    tl.store(own_y, total.to(y.dtype.element_ty), is_output[:, None] & is_row[None, :])
