"""Products of rows, each with one of several weights; only weights with rows are read.

A program computes some outputs of one weight for up to MAX_ROWS of its rows. It finds the weight in
`starts` on the device, so that the host need not synchronise: the grid has as many programs as any
routes of this many rows can need, and programs without rows exit at once. Programs that read the
same part of a weight are neighbours.

A row gives the same bits as in `linear`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.ops.cuda.launch import launch, tile
from parallel_llama.ops.cuda.linear import COMPUTED, MAX_ROWS, SHAPE, Cut, add_parts, dots
from parallel_llama.ops.routes import Routes

# Rows per step, at least those of the largest CUDA graph. More would read a weight too often.
MAX_ROUTED_ROWS = 256

_ALIGNMENT = 16  # bytes per load
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


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


def takes_routed(x: Tensor, weights: Sequence[Tensor], routes: Routes) -> bool:
    """Whether `routed_linear` supports these dtypes and this number of rows."""
    stored = {weight.dtype for weight in weights}
    is_computed = x.dtype in COMPUTED and len(stored) == 1 and stored <= {*COMPUTED}
    return is_computed and routes.max_rows <= MAX_ROUTED_ROWS


def routed_linear(
    x: Tensor, weights: Sequence[Tensor], addresses: Addresses, routes: Routes
) -> Tensor:
    """`TorchOps.routed_linear`, summed in float32.

    Shapes: x [n, in], each weight [out, in] contiguous, at its address -> [P, out].
    """
    assert x.stride(1) == 1 and len(addresses.table) == len(weights) == len(routes.starts) - 1
    assert all(weight.is_contiguous() for weight in weights)
    (n_outputs, n_inputs), dtype = weights[0].shape, weights[0].dtype
    n, n_weights = len(routes.targets), len(weights)
    cut = Cut.of(n_outputs, n_inputs, dtype.itemsize)
    y = x.new_empty(n, n_outputs)
    is_whole = cut.n_parts == 1
    sums = y if is_whole else x.new_empty(cut.n_parts, n, n_outputs, dtype=torch.float32)
    launch(
        _routed, (most_tiles(n, n_weights), cut.n_blocks, cut.n_parts),
        x, addresses.table, sums, routes.sources, routes.targets, routes.starts,
        n, n_weights, n_inputs, n_outputs, x.stride(0), cut.part,
        STORED=_TYPES[dtype], ALIGNMENT=addresses.alignment, WEIGHTS=tile(n_weights + 1),
        SIZE=cut.size, **SHAPE,
    )  # fmt: skip
    if not is_whole:
        add_parts(sums, None, y)
    return y


def most_tiles(n: int, n_weights: int) -> int:
    """The largest number of tiles that n rows of some weights, or of none, can need."""
    n_used = min(n, n_weights + 1)
    return n_used + (n - n_used) // MAX_ROWS


# Neither the number of rows nor the alignment of their tensors recompiles the kernel.
@triton.jit(
    do_not_specialize=["n"], do_not_specialize_on_alignment=["sources", "targets", "starts"]
)
def _routed(
    x, table, y, sources, targets, starts, n, n_weights, n_inputs, n_outputs, x_stride, part,
    STORED: tl.constexpr, ALIGNMENT: tl.constexpr, WEIGHTS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    weight, first, last = _rows_of(starts, tl.program_id(0), n, n_weights, WEIGHTS, ROWS)
    if first >= last:
        return
    number = tl.program_id(2)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    places = first + tl.arange(0, ROWS)
    is_output, is_row = outputs < n_outputs, places < last
    # Rows without a weight are products over no inputs.
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
