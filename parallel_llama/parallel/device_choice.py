"""Chooses the device of the ranks of a host: one GPU each, or the CPU. Imports no torch."""

import os
from itertools import takewhile
from pathlib import Path
from typing import Literal

from parallel_llama.errors import UsageError

DeviceKind = Literal["cpu", "cuda"]


def choose_device(asked: str, n_ranks: int, n_cards: int) -> DeviceKind:
    """The kind of device for `n_ranks` ranks on a host with `n_cards` GPUs.

    Two ranks never share a GPU, because NCCL does not support that.

    Args:
        asked: "auto", "cpu" or "cuda".

    >>> [choose_device("auto", n_ranks=2, n_cards=n) for n in (0, 1, 2)]
    ['cpu', 'cpu', 'cuda']

    Raises: UsageError for "cuda" with too few GPUs, and for any other value.
    """
    if asked == "auto":
        return "cuda" if n_ranks <= n_cards else "cpu"
    if asked == "cuda":
        if n_cards == 0:
            raise UsageError("device=cuda: torch sees no CUDA device here; use --device cpu")
        if n_ranks > n_cards:
            raise UsageError(
                f"device=cuda: {too_few(n_ranks, n_cards)}; start at most {n_cards} on this host "
                "(CUDA_VISIBLE_DEVICES may hide GPUs), or use --device cpu"
            )
        return "cuda"
    if asked == "cpu":
        return "cpu"
    raise UsageError(f"device={asked!r}: use auto, cpu or cuda")


def too_few(n_ranks: int, n_cards: int) -> str:
    """The part of an error message that says why the ranks cannot use GPUs."""
    cards = f"{n_cards} GPU{'s' * (n_cards != 1)}"
    return f"{n_ranks} ranks on this host and {cards}, but each rank needs its own GPU"


def count_cards(root: Path = Path("/"), visible: str | None = None) -> int:
    """The number of GPUs that a process would see, counted without torch.

    Args:
        root: the root of the file system.
        visible: used instead of the environment's CUDA_VISIBLE_DEVICES if given.
    """
    n_cards = len(list(root.glob("dev/nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    if visible is None or n_cards == 0:
        return n_cards
    # Like the driver: the first invalid name hides itself and all names after it.
    numbers = {str(number) for number in range(n_cards)}
    names = (name.strip() for name in visible.split(","))
    seen = takewhile(lambda name: name in numbers or name.startswith(("GPU-", "MIG-")), names)
    return len(list(seen))
