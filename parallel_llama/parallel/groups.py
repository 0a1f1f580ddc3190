"""How a rank finds the others and becomes part of their group.

The only place that initialises torch.distributed and fairscale. Under torchrun the ranks meet at
torchrun's own store; under `launch` at a store of rank 0 that listens on loopback alone.
"""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import timedelta
from io import StringIO

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as fairscale_groups
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from parallel_llama.errors import UsageError
from parallel_llama.parallel.collectives import Communicator, ProcessGroup, Solo
from parallel_llama.parallel.failures import RankError
from parallel_llama.parallel.launch import STORE_FD, world
from parallel_llama.parallel.shared_memory import share


def join(device: str = "cpu", timeout_s: float = 300.0) -> Communicator:
    """The group of all ranks that torchrun or `launch` started; one rank alone without them.

    `device` is cpu or cuda, and says where the model's tensors will be. No collective waits for
    another rank longer than `timeout_s`.

    Raises: UsageError for an incomplete environment, RankError naming ranks that never came.
    Collective: every rank calls it, once.
    """
    rank, size = world()
    if size == 1:
        return Solo()
    if dist.is_initialized():
        raise RuntimeError("this process has joined its group already; close that one first")
    if rank > 0 and threading.current_thread() is threading.main_thread():
        # Ctrl-C reaches every process of the terminal; rank 0 alone decides what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    store = _meet(rank, size, timedelta(seconds=timeout_s))
    return form_group(rank, size, store, device, timeout_s)


def form_group(
    rank: int,
    size: int,
    store: Store,
    device: str = "cpu",
    timeout_s: float = 300.0,
    shared_memory: bool = True,
) -> Communicator:
    """The group of `size` ranks that meet at a store.

    Without `shared_memory` the ranks of one host talk through gloo, as those of several do.

    Raises: RankError naming the ranks that never came.
    Collective: every rank calls it, with the same arguments but `rank`.
    """
    timeout = timedelta(seconds=timeout_s)
    _call_the_roll(rank, size, store, timeout)
    # Both back ends under CUDA: what is not a tensor of the model travels on the CPU.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=PrefixStore("group", store), rank=rank, world_size=size, timeout=timeout
    )
    with redirect_stdout(StringIO()):  # fairscale announces itself, and stdout belongs to --json
        fairscale_groups.initialize_model_parallel(size)
    group = fairscale_groups.get_model_parallel_group()
    for own in (
        group,
        fairscale_groups.get_data_parallel_group(),
        fairscale_groups.get_pipeline_parallel_group(),
    ):
        _set_pg_timeout(timeout, own)  # fairscale's groups start with torch's default of 30 minutes
    comm: Communicator = ProcessGroup(group, _leave(store))
    # Nobody goes on before all have met: the store may end with rank 0.
    comm.barrier()
    return share(comm, timeout_s) if shared_memory and device == "cpu" else comm


def _meet(rank: int, size: int, timeout: timedelta) -> Store:
    """The store that the environment names; rank 0 of a local start opens it."""
    listening = os.environ.pop(STORE_FD, None)
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(
            f"RANK={rank} and MASTER_ADDR={host!r}, MASTER_PORT={port!r}: the ranks need an "
            "address to meet; start them with torchrun or with --nproc"
        )
    try:
        if listening is not None:
            return TCPStore(
                host,
                int(port),
                is_master=True,
                wait_for_workers=False,
                timeout=timeout,
                master_listen_fd=int(listening),
            )
        store: Store = next(rendezvous("env://", rank, size, timeout=timeout))[0]
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"rank {rank} of {size} found nobody at MASTER_ADDR={host}, MASTER_PORT={port}: "
            f"{str(error).splitlines()[0][:300]}"
        ) from error
    return store


def _call_the_roll(rank: int, size: int, store: Store, timeout: timedelta) -> None:
    """Wait for every rank to show up, so that a missing one has a name."""
    present = {other: f"present/{other}" for other in range(size)}
    store.set(present[rank], "")
    try:
        store.wait(list(present.values()), timeout)
    except RuntimeError as error:
        missing = [str(other) for other, key in present.items() if not store.check([key])]
        raise RankError(
            f"rank {', '.join(missing[:8])} of {size} never joined within "
            f"{timeout.total_seconds():g} s; see what it says, or whether it was started"
        ) from error


def _leave(store: Store) -> Callable[[], None]:
    """Ends the groups, and with them what keeps the store alive."""
    keeping = [store]

    def leave() -> None:
        fairscale_groups.destroy_model_parallel()
        dist.destroy_process_group()
        keeping.clear()

    return leave
