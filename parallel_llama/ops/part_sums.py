"""Products as sums over parts of their inputs; the operator that reads a product adds the sums.

A kernel for a few rows splits the inputs into parts, to fill the device, and its sums over the
parts must be added. If the next operator adds them, the product takes one launch instead of two.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class PartSums:
    """A product Y = X A + b, as sums over parts of the inputs that are not added yet.

    Args:
        sums: The sums over each part, [n_parts, T, out] float32.
        bias: b, [out]; None without a bias.
        dtype: The dtype to which a total is rounded.
    """

    sums: Tensor
    bias: Tensor | None
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """The shape of the product."""
        return self.sums.shape[1:]

    def view(self, *shape: int) -> "PartSums":
        """The product in another shape, as `Tensor.view`."""
        return replace(self, sums=self.sums.view(len(self.sums), *shape))


Product = Tensor | PartSums
