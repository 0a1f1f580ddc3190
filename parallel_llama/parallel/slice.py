"""One rank's work without the other ranks, to time what a group of many would do on one device."""

import torch
from torch import Tensor

from parallel_llama.parallel.collectives import Solo


class Slice(Solo):
    """A rank of `size` whose peers are not there: no sum is whole, and everybody's x is its own.

    It does what its rank does between collectives, and leaves out what it would wait for. So its
    numbers mean nothing, and take as long to compute as those that do.

    It is the rank 0 that hears of requests, whichever share of a model it is given. What is
    recorded once and replayed elsewhere counts once in `n_collectives`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.n_collectives = 0  # all_reduces and all_gathers; a broadcast is the host's

    def all_reduce(self, x: Tensor) -> Tensor:
        self.n_collectives += 1
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        self.n_collectives += 1
        return torch.stack((x.detach(),) * self.size)
