"""Chooses the device of the ranks of a host: one GPU each, or the CPU. Does not import torch."""

import os
from itertools import takewhile
from pathlib import Path
from typing import Literal

from parallel_llama.errors import UsageError, counted
from parallel_llama.parallel.rank_env import (
    is_started_as_rank,
    is_watched,
    known_local_world,
    local_world,
    requests_gpu_per_rank,
)

DeviceKind = Literal["cpu", "cuda"]

_GPUS = "dev/nvidia[0-9]*"


def choose_device(requested: str, n_ranks: int, n_gpus: int) -> DeviceKind:
    """The kind of device for `n_ranks` ranks on a host with `n_gpus` GPUs.

    Two ranks never share a GPU, because NCCL does not support that.

    Args:
        requested: "auto", "cpu" or "cuda".

    >>> [choose_device("auto", n_ranks=2, n_gpus=n) for n in (0, 1, 2)]
    ['cpu', 'cpu', 'cuda']

    Raises: UsageError for "cuda" with too few GPUs, and for any other value.
    """
    if requested == "auto":
        return "cuda" if n_ranks <= n_gpus else "cpu"
    if requested == "cuda":
        if n_gpus == 0:
            raise UsageError("device=cuda: torch sees no CUDA device here; use --device cpu")
        if n_ranks > n_gpus:
            raise UsageError(
                f"device=cuda: {too_few(n_ranks, n_gpus)}; start at most {n_gpus} on this host "
                "(CUDA_VISIBLE_DEVICES may hide GPUs), or use --device cpu"
            )
        return "cuda"
    if requested == "cpu":
        return "cpu"
    raise UsageError(f"device={requested!r}: use auto, cpu or cuda")


def ranks_sharing_gpus(
    requested: str, size: int, n_gpus: int, root: Path = Path("/")
) -> tuple[int, int]:
    """This process's rank among the ranks that share its visible GPUs, and how many ranks do so.

    A launcher may show each rank only a GPU of its own, which then is GPU 0 in each rank. A rank
    cannot know this for certain before the ranks connect, so `rendezvous` refuses ranks that have
    the same GPU.

    Args:
        requested: "auto", "cpu" or "cuda". With "cuda", a rank that sees one GPU uses it, if it is
            possible that its launcher has hidden the other GPUs.
        size: the number of ranks on all hosts.
        n_gpus: the number of GPUs that this process sees.
        root: the root of the file system.

    Raises: UsageError as `local_world`.
    """
    local_rank, n_local = local_world(size)
    if not 0 < n_gpus < n_local or not is_started_as_rank():
        return local_rank, n_local
    if is_watched():
        # torchrun and `--nproc` show all GPUs to all ranks. The exception is --virtual-local-rank:
        # then each rank is local rank 0 and sees only its own GPU.
        return (0, 1) if requested == "cuda" and n_gpus == 1 and local_rank == 0 else (0, n_local)
    are_hidden = len(list(root.glob(_GPUS))) >= n_local * n_gpus
    if requests_gpu_per_rank() or are_hidden or (requested == "cuda" and n_gpus == 1):
        return 0, 1
    known_rank, known_size = known_local_world()
    if known_rank is not None and known_size is None and known_rank < n_gpus:
        return known_rank, n_gpus  # the other ranks are on other hosts
    return local_rank, n_local


def too_few(n_ranks: int, n_gpus: int) -> str:
    """Why ranks of a host cannot use GPUs, for error messages."""
    gpus = counted(n_gpus, "GPU")
    return f"{n_ranks} ranks on this host and {gpus}, but each rank needs its own GPU"


def count_gpus(root: Path = Path("/"), visible: str | None = None) -> int:
    """The number of GPUs that a process would see, counted without torch.

    Args:
        root: the root of the file system.
        visible: used instead of the environment's CUDA_VISIBLE_DEVICES if given.
    """
    n_gpus = len(list(root.glob(_GPUS)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    if visible is None or n_gpus == 0:
        return n_gpus
    # Like the driver: the first invalid name hides itself and all names after it.
    numbers = {str(number) for number in range(n_gpus)}
    names = (name.strip() for name in visible.split(","))
    visible_names = takewhile(
        lambda name: name in numbers or name.startswith(("GPU-", "MIG-")), names
    )
    return len(list(visible_names))
