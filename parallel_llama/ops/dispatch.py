"""Which rows each of several weights multiplies, as in a mixture of experts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Dispatch:
    """The rows of the input x and of the output y that each of n weights multiplies.

    Weight e computes row targets[i] of y from row sources[i] of x, for i from starts[e] up to
    starts[e + 1]. No weight computes the rows targets[starts[n]:] of y.

    Args:
        sources: [P] int64.
        targets: [P] int64, each row of y once.
        starts: [n + 1] int64.
        max_rows: An upper bound on the rows of each weight, known without reading tensors.
    """

    sources: Tensor
    targets: Tensor
    starts: Tensor
    max_rows: int

    def bounds(self) -> tuple[list[int], list[int]]:
        """The start and the end of each weight's rows."""
        starts = self.starts.tolist()
        return starts[:-1], starts[1:]

    def through(
        self, x: Tensor, products: Sequence[Callable[[Tensor], Tensor]], n_outputs: int
    ) -> Tensor:
        """y from one product per weight; zeros in rows that no weight computes.

        Shapes: x [T, in], each product [m, in] -> [m, n_outputs]; the result [P, n_outputs].
        """
        y = x.new_zeros(len(self.targets), n_outputs)
        for product, rows in zip(products, map(slice, *self.bounds()), strict=True):
            if rows.start < rows.stop:
                y[self.targets[rows]] = product(x[self.sources[rows]])
        return y
