"""What ranks do together, seen from one of them.

`Communicator` is the whole of it: models and engines know no other way to another rank. Here are
its two plain forms, one rank alone and a process group of torch; ranks of one host have a faster
one in `shared_memory`.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_llama.parallel.failures import RankError

# A message between ranks holds requests or completions; a length beyond this is no length.
MAX_MESSAGE_BYTES = 1 << 30

# What a rank that waits for work waits at the most: rank 0 may be waiting for a person.
IDLE_LIMIT = timedelta(days=365)


class Communicator(Protocol):
    """One tensor-parallel group as one of its ranks sees it.

    Not for several threads at once. A collective that raised leaves the group unusable.

    Collective: every method but `close`.
    """

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over all ranks, in place, bitwise the same on every rank. Returns: x.

        Shapes: x the same on every rank; partial, then replicated.
        """
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Everybody's x. Shapes: x the same on every rank; the result is [size, *x.shape]."""
        ...

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """Rank src's x on every rank, in place. Returns: x."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...

    def ring(self) -> None:
        """End every other rank's `wait_for_ring`; for rank 0."""
        ...

    def wait_for_ring(self) -> None:
        """Wait for rank 0 to ring, with no limit of time as long as it lives; for the others."""
        ...

    def close(self) -> None:
        """Leave the group; it can be called twice, and after an error."""
        ...


class Solo(Communicator):
    """The group of one rank, where every collective is already done."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.detach().clone(memory_format=torch.contiguous_format).unsqueeze(0)

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:  # noqa: ARG002, there is only rank 0
        return x

    def barrier(self) -> None:
        pass

    def ring(self) -> None:
        pass

    def wait_for_ring(self) -> None:
        pass

    def close(self) -> None:
        pass


class ProcessGroup(Communicator):
    """A process group of torch: gloo for tensors on the CPU, NCCL for those on CUDA.

    `leave` is called once, on close. Every group's rank numbers must be the world's.

    Raises: RankError from every collective that another rank's death or lateness ends.
    """

    def __init__(self, group: dist.ProcessGroup, leave: Callable[[], None]) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        self._leave: Callable[[], None] | None = leave

    def all_reduce(self, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            return x.copy_(self.all_reduce(x.contiguous()))
        try:
            dist.all_reduce(x, group=self._group)
        except RuntimeError as error:
            raise self._failed("all_reduce", error) from error
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        if x.numel() == 0:
            return gathered
        try:
            dist.all_gather(list(gathered.unbind()), x.contiguous(), group=self._group)
        except RuntimeError as error:
            raise self._failed("all_gather", error) from error
        return gathered

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        if not x.is_contiguous():
            return x.copy_(self.broadcast(x.contiguous(), src))
        try:
            dist.broadcast(x, src, group=self._group)
        except RuntimeError as error:
            raise self._failed("broadcast", error) from error
        return x

    def barrier(self) -> None:
        # Not dist.barrier: under NCCL that one guesses a device.
        self.all_reduce(torch.zeros(1, dtype=torch.int64))

    def ring(self) -> None:
        self._bell()

    def wait_for_ring(self) -> None:
        self._bell()

    def close(self) -> None:
        if self._leave is not None:
            leave, self._leave = self._leave, None
            leave()

    def _bell(self) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, IDLE_LIMIT
        try:
            work = self._group.broadcast([torch.zeros(1, dtype=torch.uint8)], options)
            work.wait(IDLE_LIMIT)
        except RuntimeError as error:
            raise self._failed("wait_for_ring", error) from error

    def _failed(self, what: str, error: RuntimeError) -> RankError:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return RankError(
            f"{what} failed on rank {self.rank} of {self.size}, another rank has died or is late: "
            f"{reason[:300]}"
        )


def broadcast_bytes(comm: Communicator, data: bytes | None) -> bytes:
    """Rank 0's bytes on every rank; the others give None.

    Raises: ValueError for more than MAX_MESSAGE_BYTES; RankError for a length that is none.
    Collective: two broadcasts, the length and the bytes.
    """
    if comm.rank == 0 and (data is None or len(data) > MAX_MESSAGE_BYTES):
        size = "nothing" if data is None else f"{len(data)} bytes"
        raise ValueError(f"rank 0 broadcasts {size}; give 0 to {MAX_MESSAGE_BYTES} bytes")
    length = torch.tensor([len(data or b"")], dtype=torch.int64)
    n_bytes = int(comm.broadcast(length)[0])
    if not 0 <= n_bytes <= MAX_MESSAGE_BYTES:
        raise RankError(f"rank 0 announced a message of {n_bytes} bytes: the ranks disagree")
    if n_bytes == 0:
        return b""
    if comm.rank == 0 and data is not None:
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        message = torch.empty(n_bytes, dtype=torch.uint8)
    return comm.broadcast(message).numpy().tobytes()
