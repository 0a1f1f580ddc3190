"""The rendezvous of the ranks at a store, and the check that their facts are equal.

Ranks that differ in a file, a setting or a version would compute wrong results without an error.
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

from parallel_llama.errors import printable
from parallel_llama.parallel.failures import RankError

_POLL_S = 0.02
_GOODBYE_S = 3.0

# Longer facts are digests, which error messages do not show.
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


def rendezvous(store: Store, own: RankInfo, missing: set[int], ended: Event) -> list[str]:
    """Waits for every rank, and checks that all facts are equal and that no two ranks share a GPU.

    The wait has no time limit.

    Args:
        missing: the ranks that have not joined; updated while this waits.
        ended: set when the caller no longer waits.

    Returns: the differences between the notes of the ranks.

    Raises: RankError naming the fact that differs and its ranks, or two ranks with the same GPU, or
    why another rank has given up; TimeoutError once `ended` is set.
    Collective: every rank calls it.
    """
    infos: dict[int, RankInfo] = {}
    key = f"info/{own.rank}"
    there = RankInfo.decode(store.compare_set(key, "", own.encode()), own.rank)
    if there.token != own.token:
        raise RankError(
            f"two processes are rank {own.rank} of {own.size}: {there.process} and "
            f"{own.process}; give each process a RANK of its own"
        )
    while len(infos) < own.size:
        if (objection := read_objection(store)) is not None:
            raise RankError(objection)
        for rank in range(own.size):
            if rank not in infos and store.check([f"info/{rank}"]):
                info = RankInfo.decode(store.get(f"info/{rank}"), rank)
                infos[rank] = _checked(info, own)
                missing.discard(rank)
        if len(infos) < own.size and ended.wait(_POLL_S):
            raise TimeoutError
    in_order = [infos[rank] for rank in range(own.size)]
    require_same(in_order)
    require_own_gpus(in_order)
    return differences([info.notes for info in in_order])


@contextmanager
def telling(store: Store, rank: int, size: int) -> Iterator[None]:
    """Publishes a RankError that ends this rank; raises the first one that any rank published."""
    try:
        yield
    except RankError as error:
        own = first = str(error).partition("\n")[0]  # the stacks are for this host
        with suppress(RuntimeError):  # the store may have ended already
            first = tell(store, rank, size, own)
        if first == own:
            raise
        raise RankError(first) from error


def tell(store: Store, rank: int, size: int, objection: str, wait_s: float = 0.0) -> str:
    """Publishes why this rank gives up, and returns the first reason that any rank published.

    The store may end with this rank, so this waits until other ranks have read the reason: at most
    `wait_s` seconds for all ranks or, if `wait_s` is 0, at most `_GOODBYE_S` seconds for the ranks
    that have joined.
    """
    first = _printable(store.compare_set("objection", "", objection))
    say_goodbye(store, rank)
    there = [r for r in range(size) if wait_s or store.check([f"info/{r}"])]
    deadline = time.monotonic() + max(wait_s, _GOODBYE_S)
    while time.monotonic() < deadline:
        if all(store.check([f"goodbye/{r}"]) for r in there):
            break
        time.sleep(_POLL_S)
    return first


def read_objection(store: Store) -> str | None:
    """Why a rank has given up; None if none has."""
    return _printable(store.get("objection")) if store.check(["objection"]) else None


def say_goodbye(store: Store, rank: int) -> None:
    """Publishes that this rank has read why another rank gives up."""
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


def differences(of_ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """For each value that is not equal on all ranks, its name and a rank that differs, as text."""
    found = []
    for name in {name: None for own in of_ranks for name in own}:
        values = [own.get(name, "nothing") for own in of_ranks]
        usual, _ = Counter(values).most_common(1)[0]  # the first if several are equally common
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            rank, like = odd[0], values.index(usual)
            difference = f"{printable(name, _SHOWN_CHARS)}: rank {rank} of {len(of_ranks)} "
            if max(len(usual), len(values[rank])) <= _SHOWN_CHARS:
                others = printable(values[rank], _SHOWN_CHARS), printable(usual, _SHOWN_CHARS)
                difference += f"has {others[0]} and rank {like} has {others[1]}"
            else:
                difference += f"differs from rank {like}"
            more = f"; so do {len(odd) - 1} more" if len(odd) > 1 else ""
            found.append(difference + more)
    return found


def require_own_gpus(infos: Sequence[RankInfo]) -> None:
    """Raises: RankError naming two ranks that have the same GPU, which NCCL does not support."""
    first: dict[str, RankInfo] = {}
    for info in infos:
        other = first.setdefault(info.gpu, info)
        if info.gpu and other is not info:
            gpu = printable(info.gpu, _SHOWN_CHARS)
            raise RankError(
                f"rank {other.rank} and rank {info.rank} of {info.size}, {other.process} and "
                f"{info.process}, have the same GPU ({gpu}); let the launcher show each rank a "
                "GPU of its own, or use --device cpu"
            )


def _checked(info: RankInfo, own: RankInfo) -> RankInfo:
    if info.size != own.size:
        raise RankError(
            f"rank {own.rank} ({own.process}) is one of {own.size} ranks and rank {info.rank} "
            f"({info.process}) one of {info.size}; give all ranks the same WORLD_SIZE"
        )
    return info
