"""Estimates the bytes that each rank of a plan needs; finds the fewest ranks that fit. No torch."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import add, mul

from parallel_llama.cli.model import BLOCK_SIZE
from parallel_llama.cli.plan_request import PlanRequest
from parallel_llama.engine.drafts import draft_kv_bytes, shared_tables
from parallel_llama.errors import UsageError
from parallel_llama.families.model_args import kv_groups
from parallel_llama.memory import (
    adapter_bytes,
    bytes_passed_over,
    default_cache_bytes,
    head_bytes,
    kv_bytes_per_token,
    most_blocks,
    values_multiplied,
    values_of_stages,
    weight_bytes,
)
from parallel_llama.plan import Shard, ShardPlan, why_unrecorded
from parallel_llama.shares import plan_with_shares

# The default of --block-size.
BLOCK_TOKENS: int = BLOCK_SIZE.initial


@dataclass(frozen=True)
class KVEstimate:
    """Bytes of a rank's KV cache, including that of a draft model.

    Args:
        per_kv_group: bytes of a token in each KV group.
        per_sequence: bytes of a sequence of `max_seq_len` tokens.
        per_step: bytes that a decode step of the model reads for a sequence of that length.
        needed: bytes of all sequences, in whole blocks.
    """

    per_kv_group: tuple[int, ...]
    per_sequence: int
    per_step: int
    needed: int

    @classmethod
    def of(cls, request: PlanRequest, shard: Shard, draft_kv: Sequence[int]) -> "KVEstimate":
        """`draft_kv`: bytes of a token of the draft model in each KV group."""
        of_model = kv_bytes_per_token(request.args, shard, request.kv)
        per_kv_group = tuple(map(add, of_model, draft_kv))
        needed = request.cache_bytes(per_kv_group, shard.block_size(BLOCK_TOKENS))
        per_sequence = sum(map(mul, per_kv_group, request.tokens_each))
        seen = [
            min(request.max_seq_len, each.window or sys.maxsize) for each in kv_groups(request.args)
        ]
        return cls(per_kv_group, per_sequence, sum(map(mul, of_model, seen)), needed)


@dataclass(frozen=True)
class RankEstimate:
    """Bytes that one rank needs for its shard of a workload, and reads in a decode step.

    Args:
        weights: bytes of the model's weights that the rank holds.
        adapters: bytes of the adapters.
        draft_weights: bytes of the draft model's weights.
        read_weights: bytes of the weights that a decode step reads, including the head.
        read_head: bytes of the head's weights.
        read_kv: bytes of the KV cache that a decode step reads at the full context.
        layer_values: values of the layers' weights that a token is multiplied with.
        head_values: values of the head's weights.
        memory: bytes that the rank has; None if not known.
        bandwidth: bytes per second that the rank reads; None if not known.
    """

    shard: Shard
    weights: int
    adapters: int
    draft_weights: int
    read_weights: int
    read_head: int
    read_kv: int
    layer_values: int
    head_values: int
    kv: KVEstimate
    working: int
    memory: int | None
    bandwidth: int | None

    @property
    def kv_per_token(self) -> int:
        """Bytes of a token in all layers while it is inside all windows."""
        return sum(self.kv.per_kv_group)

    @property
    def all_weights(self) -> int:
        """Bytes of the weights of the model, the adapters and the draft model."""
        return self.weights + self.adapters + self.draft_weights

    @property
    def needed(self) -> int:
        return self.all_weights + self.kv.needed + self.working

    def step_s(self, *, is_full: bool) -> tuple[float, float] | None:
        """The shortest time of a decode step, bytes / bandwidth, with full or empty sequences.

        Returns: the time of the layers and that of the head.
        """
        if self.bandwidth is None:
            return None
        layer_bytes = self.read_weights - self.read_head + is_full * self.read_kv
        return layer_bytes / self.bandwidth, self.read_head / self.bandwidth


@dataclass(frozen=True)
class Estimate:
    """The memory that all ranks of a plan need and have."""

    request: PlanRequest
    plan: ShardPlan
    ranks: tuple[RankEstimate, ...]

    @property
    def weights(self) -> int:
        """Bytes of the model's weights on all ranks, including replicas."""
        return sum(rank.weights for rank in self.ranks)

    @property
    def one_rank_weights(self) -> int:
        """Bytes of the model's weights, without replicas."""
        alone = replace(self.request, tp_size=1, pp=1, memory=None, adapters=(), draft=None)
        return estimate(alone).weights

    @property
    def n_kv_heads(self) -> int:
        """KV heads of a layer on all ranks, including replicas; the mean over the layers."""
        held = sum(shard.n_local_kv_heads * len(shard.layers) for shard in self.plan.shards)
        return round(held / self.request.args.n_layers) // self.plan.kv_parts

    @property
    def kv_overhead(self) -> float:
        """Additional copies of KV heads, as a fraction of the KV heads."""
        return self.n_kv_heads / self.request.args.n_kv_heads - 1

    @property
    def block_size(self) -> int:
        """Tokens per block of the KV cache."""
        return self.plan.shards[0].block_size(BLOCK_TOKENS)

    @property
    def tokens_each(self) -> int:
        """Maximum tokens of a sequence in the first KV group, in whole blocks."""
        return self.block_size * self.request.blocks_each(self.block_size)

    @property
    def room_for_tokens(self) -> int | None:
        """Capacity in tokens of the first KV group on the tightest rank, None without `memory`."""
        block_size = self.block_size
        rooms = {
            (rank.kv.per_kv_group, rank.memory - rank.all_weights - rank.working)
            for rank in self.ranks
            if rank.memory is not None
        }
        sizes = partial(self.request.pools, block_size)
        n_blocks = (
            most_blocks(sizes, [block_size * n for n in per_kv_group], room)
            for per_kv_group, room in rooms
        )
        return min((block_size * n for n in n_blocks), default=None)

    @property
    def fits(self) -> bool | None:
        room = self.room_for_tokens
        return None if room is None else room >= self.request.batch * self.tokens_each

    @property
    def cache_bytes(self) -> int:
        """The --kv-cache-bytes that the workload needs."""
        return max(rank.kv.needed for rank in self.ranks)

    @property
    def default_rooms(self) -> list[int] | None:
        """Default bytes of each rank's KV cache.

        None if they depend on memory that is not known. Ranks on the CPU share the memory of their
        host; without `hosts`, all ranks are taken to be on one host.
        """
        if self.request.device == "cpu":
            hosts = self.request.hosts
            local_ranks = [range(len(self.ranks))] if hosts is None else hosts.ranks
            return [room for ranks in local_ranks for room in self._host_rooms(ranks)]
        memory = [rank.memory for rank in self.ranks if rank.memory is not None]
        if not memory:
            return None
        return [
            default_cache_bytes("cuda", n_bytes - rank.all_weights, rank.working, 1)
            for n_bytes, rank in zip(memory, self.ranks, strict=True)
        ]

    def _host_rooms(self, ranks: range) -> list[int]:
        """Default bytes of the KV cache of each rank of a host, on the CPU."""
        local = self.ranks[ranks.start : ranks.stop]
        memory = [rank.memory for rank in local if rank.memory is not None]
        taken = sum(rank.all_weights + rank.working for rank in local)
        free = sum(memory) - taken if memory else sys.maxsize
        return [default_cache_bytes("cpu", free, 0, len(local))] * len(local)

    @property
    def unrecorded(self) -> str | None:
        """Why decode steps run operator by operator; None if they are recorded."""
        return why_unrecorded(self.request.args, self.plan.kv_parts, self.request.device)

    @property
    def needs_cache_flag(self) -> bool:
        """Whether the workload needs --kv-cache-bytes, because the default is too small."""
        rooms = self.default_rooms or []
        return any(rank.kv.needed > room for rank, room in zip(self.ranks, rooms, strict=False))

    def tokens_per_s(self, *, is_full: bool) -> float | None:
        """The most tokens per second of each sequence that the memory bandwidth allows.

        All ranks of a stage wait for the slowest, and the stages run one after another; then all
        ranks multiply the output layer. None if the bandwidth of a rank is not known.
        """
        step_s = [rank.step_s(is_full=is_full) for rank in self.ranks]
        known = [each for each in step_s if each is not None]
        if len(known) < len(step_s):
            return None
        if len(self.plan.stages) == 1:
            return 1 / max(layers_s + head_s for layers_s, head_s in known)
        stages = (known[stage.ranks.start : stage.ranks.stop] for stage in self.plan.stages)
        in_stages_s = sum(max(layers_s for layers_s, _ in stage) for stage in stages)
        return 1 / (in_stages_s + max(head_s for _, head_s in known))

    @property
    def slowest(self) -> RankEstimate:
        """The rank with the longest decode step at the full context."""
        return max(self.ranks, key=lambda rank: sum(rank.step_s(is_full=True) or (0.0,)))

    @property
    def tightest(self) -> RankEstimate:
        """The rank with the least memory left, or the highest need if memory is not known."""
        return min(self.ranks, key=lambda rank: (rank.memory or 0) - rank.needed)


@dataclass(frozen=True)
class Comparison:
    """The estimates for a range of numbers of ranks.

    Args:
        memory: bytes of every rank; None if not known.
        refused: numbers of ranks without a plan, and why.
    """

    request: PlanRequest
    memory: int | None
    allowed: tuple[Estimate, ...]
    refused: dict[int, str]

    @property
    def smallest_that_fits(self) -> int | None:
        return next((planned.plan.tp_size for planned in self.allowed if planned.fits), None)

    @property
    def fits(self) -> bool | None:
        """Whether any number of ranks fits; None if memory is not known."""
        return None if self.memory is None else self.smallest_that_fits is not None


def estimate(request: PlanRequest) -> Estimate:
    """The requested plan, and the memory that it needs.

    Raises: UsageError if the model does not support the formats, there is no plan for `tp_size`
    ranks, or `memory` has another length.
    """
    tp_size, precision, memory = request.tp_size, request.precision, request.memory
    each = (memory,) * tp_size if isinstance(memory, int) else memory
    speeds = (
        request.speeds if request.speeds is not None and len(request.speeds) == tp_size else None
    )
    plan = plan_with_shares(
        request.args,
        tp_size,
        each,
        speeds,
        precision,
        request.kv,
        request.kv_split,
        exact=request.is_exact,
        device=request.device,
        max_seq_len=request.max_seq_len,
        step_tokens=request.step_tokens,
        pp=request.pp,
        from_gguf=request.from_gguf,
    )
    values = values_of_stages(request.args, precision, plan)
    drafts = _draft_bytes(request)
    kv: dict[tuple[int, range, tuple[int, ...]], KVEstimate] = {}  # ranks often have equal caches

    def rank(shard: Shard) -> RankEstimate:
        draft_weights, draft_kv = drafts[shard.rank]
        key = shard.n_local_kv_heads, shard.layers, draft_kv
        if key not in kv:
            kv[key] = KVEstimate.of(request, shard, draft_kv)
        own, held = values[shard.stage], kv[key]
        weights = weight_bytes(shard, own)
        return RankEstimate(
            shard,
            weights,
            sum(adapter_bytes(adapter, shard, precision) for adapter in request.adapters),
            draft_weights,
            weights - bytes_passed_over(request.args, request.batch, precision, shard, own),
            head_bytes(request.args, shard, precision),
            request.batch * held.per_step,
            *values_multiplied(request.args, shard, own),
            held,
            request.working(shard),
            _of_rank(memory, shard.rank),
            _of_rank(request.bandwidth, shard.rank),
        )

    return Estimate(request, plan, tuple(map(rank, plan.shards)))


def _draft_bytes(request: PlanRequest) -> list[tuple[int, tuple[int, ...]]]:
    """Bytes of the draft model on each rank: its weights, and a token in each KV group.

    Raises: UsageError if the draft model cannot run on the ranks of the request.
    """
    if (draft := request.draft_on_ranks) is None:
        return [(0, (0,) * len(kv_groups(request.args)))] * request.tp_size
    tables = shared_tables(request.args, draft.args)
    try:
        ranks = estimate(draft).ranks
    except UsageError as error:
        raise UsageError(f"draft model: {error}") from error
    return [
        (rank.weights, draft_kv_bytes(request.args, tables, rank.kv.per_kv_group)) for rank in ranks
    ]


def _of_rank(given: int | tuple[int | None, ...] | None, rank: int) -> int | None:
    """The value for a rank: the common one, or the rank's entry; None if there is no entry."""
    if isinstance(given, tuple):
        return given[rank] if rank < len(given) else None
    return given


def compare(request: PlanRequest, sizes: range) -> Comparison:
    """The plans for a range of numbers of ranks, which all have the same memory.

    Raises: UsageError if the model does not support the formats.
    """
    allowed: list[Estimate] = []
    refused: dict[int, str] = {}
    assert not isinstance(request.memory, tuple)
    request.precision  # noqa: B018, raises an error that does not depend on the ranks
    for tp_size in sizes:
        try:
            allowed.append(estimate(replace(request, tp_size=tp_size)))
        except UsageError as error:
            refused[tp_size] = str(error)
    return Comparison(request, request.memory, tuple(allowed), refused)


def fewest_that_fit(request: PlanRequest) -> tuple[Estimate, Estimate | None]:
    """The plan with the fewest ranks that fits, or the plan with the most ranks if none fits.

    Returns: that plan, and the plan with one rank fewer, which does not fit. A pipeline has at
        least as many ranks as stages.
    """
    fewer, planned = None, estimate(replace(request, tp_size=request.pp))
    # Not a bisection: with one more rank, a rank may hold one more KV head.
    for tp_size in range(request.pp + 1, request.most_ranks + 1):
        if planned.fits:
            break
        fewer, planned = planned, estimate(replace(request, tp_size=tp_size))
    return planned, fewer
