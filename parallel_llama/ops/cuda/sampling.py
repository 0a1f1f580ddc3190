"""Sampling on the device: plain draws, and draws with filters from the candidates of all ranks.

A row of logits is split over several programs, so that one row fills the device, and further
launches merge the results. A candidate is one `sort_key` of a logit and its token. The K largest
keys are found without sorting: a bit-by-bit search finds the smallest of the K keys. The last
launch orders the keys by counting, for each key, the larger keys.

The noise is `ops.gumbel`'s, in float64; only the last bits of a logarithm may differ from the
CPU's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.ops.cuda.launch import await_inputs, launch, tile
from parallel_llama.ops.cuda.sort_key import number_of, score_of, sort_key
from parallel_llama.ops.filters import TOP_P_SLACK, Filters
from parallel_llama.ops.gumbel import GAMMA, MULTIPLIERS, TILE, SamplingKeys

_TILES = 8  # per program of a plain draw; a thread has one token of each tile

# Logits per program that searches candidates: 32 for each thread of one warp, so that sums need no
# barrier.
_SIZE = 1024

_NOBODY = tl.constexpr(0x7FFFFFFF)  # a token above all others
_NOTHING = tl.constexpr(-1)  # the key that pads missing candidates
_KEEPS = tl.constexpr(1 - TOP_P_SLACK)
_GAMMA = tl.constexpr(GAMMA)
_FIRST, _SECOND = map(tl.constexpr, MULTIPLIERS)


def draw(x: Tensor, sampling_keys: SamplingKeys, first: int) -> Tensor:
    """As `TorchOps.draw`. Shapes: [n, m], m > 0; n sampling keys -> [n, 2] float64."""
    assert (
        x.stride(1) == 1
        and sampling_keys.keys.is_contiguous()
        and sampling_keys.temperatures.is_contiguous()
    )
    n, m = x.shape
    n_parts = triton.cdiv(first % TILE + m, _TILES * TILE)
    scores = x.new_empty(n, n_parts, dtype=torch.float64)
    tokens = x.new_empty(n, n_parts, dtype=torch.int32)
    launch(
        _of_parts, (n_parts, n), x, sampling_keys.keys, sampling_keys.temperatures, scores, tokens,
        x.stride(0), first, m, TILES=_TILES, TILE=TILE, num_warps=4,
    )  # fmt: skip
    pairs = x.new_empty(n, 2, dtype=torch.float64)
    launch(_of_rows, (n,), scores, tokens, pairs, n_parts, SIZE=tile(n_parts), num_warps=1)
    return pairs


def takes_candidates(k: int) -> bool:
    """Whether the kernels support this number of candidates."""
    return k == triton.next_power_of_2(k) and k <= _SIZE // 2


def candidates(x: Tensor, temperatures: Tensor, k: int, first: int) -> Tensor:
    """As `TorchOps.candidates`. Shapes: [n, m], m > 0, [n] float64 -> [n, 1 + 2 k] float64."""
    assert x.stride(1) == 1 and takes_candidates(k)
    n, m = x.shape
    n_parts = triton.cdiv(m, _SIZE)
    keys = x.new_empty(n, n_parts, k, dtype=torch.int64)
    masses, bests = x.new_empty(2, n, n_parts, dtype=torch.float64)
    launch(
        _top_k_of_parts, (n_parts, n), x, temperatures, keys, masses, bests, x.stride(0), first, m,
        SIZE=_SIZE, K=k, num_warps=1,
    )  # fmt: skip
    while keys.shape[1] > 1:
        n_lists = keys.shape[1]
        n_merged = triton.cdiv(n_lists, _SIZE // k)
        merged = x.new_empty(n, n_merged, k, dtype=torch.int64)
        launch(_merge, (n_merged, n), keys, merged, n_lists, SIZE=_SIZE, K=k, num_warps=1)
        keys = merged
    found = x.new_empty(n, 1 + 2 * k, dtype=torch.float64)
    launch(
        _candidates, (n,), keys, masses, bests, temperatures, found, n_parts,
        PARTS=tile(n_parts), K=k, num_warps=4,
    )  # fmt: skip
    return found


def draw_filtered(of_ranks: Tensor, filters: Filters, vocab_size: int) -> Tensor:
    """As `TorchOps.draw_filtered`. Shapes: [tp_size, n, 1 + 2 k] -> [n] int64."""
    tp_size, n, width = of_ranks.shape
    assert of_ranks.is_contiguous()
    k = width // 2
    tokens = of_ranks.new_empty(n, dtype=torch.int64)
    noise = filters.sampling_keys
    size = tile(tp_size) * k
    launch(
        _draw_filtered, (n,), of_ranks, noise.keys, noise.temperatures,
        filters.top_k, filters.top_p, filters.min_p, tokens, n, tp_size, vocab_size,
        SIZE=size, K=k, CHUNK=min(k, 8), TILE=TILE, num_warps=min(size // 64, 8) or 1,
    )  # fmt: skip
    return tokens


@triton.jit(do_not_specialize_on_alignment=["keys", "temperatures"])
def _of_parts(
    x, keys, temperatures, scores, tokens, stride, first, m,
    TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    await_inputs()
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
    await_inputs()
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, SIZE)
    own = tl.load(scores + row * n_parts + parts, parts < n_parts, -float("inf"))
    whose = tl.load(tokens + row * n_parts + parts, parts < n_parts, _NOBODY)
    score, token = _first_best(own, whose)
    tl.store(pairs + 2 * row, score)
    tl.store(pairs + 2 * row + 1, token.to(tl.float64))


@triton.jit
def _first_best(scores, tokens):
    """The best score, or NaN if any score is NaN, and the smallest token that has this score."""
    is_nan = scores != scores
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    best = tl.max(tl.where(is_nan, -float("inf"), scores), 0)
    is_it = tl.where(has_nan, is_nan, scores == best)
    return tl.where(has_nan, float("nan"), best), tl.min(tl.where(is_it, tokens, _NOBODY), 0)


@triton.jit
def gumbel(key, tiles, ids, TILE: tl.constexpr):
    """As `ops.gumbel.gumbel`. Shapes: tiles [n], ids [n, TILE] of their tokens -> [n, TILE]."""
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
    """As `ops.gumbel._words`; unsigned, so that shifts are logical."""
    z = places.to(tl.int64).to(tl.uint64, bitcast=True) * _GAMMA + key.to(tl.uint64, bitcast=True)
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    return z ^ (z >> 31)


@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def _top_k_of_parts(
    x, temperatures, keys, masses, bests, stride, first, m, SIZE: tl.constexpr, K: tl.constexpr
):
    await_inputs()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * SIZE + tl.arange(0, SIZE)
    is_there = at < m
    logits = tl.load(x + row * stride + at, is_there, -float("inf")).to(tl.float32)
    place = row * tl.num_programs(0) + part
    _put_largest(tl.where(is_there, sort_key(logits, first + at), _NOTHING), keys + place * K, K)
    wide = logits.to(tl.float64)
    best = tl.max(wide, 0)
    tl.store(masses + place, tl.sum(_shift(wide, best, tl.load(temperatures + row)), 0))
    tl.store(bests + place, best)


@triton.jit
def _merge(lists, merged, n_lists, SIZE: tl.constexpr, K: tl.constexpr):
    await_inputs()
    number, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = number * SIZE + tl.arange(0, SIZE)
    own = tl.load(lists + row * n_lists * K + at, at < n_lists * K, _NOTHING)
    _put_largest(own, merged + (row * tl.num_programs(0) + number) * K, K)


@triton.jit
def _put_largest(keys, target, K: tl.constexpr):
    """Stores the K largest of some keys, unordered, padded with _NOTHING."""
    least = tl.full((), 0, tl.int64)
    for step in range(63):
        trial = least | (tl.full((), 1, tl.int64) << (62 - step))
        least = tl.where(tl.sum((keys >= trial).to(tl.int32), 0) >= K, trial, least)
    is_it = keys >= least
    counts = tl.cumsum(is_it.to(tl.int32), 0)
    tl.store(target + counts - 1, keys, is_it)
    places = tl.arange(0, K)
    tl.store(target + places, tl.full((K,), _NOTHING, tl.int64), places >= tl.max(counts, 0))


@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def _candidates(
    keys, masses, bests, temperatures, found, n_parts, PARTS: tl.constexpr, K: tl.constexpr
):
    await_inputs()
    row, places, parts = tl.program_id(0).to(tl.int64), tl.arange(0, K), tl.arange(0, PARTS)
    found += row * (1 + 2 * K)
    own, others = tl.load(keys + row * K + places)[:, None], tl.load(keys + row * K + places)[None]
    # Padding keys are equal, so they are ordered by position.
    is_before = (others > own) | ((others == own) & (places[None] < places[:, None]))
    at = found + 1 + tl.sum(is_before.to(tl.int32), 1)
    own = tl.ravel(own)
    tl.store(at, tl.where(own == _NOTHING, -float("inf"), score_of(own)).to(tl.float64))
    tl.store(at + K, tl.where(own == _NOTHING, -1, number_of(own)).to(tl.float64))
    is_there = parts < n_parts
    each = tl.load(masses + row * n_parts + parts, is_there, 0.0)
    best = tl.load(bests + row * n_parts + parts, is_there, -float("inf"))
    shift = _shift(best, tl.max(best, 0), tl.load(temperatures + row))
    tl.store(found, tl.sum(each * shift, 0))


@triton.jit(
    do_not_specialize=["n"],
    do_not_specialize_on_alignment=["keys", "temperatures", "top_ks", "top_ps", "min_ps"],
)
def _draw_filtered(
    of_ranks, keys, temperatures, top_ks, top_ps, min_ps, tokens, n, tp_size, vocab_size,
    SIZE: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    await_inputs()
    row = tl.program_id(0).to(tl.int64)
    temperature, top_p = tl.load(temperatures + row), tl.load(top_ps + row)
    top_k, min_p = tl.load(top_ks + row), tl.load(min_ps + row)
    places = tl.arange(0, SIZE)
    value, token, own = _of_ranks(of_ranks, places, row, n, tp_size, K)
    best = tl.max(value, 0)
    weight = _shift(value, best, temperature)
    # A rank's mass is stored before its candidates and counts once.
    is_first = (places % K == 0) & (places < tp_size * K)
    masses = of_ranks + (places // K * n + row) * (1 + 2 * K)
    mass = tl.sum(tl.load(masses, is_first, 0.0) * weight, 0)

    # For each candidate: the number of larger ones, and their total weight.
    top_k = tl.where(top_k == 0, vocab_size, tl.minimum(top_k, vocab_size))
    n_candidates = tl.minimum(K, vocab_size)
    number, before = tl.zeros((SIZE,), tl.int32), tl.zeros((SIZE,), tl.float64)
    for start in range(0, tp_size * K, CHUNK):
        chunk = start + tl.arange(0, CHUNK)
        other, _, key = _of_ranks(of_ranks, chunk, row, n, tp_size, K)
        is_before = key[None] > own[:, None]
        number += tl.sum(is_before.to(tl.int32), 1)
        before += tl.sum(tl.where(is_before, _shift(other, best, temperature)[None], 0.0), 1)

    # As in `Filters.keep_mask`.
    is_cut = top_k < vocab_size
    in_k = (own != _NOTHING) & (number < n_candidates) & (number < top_k)
    counted = tl.where(in_k, weight, 0.0)
    total = tl.sum(counted, 0)
    needed = top_p * tl.where(is_cut, total, mass) * _KEEPS
    has_nucleus = top_p < 1
    in_nucleus = (before < needed) | (has_nucleus == 0)
    kept = in_k & in_nucleus & (weight >= min_p) & (value > -float("inf"))
    least = tl.sum(tl.where((own != _NOTHING) & (number == n_candidates - 1), weight, 0.0), 0)
    decided = (n_candidates >= top_k) | ((is_cut == 0) & has_nucleus & (total >= needed))
    decided |= ((is_cut == 0) | (has_nucleus == 0)) & (least < min_p)

    noise = tl.ravel(gumbel(tl.load(keys + row), token // TILE, token[:, None], TILE))
    scores = tl.where(kept, value / temperature + noise, -float("inf"))
    is_it = kept & (scores == tl.max(scores, 0))
    # If several candidates have the best score, the one with the largest key is drawn.
    drawn = number_of(tl.max(tl.where(is_it, own, _NOTHING), 0))
    tl.store(tokens + row, tl.where(decided, drawn, -1))


@triton.jit
def _of_ranks(of_ranks, places, row, n, tp_size, K: tl.constexpr):
    """The candidates at some places of all ranks' lists: logits, tokens and keys."""
    ranks = places // K
    at = of_ranks + (ranks * n + row) * (1 + 2 * K) + 1 + places % K
    is_there = ranks < tp_size
    value = tl.load(at, is_there, -float("inf"))
    token = tl.load(at + K, is_there, -1.0).to(tl.int64)
    return value, token, tl.where(token < 0, _NOTHING, sort_key(value.to(tl.float32), token))


@triton.jit
def _shift(logits, largest, temperature):
    """exp((logit - largest) / temperature); 0 where all logits are -inf."""
    largest = tl.maximum(largest, -1.7976931348623157e308)
    return tl.exp((logits - largest) / temperature)
