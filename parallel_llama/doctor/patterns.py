"""Sends bit patterns through every collective, to find ranks and links that change bits.

Every rank knows the values that every other rank sends, and compares all that it receives.
"""

from collections.abc import Iterator, Sequence

import msgspec
import torch
from torch import Tensor

from parallel_llama.doctor.check import Check
from parallel_llama.doctor.records import HARDWARE, exchange
from parallel_llama.errors import named_ranks, ranks_do
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.shared_memory import SHARED_SUM_BYTES, SLOT_BYTES

# Sizes in bytes below and above each limit of an exchange through shared memory.
_SIZES = (8, 4096, SHARED_SUM_BYTES + 64, SLOT_BYTES + 4096)
_ONE_SIZE = 4096
# Every integer between -2 ** bits and 2 ** bits is exact in the dtype.
_BITS = {
    torch.float32: 23,
    torch.float64: 52,
    torch.bfloat16: 7,
    torch.float16: 10,
    torch.int32: 30,
    torch.int64: 62,
}
_MAX_FINDINGS = 50  # findings of one rank that are sent


class Finding(msgspec.Struct, frozen=True):
    """Values that a rank received with changed bits; `source` is the sender, -1 for a sum."""

    collective: str
    n_bytes: int
    source: int
    at: int


def patterns(comm: Communicator, device: torch.device) -> Check:
    """Sends known values through every collective, and compares what arrives, bit for bit.

    Collective: collectives of all kinds, in four sizes and six dtypes.
    """
    found = list(_findings(comm, device))
    comm.barrier()
    by_rank = exchange(comm, found[:_MAX_FINDINGS], list[Finding])
    return judged(by_rank)


def judged(by_rank: Sequence[list[Finding] | None]) -> Check:
    """Merges the findings of all ranks; a rank's entry is None if it arrived damaged."""
    size = len(by_rank)
    lost_ranks = [rank for rank, findings in enumerate(by_rank) if findings is None]
    if lost_ranks:
        seen = f"messages from {named_ranks(lost_ranks)} arrive damaged"
        return Check("collectives", "fail", seen, HARDWARE)
    receivers: dict[int, set[int]] = {}
    first: dict[int, Finding] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings or ():
            receivers.setdefault(finding.source, set()).add(rank)
            first.setdefault(finding.source, finding)
    if not receivers:
        n_sizes, largest = len(_SIZES), _SIZES[-1] >> 10
        seen = f"all bits arrive: 4 collectives, {n_sizes} sizes up to {largest} KiB"
        return Check("collectives", "pass", seen if size > 1 else f"one rank; {seen}")
    senders = {source: ranks for source, ranks in receivers.items() if source >= 0}
    faults = []
    victims = set().union(*receivers.values())
    if len(victims) == 1 and len(senders) == size > 1:
        place = f"{first[0].collective} of {first[0].n_bytes} bytes, value {first[0].at}"
        who = ranks_do(victims, "receives", "receive")
        seen = f"{who} changed bits from every rank ({place})"
        return Check("collectives", "fail", seen, HARDWARE)
    for source, ranks in sorted((senders or receivers).items()):
        finding = first[source]
        place = f"{finding.collective} of {finding.n_bytes} bytes, value {finding.at}"
        if source < 0:
            faults.append(f"{ranks_do(ranks, 'has', 'have')} a wrong sum ({place})")
        elif len(ranks - {source}) >= max(1, size - 1) and size > 2:
            faults.append(f"values from rank {source} arrive changed on every rank ({place})")
        else:
            receivers_text = named_ranks(ranks - {source} or ranks)
            faults.append(f"the link from rank {source} to {receivers_text} changes bits ({place})")
    return Check("collectives", "fail", "; ".join(faults), HARDWARE)


def _findings(comm: Communicator, device: torch.device) -> Iterator[Finding]:
    all_ranks = range(comm.size)
    for n_bytes in _SIZES:
        sent = [_pattern(rank, n_bytes, device) for rank in all_ranks]
        gathered = comm.all_gather(sent[comm.rank])
        for rank in all_ranks:
            yield from _compared("all_gather", n_bytes, rank, gathered[rank], sent[rank])
        widths = [3 + rank for rank in all_ranks]
        n_rows = max(1, n_bytes // widths[-1])
        columns = [
            _pattern(rank, n_rows * width, device).view(n_rows, width)
            for rank, width in enumerate(widths)
        ]
        gathered_columns = comm.gather_columns(columns[comm.rank].view(torch.uint8), widths)
        for rank, part in enumerate(torch.split(gathered_columns, widths, 1)):
            yield from _compared("gather_columns", n_bytes, rank, part, columns[rank])
        for rank in all_ranks:
            x = sent[rank].clone() if rank == comm.rank else torch.zeros_like(sent[rank])
            yield from _compared("broadcast", n_bytes, rank, comm.broadcast(x, rank), sent[rank])
    # A ring rounds after each addition, so that every partial sum must be exact in every dtype.
    n_small = max(1, (1 << min(_BITS.values())) // comm.size)
    cases = [(torch.float32, n) for n in _SIZES] + [(dtype, _ONE_SIZE) for dtype in _BITS]
    for dtype, n_bytes in cases:
        terms = [_integers(rank, n_bytes, dtype, device) for rank in all_ranks]
        for rank in all_ranks:  # one rank sends values, all other ranks send zeros
            x = terms[rank].clone() if rank == comm.rank else torch.zeros_like(terms[rank])
            yield from _compared("all_reduce", n_bytes, rank, comm.all_reduce(x), terms[rank])
        small = [term.to(torch.float64).remainder(n_small).to(torch.int64) for term in terms]
        total = torch.stack(small).sum(0).to(torch.float32).to(dtype)
        x = comm.all_reduce(small[comm.rank].to(dtype))
        yield from _compared("all_reduce", n_bytes, -1, x, total)


def _compared(
    collective: str, n_bytes: int, source: int, received: Tensor, sent: Tensor
) -> Iterator[Finding]:
    bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (received, sent)]
    if not torch.equal(*bits):
        index = int((bits[0] != bits[1]).nonzero()[0, 0]) // received.itemsize
        yield Finding(collective, n_bytes, source, index)


def _pattern(rank: int, n_bytes: int, device: torch.device) -> Tensor:
    """Random bytes. Shapes: [n_bytes] uint8."""
    generator = torch.Generator().manual_seed(n_bytes * 4099 + rank)
    return torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=generator).to(device)


def _integers(rank: int, n_bytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random integers that the dtype holds exactly. Shapes: [n_bytes / itemsize]."""
    generator = torch.Generator().manual_seed(n_bytes * 4099 + rank)
    limit, n = 1 << _BITS[dtype], max(1, n_bytes // dtype.itemsize)
    return torch.randint(-limit, limit, (n,), generator=generator).to(dtype).to(device)
