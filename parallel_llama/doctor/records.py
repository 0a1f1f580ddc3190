"""Exchanges the findings of ranks as records, and merges them into one check.

A record is sent in three copies, each with a digest, because the collectives may be faulty.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec
import torch

from parallel_llama.doctor.check import Check, Status
from parallel_llama.errors import named_ranks
from parallel_llama.parallel.collectives import Communicator

Record = TypeVar("Record")

# The remedy if the hardware may be faulty: shows the errors that the hardware has reported.
HARDWARE = "sudo dmesg | grep -iE 'mce|edac|memory error|xid'"

_COPY_BYTES = 1 << 15
_COPIES = 3
_DIGEST_BYTES, _LENGTH_BYTES = 16, 4
_SEVERITY: Sequence[Status] = ("pass", "skip", "warn", "fail")


def exchange(
    comm: Communicator, record: Record, kind: type[Record], copy_bytes: int = _COPY_BYTES
) -> list[Record | None]:
    """Returns: the record of each rank, or None if all its copies arrived damaged.

    Args:
        copy_bytes: the size of a copy, equal on all ranks; by default 32 KiB.

    Raises: ValueError for a record that does not fit into a copy.
    Collective: one all_gather.
    """
    body = msgspec.json.encode(record)
    head = hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
    data = head + len(body).to_bytes(_LENGTH_BYTES, "big") + body
    if len(data) > copy_bytes:
        raise ValueError(f"a record of {len(body)} bytes; the maximum is {copy_bytes}")
    copies = data.ljust(copy_bytes, b"\0") * _COPIES
    rows = comm.all_gather(torch.frombuffer(bytearray(copies), dtype=torch.uint8))
    records: list[Record | None] = []
    for row in rows.view(comm.size, _COPIES, copy_bytes):
        bodies = (_body_of(copy.numpy().tobytes()) for copy in row)
        intact = [content for content in bodies if content is not None]
        try:
            records.append(msgspec.json.decode(intact[0], type=kind) if intact else None)
        except msgspec.DecodeError:  # a rank of another version
            records.append(None)
    return records


def _body_of(data: bytes) -> bytes | None:
    """The body of a copy, or None if it is damaged."""
    start = _DIGEST_BYTES + _LENGTH_BYTES
    length = int.from_bytes(data[_DIGEST_BYTES:start], "big")
    body = data[start : start + length]
    is_whole = hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() == data[:_DIGEST_BYTES]
    return body if is_whole else None


def agreed(comm: Communicator, check_of_rank: Check) -> Check:
    """The check with the worst status of any rank. If it has not passed, it names its ranks, unless
    the checks of all ranks are equal.

    Collective: one all_gather.
    """
    checks_by_rank = exchange(comm, check_of_rank, Check)
    lost_ranks = [rank for rank, check in enumerate(checks_by_rank) if check is None]
    if lost_ranks:
        seen = f"the findings of {named_ranks(lost_ranks)} arrive damaged"
        return Check(check_of_rank.id, "fail", seen, HARDWARE)
    checks = [check for check in checks_by_rank if check is not None]
    worst = max(checks, key=lambda check: _SEVERITY.index(check.status))
    ranks = [rank for rank, check in enumerate(checks) if check == worst]
    if len(ranks) == len(checks) or worst.status == "pass":
        return worst
    return replace(worst, seen=f"{named_ranks(ranks)}: {worst.seen}")
