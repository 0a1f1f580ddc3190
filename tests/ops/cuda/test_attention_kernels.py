"""Attention in Triton reads each query's own keys, in any blocks, and nothing else."""

from dataclasses import replace

import pytest
import torch
from paged_samples import POISON, make_sample
from triton_compile import compiled

from parallel_llama.ops import HeadMap, PagedPlan, PagedQueries, Scores, kv_rows

pytest.importorskip("triton", reason="kernels for CUDA devices need triton")

from parallel_llama.ops.cuda.decode_attention import _programs, decode_attention
from parallel_llama.ops.cuda_ops import CUDAOps

# About the length of a tile of keys, of a split, and of a block; and a range that is padding.
DECODED = ((1, 0), (1, 127), (0, 9), (1, 150), (1, 300))
CHUNKS = ((3, 0), (0, 9), (1, 33), (17, 40), (4, 2))
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# The interpreter has no products in bfloat16.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)[: 3 if torch.cuda.is_available() else 2]
HEAD_MAPS = [(3, 2), (1, 3, 3, 2), (71,), (8, 8), (1,)]
PLAIN, CAPPED = Scores(), Scores(scale=0.7, soft_cap=2.0)
SINKING = Scores(has_sinks=True)


class Decode(CUDAOps):
    """Decode attention with this number of programs per query and KV head."""

    def __init__(self, n_programs, scores=PLAIN):
        super().__init__(scores)
        self._n_programs = n_programs

    def attention(self, q, k, v, plan, heads, out, sinks=None):
        (queries,) = plan.parts
        assert queries.max_queries == 1
        decode_attention(q, k, v, queries, heads, out, self._scores, self._n_programs, sinks)


def check(sample, ops, scores=PLAIN):
    o = sample.run(ops)
    tolerance = TOLERANCE[o.dtype]
    torch.testing.assert_close(o.double(), sample.expected(scores), rtol=0, atol=tolerance)
    return o


@pytest.mark.slow
@pytest.mark.parametrize("heads_per_kv", HEAD_MAPS, ids=str)
def test_decode_attention_matches_reference_for_any_head_map(device, heads_per_kv):
    sample = make_sample(DECODED, heads_per_kv, 16, dtype=torch.float32, device=device)
    # Two programs split a query's keys, but merging 71 heads takes the interpreter too long.
    check(sample, Decode(1 if heads_per_kv == (71,) else 2))


@pytest.mark.slow
@pytest.mark.parametrize("heads_per_kv", HEAD_MAPS, ids=str)
def test_prefill_attention_matches_reference_for_any_head_map(device, heads_per_kv):
    sample = make_sample(CHUNKS, heads_per_kv, 16, dtype=torch.float32, device=device)
    check(sample, CUDAOps())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "window", "scores"),
    [(12, None, CAPPED), (80, 1, PLAIN), (80, 30, CAPPED), (12, 30, PLAIN)],
    ids=str,
)
def test_windows_and_soft_caps_match_reference(device, dtype, head_dim, window, scores):
    own = {"dtype": dtype, "window": window, "device": device}
    check(make_sample(((1, 7), (1, 140)), (3, 2), head_dim, **own), Decode(1, scores), scores)
    check(make_sample(((2, 7), (9, 50)), (3, 2), head_dim, **own), CUDAOps(scores), scores)


@pytest.mark.parametrize("window", [None, 30])
def test_attention_with_sinks_matches_reference(device, window):
    """Also a sink far above and far below all scores, whose weights must not overflow."""
    own = {"dtype": torch.float32, "window": window, "device": device}
    sinks = torch.tensor([0.3, -200.0, 4.0, 200.0, 1.0], device=device)
    decoded = make_sample(((1, 7), (1, 200)), (3, 2), 12, **own)
    for ops in (Decode(1, SINKING), Decode(3, SINKING)):
        o = decoded.run(ops, sinks).double()
        torch.testing.assert_close(o, decoded.expected(SINKING, sinks), rtol=0, atol=2e-6)
    chunks = make_sample(((2, 7), (9, 50)), (3, 2), 12, **own)
    o = chunks.run(CUDAOps(SINKING), sinks).double()
    torch.testing.assert_close(o, chunks.expected(SINKING, sinks), rtol=0, atol=2e-6)


def test_more_heads_than_fit_registers_match_reference(device):
    own = {"dtype": torch.float32, "device": device}
    check(make_sample(((1, 5), (1, 40)), (2, 35), 256, **own), Decode(1))
    check(make_sample(((2, 5), (1, 40)), (2, 35), 256, **own), CUDAOps())


def test_window_may_be_shorter_than_a_query_tile(device):
    """The last queries of a tile then do not see the first keys of the tile."""
    own = {"dtype": torch.float16, "window": 5, "block_size": 16, "device": device}
    check(make_sample(((100, 7),), (1,), 16, **own), CUDAOps())


@pytest.mark.slow
@pytest.mark.parametrize("n_programs", [1, 5])
def test_sequence_too_long_for_short_splits_matches_reference(device, n_programs):
    own = {"dtype": torch.float32, "block_size": 16, "device": device}
    check(make_sample(((1, 64 * 128),), (2,), 16, **own), Decode(n_programs))


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_attention_reads_8_bit_kv_cache(device, cache_dtype):
    own = {"dtype": torch.float32, "cache_dtype": cache_dtype, "device": device}
    check(make_sample(((1, 3), (1, 70)), (3, 2), 16, **own), Decode(1))
    check(make_sample(((2, 3), (5, 30)), (3, 2), 16, **own), CUDAOps())


def test_every_fp8_byte_is_read_as_in_torch(device):
    """With one key per query the result is its value; a NaN byte makes its row NaN."""
    numbers = torch.arange(256, dtype=torch.uint8).repeat(2, 1)
    scales = torch.full((2, 1), 0.5).view(torch.uint8)
    v = torch.cat((numbers, scales), -1).view(torch.float8_e4m3fn)
    v = v.view(2, 1, -1)[:1].to(device)
    sample = make_sample(((1, 0),), (1,), 256, dtype=torch.float32, block_size=1, device=device)
    queries = replace(sample.queries, blocks=torch.zeros_like(sample.queries.blocks))
    k = kv_rows.pack(torch.ones(1, 1, 256), torch.float8_e4m3fn).to(device)
    out = torch.empty_like(sample.q)
    Decode(1).attention(sample.q, k, v, PagedPlan((queries,)), sample.heads, out)
    expected = kv_rows.unpack(v, torch.float32)[0]
    torch.testing.assert_close(out[0], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoded_query_is_bitwise_equal_alone_and_in_batch(device, dtype):
    """For any batch, number of programs and location of the keys."""
    sample = make_sample(DECODED, (3, 2), 16, dtype=dtype, device=device)
    together = sample.run(Decode(1))
    for n_programs in (2, 3):
        assert torch.equal(sample.run(Decode(n_programs)), together)
    for own in sample.queries.rows:
        if own[1]:
            queries = replace(sample.queries, rows=own[None])
            alone = replace(sample, queries=queries).run(Decode(3))
            assert torch.equal(alone[own[0]], together[own[0]])
            assert (alone == POISON).all((1, 2)).sum() == len(alone) - 1


def test_default_number_of_programs_does_not_change_results(device):
    sample = make_sample(((1, 200),), (2,), 16, dtype=torch.float32, device=device)
    assert torch.equal(sample.run(CUDAOps()), sample.run(Decode(1)))


def test_a_query_of_a_chunk_does_not_depend_on_other_ranges(device):
    sample = make_sample(CHUNKS, (3, 2), 16, dtype=torch.float32, device=device)
    together = sample.run(CUDAOps())
    own = sample.queries.rows[3]
    queries = replace(sample.queries, rows=own[None])
    alone = replace(sample, queries=queries).run(CUDAOps())
    rows = slice(own[0], own[0] + own[1])
    assert torch.equal(alone[rows], together[rows])
    assert (alone[: own[0]] == POISON).all() and (alone[own[0] + own[1] :] == POISON).all()


@pytest.mark.parametrize("ranges", [((0, 0), (0, 3)), ()])
def test_padding_only_batch_writes_no_output(device, ranges):
    sample = make_sample(ranges, (2,), 4, dtype=torch.float32, device=device)
    for max_queries in (1, 5):
        queries = replace(sample.queries, max_queries=max_queries)
        q = sample.q.new_zeros(3, 2, 4)
        assert (replace(sample, q=q, queries=queries).run(CUDAOps()) == POISON).all()


@pytest.mark.parametrize("max_queries", [1, 5])
def test_attention_on_meta_tensors_launches_nothing(max_queries):
    sample = make_sample(((1, 3),), (3, 2), 8, dtype=torch.float32)
    meta = torch.device("meta")
    queries = PagedQueries(
        sample.queries.rows.to(meta), sample.queries.blocks.to(meta), 4, max_queries, None
    )
    q, k, v = (each.to(meta) for each in (sample.q, sample.k, sample.v))
    heads = replace(sample.heads, bounds=sample.heads.bounds.to(meta))
    CUDAOps().attention(q, k, v, PagedPlan((queries,)), heads, torch.empty_like(q))


@pytest.mark.parametrize(
    ("n_pairs", "n_bytes", "n_programs"),
    [(0, 0, 64), (8, 1 << 20, 64), (300, 1 << 26, 6), (4096, 1 << 26, 1), (300, 1 << 27, 1)],
)
def test_few_queries_are_split_into_enough_programs_to_fill_a_gpu(n_pairs, n_bytes, n_programs):
    assert _programs(n_pairs, n_bytes) == n_programs


def launches():
    """Heads of real models: Llama's, Gemma's with its cap, Falcon's 71 over one."""
    for dtype, head_dim, heads_per_kv, cap, cache_dtype in (
        (torch.bfloat16, 128, 4, None, None),
        (torch.bfloat16, 256, 2, 50.0, None),
        (torch.float16, 64, 71, None, None),
        (torch.float32, 80, 4, None, None),
        (torch.bfloat16, 128, 8, None, torch.float8_e4m3fn),
    ):
        stored = cache_dtype or dtype
        cache = torch.empty(2, 64, kv_rows.row_width(head_dim, stored), dtype=stored)
        q = torch.empty(4, 2 * heads_per_kv, head_dim, dtype=dtype)
        rows, numbers = torch.zeros(4, 5, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        heads = HeadMap(numbers[:3], heads_per_kv, ())
        for max_queries in (1, 99):
            plan = PagedPlan((PagedQueries(rows, numbers, 16, max_queries, None),))
            CUDAOps(Scores(soft_cap=cap)).attention(q, cache, cache, plan, heads, q)


@pytest.mark.slow
def test_attention_kernels_stay_within_register_and_memory_limits():
    kernels = compiled(__file__, "launches")
    assert {kernel.kernel for kernel in kernels} == {"_decode", "_combine", "_attention"}
    # On sm_80, prefill with Llama's heads spills eight numbers, as products take registers.
    most = {80: 32, 90: 0, 100: 0}
    assert not [kernel for kernel in kernels if kernel.is_fused]
    assert not [kernel for kernel in kernels if kernel.stack_bytes > most[kernel.target]]
    # The shared memory of GPUs of the 40 series.
    assert not [kernel for kernel in kernels if kernel.shared_bytes > 99 << 10]
