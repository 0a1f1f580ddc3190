"""Which noise a draw has: the numbers that fix it, as one key, and how much it counts."""

import hashlib
import struct

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


def _key(seed: int, choice: int, position: int) -> int:
    counter = struct.pack("<qqq", seed, choice, position)
    return int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little", signed=True)
