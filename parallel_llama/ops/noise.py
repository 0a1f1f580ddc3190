"""The noise of every draw: a function of its key and a token id, and of nothing else.

A draw is an argmax of logits / temperature + Gumbel noise. Seen as a race (a token's noise is
-log of its arrival time, which is exponential), the first arrival among a tile of 128 tokens
comes as early as 1 / 128 of an exponential time, at any of them alike; the others come
after it, each by an exponential time of its own, since the race has no memory. So the noise is made
in that order: each tile's first arrival, and then the rest. One number bounds the noise of a whole
tile, and a draw need not look at tiles that cannot win.

Source: Maddison, Tarlow and Minka, A* sampling, arXiv 1411.0030, section 3 (top-down construction).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Tokens of a tile: a part of the noise's definition, and no setting.
TILE = 128

# What SplitMix64 steps by, and what it multiplies by between its shifts.
GAMMA = 0x9E3779B97F4A7C15
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class Noise:
    """What decides some rows' draws beside their logits; temperature 0 takes the largest as it is.

    Shapes: keys [n] int64, temperatures [n] float64.
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
    """The largest noise of any token in a tile, tile i holding the ids from i * TILE.

    Shapes: keys [n] int64; tiles [n, m] or [m] int64; returns [n, m] float64.
    """
    return _first_arrivals(keys, tiles)[0].log_().neg_()


_TILE_BITS = TILE.bit_length() - 1


def _first_arrivals(keys: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
    """When the first token of a tile arrives, and which it is, 0 to TILE - 1."""
    words = _words(keys, -tiles)
    # The time is made of the upper 52 bits, the winner of the lowest ones: they are independent.
    return _exponential(words).div_(TILE), words.bitwise_and(TILE - 1)


def _exponential(words: Tensor) -> Tensor:
    """Standard exponential times from the upper 52 bits of random words."""
    # Odd multiples of 2**-53: exact in float64, and neither 0 nor 1, whose logarithms end the race.
    uniform = (words >> 12).bitwise_and_((1 << 52) - 1).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_()


def _words(keys: Tensor, places: Tensor) -> Tensor:
    """The random words at some places of the keys' streams: tokens from 1 up, tiles from 0 down.

    The generator is SplitMix64 started at the key. Products wrap around as int64; a shift drags the
    sign along, so a mask takes it away.

    Shapes: keys [n] int64; places [n, m] or [m] int64; returns [n, m] int64.
    Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014, section 5;
    the multipliers are those of Vigna's splitmix64.c.
    """
    z = places * _signed(GAMMA) + keys[:, None]  # [n, m]
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        z ^= (z >> shift).bitwise_and_((1 << 64 - shift) - 1)
        z *= _signed(multiplier)
    z ^= (z >> 31).bitwise_and_((1 << 33) - 1)
    return z


def _signed(word: int) -> int:
    """A 64-bit word as the signed integer of the same bits."""
    return word - (1 << 64) if word >> 63 else word
