"""The interface of communicators, and what their implementations have in common.

Models and engines reach other ranks only through a `Communicator`. CPU tensors go through
`shared_memory` on one host, else through `sockets` and, if they are large, gloo. CUDA tensors go
through NCCL, and small sums on one host through `one_shot`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from parallel_llama.parallel.failures import RankError
from parallel_llama.parallel.wait_policy import WaitPolicy

# A message between ranks holds requests or results. A longer message is refused.
MAX_MESSAGE_BYTES = 1 << 30

_HALVES = (torch.float16, torch.bfloat16)


class Communicator(Protocol):
    """One rank's handle on a group of ranks: all ranks, or those of its pipeline stage.

    It is not thread-safe. After a collective has raised an error, the group must not be used.

    Raises: RankError, from every collective, if another rank has died, is late or called another
    collective; the message names that rank.
    Collective: every method except `computing`, `keepalive`, `require_alive` and `close`.
    """

    rank: int
    size: int

    @property
    def exchanges(self) -> bool:
        """Whether collectives must be called; if not, a product may leave its exchanges out."""
        return self.size > 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums x over all ranks in place and returns x; the result is bitwise equal on all ranks.

        Shapes: x has the same shape on every rank; partial, then replicated.
        """

    def all_gather(self, x: Tensor) -> Tensor:
        """Stacks the x of all ranks, which have equal shapes; returns [size, *x.shape]."""

    def gather_columns(self, x: Tensor, widths: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Concatenates the columns of all ranks; rank r has widths[r] columns.

        Shapes: x [T, widths[rank]] local; the result, `out` if given, [T, sum(widths)] replicated.
        """
        if max(widths) == sum(widths):  # one rank has all columns
            whole = x.new_empty(len(x), sum(widths)) if out is None else out
            src = widths.index(max(widths))
            return self.broadcast(whole.copy_(x) if self.rank == src else whole, src)
        padded = x.new_empty(len(x), max(widths))  # all_gather needs equal shapes
        padded[:, : x.shape[1]] = x
        parts = [part[:, :n] for part, n in zip(self.all_gather(padded), widths, strict=True)]
        return torch.cat(parts, 1, out=out)

    def broadcast(self, x: Tensor, src: int = 0, *, no_timeout: bool = False) -> Tensor:
        """Copies the x of rank src into x on every rank and returns x.

        With `no_timeout`, the other ranks wait as long as the process of src runs, because src may
        be waiting for user input; see `computing`. All ranks must pass the same `no_timeout`.
        """

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A context in which this rank computes, and does not wait for user input.

        Meanwhile, the time limit of the other ranks applies even to a `broadcast` with
        `no_timeout`, except between ranks that are connected through gloo alone. Several contexts
        may be open at once.
        """
        yield

    def barrier(self) -> None:
        """Returns when every rank has called it; a rank that sends keepalives is not late."""

    def keepalive(self) -> None:
        """Tells the ranks that wait at a barrier that this rank is still working."""

    def require_alive(self) -> None:
        """Checks between collectives, without waiting, that the other ranks are alive.

        Raises: RankError naming a rank that has died.
        """

    def close(self) -> None:
        """Leaves the group. It may be called twice and after an error."""


AnyCommunicator = TypeVar("AnyCommunicator", bound=Communicator)


def joined(comm: AnyCommunicator) -> AnyCommunicator:
    """Waits until all ranks have joined a new group; closes the group if a rank does not.

    Raises: RankError naming a rank that does not join.
    Collective: every rank calls it.
    """
    try:
        comm.barrier()
    except BaseException:
        comm.close()
        raise
    return comm


class Solo(Communicator):
    """A group of one rank. Its collectives exchange nothing."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.detach()[None].clone()

    def gather_columns(self, x: Tensor, widths: Sequence[int], out: Tensor | None = None) -> Tensor:
        return x if len(widths) == 1 else super().gather_columns(x, widths, out)

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


class Slice(Solo):
    """One rank of `size` without its peers, to time one rank's work of a large group on one device.

    Its collectives return immediately, so only the work between them takes time. The results are
    meaningless, but take as long to compute as real ones. Its rank is 0, so that it receives the
    requests, but it may hold the shard of any rank. `n_collectives` counts a recorded collective
    once, however often it is replayed, and does not count broadcasts.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.n_collectives = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.n_collectives += 1
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        self.n_collectives += 1
        return torch.stack((x.detach(),) * self.size)

    def gather_columns(self, x: Tensor, widths: Sequence[int], out: Tensor | None = None) -> Tensor:
        self.n_collectives += 1
        whole = x.new_empty(len(x), sum(widths)) if out is None else out
        whole.zero_()
        whole[:, : x.shape[1]] = x
        return whole


def is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


class ByDevice(Communicator):
    """Routes CUDA tensors to `gpus` and all other tensors to `host`, two groups of the same ranks.

    Messages of a step take tens of microseconds through shared memory, and 0.4 to 0.9 ms through
    gloo. `host` is closed last, because it owns what both groups share.

    Args:
        require_not_aborted: raises a RankError after the watchdog of `gpus` has aborted a
            collective, so that no message based on its invalid result leaves this rank.
    """

    def __init__(
        self,
        host: Communicator,
        gpus: Communicator,
        require_not_aborted: Callable[[], None],
        is_on_gpu: Callable[[Tensor], bool] = is_on_gpu,
    ) -> None:
        self.rank, self.size = host.rank, host.size
        self.host, self._gpus = host, gpus
        self._require_not_aborted, self._is_on_gpu = require_not_aborted, is_on_gpu
        self._alone: Slice | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._route(x).all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._route(x).all_gather(x)

    def gather_columns(self, x: Tensor, widths: Sequence[int], out: Tensor | None = None) -> Tensor:
        return self._route(x).gather_columns(x, widths, out)

    def broadcast(self, x: Tensor, src: int = 0, *, no_timeout: bool = False) -> Tensor:
        return self._route(x).broadcast(x, src, no_timeout=no_timeout)

    def barrier(self) -> None:
        self._require_not_aborted()
        self.host.barrier()

    @contextmanager
    def computing(self) -> Iterator[None]:
        with self.host.computing():
            yield

    def keepalive(self) -> None:
        self.host.keepalive()

    def require_alive(self) -> None:
        self.host.require_alive()

    def close(self) -> None:
        self._gpus.close()
        self.host.close()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A context in which collectives exchange nothing, so their results are meaningless.

        In this context a rank can compile the kernels of a step while no other rank waits for it.
        """
        self._alone = Slice(self.size)
        try:
            yield
        finally:
            self._alone = None

    def _route(self, x: Tensor) -> Communicator:
        if self._alone is not None:
            return self._alone
        self._require_not_aborted()
        return self._gpus if self._is_on_gpu(x) else self.host


def without_peers(comm: Communicator) -> AbstractContextManager[None]:
    """A context in which a rank with a GPU computes without the others; see `ByDevice.alone`."""
    return comm.alone() if isinstance(comm, ByDevice) else nullcontext()


Medium = Literal["shared memory", "sockets"]


@dataclass(frozen=True)
class Exchange:
    """What a kernel needs for an all_reduce or gather_columns.

    Args:
        medium: what carries the messages; its module describes cells and messages.
        cells: the address of rank 0's cells.
        messages: the address of rank 0's first message.
        n_looks: how often the kernel tries to receive before it leaves the exchange to `finish`.
        policy: what the kernel does between two tries.
        finish: completes the exchange in Python, after the kernel has published or begun to send
            its own part.
    """

    medium: Medium
    cells: int
    messages: int
    rank: int
    size: int
    signature: int
    n_looks: int
    policy: WaitPolicy
    finish: Callable[[Tensor], None]


def sum_in_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """Sums in rank order, so that rounding is equal on all ranks."""
    if out.dtype in _HALVES:
        total = parts[0].to(torch.float32)
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)
        return
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


def put_columns(parts: Sequence[Tensor], widths: Sequence[int], whole: Tensor) -> None:
    """Copies the columns of each rank side by side; each part begins with [T, width] values."""
    n_rows = len(whole)
    for part, columns, width in zip(
        parts, torch.split(whole, list(widths), 1), widths, strict=True
    ):
        columns.copy_(part[: n_rows * width].view(n_rows, width))


def broadcast_bytes(comm: Communicator, data: bytes | None, *, no_timeout: bool = False) -> bytes:
    """Returns the bytes of rank 0 on every rank; the other ranks pass None.

    Args:
        no_timeout: see `Communicator.broadcast`.

    Raises: ValueError for more than MAX_MESSAGE_BYTES; RankError for an invalid length.
    Collective: one broadcast of the length, and one of the bytes if there are any.
    """
    if comm.rank == 0 and (data is None or len(data) > MAX_MESSAGE_BYTES):
        size = "nothing" if data is None else f"{len(data)} bytes"
        raise ValueError(f"rank 0 broadcasts {size}; give 0 to {MAX_MESSAGE_BYTES} bytes")
    if comm.size == 1:
        return data or b""
    length = torch.tensor([len(data or b"")], dtype=torch.int64)
    n_bytes = int(comm.broadcast(length, no_timeout=no_timeout)[0])
    if not 0 <= n_bytes <= MAX_MESSAGE_BYTES:
        raise RankError(
            f"rank 0 announced a message of {n_bytes} bytes, so the ranks disagree about the "
            "current collective; end all ranks and start them again"
        )
    if n_bytes == 0:
        return b""
    if comm.rank == 0 and data is not None:
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        message = torch.empty(n_bytes, dtype=torch.uint8)
    return comm.broadcast(message).numpy().tobytes()
