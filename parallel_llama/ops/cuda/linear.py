"""Products of a few rows, for which a weight is read once.

A program has some outputs, for all rows, over all inputs or a part of them; a second launch adds up
what the parts gave. The tile has room for MAX_ROWS rows however many there are, and parts hang on
the weight's shape alone, so a row's sum is made in the same order in any company.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.ops.cuda.launch import launch

MAX_ROWS = 16

_OUTPUTS = 64  # of a program: what the widest instruction for matrices takes
_INPUT_BYTES = 256  # of one output, read at a time
# Programs that keep a device of today busy, each with several reads under way.
_PROGRAMS = 256
_MAX_PARTS = 8
_MIN_INPUTS = 512  # of a part

COMPUTED = (torch.float32, torch.bfloat16, torch.float16)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` multiplies these."""
    return len(x) <= MAX_ROWS and x.dtype in COMPUTED and weight.dtype in COMPUTED


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Y = X A + b, summed in float32; the weight in torch's order, perhaps with fewer bits.

    Shapes: [T, in], [out, in] -> [T, out], T <= MAX_ROWS.
    """
    assert takes(x, weight) and x.stride(1) == weight.stride(1) == 1
    (n, n_inputs), n_outputs = x.shape, len(weight)
    size = _INPUT_BYTES // weight.element_size()
    n_blocks = triton.cdiv(n_outputs, _OUTPUTS)
    n_parts = parts_of(n_blocks, n_inputs)
    part = triton.cdiv(triton.cdiv(n_inputs, size), n_parts) * size
    y = x.new_empty(n, n_outputs)
    sums = x.new_empty(n_parts, n, n_outputs, dtype=torch.float32) if n_parts > 1 else y
    launch(
        _product, (n_blocks if n else 0, n_parts), x, weight, sums, bias if n_parts == 1 else None,
        n, n_inputs, n_outputs, x.stride(0), weight.stride(0), part,
        ROWS=MAX_ROWS, OUTPUTS=_OUTPUTS, SIZE=size, num_warps=4, num_stages=4,
    )  # fmt: skip
    if n_parts > 1:
        add_parts(sums, bias, y)
    return y


def parts_of(n_blocks: int, n_inputs: int) -> int:
    """Into how many parts inputs are cut, so that few blocks of outputs are many programs."""
    wanted = -(-_PROGRAMS // max(n_blocks, 1))
    return max(min(wanted, _MAX_PARTS, n_inputs // _MIN_INPUTS), 1)


def add_parts(sums: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """y = the sum of all parts, in their order, + b. Shapes: [n_parts, T, out], y [T, out]."""
    n_parts, n, n_outputs = sums.shape
    grid = (triton.cdiv(n_outputs, 256), n)
    launch(_sum, grid, sums, bias, y, n, n_outputs, y.stride(0), N_PARTS=n_parts, SIZE=256)


@triton.jit(do_not_specialize=["n"])
def _product(
    x, weight, y, bias, n, n_inputs, n_outputs, x_stride, weight_stride, part,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    number = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    is_output, is_row = outputs < n_outputs, rows < n
    own_weight = weight + outputs.to(tl.int64)[:, None] * weight_stride
    own_x = x + rows[None, :] * x_stride
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(number * part, min(number * part + part, n_inputs), SIZE):
        inputs = start + tl.arange(0, SIZE)
        is_input = inputs < n_inputs
        values = tl.load(own_weight + inputs[None, :], is_output[:, None] & is_input[None, :], 0)
        factors = tl.load(own_x + inputs[:, None], is_input[:, None] & is_row[None, :], 0)
        sums = tl.dot(values.to(x.dtype.element_ty), factors, sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + outputs, is_output, 0).to(tl.float32)[:, None]
    at = (number * n + rows[None, :]).to(tl.int64) * n_outputs + outputs[:, None]
    tl.store(y + at, sums.to(y.dtype.element_ty), is_output[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["n"])
def _sum(sums, bias, y, n, n_outputs, y_stride, N_PARTS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(1)
    outputs = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_output = outputs < n_outputs
    total = tl.zeros((SIZE,), tl.float32)
    for part in tl.static_range(N_PARTS):
        total += tl.load(sums + (part * n + row).to(tl.int64) * n_outputs + outputs, is_output, 0)
    if bias is not None:
        total += tl.load(bias + outputs, is_output, 0).to(tl.float32)
    tl.store(y + row.to(tl.int64) * y_stride + outputs, total.to(y.dtype.element_ty), is_output)
