"""The product of rows with a matrix in fp8 whose panels are rows.

Floats become numbers of the rows' dtype, which holds them exactly. A group's products are summed in
float32 and multiplied by its scale; parts and tiles are those of `group_linear`, so up to MAX_ROWS
rows get each the same to the last bit in any company.

Source: `ops.groups` says how panels lie.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.dtypes import GROUP_SIZE
from parallel_llama.ops.cuda.e4m3 import from_e4m3
from parallel_llama.ops.cuda.launch import launch
from parallel_llama.ops.cuda.linear import MAX_ROWS, add_parts, parts_of
from parallel_llama.ops.groups import PanelShape

_OUTPUTS = 64  # of a program
_MANY_ROWS = 64  # of a program, where there are more than MAX_ROWS

_GROUP = tl.constexpr(GROUP_SIZE)


def fp8_linear(x: Tensor, panels: Tensor, shape: PanelShape, out: Tensor) -> None:
    """out = X A, summed in float32.

    Shapes: x [T, in]; panels [n_outputs, n_bytes] uint8; out [T, n_outputs], perhaps some columns
    of more.
    """
    n, n_outputs = out.shape
    assert shape.form.is_float and shape.n_rows == 1 and panels.is_contiguous()
    assert x.shape == (n, shape.n_inputs) and x.stride(1) == out.stride(1) == 1
    if not shape.n_inputs:  # a rank may have no channels
        out.zero_()
        return
    n_blocks = triton.cdiv(n_outputs, _OUTPUTS)
    n_parts = parts_of(n_blocks, shape.n_inputs)
    is_split = n_parts > 1 and n <= MAX_ROWS
    y = x.new_empty(n_parts, n, n_outputs, dtype=torch.float32) if is_split else out
    rows, n_warps, n_stages = (MAX_ROWS, 4, 5) if n <= MAX_ROWS else (_MANY_ROWS, 8, 3)
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
