"""The noise of draws on the device, made where it is added, in float64 as on a CPU.

Only the last bits of a logarithm may differ.
"""

import triton
import triton.language as tl

from parallel_llama.ops.noise import GAMMA, MULTIPLIERS

_GAMMA = tl.constexpr(GAMMA)
_FIRST, _SECOND = map(tl.constexpr, MULTIPLIERS)


@triton.jit
def gumbel(key, tiles, ids, TILE: tl.constexpr):
    """As `ops.noise` has it. Shapes: tiles [n], ids [n, TILE] of their tokens -> [n, TILE]."""
    words = _words(key, -tiles)
    first = (_exponential(words) / TILE)[:, None]
    winners = tiles * TILE + (words & (TILE - 1)).to(tl.int32)
    later = first + _exponential(_words(key, ids + 1))
    return -tl.log(tl.where(ids == winners[:, None], first, later))


@triton.jit
def _exponential(words):
    return -tl.log(((words >> 12).to(tl.float64) + 0.5) * (1.0 / 4503599627370496))


@triton.jit
def _words(key, places):
    """Without a sign, so that a shift drags none along."""
    z = places.to(tl.int64).to(tl.uint64, bitcast=True) * _GAMMA + key.to(tl.uint64, bitcast=True)
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    return z ^ (z >> 31)
