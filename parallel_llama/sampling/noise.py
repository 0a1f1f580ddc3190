"""Which noise a draw has, the numbers that fix it as one key; and what it is drawn from."""

import hashlib
import struct
from collections.abc import Sequence

import torch

from parallel_llama.ops import Noise
from parallel_llama.ops.filters import Filters
from parallel_llama.request import SamplingParams
from parallel_llama.sampling.draw import Draw


def noise_key(draw: Draw) -> int:
    """The 64-bit key of a draw's noise, as a signed integer."""
    return _key(draw.seed, draw.choice, draw.position)


def row_noise(params: SamplingParams, seed: int, choice: int, position: int) -> tuple[int, float]:
    """The key and the temperature of a draw from all tokens; temperature 0 for every other.

    The numbers are those of a `Draw`, known before there is one.
    """
    if params.is_greedy or params.is_filtered:
        return 0, 0.0
    return _key(seed, choice, position), params.temperature


def filters_of(draws: Sequence[Draw]) -> Filters:
    """The filters and the noise of some draws that have filters, on the host."""
    keys = torch.tensor([noise_key(draw) for draw in draws], dtype=torch.int64)
    params = [draw.params for draw in draws]
    wide = torch.float64
    return Filters(
        Noise(keys, torch.tensor([each.temperature for each in params], dtype=wide)),
        top_k=torch.tensor([each.top_k for each in params], dtype=torch.int64),
        top_p=torch.tensor([each.top_p for each in params], dtype=wide),
        min_p=torch.tensor([each.min_p for each in params], dtype=wide),
    )


def _key(seed: int, choice: int, position: int) -> int:
    counter = struct.pack("<qqq", seed, choice, position)
    return int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little", signed=True)
