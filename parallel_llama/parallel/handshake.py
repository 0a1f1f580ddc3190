"""The rendezvous: all ranks join at a store and compare their files, settings and versions.

Ranks that differ would compute wrong results without an error. A rank that gives up publishes the
reason, called its objection, and the other ranks raise the same error instead of waiting.
"""

import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event

import msgspec
from torch.distributed import Store

from parallel_llama.errors import counted, printable
from parallel_llama.parallel.failures import RankError

_POLL_S = 0.02
_GOODBYE_S = 3.0

# A fact with more characters is a digest, and error messages do not show it.
_SHOWN_CHARS = 40

_MAX_INFO_BYTES = 1 << 16
_MAX_OBJECTION_CHARS = 2000


@dataclass(frozen=True)
class RankInfo:
    """The facts that one rank publishes in the rendezvous.

    Args:
        facts: by name, values that must be equal on all ranks.
        token: distinguishes two processes that claim the same rank.
        notes: by name, values of this rank's GPU that should be equal on all ranks.
        gpu: the id of this rank's GPU, which no other rank may have; empty on the CPU.
    """

    rank: int
    size: int
    facts: Mapping[str, str]
    host: str
    pid: int
    token: str
    notes: Mapping[str, str] = field(default_factory=dict)
    gpu: str = ""

    @classmethod
    def of_this_process(
        cls,
        rank: int,
        size: int,
        facts: Mapping[str, str],
        notes: Mapping[str, str] | None = None,
        gpu: str = "",
    ) -> "RankInfo":
        name = socket.gethostname()
        # Some facts are not plain strings, such as torch's version.
        texts = {fact: str(value) for fact, value in facts.items()}
        return cls(rank, size, texts, name, os.getpid(), secrets.token_hex(8), notes or {}, gpu)

    @classmethod
    def decode(cls, data: bytes, rank: int) -> "RankInfo":
        """Raises: RankError if `data` is not a RankInfo of `rank` with at most _MAX_INFO_BYTES."""
        try:
            info = msgspec.json.decode(data[: _MAX_INFO_BYTES + 1], type=cls)
        except (msgspec.DecodeError, RecursionError):
            info = None
        if info is None or info.rank != rank or len(data) > _MAX_INFO_BYTES:
            raise RankError(
                f"the entry of rank {rank} in the store of the ranks was not written by a rank; "
                "check that no other program uses the address"
            )
        return info

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @property
    def process(self) -> str:
        return f"process {self.pid} on {printable(self.host, 255)}"


def rendezvous(store: Store, own_info: RankInfo, missing: set[int], ended: Event) -> list[str]:
    """Waits for every rank, and checks that all facts are equal and that no two ranks share a GPU.

    The wait has no time limit.

    Args:
        missing: the ranks that have not joined; updated while this waits.
        ended: set when the caller no longer waits.

    Returns: the differences between the notes of the ranks.

    Raises: RankError that names a fact and a rank that differs, or two ranks with the same GPU, or
    that says why another rank has given up; TimeoutError once `ended` is set.
    Collective: every rank calls it.
    """
    infos: dict[int, RankInfo] = {}
    key = f"info/{own_info.rank}"
    published = RankInfo.decode(store.compare_set(key, "", own_info.encode()), own_info.rank)
    if published.token != own_info.token:
        raise RankError(
            f"two processes are rank {own_info.rank} of {own_info.size}: {published.process} and "
            f"{own_info.process}; give each process a RANK of its own"
        )
    while len(infos) < own_info.size:
        if (objection := read_objection(store)) is not None:
            raise RankError(objection)
        for rank in range(own_info.size):
            if rank not in infos and store.check([f"info/{rank}"]):
                info = RankInfo.decode(store.get(f"info/{rank}"), rank)
                infos[rank] = _checked(info, own_info)
                missing.discard(rank)
        if len(infos) < own_info.size and ended.wait(_POLL_S):
            raise TimeoutError
    by_rank = [infos[rank] for rank in range(own_info.size)]
    require_same(by_rank)
    require_own_gpus(by_rank)
    return differences([info.notes for info in by_rank])


@contextmanager
def publishing_objection(store: Store, rank: int, size: int) -> Iterator[None]:
    """Publishes a RankError raised inside; raises the first objection that any rank published."""
    try:
        yield
    except RankError as error:
        # The other lines are the stacks of ranks, which are of use on this host only.
        objection = first = str(error).partition("\n")[0]
        with suppress(RuntimeError):  # the store may have ended already
            first = publish_objection(store, rank, size, objection)
        if first == objection:
            raise
        raise RankError(first) from error


def publish_objection(
    store: Store, rank: int, size: int, objection: str, wait_s: float = 0.0
) -> str:
    """Publishes why this rank gives up. Returns: the first objection that any rank published.

    The store may end with this rank, so this waits until the other ranks have read the objection:
    at most `wait_s` seconds for all ranks or, if `wait_s` is 0, at most `_GOODBYE_S` seconds for
    the ranks that have joined.
    """
    first = _printable(store.compare_set("objection", "", objection))
    acknowledge_objection(store, rank)
    readers = [r for r in range(size) if wait_s or store.check([f"info/{r}"])]
    deadline = time.monotonic() + max(wait_s, _GOODBYE_S)
    while time.monotonic() < deadline:
        if all(store.check([f"goodbye/{r}"]) for r in readers):
            break
        time.sleep(_POLL_S)
    return first


def read_objection(store: Store) -> str | None:
    """Why the first rank gave up; None if no rank has given up."""
    return _printable(store.get("objection")) if store.check(["objection"]) else None


def acknowledge_objection(store: Store, rank: int) -> None:
    """Publishes that this rank has read the objection of another rank."""
    store.set(f"goodbye/{rank}", "")


def _printable(data: bytes) -> str:
    return printable(data.decode("utf-8", "replace"), _MAX_OBJECTION_CHARS)


def require_same(infos: Sequence[RankInfo]) -> None:
    """Raises: RankError naming a fact that is not equal on all ranks and a rank that differs."""
    for difference in differences([info.facts for info in infos]):
        raise RankError(
            f"the ranks differ. {difference}. Start all ranks with the same command, files and "
            "versions"
        )


def differences(values_by_rank: Sequence[Mapping[str, str]]) -> list[str]:
    """One message for each value that is not equal on all ranks; it names a rank that differs."""
    messages = []
    for name in {name: None for facts in values_by_rank for name in facts}:
        values = [facts.get(name, "nothing") for facts in values_by_rank]
        # the first if several are equally common
        most_common, _ = Counter(values).most_common(1)[0]
        differing = [rank for rank, value in enumerate(values) if value != most_common]
        if differing:
            rank, reference = differing[0], values.index(most_common)
            difference = f"{printable(name, _SHOWN_CHARS)}: rank {rank} of {len(values_by_rank)} "
            if max(len(most_common), len(values[rank])) <= _SHOWN_CHARS:
                shown = printable(values[rank], _SHOWN_CHARS), printable(most_common, _SHOWN_CHARS)
                difference += f"has {shown[0]} and rank {reference} has {shown[1]}"
            else:
                difference += f"differs from rank {reference}"
            n_more = len(differing) - 1
            suffix = f"; {counted(n_more, 'more rank')} {'differ' if n_more > 1 else 'differs'}"
            messages.append(difference + (suffix if n_more else ""))
    return messages


def require_own_gpus(infos: Sequence[RankInfo]) -> None:
    """Raises: RankError naming two ranks that have the same GPU, which NCCL does not support."""
    by_gpu: dict[str, RankInfo] = {}
    for info in infos:
        other = by_gpu.setdefault(info.gpu, info)
        if info.gpu and other is not info:
            gpu = printable(info.gpu, _SHOWN_CHARS)
            raise RankError(
                f"rank {other.rank} and rank {info.rank} of {info.size}, {other.process} and "
                f"{info.process}, have the same GPU ({gpu}); let the launcher show each rank a "
                "GPU of its own, or use --device cpu"
            )


def _checked(info: RankInfo, own_info: RankInfo) -> RankInfo:
    if info.size != own_info.size:
        raise RankError(
            f"rank {own_info.rank} ({own_info.process}) is one of {own_info.size} ranks and rank "
            f"{info.rank} ({info.process}) one of {info.size}; give all ranks the same WORLD_SIZE"
        )
    return info
