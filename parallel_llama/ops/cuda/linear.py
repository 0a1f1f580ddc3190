"""Products of a few rows, which read the weight once.

A program computes some outputs of MAX_ROWS rows, over all inputs or a part of them; a second launch
adds the parts. The tile always has MAX_ROWS rows, and the split depends only on the weight's shape,
so a row's reduction order does not depend on the batch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.ops.cuda.launch import launch

MAX_ROWS = 16

_OUTPUTS = 64  # per program: the width of the largest matrix instruction
_INPUT_BYTES = 256  # per output and iteration
_PROGRAMS = 256  # enough to keep a GPU busy, each with several loads in flight
_MAX_PARTS = 8
_MIN_INPUTS = 512  # per part
SHAPE = {"ROWS": MAX_ROWS, "OUTPUTS": _OUTPUTS, "num_warps": 4, "num_stages": 4}  # per program

COMPUTED = (torch.float32, torch.bfloat16, torch.float16)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` supports these dtypes and this number of rows."""
    return len(x) <= MAX_ROWS and x.dtype in COMPUTED and weight.dtype in COMPUTED


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Y = X A + b, summed in float32; the weight in torch's order, perhaps in fewer bits.

    Shapes: [T, in], [out, in] -> [T, out].
    """
    assert x.stride(1) == weight.stride(1) == 1
    (n, n_inputs), n_outputs = x.shape, len(weight)
    cut = Cut.of(n_outputs, n_inputs, weight.element_size())
    y = x.new_empty(n, n_outputs)
    is_whole = cut.n_parts == 1
    sums = y if is_whole else x.new_empty(cut.n_parts, n, n_outputs, dtype=torch.float32)
    launch(
        _product, (cut.n_blocks, cut.n_parts, triton.cdiv(n, MAX_ROWS)),
        x, weight, sums, bias if is_whole else None,
        n, n_inputs, n_outputs, x.stride(0), weight.stride(0), cut.part,
        SIZE=cut.size, **SHAPE,
    )  # fmt: skip
    if not is_whole:
        add_parts(sums, bias, y)
    return y


@dataclass(frozen=True)
class Cut:
    """How a product is split, which depends on the weight alone.

    Args:
        n_blocks: Blocks of outputs.
        n_parts: Parts of the inputs.
        part: Inputs per part.
        size: Inputs per iteration.
    """

    n_blocks: int
    n_parts: int
    part: int
    size: int

    @classmethod
    def of(cls, n_outputs: int, n_inputs: int, itemsize: int) -> "Cut":
        """The split of a weight [n_outputs, n_inputs]."""
        n_blocks, size = triton.cdiv(n_outputs, _OUTPUTS), _INPUT_BYTES // itemsize
        n_parts = parts_of(n_blocks, n_inputs)
        part = triton.cdiv(triton.cdiv(n_inputs, size), n_parts) * size
        return cls(n_blocks, n_parts, part, size)


def parts_of(n_blocks: int, n_inputs: int) -> int:
    """The number of parts of the inputs, so that few blocks of outputs are enough programs."""
    wanted = -(-_PROGRAMS // max(n_blocks, 1))
    return max(min(wanted, _MAX_PARTS, n_inputs // _MIN_INPUTS), 1)


def add_parts(sums: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """y = the sum of all parts, in order, + b. Shapes: sums [n_parts, T, out], y [T, out]."""
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
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_output, is_row = outputs < n_outputs, rows < n
    sums = dots(
        x + rows.to(tl.int64) * x_stride, weight + outputs.to(tl.int64) * weight_stride,
        is_row, is_output, number * part, min(number * part + part, n_inputs), n_inputs,
        ROWS, OUTPUTS, SIZE,
    )  # fmt: skip
    if bias is not None:
        sums += tl.load(bias + outputs, is_output, 0).to(tl.float32)[:, None]
    at = (number * n + rows[None, :]).to(tl.int64) * n_outputs + outputs[:, None]
    tl.store(y + at, sums.to(y.dtype.element_ty), is_output[:, None] & is_row[None, :])


@triton.jit
def dots(
    x, weight, is_row, is_output, first, last, n_inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Products of rows of x and of a weight over some inputs, [OUTPUTS, ROWS] in float32.

    Shapes: x [ROWS] and weight [OUTPUTS], pointers to the start of each row.
    """
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(first, last, SIZE):
        inputs = start + tl.arange(0, SIZE)
        is_input = inputs < n_inputs
        is_value = is_output[:, None] & is_input[None, :]
        values = tl.load(weight[:, None] + inputs[None, :], is_value, 0)
        factors = tl.load(x[None, :] + inputs[:, None], is_input[:, None] & is_row[None, :], 0)
        sums = tl.dot(values.to(factors.dtype), factors, sums, input_precision="ieee")
    return sums


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
