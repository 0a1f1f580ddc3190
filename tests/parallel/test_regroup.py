"""New groups of ranks of one host that wait for a rank which still loads for the old group."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from ranks import SILENCE_S, Ranks

from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.failures import RankError
from parallel_llama.parallel.regroup import Orders, join_group, lead_group
from parallel_llama.parallel.timeouts import Timeouts


def regroup(comm: Communicator, folder: Path, is_hung: bool) -> str:
    """Forms a new group while rank 2 loads for 5 s; the result of a sum, or the error.

    Args:
        is_hung: whether rank 2 sends no keepalives while it loads.
    """
    pids = comm.all_gather(torch.tensor(os.getpid())).tolist()
    timeouts, file = Timeouts(SILENCE_S, 2.0), folder / f"{comm.rank}"
    os.mkfifo(file)
    comm.barrier()

    def send_order(rank: int, line: bytes) -> None:
        (folder / f"{rank}").write_bytes(line)

    try:
        if comm.rank == 0:
            others = dict(enumerate(pids[1:], 1))
            local_ranks = SimpleNamespace(pids=lambda: others, send_order=send_order)
            group = lead_group(local_ranks, 1, timeouts)
        else:
            orders = Orders(os.open(file, os.O_RDWR))  # never at the end of the file
            for _ in range(50 if comm.rank == 2 else 0):
                time.sleep(0.1)
                if not is_hung:
                    orders.keepalive()
            group = join_group(orders.latest(), orders, timeouts)
        return str(group.all_reduce(torch.ones(3)).tolist())
    except RankError as error:
        return str(error)


def test_new_group_waits_for_a_rank_that_still_loads(tmp_path):
    """Regression: the rank sent keepalives only to the old group, and counted as late."""
    with Ranks(3, shared_memory=True) as pool:
        assert pool.run(regroup, tmp_path, False) == ["[3.0, 3.0, 3.0]"] * 3


def test_new_group_names_a_rank_that_sends_no_keepalives(tmp_path):
    with Ranks(3, shared_memory=True) as pool:
        outcomes = pool.run(regroup, tmp_path, True)
    assert outcomes[0].startswith("rank 2 of 3 is late: no progress for 2 s")
