"""Which rows go through which of several weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Routes:
    """For each of n weights, the rows of x that it takes, and the rows of y that they become.

    Weight e takes sources[i] and gives targets[i], for each i from starts[e] to before the next.
    Targets from the last start on are rows of y that no weight gives. No weight has more rows than
    `max_rows`, which is known without a look into tensors.

    Shapes: int64 sources and targets [P], targets with each row of y once; starts [n + 1].
    """

    sources: Tensor
    targets: Tensor
    starts: Tensor
    max_rows: int

    def bounds(self) -> tuple[list[int], list[int]]:
        """Where each weight's rows begin, and where they end."""
        starts = self.starts.tolist()
        return starts[:-1], starts[1:]

    def through(
        self, x: Tensor, products: Sequence[Callable[[Tensor], Tensor]], n_outputs: int
    ) -> Tensor:
        """What the weights give, one by one; zeros in the other rows.

        Shapes: x [n, in], each product [m, in] -> [m, n_outputs]; the result [P, n_outputs].
        """
        y = x.new_zeros(len(self.targets), n_outputs)
        for product, own in zip(products, map(slice, *self.bounds()), strict=True):
            if own.start < own.stop:
                y[self.targets[own]] = product(x[self.sources[own]])
        return y
