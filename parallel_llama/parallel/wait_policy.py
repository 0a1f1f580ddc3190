"""Chooses how a rank waits for the other ranks of its host. Does not import torch.

The term is OpenMP's: `OMP_WAIT_POLICY` chooses between active and passive waits.
"""

import os
from enum import IntEnum

from parallel_llama.parallel.cgroups import cpu_cores


class WaitPolicy(IntEnum):
    """What a waiting rank does between two polls. Kernels receive the integer value."""

    SPIN = 0  # keeps the core: every rank has its own core
    YIELD = 1  # lets another rank on the same core run
    SLEEP = 2  # leaves the core idle, so that waiting does not use the CPU quota


def wait_policy(n_ranks: int, n_cores: int | None = None) -> WaitPolicy:
    """The policy of this process if `n_ranks` ranks of its group share the host.

    Args:
        n_cores: the cores that the ranks may use together; by default those of this process.
    """
    n_own_cores = len(os.sched_getaffinity(0))
    if cpu_cores() < min(n_ranks, n_own_cores):
        return WaitPolicy.SLEEP
    return WaitPolicy.SPIN if (n_cores or n_own_cores) >= n_ranks else WaitPolicy.YIELD
