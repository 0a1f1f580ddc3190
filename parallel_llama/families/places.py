"""Where a layout keeps each weight: in which stored tensor, and in which rows of that.

Weights to which a layout gives one name lie in one stored tensor, one behind the other in the order
of the model. It is cut into equal groups where a layout keeps every KV head's queries, key and
value together:

    one group    q0 q1 q2 q3 k0 k1 v0 v1        two groups    q0 q1 k0 v0 | q2 q3 k1 v1
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallel_llama.families.weights import Param


@dataclass(frozen=True)
class Place:
    """The rows of a weight in a stored tensor: runs of them, each `step` behind the one before.

    A stored tensor's rows are those of all its dimensions but the last; a vector's are its values.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    run: int
    step: int

    @property
    def n_rows(self) -> int:
        """Rows of the stored tensor."""
        return math.prod(self.shape[: max(1, len(self.shape) - 1)])

    @property
    def extent(self) -> range:
        """The stored rows from the weight's first to its last, whatever lies between."""
        return range(self.first, self.n_rows - self.step + self.first + self.run)

    def runs(self, rows: range) -> Iterator[range]:
        """Where some rows of the weight lie, in their order.

        >>> list(Place("qkv", (8, 5), first=0, run=2, step=4).runs(range(1, 4)))
        [range(1, 2), range(4, 6)]
        """
        start = rows.start
        while start < rows.stop:
            number, skipped = divmod(start, self.run)
            count = min(self.run - skipped, rows.stop - start)
            at = self.first + number * self.step + skipped
            yield range(at, at + count)
            start += count


def whole(name: str, shape: tuple[int, ...]) -> Place:
    """The place of a weight that has a stored tensor to itself."""
    return Place(name, shape, 0, shape[0], shape[0])


def shared(
    name: str, weights: Sequence[Param], n_groups: int = 1, n_slices: int = 1
) -> Iterator[tuple[str, Place]]:
    """The places of weights that share a stored tensor, by their names.

    `n_slices` is the first dimension of a tensor that has one more than the weights.

    Shapes: the weights differ in their first dimension at most, and each divides by `n_groups`.
    """
    n_rows, row = sum(weight.shape[0] for weight in weights), weights[0].shape[1:]
    shape = (n_rows, *row) if n_slices == 1 else (n_slices, n_rows // n_slices, *row)
    first = 0
    for weight in weights:
        assert weight.shape[1:] == row and weight.shape[0] % n_groups == 0, weight.name
        run = weight.shape[0] // n_groups
        yield weight.name, Place(name, shape, first, run, n_rows // n_groups)
        first += run
