"""Gumbel noise for sampling: a function of a key and a token id alone.

A token is sampled as the argmax of logits / temperature + Gumbel noise. The noise of a token is
-log of its arrival time, which is exponentially distributed. Which of the 128 tokens of a tile
arrives first is drawn uniformly; it arrives after an exponential time / 128. Since the exponential
distribution is memoryless, each other token of the tile arrives an exponential time after that. So
the first arrival bounds the noise of all tokens of the tile, and sampling can skip tiles that
cannot win.

Source: Maddison, Tarlow and Minka, A* sampling, arXiv 1411.0030, section 3 (top-down construction).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_llama.plan import VOCAB_TILE

# Tokens per tile: a part of the noise's definition, not a setting.
TILE = VOCAB_TILE

# The increment and the multipliers of SplitMix64.
GAMMA = 0x9E3779B97F4A7C15
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class SamplingKeys:
    """The random keys and the temperatures of some rows.

    Args:
        keys: [n] int64.
        temperatures: [n] float64; 0 for the largest logit without noise.
    """

    keys: Tensor
    temperatures: Tensor


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise, independent for every key and token id.

    Shapes: keys [n] int64; tokens [n, m] or [m] int64; returns [n, m] float64.
    """
    tiles = tokens >> _TILE_BITS
    first, winners = _first_arrivals(keys, tiles)
    later = first + _exponential(_words(keys, tokens + 1))
    arrivals = torch.where(tokens == tiles * TILE + winners, first, later)
    return arrivals.log_().neg_()


def tile_gumbel(keys: Tensor, tiles: Tensor) -> Tensor:
    """The largest noise of any token of a tile; tile i has the ids from i * TILE on.

    Shapes: keys [n] int64; tiles [n, m] or [m] int64; returns [n, m] float64.
    """
    return _first_arrivals(keys, tiles)[0].log_().neg_()


_TILE_BITS = TILE.bit_length() - 1


def _first_arrivals(keys: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
    """The first arrival time in each tile, and the arriving token's number, 0 to TILE - 1."""
    words = _words(keys, -tiles)
    # The time takes the upper 52 bits, the token the lowest bits, so the two are independent.
    return _exponential(words).div_(TILE), words.bitwise_and(TILE - 1)


def _exponential(words: Tensor) -> Tensor:
    """Standard exponential times from the upper 52 bits of random words."""
    # Odd multiples of 2**-53: exact in float64, and neither 0 nor 1.
    uniform = (words >> 12).bitwise_and_((1 << 52) - 1).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_()


def _words(keys: Tensor, counters: Tensor) -> Tensor:
    """Random words of SplitMix64 seeded with the keys. Counters: i + 1 for token i, -i for tile i.

    Products wrap around as int64; the masks make the arithmetic shifts logical.

    Shapes: keys [n] int64; counters [n, m] or [m] int64; returns [n, m] int64.
    Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014, section 5;
    the multipliers are from Vigna's splitmix64.c.
    """
    z = counters * _signed(GAMMA) + keys[:, None]  # [n, m]
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        z ^= (z >> shift).bitwise_and_((1 << 64 - shift) - 1)
        z *= _signed(multiplier)
    z ^= (z >> 31).bitwise_and_((1 << 33) - 1)
    return z


def _signed(word: int) -> int:
    """The signed integer with the bits of a 64-bit word."""
    return word - (1 << 64) if word >> 63 else word
