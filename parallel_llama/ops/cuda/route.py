"""The experts of each token, and the rows of each expert; torch takes two dozen launches."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.ops.cuda.launch import await_inputs, launch, tile, warps
from parallel_llama.ops.cuda.linear import TYPES, load_row, source_of
from parallel_llama.ops.cuda.sort_key import sort_key
from parallel_llama.ops.dispatch import Dispatch
from parallel_llama.ops.part_sums import Product

MAX_PAIRS = 4096  # limited, since each pair is compared with all others

_TILE = 64  # pairs per program, and per iteration


def route(
    scores: Product, n_active: int, bias: Tensor | None = None, *, normed: bool
) -> tuple[Tensor, Tensor]:
    """`TorchOps.route` from the router's scores; the routing weights are in float32.

    Shapes: scores [T, n_experts], bias [n_experts] -> routing_weights [T, n_active], experts
        [T, n_active].
    """
    assert bias is None or bias.is_contiguous()
    (values, sum_bias, stride, n_parts), (n, n_experts) = source_of(scores), scores.shape
    assert values.stride(-1) == 1 and n_active <= n_experts
    routing_weights = values.new_empty(n, n_active, dtype=torch.float32)
    experts = values.new_empty(n, n_active, dtype=torch.int64)
    launch(
        _route, (n,), values, sum_bias, bias, routing_weights, experts, n, stride, n_experts,
        DTYPE=TYPES[scores.dtype], N_PARTS=n_parts, N_ACTIVE=n_active, NORMED=normed,
        EXPERTS=tile(n_experts), PLACES=tile(n_active), num_warps=warps(n_experts),
    )  # fmt: skip
    return routing_weights, experts


def expert_dispatch(experts: Tensor, local_experts: range) -> tuple[Dispatch, Dispatch]:
    """`TorchOps.expert_dispatch` for up to MAX_PAIRS pairs. Shapes: experts [T, n_active]."""
    n, n_active = experts.numel(), experts.shape[1]
    assert experts.is_contiguous() and n <= MAX_PAIRS
    tokens, order, pairs = experts.new_empty(3, n)
    starts = experts.new_empty(len(local_experts) + 1)
    grid = (triton.cdiv(n + len(starts), _TILE),)
    launch(
        _expert_dispatch, grid, experts, tokens, order, pairs, starts, n, n_active,
        local_experts.start, len(local_experts), TILE=_TILE,
    )  # fmt: skip
    max_rows = len(experts)
    return Dispatch(tokens, order, starts, max_rows), Dispatch(order, pairs, starts, max_rows)


@triton.jit(do_not_specialize=["n"])
def _route(
    scores, sum_bias, bias, routing_weights, experts, n, stride, n_experts,
    DTYPE: tl.constexpr, N_PARTS: tl.constexpr, N_ACTIVE: tl.constexpr, NORMED: tl.constexpr,
    EXPERTS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    await_inputs()
    row = tl.program_id(0).to(tl.int64)
    numbers, places = tl.arange(0, EXPERTS), tl.arange(0, PLACES)
    is_expert = numbers < n_experts
    own = load_row(scores, sum_bias, row, n, stride, numbers, is_expert, N_PARTS, DTYPE)
    own = tl.where(is_expert, own, -float("inf"))
    if bias is not None:
        own += tl.load(bias + numbers, numbers < n_experts, 0)
    weights = tl.exp(own - tl.max(own, 0))
    weights = tl.div_rn(weights, tl.zeros_like(weights) + tl.sum(weights, 0))
    left = tl.where(numbers < n_experts, sort_key(own, numbers), -1)
    best, kept = tl.zeros((PLACES,), tl.int64), tl.zeros((PLACES,), tl.float32)
    for place in tl.static_range(N_ACTIVE):
        first = tl.max(left, 0)
        is_first = left == first
        best = tl.where(places == place, tl.sum(tl.where(is_first, numbers, 0), 0), best)
        kept = tl.where(places == place, tl.sum(tl.where(is_first, weights, 0), 0), kept)
        left = tl.where(is_first, -1, left)
    if NORMED:
        kept = tl.div_rn(kept, tl.zeros_like(kept) + tl.sum(kept, 0))
    at = row * N_ACTIVE + places
    tl.store(experts + at, best, places < N_ACTIVE)
    tl.store(routing_weights + at, kept, places < N_ACTIVE)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["order", "pairs"])
def _expert_dispatch(
    experts, tokens, order, pairs, starts, n, n_active, first_expert, n_experts, TILE: tl.constexpr
):
    """The index of a pair is the number of pairs with a smaller sort key.

    The start of an expert is the index of an imaginary pair before all its pairs.
    """
    await_inputs()
    items = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_pair, expert = items < n, items - n
    own = _keys(experts, items, n, first_expert, n_experts)
    own = tl.where(is_pair, own, expert.to(tl.int64) * n)
    place = tl.zeros((TILE,), tl.int64)
    for start in range(0, n, TILE):
        others = start + tl.arange(0, TILE)
        keys = _keys(experts, others, n, first_expert, n_experts)
        is_before = (keys[None, :] < own[:, None]) & (others < n)[None, :]
        place += tl.sum(is_before.to(tl.int32), 1)
    tl.store(tokens + place, items // n_active, is_pair)
    tl.store(order + place, place, is_pair)
    tl.store(pairs + place, items, is_pair)
    tl.store(starts + expert, place, (expert >= 0) & (expert <= n_experts))


@triton.jit
def _keys(experts, pairs, n, first_expert, n_experts):
    """Sort keys: this rank's experts first, then by expert, then by pair."""
    own = tl.load(experts + pairs, pairs < n, 0) - first_expert
    return tl.where((own >= 0) & (own < n_experts), own, n_experts) * n + pairs
