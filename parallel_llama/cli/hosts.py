"""Reads the file of `plan --hosts`: hosts, their ranks, and the network between them. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated

import msgspec

from parallel_llama.cli.calibration import Calibration, RankEntry, merged, read_calibration
from parallel_llama.cli.hardware import EXCHANGE_S, Hardware, equal_part
from parallel_llama.cli.parsers import GPU, byte_size, gpu_list
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.files.bounded_files import read_again
from parallel_llama.memory import GIB
from parallel_llama.parallel.launch import MAX_RANKS

_MAX_BYTES = 1 << 20

_Positive = Annotated[float, msgspec.Meta(gt=0)]


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The network of a host.

    Args:
        latency_us: microseconds from sending a small message until another host has it.
        gbit_per_s: 10^9 bits per second that the host receives from all other hosts together.
    """

    latency_us: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    gbit_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One host of a file.

    Args:
        name: shown in the output; by default the number of the host.
        ranks: the number of CPU ranks.
        gpus: the GPUs of the host, instead of `ranks`, as in --gpus: 8xH200 or 4x24.
        memory: of each CPU rank, in GiB or as a text with a unit.
        calibration: the file of bench --calibrate on this host, relative to the file of the hosts.
        link: the network of the host; not needed for a single host.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] | None = None
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] | None = None
    gpus: str | None = None
    memory: _Positive | str | None = None
    calibration: str | None = None
    link: Link | None = None


@dataclass(frozen=True)
class Hosts:
    """The hosts of a plan, in rank order.

    Args:
        ranks: the ranks of each host.
        memory: bytes of each rank; None if not known.
        gpus: the GPU of each rank; None for CPU ranks.
        calibration: the rates of all CPU ranks; None if a host has no file.
    """

    hosts: tuple[Host, ...]
    ranks: tuple[range, ...]
    memory: tuple[int, ...] | None
    gpus: list[GPU] | None
    calibration: Calibration | None

    @property
    def n_ranks(self) -> int:
        return self.ranks[-1].stop

    @property
    def links(self) -> list[Link]:
        """The networks of the hosts; empty for one host."""
        return [host.link for host in self.hosts if host.link is not None and len(self.hosts) > 1]

    def name(self, host: int) -> str:
        return self.hosts[host].name or f"host {host}"

    @property
    def slowest(self) -> set[int]:
        """The hosts with the slowest rank, the longest latency and the slowest link.

        Several hosts with known rates. Of equal hosts, the last: rank 0 is on the first.
        """
        if self.calibration is not None:
            rates = [rank.read_bytes_per_s for rank in self.calibration.ranks]
        else:
            rates = [gpu.bandwidth or math.inf for gpu in self.gpus or ()]
        hosts = range(len(self.hosts))[::-1]
        return {
            min(hosts, key=lambda host: min(rates[rank] for rank in self.ranks[host])),
            max(hosts, key=lambda host: self.links[host].latency_us),
            min(hosts, key=lambda host: self.links[host].gbit_per_s),
        }

    def without(self, host: int) -> "Hosts":
        """The other hosts; there must be at least one."""
        hosts = [number for number in range(len(self.hosts)) if number != host]
        ranks = [rank for number in hosts for rank in self.ranks[number]]
        counts = [len(self.ranks[number]) for number in hosts]
        return Hosts(
            tuple(
                msgspec.structs.replace(self.hosts[number], name=self.name(number))
                for number in hosts
            ),
            _consecutive(counts),
            self.memory and tuple(self.memory[rank] for rank in ranks),
            self.gpus and [self.gpus[rank] for rank in ranks],
            self.calibration
            and replace(
                self.calibration,
                ranks=tuple(self.calibration.ranks[rank] for rank in ranks),
                n_files=len(hosts),
            ),
        )

    def with_links(self, hardware: Hardware | None) -> Hardware | None:
        """The hardware of the ranks, with exchanges over the links between the hosts.

        docs/plan.md has the formulas.
        """
        if hardware is None or not self.links:
            return hardware
        latency_s = max(item.latency_us for item in self.links) * 1e-6
        rate = min(item.gbit_per_s for item in self.links) * 1e9 / 8
        if self.gpus is not None:  # an all-reduce goes around NCCL's ring twice
            exchange_s = EXCHANGE_S + 2 * (len(self.hosts) - 1) * latency_s
            link = rate if hardware.link is None else min(rate, hardware.link)
            return replace(hardware, exchange_s=exchange_s, link=link)
        assert self.calibration is not None
        measured_s = [item.exchange_s for item in self.calibration.ranks if item.exchange_s]
        return replace(
            hardware,
            exchange_s=max([latency_s, *measured_s]),
            link=rate,
            messages=max(self.n_ranks - len(local_ranks) for local_ranks in self.ranks),
        )


def read_hosts(path: str) -> Hosts:
    """The hosts in a JSON file.

    Raises: UsageError if the file cannot be read, has other keys or values, or its hosts contradict
    each other.
    """
    try:
        try:
            hosts = msgspec.json.decode(read_again(Path(path), _MAX_BYTES), type=tuple[Host, ...])
        except msgspec.ValidationError as error:
            raise UsageError(_plain(str(error))) from None
        except msgspec.DecodeError as error:
            raise UsageError(f"not JSON: {error}") from None
        return _hosts(hosts, Path(path).parent)
    except (UsageError, CheckpointError) as error:
        raise UsageError(
            f"--hosts {path}: {error}; docs/plan.md has an example of the file"
        ) from None


def _plain(error: str) -> str:
    """An error of msgspec with the host's number instead of a JSON path."""
    text, _, path = error.partition(" - at `$[")
    number, _, key = path.removesuffix("`").partition("]")
    text = text[:1].lower() + text[1:]
    return f"host {number}: {key.removeprefix('.')}: {text}" if path else text


def _hosts(hosts: Sequence[Host], folder: Path) -> Hosts:
    if not hosts:
        raise UsageError("the list has no host")
    are_gpus = {host.gpus is not None for host in hosts}
    if len(are_gpus) > 1:
        raise UsageError("some hosts have gpus, others ranks; use gpus for all hosts, or for none")
    if len({host.memory is None for host in hosts}) > 1:
        raise UsageError("some hosts have no memory; give it for all hosts, or for none")
    gpus: list[GPU] = []
    sizes: list[int] = []
    counts: list[int] = []
    entries: list[Calibration] = []
    for number, host in enumerate(hosts):
        try:
            host_gpus = _gpus(host)
            counts.append(len(host_gpus) or host.ranks or 0)
            gpus += host_gpus
            sizes += [gpu.memory for gpu in host_gpus] or [_bytes(host.memory)] * counts[-1]
            if len(hosts) > 1 and host.link is None:
                raise UsageError('link is missing; give {"latency_us": .., "gbit_per_s": ..}')
        except (UsageError, ValueError) as error:
            raise UsageError(f"host {number}: {error}") from None
        if host.calibration is not None:
            calibration = read_calibration(str(folder / host.calibration))
            entries.append(_rates_for(calibration, counts[-1]))
    if sum(counts) > MAX_RANKS:
        raise UsageError(f"the hosts have {sum(counts)} ranks; the maximum is {MAX_RANKS}")
    return Hosts(
        tuple(hosts),
        _consecutive(counts),
        tuple(sizes) if gpus or hosts[0].memory is not None else None,
        gpus or None,
        merged(entries, [host.calibration or "" for host in hosts])
        if len(entries) == len(hosts)
        else None,
    )


def _consecutive(counts: Sequence[int]) -> tuple[range, ...]:
    """The ranks of hosts with these numbers of ranks."""
    return tuple(range(a, b) for a, b in pairwise(accumulate(counts, initial=0)))


def _gpus(host: Host) -> list[GPU]:
    """The GPUs of a host; empty for CPU ranks. Raises: UsageError, ValueError for wrong values."""
    if (host.gpus is None) == (host.ranks is None):
        raise UsageError("give either ranks or gpus")
    if host.gpus is None:
        return []
    for name in ("memory", "calibration"):
        if getattr(host, name) is not None:
            raise UsageError(f"{name} is for CPU ranks, not for gpus; drop {name}")
    gpus = gpu_list(host.gpus)
    if isinstance(gpus, GPU):
        raise UsageError(f"gpus={host.gpus!r:.80} has no number; use 8x{host.gpus:.40}")
    return gpus


def _bytes(memory: float | str | None) -> int:
    """Raises: ValueError for a number or a text that is not a size."""
    return 0 if memory is None else byte_size(f"{memory}", GIB)


def _rates_for(calibration: Calibration, n_ranks: int) -> Calibration:
    """The rates of `n_ranks` ranks: as measured, or equal parts of the sums."""
    if len(calibration.ranks) == n_ranks:
        return calibration
    read = sum(rank.read_bytes_per_s for rank in calibration.ranks) / n_ranks
    operations = sum(rank.operations_per_s for rank in calibration.ranks) / n_ranks
    of_pieces = equal_part([rank.piece_operations_per_s for rank in calibration.ranks], n_ranks)
    first = calibration.ranks[0]
    entry = RankEntry(read, operations, of_pieces, first.exchange_s, first.link_bytes_per_s)
    return replace(calibration, ranks=(entry,) * n_ranks)
