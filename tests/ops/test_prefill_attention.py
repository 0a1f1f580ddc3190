"""The kernels for prefill attention: consecutive queries attend to the keys before them."""

import random
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from parallel_llama.ops import Scores, kv_rows
from parallel_llama.ops.attention import Queries, QueryChunk, QueryRange
from parallel_llama.ops.cpu import prefill_attention_amx
from parallel_llama.ops.cpu.attention_plan import CPUPlan, DecodeBatch
from parallel_llama.ops.cpu.decode_attention import DecodeAttentionKernel
from parallel_llama.ops.cpu.gemm_amx import tiles_are_allowed
from parallel_llama.ops.cpu.jit import CPUFeatures, openmp
from parallel_llama.ops.cpu.prefill_attention import PrefillAttentionKernel
from parallel_llama.ops.cpu.prefill_attention_amx import (
    PrefillAttentionAMXKernel,
    make_prefill_attention_amx,
)

pytestmark = pytest.mark.skipif(openmp() is None, reason="kernels need torch's own GNU OpenMP")

MACHINES = {16: CPUFeatures(16, 16), 32: CPUFeatures(32, 16), 64: CPUFeatures(64, 32)}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
HALF = 1e-4  # the error of products of numbers that are split into two bfloat16 parts
has_tiles = pytest.mark.skipif(
    openmp() is None or not tiles_are_allowed(), reason="this CPU has no tiles (AMX)"
)
PLAIN, CAPPED = Scores(), Scores(scale=0.7, soft_cap=2.0)
CACHES = [torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]
N_SLOTS, N_KV_HEADS = 700, 2
# Numbers of queries, tokens before them, and windows: sizes around blocks of columns and tiles of
# keys, and windows that begin after the first tile for some or for all queries.
CHUNKS = [(1, 0, None), (17, 0, None), (150, 0, None), (16, 63, None), (49, 170, None)]
WINDOWS = [(70, 0, 1), (150, 0, 64), (150, 130, 100), (20, 300, 7), (40, 10, 60)]


@cache
def kernel(
    dtype: torch.dtype,
    head_dim: int,
    vector_bytes: int = 64,
    scores: Scores = PLAIN,
    cache_dtype: torch.dtype | None = None,
) -> PrefillAttentionKernel:
    machine = MACHINES[vector_bytes]
    return PrefillAttentionKernel(dtype, cache_dtype or dtype, head_dim, scores, machine)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restores the number of threads, which tests change."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_chunk(n: int, start: int, window: int | None, slots: Tensor | None = None) -> QueryChunk:
    """A chunk with keys in random slots, or in these slots of the sequence from its start."""
    if slots is None:
        slots = torch.randperm(N_SLOTS)[: start + n]
    first = 0 if window is None else max(start - window + 1, 0)
    rows = slice(2, 2 + n)
    own = slots[first : start + n].clone()
    return QueryChunk(rows, range(start, start + n), own, torch.zeros(1, dtype=torch.int64), window)


def make_cache(dtype: torch.dtype, head_dim: int, chunk: QueryChunk) -> tuple[Tensor, Tensor]:
    """Keys and values of the chunk; all other slots are NaN, as unwritten memory may be."""
    kv = torch.full((2, N_KV_HEADS, N_SLOTS, head_dim), torch.nan, dtype=dtype)
    shape = (2, N_KV_HEADS, len(chunk.slots), head_dim)
    kv[:, :, chunk.slots] = torch.randn(shape, dtype=torch.float64).to(dtype)
    return kv[0], kv[1]


def make_queries(dtype: torch.dtype, n: int, heads_per_kv: int, head_dim: int) -> Tensor:
    """The first heads of a wider tensor, so that rows are not adjacent."""
    n_heads = N_KV_HEADS * heads_per_kv
    return torch.randn(n + 3, n_heads + 3, head_dim, dtype=dtype)[:, :n_heads]


def run(
    attention: PrefillAttentionKernel | PrefillAttentionAMXKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk: QueryChunk,
) -> Tensor:
    """Computes the chunk's rows, and checks that everything else is unchanged."""
    wide = torch.full((len(q), q.shape[1] + 1, q.shape[2]), -7.0, dtype=q.dtype)
    attention(q, k, v, chunk, wide[:, :-1])
    assert (wide[:, -1] == -7).all()
    assert (wide[: chunk.rows.start] == -7).all() and (wide[chunk.rows.stop :] == -7).all()
    assert chunk.taken.item() == 0
    return wide[chunk.rows, :-1]


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, chunk: QueryChunk, scores: Scores = PLAIN
) -> Tensor:
    """The result in float64, for one KV head at a time."""
    q = q[chunk.rows].double()
    k, v = (kv_rows.unpack(kv_rows.take(each, chunk.slots), torch.float64) for each in (k, v))
    at = torch.arange(chunk.positions.start, chunk.positions.stop)[:, None]
    behind = at - torch.arange(chunk.first_key, chunk.positions.stop)
    hidden = (behind < 0) | (behind >= (chunk.window or N_SLOTS))
    result, heads_per_kv = torch.empty_like(q), q.shape[1] // len(k)
    for head in range(q.shape[1]):
        products = q[:, head] @ k[head // heads_per_kv].T * (scores.scale or q.shape[2] ** -0.5)
        if (cap := scores.soft_cap) is not None:
            products = cap * (products / cap).tanh()
        weights = products.masked_fill(hidden, -torch.inf).softmax(-1)
        result[:, head] = weights @ v[head // heads_per_kv]
    return result


def check(
    dtype: torch.dtype,
    head_dim: int,
    heads_per_kv: int,
    vector_bytes: int = 64,
    scores: Scores = PLAIN,
    chunks: list[tuple[int, int, int | None]] = CHUNKS,
) -> None:
    attention = kernel(dtype, head_dim, vector_bytes, scores)
    for n, start, window in chunks:
        chunk = make_chunk(n, start, window)
        k, v = make_cache(dtype, head_dim, chunk)
        q = make_queries(dtype, n, heads_per_kv, head_dim)
        o = run(attention, q, k, v, chunk).double()
        expected = by_definition(q, k, v, chunk, scores)
        torch.testing.assert_close(o, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "head_dim", "vector_bytes"),
    [
        (dtype, head_dim, [*MACHINES][(number + at) % 3])
        for number, dtype in enumerate(TOLERANCE)
        for at, head_dim in enumerate([1, 6, 64, 80])
    ],
)
def test_attention_matches_reference_for_any_head_dim_and_vector_width(
    dtype: torch.dtype, head_dim: int, vector_bytes: int
) -> None:
    check(dtype, head_dim, 3, vector_bytes)


@pytest.mark.parametrize("heads_per_kv", [1, 2, 5, 71])
def test_attention_matches_reference_for_any_heads_per_kv(heads_per_kv: int) -> None:
    check(torch.float32, 16, heads_per_kv)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sliding_window_matches_reference(dtype: torch.dtype) -> None:
    check(dtype, 16, 3, chunks=WINDOWS)


@pytest.mark.parametrize("vector_bytes", MACHINES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_scale_and_soft_cap_match_reference(dtype: torch.dtype, vector_bytes: int) -> None:
    check(dtype, 16, 3, vector_bytes, CAPPED)


@pytest.mark.parametrize("cache_dtype", CACHES)
def test_narrow_kv_cache_gives_same_bits_as_its_float32_values(cache_dtype: torch.dtype) -> None:
    chunk = make_chunk(70, 100, None)
    wide = torch.randn(2, N_KV_HEADS, N_SLOTS, 48) * (torch.rand(N_SLOTS, 1) + 0.5)
    kv = kv_rows.pack(wide, cache_dtype)
    k, v = kv_rows.unpack(kv, torch.float32)
    q = make_queries(torch.float32, 70, 3, 48)
    o = run(kernel(torch.float32, 48, cache_dtype=cache_dtype), q, kv[0], kv[1], chunk)
    assert torch.equal(o, run(kernel(torch.float32, 48), q, k, v, chunk))


@pytest.mark.parametrize("window", [None, 50, 100])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_results_are_bitwise_equal_for_any_prompt_chunks(
    dtype: torch.dtype, window: int | None
) -> None:
    check_cuts(kernel(dtype, 16), dtype, dtype, 16, window)


def check_cuts(
    attention: PrefillAttentionKernel | PrefillAttentionAMXKernel,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dim: int,
    window: int | None,
) -> None:
    """Compares bits across prompt chunks, numbers of threads, and slots."""
    n = 180
    whole = make_chunk(n, 0, window, torch.randperm(N_SLOTS)[:n])
    k, v = make_cache(cache_dtype, head_dim, whole)
    q = make_queries(dtype, n, 3, head_dim)
    torch.set_num_threads(1)
    expected = run(attention, q, k, v, whole)
    for n_threads, cuts in ((2, [180]), (3, [67, 130, 180]), (2, [1, 2, 65, 179, 180])):
        torch.set_num_threads(n_threads)
        moved = torch.randperm(N_SLOTS)[:n]
        new_k, new_v = (torch.full_like(each, torch.nan) for each in (k, v))
        new_k[:, moved], new_v[:, moved] = k[:, whole.slots], v[:, whole.slots]
        start = 0
        for stop in cuts:
            part = make_chunk(stop - start, start, window, moved)
            own = q[start : start + stop - start + 3]
            assert torch.equal(run(attention, own, new_k, new_v, part), expected[start:stop])
            start = stop


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "vector_bytes", "head_dim", "heads_per_kv", "scores"),
    [
        (torch.float32, torch.float32, 64, 64, 3, PLAIN),
        (torch.float32, torch.float32, 32, 80, 1, CAPPED),
        (torch.float32, torch.float32, 16, 6, 5, PLAIN),
        (torch.float64, torch.float64, 64, 80, 1, PLAIN),
        (torch.float64, torch.float64, 16, 6, 5, CAPPED),
        *((torch.float32, each, 64, 48, 2, PLAIN) for each in CACHES),
    ],
    ids=str,
)
def test_prefill_kernel_is_bitwise_equal_to_decode_kernel(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    vector_bytes: int,
    head_dim: int,
    heads_per_kv: int,
    scores: Scores,
) -> None:
    """Regression: up to nine tokens used the decode kernel, which summed in another order."""
    rng, machine = random.Random(0), MACHINES[vector_bytes]
    decode = DecodeAttentionKernel(dtype, cache_dtype, head_dim, heads_per_kv, scores, machine)
    attention = kernel(dtype, head_dim, vector_bytes, scores, cache_dtype)
    for _ in range(10):
        n, start = rng.randint(1, 60), rng.choice([0, 1, 100, 127, 128, 255, 400])
        chunk = make_chunk(n, start, rng.choice([None, None, 1, 7, 100, 128, 300]))
        wide = torch.randn(2, N_KV_HEADS, N_SLOTS, head_dim, dtype=dtype)
        k, v = wide if cache_dtype == dtype else kv_rows.pack(wide, cache_dtype)
        q = make_queries(dtype, n, heads_per_kv, head_dim)
        torch.set_num_threads(rng.randint(1, 3))
        alone = torch.empty_like(q)
        decode(q, k, v, DecodeBatch.of(rows_of(chunk, rng)), alone)
        assert torch.equal(run(attention, q, k, v, chunk), alone[chunk.rows])


@pytest.mark.parametrize(("first", "n", "size"), [(117, 13, 13), (130, 126, 130), (200, 200, 200)])
def test_chunked_attention_across_tiles_is_bitwise_equal_to_decode(
    first: int, n: int, size: int
) -> None:
    """Regression: tiles started at the attention chunk in prefill, but not in decode."""
    both = []
    k, v = torch.randn(2, N_KV_HEADS, N_SLOTS, 8, dtype=torch.float64)
    q = make_queries(torch.float64, n, 3, 8)
    for is_decoded in (False, True):
        own = QueryRange(0, range(first, first + n), 0, range(N_SLOTS // 4), is_decoded)
        plan = CPUPlan.of(Queries([own], 4, window=size, has_chunks=True))
        out = torch.empty_like(q)
        for chunk in plan.chunks:
            kernel(torch.float64, 8)(q, k, v, chunk, out)
        if plan.decode is not None:
            machine = MACHINES[64]
            decode = DecodeAttentionKernel(torch.float64, torch.float64, 8, 3, PLAIN, machine)
            decode(q, k, v, plan.decode, out)
        both.append(out[:n])
    assert torch.equal(*both)
    keys = range(first // size * size, first + n)
    whole = QueryChunk(slice(0, n), range(first, first + n), torch.tensor(keys), torch.zeros(1))
    expected = by_definition(q, k, v, whole)
    torch.testing.assert_close(both[0].double(), expected, rtol=0, atol=1e-12)


def rows_of(chunk: QueryChunk, rng: random.Random) -> dict[int, tuple[int, list[slice]]]:
    """The queries of the chunk one by one, in random order."""
    rows, slots = {}, chunk.slots.tolist()
    for row, position in enumerate(chunk.positions, chunk.rows.start):
        first = max(position - (chunk.window or N_SLOTS) + 1, 0)
        own = slots[first - chunk.first_key : position + 1 - chunk.first_key]
        rows[row] = first, [slice(slot, slot + 1) for slot in own]
    order = list(rows)
    rng.shuffle(order)
    return {row: rows[row] for row in order}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_large_scores_do_not_overflow_in_any_tile(dtype: torch.dtype) -> None:
    """Inputs are integers, so scores up to 10^4 are exact; the largest score is in any tile."""
    chunk = make_chunk(60, 140, None, torch.arange(200))
    k = torch.randint(-50, 51, (N_KV_HEADS, 200, 4)).to(dtype)
    v = torch.randn(N_KV_HEADS, 200, 4, dtype=dtype)
    q = torch.randint(-100, 101, (63, N_KV_HEADS * 3, 4)).to(dtype)
    k[0, 0], k[0, 140], k[1, 0], k[1, 140] = 50, -50, -50, 50
    q[:, ::2] = 100
    o = run(kernel(dtype, 4), q, k, v, chunk)
    expected = by_definition(q, k, v, chunk)
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_nan_value_affects_only_its_own_kv_head() -> None:
    """Earlier queries may change only in a block of columns with a query that sees the value."""
    chunk = make_chunk(100, 0, None)
    k, v = make_cache(torch.float32, 8, chunk)
    q = make_queries(torch.float32, 100, 3, 8)
    attention = kernel(torch.float32, 8)
    before = run(attention, q, k, v, chunk)
    v[1, chunk.slots[90]] = torch.nan
    after = run(attention, q, k, v, chunk)
    assert after[90:, 3:].isnan().all()
    assert torch.equal(after[:, :3], before[:, :3]) and torch.equal(after[:64], before[:64])


@cache
def tiles(head_dim: int, scores: Scores = PLAIN) -> PrefillAttentionAMXKernel:
    return PrefillAttentionAMXKernel(head_dim, scores)


@has_tiles
@pytest.mark.parametrize("scores", [PLAIN, CAPPED], ids=str)
@pytest.mark.parametrize(("head_dim", "heads_per_kv"), [(32, 1), (64, 3), (96, 71)])
def test_amx_attention_matches_reference(head_dim: int, heads_per_kv: int, scores: Scores) -> None:
    """Without splitting queries and weights in two parts, errors would be 100 times as large."""
    for n, start, window in [*CHUNKS, *WINDOWS]:
        chunk = make_chunk(n, start, window)
        k, v = make_cache(torch.bfloat16, head_dim, chunk)
        q = make_queries(torch.float32, n, heads_per_kv, head_dim)
        o = run(tiles(head_dim, scores), q, k, v, chunk).double()
        expected = by_definition(q, k, v, chunk, scores)
        torch.testing.assert_close(o, expected, rtol=0, atol=HALF)


@has_tiles
@pytest.mark.parametrize("window", [None, 50, 100])
def test_amx_results_are_bitwise_equal_for_any_prompt_chunks(window: int | None) -> None:
    check_cuts(tiles(64), torch.float32, torch.bfloat16, 64, window)


@has_tiles
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800001])
def test_nan_query_affects_only_its_own_result_on_amx(bits: int) -> None:
    chunk = make_chunk(100, 0, None)
    k, v = make_cache(torch.bfloat16, 64, chunk)
    q = make_queries(torch.float32, 100, 3, 64)
    q.view(torch.int32)[50, 2, 7] = bits
    o = run(tiles(64), q, k, v, chunk)
    spoiled = torch.zeros(100, 6, dtype=torch.bool)
    spoiled[48, 2] = True
    assert o[spoiled].isnan().all() and o[~spoiled].isfinite().all()


@has_tiles
def test_nan_value_affects_only_its_own_kv_head_on_amx() -> None:
    """Tiles of keys begin before the window, and are packed head by head."""
    chunk = make_chunk(20, 300, 7)
    k, v = make_cache(torch.bfloat16, 64, chunk)
    q = make_queries(torch.float32, 20, 3, 64)
    v[0, chunk.slots[-1]] = torch.nan
    o = run(tiles(64), q, k, v, chunk)
    assert o[-1, :3].isnan().all() and o[:, 3:].isfinite().all()


def test_amx_attention_needs_amx_and_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillAttentionAMXKernel, "__init__", lambda *_: None)
    monkeypatch.setattr(prefill_attention_amx, "make_gemm_amx", lambda: object())
    assert make_prefill_attention_amx.__wrapped__(64, PLAIN) is not None
    assert make_prefill_attention_amx.__wrapped__(80, PLAIN) is None
    monkeypatch.setattr(prefill_attention_amx, "make_gemm_amx", lambda: None)
    assert make_prefill_attention_amx.__wrapped__(64, PLAIN) is None
