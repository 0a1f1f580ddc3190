"""The device of this rank, and the current device of its threads."""

import torch

from parallel_llama.parallel.device_choice import DeviceKind


def visible_cards() -> int:
    """The number of CUDA cards that torch sees in this process; 0 if none can be used."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def own_device(kind: DeviceKind, local_rank: int) -> torch.device:
    """The CPU, or the card with the index `local_rank`."""
    return torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")


def use_device(device: torch.device) -> None:
    """Makes `device` the current card of this thread, if it is a card with an index.

    Every thread begins with card 0, and kernels run on the current card of the thread that launches
    them, wherever their tensors are. So every thread that launches kernels calls this first.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
