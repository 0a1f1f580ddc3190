"""The kernel for decode attention: one query per sequence attends to its own keys."""

import ctypes
import math
import mmap
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from parallel_llama.ops import Scores
from parallel_llama.ops.cpu.attention_plan import DecodeBatch
from parallel_llama.ops.cpu.decode_attention import DecodeAttentionKernel
from parallel_llama.ops.cpu.jit import CPUFeatures, openmp

pytestmark = pytest.mark.skipif(openmp() is None, reason="kernels need torch's own GNU OpenMP")

MACHINES = {16: CPUFeatures(16, 16), 32: CPUFeatures(32, 16), 64: CPUFeatures(64, 32)}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
PLAIN, CAPPED = Scores(), Scores(scale=0.7, soft_cap=2.0)
N_SLOTS, N_KV_HEADS = 720, 2
# Lengths around the width of a vector, and some with more than one block of values.
SEQUENCES = (
    (slice(3, 4),),
    (slice(20, 320),),
    (slice(400, 417), slice(5, 20), slice(704, 720)),
    (slice(330, 331), slice(340, 341), slice(700, 703), slice(350, 390)),
    (slice(420, 480), slice(331, 333), slice(480, 700)),
)


@cache
def kernel(
    dtype: torch.dtype, head_dim: int, heads_per_kv: int, vector_bytes: int, scores: Scores = PLAIN
) -> DecodeAttentionKernel:
    return DecodeAttentionKernel(
        dtype, dtype, head_dim, heads_per_kv, scores, MACHINES[vector_bytes]
    )


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restores the number of threads, which tests change."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def slots_of(slices: Sequence[slice]) -> list[int]:
    return [slot for own in slices for slot in range(own.start, own.stop)]


def make_cache(dtype: torch.dtype, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the sequences; all other slots are NaN, as unwritten memory may be."""
    kv = torch.full((2, N_KV_HEADS, N_SLOTS, head_dim), torch.nan, dtype=dtype)
    used = [slot for slices in SEQUENCES for slot in slots_of(slices)]
    kv[:, :, used] = torch.randn(2, N_KV_HEADS, len(used), head_dim, dtype=dtype)
    return kv[0], kv[1]


def make_queries(dtype: torch.dtype, heads_per_kv: int, head_dim: int) -> Tensor:
    """The first heads of a wider tensor, so that rows are not adjacent."""
    n_heads = N_KV_HEADS * heads_per_kv
    return torch.randn(len(SEQUENCES), n_heads + 3, head_dim, dtype=dtype)[:, :n_heads]


def run(
    attention: DecodeAttentionKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequence[Sequence[slice]],
) -> Tensor:
    """Writes to the first heads of wider rows, and checks that the others are unchanged."""
    wide = torch.full((len(q), q.shape[1] + 1, q.shape[2]), -7.0, dtype=q.dtype)
    seen = {row: (0, slices) for row, slices in enumerate(sequences)}
    attention(q, k, v, DecodeBatch.of(seen), wide[:, :-1])
    assert (wide[:, -1] == -7).all()
    return wide[:, :-1]


def by_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequence[Sequence[slice]],
    scores: Scores = PLAIN,
) -> Tensor:
    """The result in float64, for one sequence and one KV head at a time."""
    q, k, v = q.double(), k.double(), v.double()
    result = torch.empty_like(q)
    heads_per_kv = q.shape[1] // len(k)
    for row, slices in enumerate(sequences):
        slots = slots_of(slices)
        for head in range(len(k)):
            group = slice(head * heads_per_kv, (head + 1) * heads_per_kv)
            products = q[row, group] @ k[head, slots].T * (scores.scale or q.shape[2] ** -0.5)
            if (cap := scores.soft_cap) is not None:
                products = cap * (products / cap).tanh()
            result[row, group] = products.softmax(-1) @ v[head, slots]
    return result


def check(
    dtype: torch.dtype, head_dim: int, heads_per_kv: int, vector_bytes: int, scores: Scores = PLAIN
) -> None:
    k, v = make_cache(dtype, head_dim)
    q = make_queries(dtype, heads_per_kv, head_dim)
    expected = by_definition(q, k, v, SEQUENCES, scores)
    for n_threads in (1, 2):
        torch.set_num_threads(n_threads)
        o = run(kernel(dtype, head_dim, heads_per_kv, vector_bytes, scores), q, k, v, SEQUENCES)
        torch.testing.assert_close(o.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "head_dim", "vector_bytes"),
    [
        (dtype, head_dim, [*MACHINES][(number + at) % 3])
        for number, dtype in enumerate(TOLERANCE)
        for at, head_dim in enumerate([1, 4, 6, 8, 64, 80, 128])
    ],
)
def test_attention_matches_reference_for_any_head_dim_and_vector_width(
    dtype: torch.dtype, head_dim: int, vector_bytes: int
) -> None:
    check(dtype, head_dim, 3, vector_bytes)


@pytest.mark.parametrize("heads_per_kv", [1, 2, 4, 5, 9, 71])
def test_attention_matches_reference_for_any_heads_per_kv(heads_per_kv: int) -> None:
    """More than four queries are split into chunks, of two sizes if they do not divide evenly."""
    check(torch.float32, 16, heads_per_kv, 32)


@pytest.mark.parametrize("vector_bytes", MACHINES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_scale_and_soft_cap_match_reference(dtype: torch.dtype, vector_bytes: int) -> None:
    check(dtype, 16, 3, vector_bytes, CAPPED)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_scores_far_beyond_a_cap_become_the_cap(dtype: torch.dtype) -> None:
    """Positive and negative: the scores become 2, 2 and -2, and the weights e^4, e^4 and 1."""
    k = torch.tensor([1e6, 30, -1e6], dtype=dtype).view(1, 3, 1)
    v = torch.tensor([0, 0, 1], dtype=dtype).view(1, 3, 1)
    q = torch.ones(1, 1, 1, dtype=dtype)
    o = run(kernel(dtype, 1, 1, 64, Scores(soft_cap=2.0)), q, k, v, [[slice(0, 3)]])
    assert o.item() == pytest.approx(1 / (1 + 2 * math.exp(4)), rel=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_results_are_bitwise_equal_in_any_batch(dtype: torch.dtype) -> None:
    k, v = make_cache(dtype, 64)
    q = make_queries(dtype, 5, 64)
    attention = kernel(dtype, 64, 5, 64)
    torch.set_num_threads(1)
    alone = torch.cat(
        [run(attention, q[i : i + 1], k, v, SEQUENCES[i : i + 1]) for i in range(len(q))]
    )
    for n_threads in (1, 2, 3):
        torch.set_num_threads(n_threads)
        for order in ([0, 1, 2, 3, 4], [4, 2, 0, 1, 3], [1, 3]):
            together = run(attention, q[order], k, v, [SEQUENCES[i] for i in order])
            assert torch.equal(together, alone[order])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_results_are_bitwise_equal_for_any_key_slots(dtype: torch.dtype) -> None:
    """In a batch a sequence gets other blocks than alone, so its slots form other slices."""
    keys, values = torch.randn(2, N_KV_HEADS, 150, 80, dtype=dtype)
    q = torch.randn(1, N_KV_HEADS * 3, 80, dtype=dtype)
    attention = kernel(dtype, 80, 3, 64)
    results = []
    for slices in (
        [slice(0, 150)],
        [slice(5, 6), slice(100, 249)],
        [slice(start, start + 15) for start in range(700, 0, -70)],
    ):
        kv = torch.full((2, N_KV_HEADS, N_SLOTS, 80), torch.nan, dtype=dtype)
        kv[0, :, slots_of(slices)], kv[1, :, slots_of(slices)] = keys, values
        results.append(run(attention, q, kv[0], kv[1], [slices]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("n_keys", [255, 256, 257, 512, 3001])
def test_long_sequences_are_bitwise_equal_for_any_thread_count(
    dtype: torch.dtype, n_keys: int
) -> None:
    """Threads split the keys of a sequence.

    The scores of one key are so large that splits without this key have weight 0.
    """
    keys, values = torch.randn(2, N_KV_HEADS, n_keys, 16, dtype=dtype)
    keys[:, n_keys // 2] *= 40
    q = torch.randn(2, N_KV_HEADS * 3, 16, dtype=dtype)
    half = n_keys // 3
    results = []
    for slices in ([slice(9, 9 + n_keys)], [slice(4000, 4000 + half), slice(7, 7 + n_keys - half)]):
        k, v = torch.full((2, N_KV_HEADS, 8000, 16), torch.nan, dtype=dtype)
        k[:, slots_of(slices)], v[:, slots_of(slices)] = keys, values
        both = [slices, [slice(slices[0].start, slices[0].start + 40)]]
        expected = by_definition(q, k, v, both)
        for n_threads in (1, 2, 3):
            torch.set_num_threads(n_threads)
            o = run(kernel(dtype, 16, 3, 64), q, k, v, both)
            torch.testing.assert_close(o.double(), expected, rtol=0, atol=TOLERANCE[dtype])
            results.append(o[0].clone())
    assert all(torch.equal(o, results[0]) for o in results)


def test_work_counters_are_zero_after_a_call() -> None:
    k = torch.randn(1, 900, 16)
    q = torch.randn(2, 3, 16)
    batch = DecodeBatch.of({0: (0, [slice(0, 900)]), 1: (0, [slice(0, 257)])})
    kernel(torch.float32, 16, 3, 64)(q, k, k, batch, torch.empty_like(q))
    assert not batch.taken.any() and not batch.done.any()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_large_scores_do_not_overflow(dtype: torch.dtype) -> None:
    """Inputs are integers, so that scores up to 10^4 are exact."""
    k = torch.randint(-50, 51, (N_KV_HEADS, 200, 4)).to(dtype)
    v = torch.randn(N_KV_HEADS, 200, 4, dtype=dtype)
    q = torch.randint(-100, 101, (1, N_KV_HEADS * 3, 4)).to(dtype)
    q[:, 0], k[0, 0], k[0, 1] = 100, 50, -50
    o = run(kernel(dtype, 4, 3, 64), q, k, v, [[slice(0, 200)]])
    expected = by_definition(q, k, v, [[slice(0, 200)]])
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_tiny_softmax_weights_are_accurate_to_2_eps(dtype: torch.dtype) -> None:
    """For two keys with scores 0 and x and values 0 and 1 the result is exp(x) / (1 + exp(x))."""
    least = torch.finfo(dtype).tiny
    x = -torch.linspace(0, 1.05, 9999, dtype=dtype) * -torch.tensor(least, dtype=dtype).log()
    x = torch.cat((x, torch.tensor([-torch.inf], dtype=dtype)))
    k = torch.stack((torch.zeros_like(x), x), dim=1).view(1, -1, 1)
    v = torch.tensor([0, 1], dtype=dtype).repeat(len(x)).view(1, -1, 1)
    pairs = [[slice(2 * i, 2 * i + 2)] for i in range(len(x))]
    o = run(kernel(dtype, 1, 1, 64), torch.ones(len(x), 1, 1, dtype=dtype), k, v, pairs)
    precise = x.double()
    expected = precise.exp() / (1 + precise.exp())
    rtol = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(o.flatten().double(), expected, rtol=rtol, atol=2 * least)
    assert o[-1] == 0


def test_nan_key_affects_only_its_own_sequence_and_kv_head() -> None:
    k, v = make_cache(torch.float32, 8)
    q = make_queries(torch.float32, 3, 8)
    attention = kernel(torch.float32, 8, 3, 64)
    before = run(attention, q, k, v, SEQUENCES)
    k[1, 100] = torch.nan  # of the second sequence
    spoiled = torch.zeros(before.shape[:2], dtype=torch.bool)
    spoiled[1, 3:] = True
    after = run(attention, q, k, v, SEQUENCES)
    assert after[spoiled].isnan().all() and torch.equal(after[~spoiled], before[~spoiled])


@pytest.mark.parametrize("n_keys", [1, 15, 17])
def test_nothing_after_the_cache_is_read(n_keys: int) -> None:
    """The cache ends where memory ends: a read after it kills the process."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + page), page, 0) == 0
    k = torch.frombuffer(memory, dtype=torch.float32, count=page // 4).view(1, -1, 16)
    k.normal_()
    q = torch.randn(1, 3, 16)
    own = [[slice(k.shape[1] - n_keys, k.shape[1])]]
    o = run(kernel(torch.float32, 16, 3, 64), q, k, k, own)
    torch.testing.assert_close(o.double(), by_definition(q, k, k, own), rtol=0, atol=1e-5)
