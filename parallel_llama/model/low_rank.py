"""The low-rank products that LoRA adapters add to the outputs of a layer, row by row.

A batch can have rows of several adapters, and rows without an adapter. The rows of each adapter are
multiplied separately, so a row's result does not depend on the other rows. On a CPU with kernels,
two kernel calls compute the products of all adapters. In a recorded decode step, each replay reads
which rows have which adapter.

A column-parallel layer holds all of A, and the rows of B that belong to its outputs. A row-parallel
layer holds all of B, and the columns of A that belong to its inputs: its low-rank product is a
partial sum like the layer's own, and one all_reduce sums both. With exact sums, a row-parallel
layer holds the same parts as a column-parallel one, and multiplies the inputs that the ranks have
gathered, so no sum is split.

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
        first: The index of the first of these outputs in the layer.
    """

    a: Tensor
    b: Tensor
    first: int


@dataclass(frozen=True)
class AdapterRows:
    """The rows of a batch that run with an adapter.

    Args:
        name: The adapter's name.
        rows: [n] int64; None for all rows.
    """

    name: str
    rows: Tensor | None


# The rows of a batch that run with adapters; an `AdapterRoom` for the kernels of the CPU.
Adapters = Sequence[AdapterRows] | AdapterRoom


class LowRanks(dict[str, Sequence[LowRank]]):
    """The matrices that each adapter adds to a layer, by the adapters' names.

    `number` is the layer's number among all layers that may have adapters, set by
    `adapters.number_layers`.
    """

    number: int


def add_low_rank_(
    y: Tensor, x: Tensor, low_ranks: LowRanks, adapters: Adapters, ops: TorchOps
) -> None:
    """Adds the low-rank product of each row's adapter to y, in place.

    Shapes: y [T, out]; x [T, in].
    """
    if isinstance(adapters, AdapterRoom):
        assert isinstance(ops, CPUOps)
        ops.add_low_ranks_(y, x, adapters, low_ranks.number)
        return
    for adapter in adapters:
        parts = low_ranks.get(adapter.name, ())
        if not parts:
            continue
        inputs = x if adapter.rows is None else x[adapter.rows]
        for part in parts:
            product = ops.low_rank(inputs, part.a, part.b)
            outputs = y[:, part.first : part.first + len(part.b)]
            if adapter.rows is None:
                outputs.add_(product)
            else:
                outputs.index_add_(0, adapter.rows, product)
