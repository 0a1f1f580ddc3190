"""Products of a few rows with one weight, or of each row with one of several weights.

A program computes some outputs of MAX_ROWS rows, over all inputs or a part; a second launch adds
the sums over parts, unless the operator that reads the product adds them (`ops.part_sums`). The
tile always has MAX_ROWS rows, and the split depends only on the weight's shape, so a row's
reduction order depends neither on the batch nor on its route.

A routed program finds its weight and rows in `starts` on the device, so that the host need not
synchronise: the grid has enough programs for any dispatch of this many rows, and programs without
rows exit at once. Programs that read the same part of a weight are neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.ops.cuda.launch import await_inputs, launch, tile
from parallel_llama.ops.dispatch import Dispatch
from parallel_llama.ops.part_sums import PartSums, Product

MAX_ROWS = 16

_OUTPUTS = 64  # per program: the width of the largest matrix instruction
_INPUT_BYTES = 256  # per output and iteration
_PROGRAMS = 256  # enough to keep a GPU busy, each with several loads in flight
_MAX_PARTS = 8
_MIN_INPUTS = 512  # per part
_SHAPE = {"ROWS": MAX_ROWS, "OUTPUTS": _OUTPUTS, "num_warps": 4, "num_stages": 4}  # per program

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# Rows per step, at least as many as in the largest CUDA graph. More would read a weight too often.
MAX_ROUTED_ROWS = 256

_ALIGNMENT = 16  # bytes per load


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether products of these dtypes and this many rows use `linear` rather than cuBLAS."""
    return len(x) <= MAX_ROWS and x.dtype in TYPES and weight.dtype in TYPES


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Y = X A + b, summed in float32; the weight in torch's order, perhaps in fewer bits.

    Shapes: [T, in], [out, in] -> [T, out].
    """
    return whole(product(x, weight, bias))


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Product:
    """As `linear`, but sums over parts of the inputs are not added."""
    assert x.stride(1) == weight.stride(1) == 1
    (n, n_inputs), n_outputs = x.shape, len(weight)
    cut = Cut.of(n_outputs, n_inputs, weight.element_size())
    sums = _empty_sums(x, cut.n_parts, n, n_outputs)
    launch(
        _product, (cut.n_blocks, cut.n_parts, triton.cdiv(n, MAX_ROWS)),
        x, weight, sums, bias if cut.n_parts == 1 else None,
        n, n_inputs, n_outputs, x.stride(0), weight.stride(0), cut.part,
        SIZE=cut.size, **_SHAPE,
    )  # fmt: skip
    return sums if cut.n_parts == 1 else PartSums(sums, bias, x.dtype)


def _empty_sums(x: Tensor, n_parts: int, n: int, n_outputs: int) -> Tensor:
    """Memory for sums over parts, or for the product in x's dtype if there is one part."""
    if n_parts == 1:
        return x.new_empty(n, n_outputs)
    return x.new_empty(n_parts, n, n_outputs, dtype=torch.float32)


def whole(product: Product) -> Tensor:
    """A product as a tensor: adds its sums over parts, if any."""
    if isinstance(product, Tensor):
        return product
    y = torch.empty(product.shape, dtype=product.dtype, device=product.sums.device)
    add_parts(product.sums.flatten(2), product.bias, y.flatten(1))
    return y


def source_of(product: Product) -> tuple[Tensor, Tensor | None, int, int]:
    """What `load_row` reads a product with: values, bias, row stride and N_PARTS."""
    if isinstance(product, Tensor):
        return product, None, product.stride(0), 0
    return product.sums, product.bias, product.sums.stride(1), len(product.sums)


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
    """Number of parts of the inputs; more for few blocks of outputs, to fill a GPU."""
    wanted = -(-_PROGRAMS // max(n_blocks, 1))
    return max(min(wanted, _MAX_PARTS, n_inputs // _MIN_INPUTS), 1)


def add_parts(sums: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """y = the sum of all parts, in order, + b. Shapes: sums [n_parts, T, out], y [T, out]."""
    n_parts, n, n_outputs = sums.shape
    grid = (triton.cdiv(n_outputs, 256), n)
    launch(_sum, grid, sums, bias, y, n, n_outputs, y.stride(0), N_PARTS=n_parts, SIZE=256)


@dataclass(frozen=True)
class Addresses:
    """The fixed addresses of weights.

    Args:
        table: [n] int64, on the device of the weights.
        alignment: A divisor of all addresses.
    """

    table: Tensor
    alignment: int

    @classmethod
    def of(cls, addresses: Sequence[int], device: torch.device) -> "Addresses":
        """Copy the addresses to the device, and wait for the copy."""
        table = torch.tensor(addresses, dtype=torch.int64).to(device)
        return cls(table, gcd(_ALIGNMENT, *addresses))


def takes_routed(x: Tensor, weights: Sequence[Tensor], dispatch: Dispatch) -> bool:
    """Whether products of these dtypes and this many rows use `routed_product`."""
    stored = {weight.dtype for weight in weights}
    is_computed = x.dtype in TYPES and len(stored) == 1 and stored <= {*TYPES}
    return is_computed and dispatch.max_rows <= MAX_ROUTED_ROWS


def routed_product(
    x: Tensor, weights: Sequence[Tensor], addresses: Addresses, dispatch: Dispatch
) -> Product:
    """`TorchOps.routed_product`, summed in float32.

    Shapes: x [n, in], each weight [out, in] contiguous, at its address -> [P, out].
    """
    assert x.stride(1) == 1 and len(addresses.table) == len(weights) == len(dispatch.starts) - 1
    assert all(weight.is_contiguous() for weight in weights)
    (n_outputs, n_inputs), dtype = weights[0].shape, weights[0].dtype
    n, n_weights = len(dispatch.targets), len(weights)
    cut = Cut.of(n_outputs, n_inputs, dtype.itemsize)
    sums = _empty_sums(x, cut.n_parts, n, n_outputs)
    launch(
        _routed, (most_tiles(n, n_weights), cut.n_blocks, cut.n_parts),
        x, addresses.table, sums, dispatch.sources, dispatch.targets, dispatch.starts,
        n, n_weights, n_inputs, n_outputs, x.stride(0), cut.part,
        STORED=TYPES[dtype], ALIGNMENT=addresses.alignment, WEIGHTS=tile(n_weights + 1),
        SIZE=cut.size, **_SHAPE,
    )  # fmt: skip
    return sums if cut.n_parts == 1 else PartSums(sums, None, x.dtype)


def most_tiles(n: int, n_weights: int) -> int:
    """The most tiles that n rows can need; each row is assigned to one weight or to none."""
    n_used = min(n, n_weights + 1)
    return n_used + (n - n_used) // MAX_ROWS


@triton.jit(do_not_specialize=["n"])
def _product(
    x, weight, y, bias, n, n_inputs, n_outputs, x_stride, weight_stride, part,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    await_inputs()
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
    await_inputs()
    row = tl.program_id(1).to(tl.int64)
    outputs = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_output = outputs < n_outputs
    dtype: tl.constexpr = y.dtype.element_ty
    total = load_row(sums, bias, row, n, n_outputs, outputs, is_output, N_PARTS, dtype)
    tl.store(y + row * y_stride + outputs, total.to(dtype), is_output)


@triton.jit
def load_row(
    values, bias, row, n, stride, columns, is_there, N_PARTS: tl.constexpr, DTYPE: tl.constexpr
):
    """Some columns of a row of a product, rounded to DTYPE and returned in float32.

    Args:
        values: The product if N_PARTS is 0, else its sums over parts.
        n: The number of rows.
    """
    if N_PARTS == 0:
        total = tl.load(values + row * stride + columns, is_there, 0)
    else:
        total = tl.zeros(columns.shape, tl.float32)
        for part in tl.static_range(N_PARTS):
            total += tl.load(values + (part * n + row) * stride + columns, is_there, 0)
        if bias is not None:
            total += tl.load(bias + columns, is_there, 0).to(tl.float32)
    return total.to(DTYPE).to(tl.float32)


# No recompilation for another number of rows or alignment of their tensors.
@triton.jit(
    do_not_specialize=["n"], do_not_specialize_on_alignment=["sources", "targets", "starts"]
)
def _routed(
    x, table, y, sources, targets, starts, n, n_weights, n_inputs, n_outputs, x_stride, part,
    STORED: tl.constexpr, ALIGNMENT: tl.constexpr, WEIGHTS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    await_inputs()
    weight, first, last = _rows_of(starts, tl.program_id(0), n, n_weights, WEIGHTS, ROWS)
    if first >= last:
        return
    number = tl.program_id(2)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    places = first + tl.arange(0, ROWS)
    is_output, is_row = outputs < n_outputs, places < last
    # For rows without a weight, the sum is over no inputs, so that they become zeros.
    is_given = weight < n_weights
    end = tl.where(is_given, min(number * part + part, n_inputs), 0)
    address = tl.multiple_of(tl.load(table + weight, is_given, 0), ALIGNMENT)
    own = tl.multiple_of(address.to(tl.pointer_type(STORED)), ALIGNMENT)
    source = tl.load(sources + places, is_row, 0)
    sums = dots(
        x + source * x_stride, own + outputs.to(tl.int64) * n_inputs, is_row, is_output,
        number * part, end, n_inputs, ROWS, OUTPUTS, SIZE,
    )  # fmt: skip
    target = tl.load(targets + places, is_row, 0)
    at = (number * n + target[None, :]) * n_outputs + outputs[:, None]
    tl.store(y + at, sums.to(y.dtype.element_ty), is_output[:, None] & is_row[None, :])


@triton.jit
def _rows_of(starts, number, n, n_weights, WEIGHTS: tl.constexpr, ROWS: tl.constexpr):
    """The weight of a tile, and the start and end of its rows; start >= end for no rows.

    Rows without a weight belong to weight number `n_weights`.
    """
    weights = tl.arange(0, WEIGHTS)
    first = tl.load(starts + weights, weights <= n_weights, n).to(tl.int32)
    last = tl.load(starts + weights + 1, weights < n_weights, n).to(tl.int32)
    n_tiles = tl.cdiv(last - first, ROWS)
    end = tl.cumsum(n_tiles, 0)
    weight = tl.sum((end <= number).to(tl.int32), 0)
    is_own = weights == weight
    start = tl.sum(tl.where(is_own, first + (number - end + n_tiles) * ROWS, 0), 0)
    return weight, start, tl.sum(tl.where(is_own, last, 0), 0)
