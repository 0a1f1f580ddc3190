"""What ranks do together, seen from one of them.

`Communicator` is the whole of it: models and engines know no other way to another rank. Here are
the group of one rank and how bytes travel; several ranks talk through a `process_group` of torch
or, on one host, through `shared_memory`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parallel_llama.parallel.failures import RankError

# A message between ranks holds requests or numbers to score; a length beyond this is no length.
MAX_MESSAGE_BYTES = 1 << 30


@dataclass(frozen=True)
class Timeouts:
    """How long a rank waits for another before it calls it late.

    Units: seconds; `step_s` in a collective, `start_s` while ranks meet and load.
    """

    step_s: float = 30.0
    start_s: float = 60.0

    @classmethod
    def of(cls, timeout_s: float | None) -> "Timeouts":
        """One limit for both, or the defaults."""
        return cls() if timeout_s is None else cls(timeout_s, timeout_s)


class Communicator(Protocol):
    """One tensor-parallel group as one of its ranks sees it.

    Not for several threads at once. A collective that raised leaves the group unusable.

    Raises: RankError, from every collective, that names a rank which has died, is late or has gone
    another way.
    Collective: every method but `keepalive`, `require_alive` and `close`.
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

    def broadcast(self, x: Tensor, src: int = 0, *, no_timeout: bool = False) -> Tensor:
        """Rank src's x on every rank, in place. Returns: x.

        With `no_timeout`, the same on all ranks, the others wait for src without a limit of time, as
        long as it lives: it may be waiting for a person.
        """
        ...

    def barrier(self) -> None:
        """Return when every rank has called it; a rank that sends keepalives is not late."""
        ...

    def keepalive(self) -> None:
        """Tell the ranks that wait at a barrier that this rank is still working."""
        ...

    def require_alive(self) -> None:
        """Look whether the other ranks are alive, between collectives, without waiting for any.

        Raises: RankError naming a rank that has died.
        """
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
        return x.detach()[None].clone()

    # There is only rank 0, which waits for nobody.
    def broadcast(self, x: Tensor, src: int = 0, *, no_timeout: bool = False) -> Tensor:  # noqa: ARG002
        return x

    def barrier(self) -> None:
        pass

    def keepalive(self) -> None:
        pass

    def require_alive(self) -> None:
        pass

    def close(self) -> None:
        pass


def broadcast_bytes(comm: Communicator, data: bytes | None, *, no_timeout: bool = False) -> bytes:
    """Rank 0's bytes on every rank; the others give None, and with `no_timeout` wait without a limit.

    Raises: ValueError for more than MAX_MESSAGE_BYTES; RankError for a length that is none.
    Collective: two broadcasts, the length and the bytes.
    """
    if comm.rank == 0 and (data is None or len(data) > MAX_MESSAGE_BYTES):
        size = "nothing" if data is None else f"{len(data)} bytes"
        raise ValueError(f"rank 0 broadcasts {size}; give 0 to {MAX_MESSAGE_BYTES} bytes")
    if comm.size == 1:
        return data or b""
    length = torch.tensor([len(data or b"")], dtype=torch.int64)
    n_bytes = int(comm.broadcast(length, no_timeout=no_timeout)[0])
    if not 0 <= n_bytes <= MAX_MESSAGE_BYTES:
        raise RankError(f"rank 0 announced a message of {n_bytes} bytes: the ranks disagree")
    if n_bytes == 0:
        return b""
    if comm.rank == 0 and data is not None:
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        message = torch.empty(n_bytes, dtype=torch.uint8)
    return comm.broadcast(message).numpy().tobytes()
