"""Forms the communicator of one pipeline stage from the communicator of all ranks."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from parallel_llama.errors import UsageError
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.parallel.shared_memory import PartOfGroup, SharedMemory, share
from parallel_llama.parallel.sockets import Sockets
from parallel_llama.parallel.timeouts import Timeouts


def stage_group(comm: Communicator, stages: Sequence[range], timeouts: Timeouts) -> Communicator:
    """Forms the group of the ranks of this rank's stage, which must share memory.

    Args:
        comm: the group of all ranks.
        stages: the ranks of each stage.

    Raises: UsageError on all ranks if the ranks of a stage do not share memory.
    Collective: every rank of `comm` calls it.
    """
    own_ranks = next(ranks for ranks in stages if comm.rank in ranks)
    part = PartOfGroup(own_ranks, comm.size)
    if isinstance(comm, Sockets):  # other hosts cannot detect that a rank of this host fails
        part = replace(part, on_failure=comm.report_failure)
    group = share(_Members(comm, own_ranks), timeouts, part)
    is_formed = isinstance(group, SharedMemory) or len(own_ranks) == 1
    formed = comm.all_gather(torch.tensor([is_formed])).flatten().tolist()
    for number, ranks in enumerate(stages):
        if not formed[ranks.start]:
            group.close()
            raise UsageError(
                f"ranks {ranks.start}-{ranks.stop - 1} are stage {number} of {len(stages)} and "
                "do not share memory, which needs one host with x86-64; use another number of "
                "stages, or number the ranks host by host"
            )
    if len(own_ranks) > 1:
        return group
    group.close()
    return Solo()


class _Members(Solo):
    """Gathers from the ranks of one stage, through the group of all ranks.

    Collective: every rank of `comm` calls `all_gather`, each for its own stage.
    """

    def __init__(self, comm: Communicator, ranks: range) -> None:
        self.rank, self.size = comm.rank - ranks.start, len(ranks)
        self._comm, self._rows = comm, slice(ranks.start, ranks.stop)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._comm.all_gather(x)[self._rows]
