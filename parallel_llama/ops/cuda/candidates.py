"""The candidates of draws with filters, and the draw from all ranks' candidates.

A logit and its token are one `sort_key`, so that the largest keys are the candidates. A row is
searched in parts, so that one row keeps the whole device busy, and what they find is searched
again, some lists at a time: bit by bit for the smallest key that still counts, which needs no
order. In order they are put by counting who is before each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.ops.cuda.launch import launch, tile
from parallel_llama.ops.cuda.noise import gumbel
from parallel_llama.ops.cuda.sort_key import number_of, score_of, sort_key
from parallel_llama.ops.filters import TOP_P_SLACK, Filters
from parallel_llama.ops.noise import TILE

# Numbers that one program searches: 32 for each thread of one warp, whose sums wait for no other.
_SIZE = 1024

_KEEPS = tl.constexpr(1 - TOP_P_SLACK)
_NOTHING = tl.constexpr(-1)  # the key of no token


def takes_candidates(k: int) -> bool:
    """Whether so many are some that are searched for here."""
    return k == triton.next_power_of_2(k) and k <= _SIZE // 2


def candidates(x: Tensor, temperatures: Tensor, k: int, first: int) -> Tensor:
    """As `TorchOps.candidates`. Shapes: [n, m], m > 0, [n] float64 -> [n, 1 + 2 k] float64."""
    assert x.stride(1) == 1 and takes_candidates(k)
    n, m = x.shape
    n_parts = triton.cdiv(m, _SIZE)
    keys = x.new_empty(n, n_parts, k, dtype=torch.int64)
    sums = x.new_empty(2, n, n_parts, dtype=torch.float64)
    launch(
        _leaders_of_parts, (n_parts, n), x, temperatures, keys, *sums, x.stride(0), first, m,
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
        _candidates, (n,), keys, *sums, temperatures, found, n_parts,
        PARTS=tile(n_parts), K=k, num_warps=4,
    )  # fmt: skip
    return found


def draw_filtered(of_ranks: Tensor, filters: Filters, vocab_size: int) -> Tensor:
    """As `TorchOps.draw_filtered`. Shapes: [tp_size, n, 1 + 2 k] -> [n] int64."""
    tp_size, n, width = of_ranks.shape
    assert of_ranks.is_contiguous()
    k = width // 2
    tokens = of_ranks.new_empty(n, dtype=torch.int64)
    noise = filters.noise
    size = tile(tp_size) * k
    launch(
        _draw_filtered, (n,), of_ranks, noise.keys, noise.temperatures,
        filters.top_k, filters.top_p, filters.min_p, tokens, n, tp_size, vocab_size,
        SIZE=size, K=k, CHUNK=min(k, 8), TILE=TILE, num_warps=min(size // 64, 8) or 1,
    )  # fmt: skip
    return tokens


@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def _leaders_of_parts(
    x, temperatures, keys, masses, bests, stride, first, m, SIZE: tl.constexpr, K: tl.constexpr
):
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
    number, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = number * SIZE + tl.arange(0, SIZE)
    own = tl.load(lists + row * n_lists * K + at, at < n_lists * K, _NOTHING)
    _put_largest(own, merged + (row * tl.num_programs(0) + number) * K, K)


@triton.jit
def _put_largest(keys, target, K: tl.constexpr):
    """The K largest of some keys, in no order; no token's where there are fewer."""
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
    row, places, parts = tl.program_id(0).to(tl.int64), tl.arange(0, K), tl.arange(0, PARTS)
    found += row * (1 + 2 * K)
    own, others = tl.load(keys + row * K + places)[:, None], tl.load(keys + row * K + places)[None]
    # Those of no token are all alike, and lie in their own places of the last.
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
    row = tl.program_id(0).to(tl.int64)
    temperature, top_p = tl.load(temperatures + row), tl.load(top_ps + row)
    top_k, min_p = tl.load(top_ks + row), tl.load(min_ps + row)
    places = tl.arange(0, SIZE)
    value, token, own = _of_ranks(of_ranks, places, row, n, tp_size, K)
    best = tl.max(value, 0)
    weight = _shift(value, best, temperature)
    # Of each rank once: its mass lies before its candidates.
    is_first = (places % K == 0) & (places < tp_size * K)
    masses = of_ranks + (places // K * n + row) * (1 + 2 * K)
    mass = tl.sum(tl.load(masses, is_first, 0.0) * weight, 0)

    # In the order of all: how many are before each, and what they weigh.
    top_k = tl.where(top_k == 0, vocab_size, tl.minimum(top_k, vocab_size))
    n_candidates = tl.minimum(K, vocab_size)
    number, before = tl.zeros((SIZE,), tl.int32), tl.zeros((SIZE,), tl.float64)
    for start in range(0, tp_size * K, CHUNK):
        chunk = start + tl.arange(0, CHUNK)
        other, _, key = _of_ranks(of_ranks, chunk, row, n, tp_size, K)
        is_before = key[None] > own[:, None]
        number += tl.sum(is_before.to(tl.int32), 1)
        before += tl.sum(tl.where(is_before, _shift(other, best, temperature)[None], 0.0), 1)

    # As `Filters.kept` has it.
    is_cut = top_k < vocab_size
    in_k = (own != _NOTHING) & (number < n_candidates) & (number < top_k)
    counted = tl.where(in_k, weight, 0.0)
    total = tl.sum(counted, 0)
    needed = top_p * tl.where(is_cut, total, mass) * _KEEPS
    has_nucleus = top_p < 1
    in_nucleus = (before < needed) | (has_nucleus == 0)
    kept = in_k & in_nucleus & (weight >= min_p) & (value > -float("inf"))
    knows = n_candidates >= top_k
    least = tl.sum(tl.where((own != _NOTHING) & (number == n_candidates - 1), weight, 0.0), 0)
    settled = knows | ((is_cut == 0) & has_nucleus & (total >= needed))
    settled |= (knows | (is_cut == 0) | (has_nucleus == 0)) & (least < min_p)

    noise = tl.ravel(gumbel(tl.load(keys + row), token // TILE, token[:, None], TILE))
    scores = tl.where(kept, value / temperature + noise, -float("inf"))
    is_it = kept & (scores == tl.max(scores, 0))
    # The largest key's is the first of equal ones.
    drawn = number_of(tl.max(tl.where(is_it, own, _NOTHING), 0))
    tl.store(tokens + row, tl.where(settled, drawn, -1))


@triton.jit
def _of_ranks(of_ranks, places, row, n, tp_size, K: tl.constexpr):
    """Candidates by their places in the lists of all ranks: logits, tokens and keys."""
    ranks = places // K
    at = of_ranks + (ranks * n + row) * (1 + 2 * K) + 1 + places % K
    is_there = ranks < tp_size
    value = tl.load(at, is_there, -float("inf"))
    token = tl.load(at + K, is_there, -1.0).to(tl.int64)
    return value, token, tl.where(token < 0, _NOTHING, sort_key(value.to(tl.float32), token))


@triton.jit
def _shift(logits, largest, temperature):
    """exp((logit - largest) / temperature), where all may be -inf."""
    largest = tl.maximum(largest, -1.7976931348623157e308)
    return tl.exp((logits - largest) / temperature)
