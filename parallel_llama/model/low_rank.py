"""The low-rank products that LoRA adapters add to the outputs of a layer, row by row.

A batch can have rows of several adapters, and rows without an adapter. The rows of each adapter are
multiplied separately, so a row's result does not depend on the other rows. In a recorded decode
step on the CPU, one kernel call computes the products of all adapters; at each replay it reads
which rows have which adapter.

A column-parallel layer holds its outputs' rows of B and all of A. A row-parallel layer holds its
inputs' columns of A and all of B: its low-rank product is a partial sum like that of the layer, and
one all_reduce sums both. With exact sums, a row-parallel layer holds its outputs' rows of B and all
of A, and multiplies the inputs that the ranks have gathered, so no sum is split.

Source: LoRA, arXiv 2106.09685, section 4.1; S-LoRA, arXiv 2311.03285, section 6.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from parallel_llama.ops import AdapterRoom, CPUOps, TorchOps


@dataclass(frozen=True)
class LowRank:
    """The matrices that an adapter adds to some outputs of a layer.

    Args:
        a: [rank, in].
        b: [out, rank]; contains the scaling.
        first: The first of these outputs among those of the layer.
    """

    a: Tensor
    b: Tensor
    first: int


@dataclass(frozen=True)
class AdapterRows:
    """The rows of a batch that run with an adapter.

    Args:
        name: The adapter.
        rows: [n] int64; None for all rows.
    """

    name: str
    rows: Tensor | None


# The rows of a batch that run with adapters; an `AdapterRoom` while a decode step is recorded.
Adapters = Sequence[AdapterRows] | AdapterRoom


class LowRanks(dict[str, Sequence[LowRank]]):
    """The matrices that each adapter adds to a layer, by the adapters' names.

    `number` is the layer's number among all layers that may have adapters; see
    `adapters.number_layers`.
    """

    number: int


def add_low_rank_(
    y: Tensor, x: Tensor, low_ranks: LowRanks, adapters: Adapters, ops: TorchOps
) -> None:
    """Adds the products of each adapter's rows to y. Shapes: y [T, out]; x [T, in]."""
    if isinstance(adapters, AdapterRoom):
        assert isinstance(ops, CPUOps)
        ops.add_low_ranks_(y, x, adapters, low_ranks.number)
        return
    for each in adapters:
        parts = low_ranks.get(each.name, ())
        if not parts:
            continue
        own = x if each.rows is None else x[each.rows]
        for part in parts:
            product = ops.low_rank(own, part.a, part.b)
            outputs = y[:, part.first : part.first + len(part.b)]
            if each.rows is None:
                outputs.add_(product)
            else:
                outputs.index_add_(0, each.rows, product)
