"""What a draw takes of each row of logits: the best score and whose it is, in two launches.

A row is searched in parts of whole tiles, so that one row keeps the whole device busy, and a second
launch has the best of the parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.ops.cuda.launch import launch, tile
from parallel_llama.ops.cuda.noise import gumbel
from parallel_llama.ops.noise import TILE, Noise

# Tiles of a part: one number of each for a thread.
_TILES = 8

_NOBODY = tl.constexpr(0x7FFFFFFF)


def draw(x: Tensor, noise: Noise, first: int) -> Tensor:
    """The best score of each row, and the first token that has it, their ids counted from `first`.

    Shapes: [n, m], m > 0; noise of n rows -> [n, 2] float64.
    """
    assert x.stride(1) == 1 and noise.keys.is_contiguous() and noise.temperatures.is_contiguous()
    n, m = x.shape
    n_parts = triton.cdiv(first % TILE + m, _TILES * TILE)
    scores = x.new_empty(n, n_parts, dtype=torch.float64)
    tokens = x.new_empty(n, n_parts, dtype=torch.int32)
    launch(
        _of_parts, (n_parts, n), x, noise.keys, noise.temperatures, scores, tokens,
        x.stride(0), first, m, TILES=_TILES, TILE=TILE, num_warps=4,
    )  # fmt: skip
    pairs = x.new_empty(n, 2, dtype=torch.float64)
    launch(_of_rows, (n,), scores, tokens, pairs, n_parts, SIZE=tile(n_parts), num_warps=1)
    return pairs


@triton.jit(do_not_specialize_on_alignment=["keys", "temperatures"])
def _of_parts(
    x, keys, temperatures, scores, tokens, stride, first, m,
    TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tiles = first // TILE + part * TILES + tl.arange(0, TILES)
    ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    is_there = (ids >= first) & (ids < first + m)
    logits = tl.load(x + row * stride + (ids - first), is_there, -float("inf"))
    own = logits.to(tl.float32).to(tl.float64)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        own = own / temperature + gumbel(tl.load(keys + row), tiles, ids, TILE)
    score, token = _first_best(tl.ravel(own), tl.ravel(tl.where(is_there, ids, _NOBODY)))
    at = row * tl.num_programs(0) + part
    tl.store(scores + at, score)
    tl.store(tokens + at, token)


@triton.jit
def _of_rows(scores, tokens, pairs, n_parts, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, SIZE)
    own = tl.load(scores + row * n_parts + parts, parts < n_parts, -float("inf"))
    whose = tl.load(tokens + row * n_parts + parts, parts < n_parts, _NOBODY)
    score, token = _first_best(own, whose)
    tl.store(pairs + 2 * row, score)
    tl.store(pairs + 2 * row + 1, token.to(tl.float64))


@triton.jit
def _first_best(scores, tokens):
    """The best score, nan being best, and the smallest of its tokens."""
    is_nan = scores != scores
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    best = tl.max(tl.where(is_nan, -float("inf"), scores), 0)
    is_it = tl.where(has_nan, is_nan, scores == best)
    return tl.where(has_nan, float("nan"), best), tl.min(tl.where(is_it, tokens, _NOBODY), 0)
