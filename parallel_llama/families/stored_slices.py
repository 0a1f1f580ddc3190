"""Where a layout stores each weight: the stored tensor, and the weight's rows in it.

Weights with the same name in a layout share a stored tensor, concatenated in the order of the
model. If the layout stores the queries, key and value of every KV head together, the tensor is cut
into equal groups:

    one group    q0 q1 q2 q3 k0 k1 v0 v1        two groups    q0 q1 k0 v0 | q2 q3 k1 v1

A layout may alternate the rows of an expert's w1 and w3 (w1, w3, w1, w3, ...), and may store each
matrix of an expert transposed, alternating or not: the rows of the matrix are then columns in the
file. A vector with values for each head may be stored as a matrix with a row for each head.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallel_llama.families.weights import Param


@dataclass(frozen=True)
class StoredSlice:
    """The rows of a weight in a stored tensor, as evenly spaced runs.

    All dimensions of a stored tensor but the last are flattened into rows; the rows of a vector are
    its values.

    Args:
        name: The name of the stored tensor.
        shape: Its shape.
        first: The first row of the first run.
        run: Rows per run.
        step: The distance between the starts of two runs.
        count: The number of runs; None for as many as the stored tensor holds.
        is_transposed: Whether the file stores each of the tensor's matrices as [in, out]. `shape`
            is then the shape in the file, and rows are rows of the matrices as [out, in].
        of_vector: Whether the weight is a vector, so that each value of the tensor is a row.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    run: int
    step: int
    count: int | None = None
    is_transposed: bool = False
    of_vector: bool = False

    @property
    def n_rows(self) -> int:
        """Rows of the stored tensor."""
        shape = self.matrix_shape
        return math.prod(shape if self.of_vector else shape[: max(1, len(shape) - 1)])

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape of the stored tensor with matrices as [out, in]."""
        if not self.is_transposed:
            return self.shape
        return (*self.shape[:-2], self.shape[-1], self.shape[-2])

    @property
    def extent(self) -> range:
        """The stored rows from the weight's first to its last, with all rows in between."""
        if self.count is not None:
            return range(self.first, self.first + (self.count - 1) * self.step + self.run)
        return range(self.first, self.n_rows - self.step + self.first + self.run)

    def runs(self, rows: range) -> Iterator[range]:
        """The stored rows of some rows of the weight, in order.

        >>> list(StoredSlice("qkv", (8, 5), first=0, run=2, step=4).runs(range(1, 4)))
        [range(1, 2), range(4, 6)]
        """
        start = rows.start
        while start < rows.stop:
            index, skipped = divmod(start, self.run)
            count = min(self.run - skipped, rows.stop - start)
            first = self.first + index * self.step + skipped
            yield range(first, first + count)
            start += count


def whole(name: str, shape: tuple[int, ...]) -> StoredSlice:
    """The slice of a weight that is a whole stored tensor."""
    return StoredSlice(name, shape, 0, shape[0], shape[0], of_vector=len(shape) == 1)


def by_head(name: str, weight: Param, head_dim: int) -> StoredSlice:
    """The slice of a vector that is stored as a matrix with a row for each head."""
    (size,) = weight.shape
    return StoredSlice(name, (size // head_dim, head_dim), 0, size, size, of_vector=True)


def shared(
    name: str, weights: Sequence[Param], n_groups: int = 1, n_slices: int = 1
) -> Iterator[tuple[str, StoredSlice]]:
    """The slices of weights that share a stored tensor, by the weights' names.

    `n_slices` is the size of the stored tensor's first dimension if the tensor has one dimension
    more than the weights, else 1.

    Shapes: the weights differ at most in their first dimension, a multiple of `n_groups`.
    """
    n_rows, row = sum(weight.shape[0] for weight in weights), weights[0].shape[1:]
    shape = (n_rows, *row) if n_slices == 1 else (n_slices, n_rows // n_slices, *row)
    first = 0
    for weight in weights:
        assert weight.shape[1:] == row and weight.shape[0] % n_groups == 0, weight.name
        run = weight.shape[0] // n_groups
        step = n_rows // n_groups
        yield weight.name, StoredSlice(name, shape, first, run, step, of_vector=not row)
        first += run


def transposed(
    name: str, weights: Sequence[Param], n_experts: int
) -> Iterator[tuple[str, StoredSlice]]:
    """The slices of experts' matrices that are stored as [in, out], by the weights' names.

    `weights` has the weights of the first expert, then of the second, and so on. The weights of an
    expert are stored one after the other.

    Shapes: the weights have the same shape.
    """
    n_rows, n_inputs = weights[0].shape
    shape = (n_experts, n_inputs, len(weights) // n_experts * n_rows)
    for index, weight in enumerate(weights):
        assert weight.shape == weights[0].shape, weight.name
        first = index * n_rows
        yield weight.name, StoredSlice(name, shape, first, 1, 1, n_rows, is_transposed=True)


def interleaved(
    name: str, weights: Sequence[Param], n_experts: int
) -> Iterator[tuple[str, StoredSlice]]:
    """The slices of experts' weights that are stored with alternating rows, by weight name.

    `weights` has the weights of the first expert, then of the second, and so on. Matrices are
    stored as [in, out].

    Shapes: the weights have the same shape.
    """
    n_rows, *inputs = weights[0].shape
    n_per_expert = len(weights) // n_experts
    shape = (n_experts, *inputs, n_per_expert * n_rows)
    for index, weight in enumerate(weights):
        assert weight.shape == weights[0].shape, weight.name
        expert, number = divmod(index, n_per_expert)
        first = expert * n_per_expert * n_rows + number
        is_matrix = len(inputs) > 0
        yield (
            weight.name,
            StoredSlice(name, shape, first, 1, n_per_expert, n_rows, is_matrix, not is_matrix),
        )
