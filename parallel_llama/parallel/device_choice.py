"""Which device a host's ranks compute on: a CUDA card each, or the CPU. Imports no torch."""

import os
from itertools import takewhile
from pathlib import Path
from typing import Literal

from parallel_llama.errors import UsageError

DeviceKind = Literal["cpu", "cuda"]


def choose_device(asked: str, n_ranks: int, n_cards: int) -> DeviceKind:
    """The device of `n_ranks` ranks on a host of `n_cards` CUDA cards, for auto, cpu or cuda.

    Ranks never share a card: NCCL refuses two on one.

    >>> [choose_device("auto", n_ranks=2, n_cards=n) for n in (0, 1, 2)]
    ['cpu', 'cpu', 'cuda']

    Raises: UsageError for cuda with too few cards, and for another name.
    """
    if asked == "auto":
        return "cuda" if n_ranks <= n_cards else "cpu"
    if asked == "cuda":
        if n_cards == 0:
            raise UsageError("device=cuda: torch sees no CUDA device here; use --device cpu")
        if n_ranks > n_cards:
            raise UsageError(
                f"device=cuda: {too_few(n_ranks, n_cards)}; start at most {n_cards} on this host "
                "(CUDA_VISIBLE_DEVICES may hide cards), or use --device cpu"
            )
        return "cuda"
    if asked == "cpu":
        return "cpu"
    raise UsageError(f"device={asked!r}: use auto, cpu or cuda")


def too_few(n_ranks: int, n_cards: int) -> str:
    """Why ranks get no cards, for a person."""
    cards = f"{n_cards} CUDA card{'s' * (n_cards != 1)}"
    return f"{n_ranks} ranks on this host and {cards}, and a rank needs one of its own"


def count_cards(root: Path = Path("/"), visible: str | None = None) -> int:
    """The CUDA cards that a process would see, as far as that shows without torch.

    `visible` stands for the environment's CUDA_VISIBLE_DEVICES where it is given.
    """
    n_cards = len(list(root.glob("dev/nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    if visible is None or n_cards == 0:
        return n_cards
    # As the driver reads it: nothing is seen from the first name on that is no card's.
    numbers = {str(number) for number in range(n_cards)}
    names = (name.strip() for name in visible.split(","))
    seen = takewhile(lambda name: name in numbers or name.startswith(("GPU-", "MIG-")), names)
    return len(list(seen))
