"""Every operator of every backend gives what its definition says.

Without a GPU the kernels in Triton run in its interpreter, which has no products in bfloat16.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from math import pi, sqrt

import pytest
import torch
from torch import Tensor

from parallel_llama.ops import (
    Dispatch,
    HeadMap,
    HeadNorms,
    Queries,
    QueryRange,
    SamplingKeys,
    Scores,
    TorchOps,
    choose_ops,
    kv_rows,
)
from parallel_llama.ops.gumbel import gumbel
from parallel_llama.plan import HeadRun

HEAD_DIM, HEADS_PER_KV, N_KV_HEADS, N_SLOTS = 16, 3, 2, 64
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SCORES = [Scores(), Scores(scale=0.7), Scores(scale=0.7, soft_cap=2.0), Scores(soft_cap=1.5)]
CACHES = [None, torch.bfloat16, torch.int8, torch.float8_e4m3fn]  # None: the model's own dtype
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

Backend = tuple[TorchOps, torch.dtype, torch.device]


def backends() -> Iterator[Backend]:
    """torch's operators and the fastest operators, for every dtype on every device."""
    for device in map(torch.device, DEVICES):
        for dtype in TOLERANCE:
            if dtype != torch.float16:
                yield TorchOps(), dtype, device
            best = choose_ops(dtype, device, HEAD_DIM, {HEADS_PER_KV})
            if type(best) is not TorchOps:
                yield best, dtype, device
    if find_spec("triton") is not None and "cuda" not in DEVICES:
        from parallel_llama.ops.cuda_ops import CUDAOps

        yield CUDAOps(), torch.float32, torch.device("cpu")
        yield CUDAOps(), torch.float16, torch.device("cpu")


def name_of(backend: Backend) -> str:
    return f"{type(backend[0]).__name__}-{backend[1]}-{backend[2]}"


@pytest.fixture(params=backends(), ids=name_of)
def backend(request: pytest.FixtureRequest) -> Backend:
    torch.manual_seed(0)
    ops, dtype, device = request.param
    ops.compile()
    return ops, dtype, device


def with_scores(backend: Backend, scores: Scores) -> TorchOps:
    """The same operators with another score function."""
    ops, dtype, device = backend
    best = choose_ops(dtype, device, HEAD_DIM, {HEADS_PER_KV}, scores)
    return best if type(ops) is type(best) else type(ops)(scores)


def check(ours: Tensor, expected: Tensor) -> None:
    """`expected` is in float64."""
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("n_rows", "has_bias"), [(0, True), (1, False), (1, True), (7, True), (40, False), (40, True)]
)
def test_linear(backend, n_rows, has_bias):
    ops, dtype, device = backend
    x, weight, bias = (
        torch.randn(shape, dtype=dtype, device=device) for shape in ((n_rows, 37), (21, 37), (21,))
    )
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    check(ops.linear(x, weight, bias if has_bias else None), expected)


@pytest.mark.parametrize(("n_rows", "rank"), [(1, 1), (7, 3), (40, 16)])
def test_low_rank(backend, n_rows, rank):
    ops, dtype, device = backend
    x, a, b = (
        torch.randn(shape, dtype=dtype, device=device)
        for shape in ((n_rows, 37), (rank, 37), (21, rank))
    )
    check(ops.low_rank(x, a, b), (x.double() @ a.double().T).to(dtype).double() @ b.double().T)


@pytest.mark.parametrize("counts", [[3, 0, 1], [0, 0, 0], [40, 2, 7]])
def test_routed_linear(backend, counts):
    """Rows of x are used several times, and some rows of y have no weight."""
    ops, dtype, device = backend
    x = torch.randn(9, 37, dtype=dtype, device=device)
    weights = [torch.randn(21, 37, dtype=dtype, device=device) for _ in counts]
    n_given, n_rows = sum(counts), sum(counts) + 2
    sources = torch.randint(0, 9, (n_rows,), device=device)
    targets = torch.randperm(n_rows, device=device)
    starts = torch.tensor([0, *counts], device=device).cumsum(0)
    expected = torch.zeros(n_rows, 21, dtype=torch.float64, device=device)
    chosen = [weight for weight, count in zip(weights, counts, strict=True) for _ in range(count)]
    for i, weight in enumerate(chosen):
        expected[targets[i]] = weight.double() @ x[sources[i]].double()
    dispatch = Dispatch(sources, targets, starts, max_rows=n_given)
    check(ops.routed_linear(x, weights, dispatch), expected)


@pytest.mark.parametrize("own", [range(6), range(2, 5), range(3, 3)], ids=str)
@pytest.mark.parametrize("n_tokens", [0, 1, 3, 50])
def test_expert_dispatch(backend, n_tokens, own):
    """The tokens of each expert in order, and a row for each pair; pairs of other ranks last."""
    ops, _, device = backend
    experts = torch.rand(n_tokens, 6, device=device).topk(2).indices
    to_experts, back = ops.expert_dispatch(experts, own)
    pairs = [
        [pair for pair, expert in enumerate(experts.flatten().tolist()) if expert == each]
        for each in own
    ]
    for number, (start, stop) in enumerate(zip(*back.bounds(), strict=True)):
        assert back.targets[start:stop].tolist() == pairs[number]
        assert to_experts.sources[start:stop].tolist() == [pair // 2 for pair in pairs[number]]
        assert torch.equal(to_experts.targets[start:stop], back.sources[start:stop])
    for dispatch in (to_experts, back):
        assert dispatch.starts.tolist() == [sum(map(len, pairs[:n])) for n in range(len(own) + 1)]
        assert sorted(dispatch.targets.tolist()) == list(range(2 * n_tokens))
        assert dispatch.max_rows >= max(map(len, pairs), default=0)


@pytest.mark.parametrize("n_tokens", [0, 1, 9])
def test_biases_of_experts(backend, n_tokens):
    """Rows of other ranks' experts, the last ones, are not changed."""
    ops, dtype, device = backend
    experts = torch.rand(n_tokens, 6, device=device).topk(2).indices
    to_experts, _ = ops.expert_dispatch(experts, range(2, 5))
    y, bias = (torch.randn(n, 37, device=device).to(dtype) for n in (2 * n_tokens, 3))
    starts, expected = to_experts.starts.tolist(), y.double()
    for number in range(3):
        expected[starts[number] : starts[number + 1]] += bias[number].double()
    check(ops.add_expert_bias_(y, bias, to_experts), expected)


def test_clamped_swiglu(backend):
    """NaN stays NaN, in the gate and in the other half."""
    ops, dtype, device = backend
    x = (torch.randn(7, 2 * 37, device=device) * 3).to(dtype)
    gate, up = x.double().chunk(2, -1)
    gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
    expected = (up + 1) * gate / (1 + (-0.7 * gate).exp())
    check(ops.clamped_swiglu(x.clone(), 0.7, 1.5), expected)
    x[0, 5] = x[1, 40] = torch.nan
    y = ops.clamped_swiglu(x, 0.7, 1.5)
    assert y[0, 5].isnan() and y[1, 3].isnan() and y.isnan().sum() == 2


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("n_experts", "n_active"), [(1, 1), (4, 2), (7, 7), (130, 8)])
def test_route(backend, n_experts, n_active, normed):
    """The router is a unit matrix, so that its scores are x itself."""
    ops, dtype, device = backend
    x = torch.stack([torch.randperm(n_experts, device=device) for _ in range(3)]).to(dtype) / 16
    routing_weights, experts = ops.route(
        x, torch.eye(n_experts, dtype=dtype, device=device), n_active, normed=normed
    )
    expected, order = x.double().softmax(-1).sort(descending=True)
    expected = expected[:, :n_active]
    assert torch.equal(experts, order[:, :n_active])
    check(routing_weights, expected / expected.sum(-1, keepdim=True) if normed else expected)


def test_router_bias_affects_choice_and_weights(backend):
    ops, dtype, device = backend
    x, wide = (
        torch.zeros(2, 4, dtype=dtype, device=device),
        torch.promote_types(dtype, torch.float32),
    )
    bias = torch.tensor([0.25, -1, 2, 0.5], dtype=wide, device=device)
    gate = torch.eye(4, dtype=dtype, device=device)
    routing_weights, experts = ops.route(x, gate, 2, bias, normed=True)
    assert experts.tolist() == [[2, 3]] * 2
    check(routing_weights, bias.double()[[2, 3]].softmax(-1).expand(2, -1))


@pytest.mark.parametrize("tokens", [[], [7], [9, 2, 28, 27, 7, 0, 2**40, -(2**40)]], ids=len)
@pytest.mark.parametrize("n_rows", [0, 21])
def test_lookup(backend, tokens, n_rows):
    """The weight starts at token 7; rows of tokens outside the weight are zeros."""
    ops, dtype, device = backend
    for stored in {dtype, *([torch.bfloat16] if dtype == torch.float32 else [])}:
        weight = torch.randn(n_rows, 1103, device=device).to(stored)
        rows = ops.lookup(torch.tensor(tokens, dtype=torch.int64, device=device), weight, 7, dtype)
        assert rows.shape == (len(tokens), 1103) and rows.dtype == dtype
        for row, token in zip(rows, tokens, strict=True):
            is_there = 7 <= token < 7 + n_rows
            assert torch.equal(row, weight[token - 7].to(dtype) if is_there else 0 * row)


@pytest.mark.parametrize("n_columns", [1, 16, 101, 70_000])
@pytest.mark.parametrize("n_rows", [0, 5])
def test_largest_returns_first_of_equal_maxima(backend, n_rows, n_columns):
    ops, dtype, device = backend
    x = torch.randint(-40, 40, (n_rows, n_columns), device=device).to(dtype)
    expected = [[max(row), row.index(max(row)) + 9] for row in x.tolist()]
    assert ops.largest(x, 9).tolist() == expected


@pytest.mark.parametrize(("n_rows", "n_columns"), [(0, 101), (1, 1), (5, 101), (5, 3000)])
def test_draw(backend, n_rows, n_columns):
    """The first row is greedy and has equal logits; the first of the largest logits wins."""
    ops, dtype, device = backend
    x = torch.randn(n_rows, n_columns, device=device).to(dtype)
    x[:1] = x[:1].round()
    keys = torch.arange(n_rows, device=device)
    temperatures = 0.5 * torch.arange(n_rows, dtype=torch.float64, device=device)
    drawn = ops.draw(x, SamplingKeys(keys, temperatures), 200)
    assert drawn.shape == (n_rows, 2)
    noise = gumbel(keys, torch.arange(200, 200 + n_columns, device=device))
    for row, (logits, added, (score, token)) in enumerate(zip(x, noise, drawn, strict=True)):
        scores = logits.double() / temperatures[row] + added if row else logits.double()
        assert token == 200 + (scores == scores.max()).nonzero()[0, 0]
        torch.testing.assert_close(score, scores.max(), rtol=1e-14, atol=1e-14)


def test_largest_reports_nan_and_inf(backend):
    ops, dtype, device = backend
    x = torch.zeros(5, 101, dtype=dtype, device=device)
    x[0], x[1, 60], x[2, 3], x[3, 100] = -torch.inf, torch.nan, torch.inf, -torch.inf
    x[4, 2], x[4, 90] = torch.inf, torch.nan
    values, places = ops.largest(x, 9).T.tolist()
    assert [str(value) for value in values] == ["-inf", "nan", "inf", "0.0", "nan"]
    assert (places[0], places[2], places[3]) == (9, 12, 9)
    assert ops.largest(x[:, :0], 9).tolist() == [[-torch.inf, 9]] * 5


@pytest.mark.parametrize("n_columns", [37, 1030])
def test_weighted_sum(backend, n_columns):
    ops, dtype, device = backend
    parts = torch.randn(5 * 3, n_columns, dtype=dtype, device=device)
    routing_weights = torch.rand(5, 3, device=device).to(torch.promote_types(dtype, torch.float32))
    expected = (parts.double().view(5, 3, -1) * routing_weights.double()[..., None]).sum(1)
    check(ops.weighted_sum(parts, routing_weights), expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("n_columns", [37, 1030])
def test_add_gated_scales_each_row_by_the_sigmoid_of_its_score(backend, n_columns):
    """Far below 0, exp(-score) overflows, and the row stays as it is."""
    ops, dtype, device = backend
    y, x = torch.randn(2, 5, n_columns, dtype=dtype, device=device)
    scores = torch.tensor([[-200.0], [-1.5], [0.0], [3.0], [200.0]], dtype=dtype, device=device)
    expected = y.double() + scores.double().sigmoid() * x.double()
    assert ops.add_gated_(y, x, scores) is y
    check(y, expected)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(0, 96), (1, 2), (5, 130), (2, 3, 48)], ids=str)
def test_rms_norm_sums_squares_in_float32_and_keeps_its_input(backend, shape, offset):
    ops, dtype, device = backend
    x = (300 * torch.randn(shape, device=device)).to(dtype)
    weight, before = torch.randn(shape[-1], device=device).to(dtype), x.clone()
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    check(ops.rms_norm(x, weight, 1e-5, offset), expected * (weight.double() + offset))
    assert torch.equal(x, before)


def test_in_place_rms_norm_writes_only_its_heads(backend):
    ops, dtype, device = backend
    around = torch.full((3, 9, 40), 7.0, dtype=dtype, device=device)
    heads = around[:, 2:6].normal_()
    weight, wide = torch.randn(40, device=device).to(dtype), heads.double().clone()
    ops.rms_norm_(heads, weight, 1e-5)
    rms = (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    check(heads, wide / rms * weight.double())
    assert (around[:, :2] == 7).all() and (around[:, 6:] == 7).all()


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("n_rows", [0, 1, 5])
def test_add_rms_norm_is_bitwise_equal_to_add_then_rms_norm(backend, n_rows, offset):
    ops, dtype, device = backend
    x, y = torch.randn(2, n_rows, 96, device=device).to(dtype)
    weight, expected, old_y = torch.randn(96, device=device).to(dtype), x + y, y.clone()
    normed = ops.add_rms_norm(x, y, weight, 1e-5, offset)
    assert torch.equal(x, expected) and torch.equal(y, old_y)
    assert torch.equal(normed, ops.rms_norm(expected, weight, 1e-5, offset))
    post_weight = torch.randn(96, device=device).to(dtype)
    expected = x + ops.rms_norm(y, post_weight, 1e-5, offset)
    normed = ops.add_rms_norm(x, y, weight, 1e-5, offset, post_weight)
    assert torch.equal(x, expected) and torch.equal(y, old_y)
    assert torch.equal(normed, ops.rms_norm(expected, weight, 1e-5, offset))


@pytest.mark.filterwarnings("ignore:.*encountered in multiply")
def test_rms_norm_of_overflowing_row_is_nan(backend):
    """Regression: the row became zeros, so the model gave token 0 and exit code 0."""
    ops, dtype, device = backend
    x = torch.randn(3, 96, device=device).to(dtype)
    x[1, 7] = {torch.float64: 1e308, torch.float16: torch.inf}.get(dtype, 1e38)
    y = ops.rms_norm(x, torch.ones(96, dtype=dtype, device=device), 1e-5)
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


@pytest.mark.parametrize("shape", [(0, 58), (1, 2), (3, 58), (2, 2200)], ids=str)
def test_activations(backend, shape):
    """silu, gelu, its tanh approximation and squared ReLU, also for inputs that are large or 0."""
    ops, dtype, device = backend
    x = (4 * torch.randn(shape, device=device)).to(dtype)
    x.view(-1)[:3] = torch.tensor([200.0, -200.0, 0.0], device=device)[: x.numel()]
    gate, up = x.double().chunk(2, dim=-1)
    cubic = sqrt(2 / pi) * (gate + 0.044715 * gate**3)
    check(ops.silu_and_mul(x.clone()), gate * gate.sigmoid() * up)
    check(ops.gelu_and_mul(x.clone(), is_tanh=False), gate * (1 + (gate / sqrt(2)).erf()) / 2 * up)
    check(ops.gelu_and_mul(x.clone(), is_tanh=True), gate * (1 + cubic.tanh()) / 2 * up)
    check(ops.relu2(x), x.double().clamp(min=0).square())


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_rotate_and_store(backend, cache):
    """Pair i of a head is its values 2 i and 2 i + 1; nothing else is written."""
    ops, dtype, device = backend
    n, n_heads, stored = 4, N_KV_HEADS * HEADS_PER_KV, cache or dtype
    n_all = n_heads + 2 * N_KV_HEADS
    around = torch.full((n + 1, n_all, HEAD_DIM), 7.0, dtype=dtype, device=device)
    qkv = around[:n].normal_()
    angles = torch.randn(n, 1, HEAD_DIM // 2, dtype=torch.float64, device=device)
    wide = torch.promote_types(dtype, torch.float32)
    rotations = torch.polar(torch.ones_like(angles), angles).to(wide.to_complex())
    slots = torch.tensor([5, 60, 0, 31], device=device)
    size = (2, N_KV_HEADS, N_SLOTS, kv_rows.row_width(HEAD_DIM, stored) * stored.itemsize)
    before = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
    after = before.clone()
    k, v = after.view(stored)
    pairs, turns = qkv.double().unflatten(-1, (-1, 2)), rotations.to(torch.complex128)
    cos, sin = turns.real, turns.imag
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    values = qkv[:, -N_KV_HEADS:].transpose(0, 1).clone()
    ops.rotate_and_store(qkv, rotations, slots, k, v)
    check(qkv[:, :n_heads], turned[:, :n_heads])
    assert (around[n:] == 7).all()
    steps = {torch.bfloat16: 3e-2, torch.int8: 3e-2, torch.float8_e4m3fn: 0.3}
    step = max(TOLERANCE[dtype], steps.get(stored, 0))
    keys = turned[:, n_heads:-N_KV_HEADS].transpose(0, 1)
    for cached, expected in ((k, keys), (v, values.double())):
        unpacked = kv_rows.unpack(kv_rows.take(cached, slots), torch.float64)
        torch.testing.assert_close(unpacked, expected, rtol=step, atol=step)
    if stored != torch.bfloat16:  # Triton's interpreter truncates bfloat16
        # Values are not rotated, so nothing is rounded before they are packed.
        packed = kv_rows.pack(values, stored).view(torch.uint8)
        assert torch.equal(kv_rows.take(v, slots).view(torch.uint8), packed)
    others = [slot for slot in range(N_SLOTS) if slot not in slots.tolist()]
    assert torch.equal(after[:, :, others], before[:, :, others])


@pytest.mark.parametrize("cache", CACHES[:2], ids=str)
def test_rotate_and_store_without_rotations(backend, cache):
    """For layers without rotary embeddings: queries are unchanged, keys are stored unrotated."""
    ops, dtype, device = backend
    n, n_heads, stored = 4, N_KV_HEADS * HEADS_PER_KV, cache or dtype
    qkv = torch.randn(n, n_heads + 2 * N_KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
    before, slots = qkv.clone(), torch.tensor([5, 60, 0, 31], device=device)
    k, v = torch.zeros(2, N_KV_HEADS, N_SLOTS, HEAD_DIM, dtype=stored, device=device)
    ops.rotate_and_store(qkv, None, slots, k, v)
    assert torch.equal(qkv[:, :n_heads], before[:, :n_heads])
    first_value = n_heads + N_KV_HEADS
    for cached, heads in ((k, before[:, n_heads:first_value]), (v, before[:, first_value:])):
        step = 3e-2 if stored == torch.bfloat16 else 0  # Triton's interpreter truncates bfloat16
        kept = cached[:, slots].transpose(0, 1)
        torch.testing.assert_close(kept.to(dtype), heads, rtol=step, atol=step)


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_queries_and_keys_are_normed_before_they_are_rotated(backend, rotates, offset):
    ops, dtype, device = backend
    n, n_heads = 4, N_KV_HEADS * HEADS_PER_KV
    qkv = torch.randn(n, n_heads + 2 * N_KV_HEADS, HEAD_DIM, device=device).to(dtype)
    angles = torch.randn(n, 1, HEAD_DIM // 2, dtype=torch.float64, device=device)
    wide = torch.promote_types(dtype, torch.float32)
    rotations = torch.polar(torch.ones_like(angles), angles).to(wide.to_complex())
    turns, slots = rotations if rotates else None, torch.tensor([5, 60, 0, 31], device=device)
    norms = HeadNorms(*torch.randn(2, HEAD_DIM, device=device).to(dtype), 0.1, offset)
    first_k, first_v = n_heads, n_heads + N_KV_HEADS
    rms = (qkv.double().square().mean(-1, keepdim=True) + norms.eps).sqrt()
    normed = qkv.double() / rms
    normed[:, :first_k] *= norms.q.double() + offset
    normed[:, first_k:first_v] *= norms.k.double() + offset
    normed[:, first_v:] = qkv[:, first_v:].double()
    expected = torch.zeros(2, N_KV_HEADS, N_SLOTS, HEAD_DIM, dtype=torch.float64, device=device)
    turns_of = None if turns is None else turns.to(torch.complex128)
    expected_q = TorchOps().rotate_and_store(normed, turns_of, slots, *expected)
    caches = torch.zeros_like(expected, dtype=dtype)
    check(ops.rotate_and_store(qkv, turns, slots, *caches, norms), expected_q)
    step = max(TOLERANCE[dtype], 3e-2 if dtype == torch.bfloat16 else 0)
    torch.testing.assert_close(caches.double(), expected, rtol=step, atol=step)


@pytest.mark.parametrize("n_heads", [0, 3])
def test_norms_across_heads(backend, n_heads):
    """This rank has some heads of ten, whose sums of squares are in columns 2 to 11."""
    ops, dtype, device = backend
    columns, first, n, eps = range(2, 12), 5, 4, 0.1
    around = torch.randn(n, 6, HEAD_DIM, device=device).to(dtype)
    x, before = around[:, 1 : 1 + n_heads], around.double().clone()
    weight = torch.randn(n_heads * HEAD_DIM, device=device).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    squares = torch.full((n, 13), 7.0, dtype=wide, device=device)
    ops.head_squares_(x, squares, columns, first)
    own = before[:, 1 : 1 + n_heads]
    check(squares[:, first : first + n_heads], own.square().sum(-1))
    assert not squares[:, 2:first].any() and not squares[:, first + n_heads : 12].any()
    assert (squares[:, :2] == 7).all() and (squares[:, 12:] == 7).all()
    squares[:, 2:first] = 3.0  # of other ranks
    total = squares[:, 2:12].double().sum(1)
    ops.norm_heads_(x, squares, columns, weight, eps)
    expected = own / (total / (10 * HEAD_DIM) + eps).sqrt()[:, None, None]
    check(x, expected * weight.double().view(n_heads, HEAD_DIM))
    assert torch.equal(around[:, 1 + n_heads :].double(), before[:, 1 + n_heads :])


def in_pairs(*windows: int | None) -> list[tuple[torch.dtype | None, Scores, int | None]]:
    """Every cache with every window, and every window with every kind of scores."""
    return [
        (cache, SCORES[(at + number) % len(SCORES)], window)
        for at, cache in enumerate(CACHES)
        for number, window in enumerate(windows)
    ]


def some_rows(
    dtype: torch.dtype, device: torch.device, cache: torch.dtype | None, n: int
) -> Tensor:
    """Keys or values in a cache, of sizes that differ from token to token."""
    sizes = torch.rand(N_KV_HEADS, n, 1, device=device) + 0.5
    x = (torch.randn(N_KV_HEADS, n, HEAD_DIM, device=device) * sizes).to(dtype)
    return kv_rows.pack(x, cache or dtype)


def by_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: list[int],
    scores: Scores,
    sinks: Tensor | None = None,
) -> Tensor:
    """One query [K * G, D] over some slots, one KV head at a time, in float64."""
    v = kv_rows.unpack(v, torch.float64)
    rows = []
    for number, products in enumerate(products_of(q, k, slots, scores)):
        if sinks is not None:  # one more score, without a value
            own = sinks.double().view(N_KV_HEADS, HEADS_PER_KV, 1)[number]
            weights = torch.cat((products, own), -1).softmax(-1)[:, :-1]
        else:
            weights = products.softmax(-1)
        rows.append(weights @ v[number, slots])
    return torch.cat(rows)


def log_sum_exp(q: Tensor, k: Tensor, slots: list[int], scores: Scores) -> Tensor:
    """The log-sum-exp of one query's scores. Shape: [K * G]."""
    return torch.cat([each.logsumexp(-1) for each in products_of(q, k, slots, scores)])


def products_of(q: Tensor, k: Tensor, slots: list[int], scores: Scores) -> Iterator[Tensor]:
    """The scores [G, len(slots)] of one query for each KV head, in float64."""
    q, k = q.double(), kv_rows.unpack(k, torch.float64)
    scale, cap = scores.scale or HEAD_DIM**-0.5, scores.soft_cap
    for number, head in enumerate(q.view(N_KV_HEADS, HEADS_PER_KV, HEAD_DIM)):
        products = head @ k[number, slots].T * scale
        yield products if cap is None else cap * (products / cap).tanh()


def attended(
    backend: Backend,
    scores: Scores,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Queries,
    sinks: Tensor | None = None,
) -> Tensor:
    """The result of attention, with -7 in rows without a query."""
    _, _, device = backend
    ops, out = with_scores(backend, scores), torch.full_like(q, -7.0)
    run = HeadRun(range(N_KV_HEADS * HEADS_PER_KV), range(N_KV_HEADS))
    ops.attention(q, k, v, ops.plan(queries, device), HeadMap.of([run], device), out, sinks)
    return out


@pytest.mark.parametrize(("cache", "window"), [(None, None), (None, 3), (torch.int8, 30)], ids=str)
def test_attention_with_sinks(
    backend: Backend, cache: torch.dtype | None, window: int | None
) -> None:
    """Also with a sink far above and far below all scores, whose weights must not overflow."""
    _, dtype, device = backend
    k, v = (some_rows(dtype, device, cache, 160) for _ in range(2))
    q = torch.randn(20, N_KV_HEADS * HEADS_PER_KV, HEAD_DIM, device=device).to(dtype)
    sinks = torch.tensor([0.3, -800.0, 4.0, 800.0, -2.0, 1.0], device=device)
    sinks, scores = sinks.to(torch.promote_types(dtype, torch.float32)), Scores(None, None, True)
    slots = [155, *range(1, 152)]
    for start, n, is_decoded in ((0, 17, False), (131, 17, False), (131, 3, True), (0, 1, True)):
        own = QueryRange(2, range(start, start + n), 0, slots[: start + n], is_decoded)
        out = attended(backend, scores, q, k, v, Queries([own], 1, window), sinks)
        for row in range(n):
            stop = start + row + 1
            seen = slots[max(stop - (window or stop), 0) : stop]
            check(out[2 + row], by_definition(q[2 + row], k, v, seen, scores, sinks))


@pytest.mark.parametrize(("cache", "scores", "window"), in_pairs(None, 3, 30), ids=str)
def test_attention_of_prefill_chunks(
    backend: Backend, scores: Scores, cache: torch.dtype | None, window: int | None
) -> None:
    """Chunks at the start of a prompt and after it; other rows are not changed."""
    _, dtype, device = backend
    k, v = (some_rows(dtype, device, cache, N_SLOTS) for _ in range(2))
    q = torch.randn(20, N_KV_HEADS * HEADS_PER_KV, HEAD_DIM, device=device).to(dtype)
    slots = [60, *range(1, 52)]
    for start, n in ((0, 17), (40, 11), (9, 1)):
        own = QueryRange(2, range(start, start + n), 0, slots[: start + n], False)
        out = attended(backend, scores, q, k, v, Queries([own], 1, window))
        for row in range(n):
            stop = start + row + 1
            seen = slots[max(stop - (window or stop), 0) : stop]
            check(out[2 + row], by_definition(q[2 + row], k, v, seen, scores))
        assert (out[:2] == -7).all() and (out[2 + n :] == -7).all()


@pytest.mark.parametrize(("cache", "scores", "window"), in_pairs(None, 3), ids=str)
def test_attention_of_decoded_queries(
    backend: Backend, scores: Scores, cache: torch.dtype | None, window: int | None
) -> None:
    """Queries with keys in one range of slots or several; other rows are not changed."""
    _, dtype, device = backend
    k, v = (some_rows(dtype, device, cache, N_SLOTS) for _ in range(2))
    q = torch.randn(5, N_KV_HEADS * HEADS_PER_KV, HEAD_DIM, device=device).to(dtype)
    slots = {0: [3], 1: [*range(40, 64), *range(9)], 3: [*range(5, 30)]}
    ranges = [QueryRange(row, range(len(s) - 1, len(s)), 0, s, True) for row, s in slots.items()]
    ranges[-1] = ranges[-1]._replace(positions=range(23, 25))  # a token and a draft
    out = attended(backend, scores, q, k, v, Queries(ranges, 1, window))
    for row, own in (*slots.items(), (4, slots[3]), (3, slots[3][:-1])):
        if (row, own) != (3, slots[3]):
            check(out[row], by_definition(q[row], k, v, own[-(window or 99) :], scores))
    assert (out[2] == -7).all()


@pytest.mark.parametrize(("cache", "scores"), zip(CACHES, SCORES, strict=True), ids=str)
def test_partial_attention(backend: Backend, scores: Scores, cache: torch.dtype | None) -> None:
    """The keys are in one range of slots or in several."""
    _, dtype, device = backend
    ops = with_scores(backend, scores)
    k, v = (some_rows(dtype, device, cache, N_SLOTS) for _ in range(2))
    q = torch.randn(5, N_KV_HEADS * HEADS_PER_KV, HEAD_DIM, device=device).to(dtype)
    for slots in ([7], [1, 2, 3, 4, 5], [60, 61, 1, 2, 9]):
        own = QueryRange(0, range(4, 9), 0, slots + [-1] * (9 - len(slots)), False)
        (tile,) = Queries([own], 1).tiles(dtype, device)
        o, lse = ops.partial_attention(q, k, v, tile)
        for row in range(5):
            check(o[row], by_definition(q[row], k, v, slots, scores))
            check(lse[row].to(dtype), log_sum_exp(q[row], k, slots, scores))
