"""The group of the ranks of one stage of a pipeline, beside the group of all ranks."""

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
    """The group of the ranks of this rank's stage, which must share memory.

    Args:
        comm: the group of all ranks.
        stages: the ranks of each stage.

    Raises: UsageError on all ranks if the ranks of a stage do not share memory.
    Collective: every rank of `comm` calls it.
    """
    own = next(ranks for ranks in stages if comm.rank in ranks)
    part = PartOfGroup(own, comm.size)
    if isinstance(comm, Sockets):  # other hosts cannot detect that a rank of this host fails
        part = replace(part, on_failure=comm.tell_failure)
    group = share(_Members(comm, own), timeouts, part)
    is_formed = isinstance(group, SharedMemory) or len(own) == 1
    formed = comm.all_gather(torch.tensor([is_formed])).flatten().tolist()
    for number, ranks in enumerate(stages):
        if not formed[ranks.start]:
            group.close()
            raise UsageError(
                f"ranks {ranks.start}-{ranks.stop - 1} are stage {number} of pp={len(stages)} and "
                "do not share memory, which needs one host with x86-64; use another pp, or number "
                "the ranks host by host"
            )
    if len(own) > 1:
        return group
    group.close()
    return Solo()


class _Members(Solo):
    """Some consecutive ranks of a group, which use its all_gather until they have their own group.

    Collective: every rank of `comm` calls `all_gather`, as a member of some part of it.
    """

    def __init__(self, comm: Communicator, ranks: range) -> None:
        self.rank, self.size = comm.rank - ranks.start, len(ranks)
        self._comm, self._own = comm, slice(ranks.start, ranks.stop)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._comm.all_gather(x)[self._own]
