"""Flips bits of memory, for tests that must find them."""

import numpy as np
import torch
from torch import Tensor


def flip(values: Tensor, bit: int) -> None:
    """Flip a bit of contiguous memory."""
    own = values.view(-1).view(torch.uint8).numpy()
    own[bit // 8] ^= np.uint8(1 << bit % 8)
