"""Compares the exchanges of a forward pass on several ranks with the same pass on one rank.

With exact sums (see `LLMConfig.exact`) each column of an exchanged tensor is computed by one rank
alone. So a column that differs identifies the rank, and the number of the exchange identifies the
product and the layer.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec
import torch
from torch import Tensor

from parallel_llama.errors import named_ranks, ranks_do
from parallel_llama.parallel.collectives import Communicator, Solo


class Trace:
    """The results of a forward pass's exchanges, in order."""

    def __init__(self) -> None:
        self.results: list[Tensor] = []
        self.widths: list[tuple[int, ...]] = []  # columns of each rank; () for a sum

    def add(self, result: Tensor, widths: Sequence[int] = ()) -> None:
        self.results.append(result.detach().clone())
        self.widths.append(tuple(widths))


class TracedSolo(Solo):
    """One rank, which records what several ranks would exchange."""

    exchanges = True

    def __init__(self) -> None:
        self.trace = Trace()

    def all_reduce(self, x: Tensor) -> Tensor:
        self.trace.add(x)
        return x

    def gather_columns(self, x: Tensor, widths: Sequence[int], out: Tensor | None = None) -> Tensor:
        result = super().gather_columns(x, widths, out)
        self.trace.add(result, widths)
        return result


class Traced(Communicator):
    """A communicator that records the results of its collectives."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.trace, self._comm = Trace(), comm

    def all_reduce(self, x: Tensor) -> Tensor:
        result = self._comm.all_reduce(x)
        self.trace.add(result)
        return result

    def all_gather(self, x: Tensor) -> Tensor:
        return self._comm.all_gather(x)

    def gather_columns(self, x: Tensor, widths: Sequence[int], out: Tensor | None = None) -> Tensor:
        result = self._comm.gather_columns(x, widths, out)
        self.trace.add(result, widths)
        return result

    def broadcast(self, x: Tensor, src: int = 0, *, no_timeout: bool = False) -> Tensor:
        return self._comm.broadcast(x, src, no_timeout=no_timeout)

    def barrier(self) -> None:
        self._comm.barrier()

    def keepalive(self) -> None:
        self._comm.keepalive()

    def require_alive(self) -> None:
        self._comm.require_alive()

    def close(self) -> None:
        """Leaves the communicator open for the next checks."""


class Repeated(Solo):
    """Emulates `size` ranks on a larger communicator: its rank r acts as rank r % size.

    Collective: all ranks of the larger communicator call the same methods.
    """

    def __init__(self, comm: Communicator, size: int) -> None:
        self.rank, self.size, self._comm = comm.rank % size, size, comm

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self._comm.all_gather(x)[: self.size]
        x.copy_(first)
        for other in others:
            x.add_(other)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return self._comm.all_gather(x)[: self.size]

    def gather_columns(self, x: Tensor, widths: Sequence[int], out: Tensor | None = None) -> Tensor:
        return Communicator.gather_columns(self, x, widths, out)


class Difference(msgspec.Struct, frozen=True):
    """A rank's first exchange with a different result, and the ranks that computed this result.

    `owners` is empty for a sum, which does not show its terms.
    """

    exchange: int
    owners: tuple[int, ...]


def first_difference(
    expected_trace: Trace, actual_trace: Trace, tolerance: float = 0.0
) -> Difference | None:
    """Compares two passes, bit by bit or with a tolerance relative to the largest value."""
    if len(expected_trace.results) != len(actual_trace.results):
        return Difference(min(len(expected_trace.results), len(actual_trace.results)), ())
    for number, (expected, actual) in enumerate(
        zip(expected_trace.results, actual_trace.results, strict=True)
    ):
        differs = differing(expected, actual, tolerance)
        if differs.any():
            widths, columns = actual_trace.widths[number], differs.view(len(expected), -1).any(0)
            stops = list(accumulate(widths))
            owners = [
                rank
                for rank, (start, stop) in enumerate(zip([0, *stops], stops, strict=False))
                if columns[start:stop].any()
            ]
            return Difference(number, tuple(owners))
    return None


def differing(one: Tensor, other: Tensor, tolerance: float = 0.0) -> Tensor:
    """Where two tensors differ. Shapes: that of both, bool."""
    if tolerance:
        limit = tolerance * one.abs().max()
        return ~((one - other).abs() <= limit)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return one.view(bits) != other.contiguous().view(bits)


def describe(differences: Mapping[int, Difference | None], names: Sequence[str]) -> str:
    """Describes the differences that ranks have found; `names` are the names of the exchanges."""
    present = {
        rank: difference for rank, difference in differences.items() if difference is not None
    }
    first = min(present.values(), key=lambda difference: (difference.exchange, difference.owners))
    ranks = [rank for rank, difference in present.items() if difference == first]
    if first.exchange >= len(names):
        return f"{ranks_do(ranks, 'has', 'have')} a different number of exchanges"
    exchange = names[first.exchange]
    owners = named_ranks(first.owners)
    if not first.owners:
        return f"{ranks_do(ranks, 'has', 'have')} a different sum of {exchange}"
    if (
        list(present.values()).count(first) == len(differences)
        or set(first.owners) & present.keys()
    ):
        return f"{owners} computed {exchange} differently"
    return f"{named_ranks(ranks)} received {exchange} of {owners} differently"
