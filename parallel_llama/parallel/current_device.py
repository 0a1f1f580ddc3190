"""The device of this rank, and of the threads that launch work on it."""

import torch

from parallel_llama.parallel.device_choice import DeviceKind


def visible_cards() -> int:
    """The CUDA cards that torch sees in this process; 0 where none can be used."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def own_device(kind: DeviceKind, local_rank: int) -> torch.device:
    """The CPU, or the card of this number among the host's ranks."""
    return torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")


def use_device(device: torch.device) -> None:
    """Make a card the current one of this thread; without an index the device is its current card.

    Every thread begins with card 0; a kernel that it launches runs on the current one, wherever its
    tensors are. Whatever starts a thread that launches work calls this in it.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
