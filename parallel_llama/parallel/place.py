"""Where a process stands among the ranks, as whoever started it has said. Imports no torch."""

import ctypes
import os
import signal
import sys
from dataclasses import dataclass, field

from parallel_llama.errors import UsageError

# The number of the socket that rank 0 has inherited, bound to MASTER_ADDR and MASTER_PORT.
STORE_FD = "PARALLEL_LLAMA_STORE_FD"
# The number of the file that all ranks of `launch` have inherited, with the run's secret.
SECRET_FD = "PARALLEL_LLAMA_SECRET_FD"
SECRET_BYTES = 32

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Place:
    """One process's number among `size` ranks, and where they meet.

    `bound` is the number of a socket that is bound to the address already, for rank 0 to listen at.
    `is_served` says that somebody else keeps the store there, as torchrun's agent does; else rank 0
    keeps it. `secret` is known to the ranks of this run alone; it is empty where nobody has handed
    one out.
    """

    rank: int
    size: int
    host: str = ""
    port: int = 0
    bound: int | None = None
    is_served: bool = False
    secret: bytes = field(default=b"", repr=False)


def world() -> tuple[int, int]:
    """This process's rank and the number of ranks, from torchrun's environment; (0, 1) without.

    Raises: UsageError if RANK and WORLD_SIZE are not a rank and a number of ranks.
    """
    return _numbers("RANK", "WORLD_SIZE") or (0, 1)


def local_world(size: int) -> tuple[int, int]:
    """This process's number among the ranks of its own host, and how many they are.

    Of `size` ranks in all, those that this program starts are on one host, and so are those of an
    environment without LOCAL_WORLD_SIZE.

    Raises: UsageError like `world`.
    """
    if not is_started_as_rank():
        return 0, size
    local_size = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "WORLD_SIZE"
    if "LOCAL_RANK" not in os.environ and local_size == "WORLD_SIZE":
        return world()
    return _numbers("LOCAL_RANK", local_size) or world()


def place_in_environment() -> Place:
    """This process's place from torchrun's environment; one rank alone without it.

    The bound socket and the secret can be taken once: another call does not find them.

    Raises: UsageError for an environment that is incomplete.
    """
    rank, size = world()
    if size == 1:
        return Place(0, 1)
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(
            f"RANK={rank} and MASTER_ADDR={host!r}, MASTER_PORT={port!r}: the ranks need an "
            "address to meet; start them with torchrun or with --nproc"
        )
    bound = os.environ.pop(STORE_FD, None)
    return Place(
        rank,
        size,
        host,
        int(port),
        bound=None if bound is None else int(bound),
        is_served=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        secret=_inherited_secret(),
    )


def _inherited_secret() -> bytes:
    number = os.environ.pop(SECRET_FD, None)
    if number is None:
        return b""
    secret = os.pread(int(number), SECRET_BYTES, 0)
    os.close(int(number))
    return secret


def is_started_as_rank() -> bool:
    """Whether somebody has started this process as one of some ranks, or the only one."""
    return "RANK" in os.environ


def is_under_torchrun() -> bool:
    """Whether torchrun's agent has started this process."""
    return "TORCHELASTIC_USE_AGENT_STORE" in os.environ


def _numbers(rank_name: str, size_name: str) -> tuple[int, int] | None:
    """A rank and a number of ranks from the environment; None where it has neither."""
    texts = os.environ.get(rank_name), os.environ.get(size_name)
    if texts == (None, None):
        return None
    rank, size = (int(t) if t and t.isascii() and t.isdigit() else -1 for t in texts)
    if not 0 <= rank < size:
        raise UsageError(
            f"{rank_name}={texts[0]!r} and {size_name}={texts[1]!r}: need integers, "
            f"0 <= {rank_name} < {size_name}; start with torchrun, or unset both"
        )
    return rank, size


def end_with_parent() -> None:
    """From here on the system ends this process when its parent ends.

    More exactly: when the thread does that started it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
