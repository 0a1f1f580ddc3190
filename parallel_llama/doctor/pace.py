"""Measures and compares the speed of the ranks: exchanges, a fixed product, and memory reads."""

import platform
import statistics
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from parallel_llama.doctor.check import Check
from parallel_llama.doctor.records import exchange
from parallel_llama.engine.machine import reading
from parallel_llama.errors import ranks_do
from parallel_llama.parallel.collectives import ByDevice, Communicator
from parallel_llama.parallel.shared_memory import SharedMemory
from parallel_llama.parallel.sockets import Sockets

_MESSAGE_BYTES, _N_MESSAGES = 8192, 40
# Limits on the fastest exchange, in seconds: through shared memory, over one host's loopback, over
# a network. A busy machine delays most exchanges, but not the fastest.
_SHARED_S, _LOOPBACK_S, _NETWORK_S = 0.5e-3, 5e-3, 2e-3
_SIDE, _N_PRODUCTS = 384, 30
_SLOW = 2.5  # times slower than the median rank
_READ_BYTES, _N_READS = 1 << 27, 3
_LEAST_BANDWIDTH = 2e9  # bytes per second of all ranks; one channel of DDR3 has 10e9


class Pace(msgspec.Struct, frozen=True):
    """The measurements of one rank."""

    exchange_s: float
    product_s: float
    bytes_per_s: float


def transport(
    comm: Communicator, hosts: Sequence[str], is_one_host: bool, exchange_s: Sequence[float]
) -> Check:
    """Judges the fastest exchange of each rank; `hosts` has the name of each rank's host."""
    if comm.size == 1:
        return Check("transport", "skip", "one rank exchanges nothing")
    comm = comm.host if isinstance(comm, ByDevice) else comm  # the one that `measure` uses
    is_shared = isinstance(comm, SharedMemory)
    slowest_s = max(exchange_s)
    how = "shared memory" if is_shared else "sockets" if isinstance(comm, Sockets) else "gloo"
    how += "" if is_one_host else " between hosts"
    seen = f"{how}, {slowest_s * 1e3:.2f} ms for {_MESSAGE_BYTES >> 10} KiB"
    limit_s = _SHARED_S if is_shared else _LOOPBACK_S if is_one_host else _NETWORK_S
    if slowest_s > limit_s:
        rank = list(exchange_s).index(slowest_s)
        seen += f", more than {limit_s * 1e3:g} ms; slowest on rank {rank} ({hosts[rank]})"
        remedy = "ping -c 20 HOST (use a faster network: export GLOO_SOCKET_IFNAME=INTERFACE)"
        return Check("transport", "warn", seen, "end other programs" if is_one_host else remedy)
    if is_one_host and not is_shared:
        seen += "; ranks of one host usually share memory, which is faster"
        is_x86 = platform.machine() == "x86_64"
        remedy = "start all ranks in one container" if is_x86 else "use one rank with all cores"
        return Check("transport", "warn", seen, remedy)
    return Check("transport", "pass", seen)


def measure(comm: Communicator) -> list[Pace | None]:
    """The pace of every rank.

    Collective: tens of all_gathers and barriers.
    """
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    exchange_s = min(_timed(lambda: comm.all_gather(message)) for _ in range(_N_MESSAGES))
    x = torch.ones(_SIDE, _SIDE)
    product_s = []
    for _ in range(_N_PRODUCTS):
        comm.barrier()
        product_s.append(_timed(lambda: x @ x))
    n_bytes, read = reading(_READ_BYTES // min(comm.size, 4))
    read_s = []
    for _ in range(_N_READS):
        comm.barrier()
        read_s.append(_timed(read))
    # The mean, because a rank that shares its core still finishes some products in the usual time.
    own = Pace(exchange_s, statistics.fmean(product_s), n_bytes / min(read_s))
    return exchange(comm, own, Pace)


def pace(product_s: Sequence[float]) -> Check:
    """Compares the time of a fixed product on each rank."""
    seen = f"a fixed product takes {_range([s * 1e3 for s in product_s])} ms"
    usual = statistics.median_low(product_s)
    slow = [rank for rank, s in enumerate(product_s) if s > _SLOW * usual]
    if not slow:
        return Check("pace", "pass", seen)
    most = max(product_s) / usual
    seen = f"{ranks_do(slow, 'is', 'are')} up to {most:.1f} times slower than the others: {seen}"
    remedy = "end other programs on its cores (ps -eo pid,psr,pcpu,comm --sort=-pcpu | head)"
    return Check("pace", "warn", seen, remedy)


def bandwidth(bytes_per_s: Sequence[float]) -> Check:
    """Compares the memory bandwidths of the ranks, measured on all ranks at the same time."""
    total = sum(bytes_per_s)
    seen = f"{total / 1e9:.1f} GB/s, {_range([each / 1e9 for each in bytes_per_s])} on each rank"
    usual = statistics.median_high(bytes_per_s)
    slow = [rank for rank, each in enumerate(bytes_per_s) if each < usual / _SLOW]
    remedy = "end other programs (ps -eo pid,pcpu,comm --sort=-pcpu | head)"
    if slow:
        return Check("bandwidth", "warn", f"{ranks_do(slow, 'is', 'are')} slow: {seen}", remedy)
    if total < _LEAST_BANDWIDTH:
        return Check("bandwidth", "warn", f"{seen}; expected {_LEAST_BANDWIDTH / 1e9:g}", remedy)
    return Check("bandwidth", "pass", seen)


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _range(values: Sequence[float]) -> str:
    least, most = f"{min(values):.2g}", f"{max(values):.2g}"
    return least if least == most else f"{least} to {most}"
