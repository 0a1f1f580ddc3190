"""The shard plan: which rank holds which part of every weight.

Every weight is cut along at most one axis, and every axis is counted in units. A plan gives each
rank one half-open range of units per axis. All head arithmetic is here: layers, the KV cache, the
checkpoint reader and the `plan` command take ranges from the plan. Pure integers: no torch, no
process group.

    heads        0   1   2   3   4   5   6   7   8        9 query heads, 3 per KV head
    kv heads     [    0    ] [    1    ] [    2    ]
    rank 0       [0 ............. 5)                      query heads 0-4, KV heads 0-1
    rank 1                       [5 ............. 9)      query heads 5-8, KV heads 1-2

In a mixture of experts, ranks split the channels of every expert, or the experts, or both: then
each group of ranks holds some experts, and each rank of the group some of their channels.

    experts      0   1   2   3   4   5        6 experts of 768 channels on 5 ranks
    ranks 0-2    [0 ......... 4)              experts 0-3, 256 channels of each per rank
    ranks 3-4                    [4 . 6)      experts 4-5, 384 channels of each per rank

The channels of a shared expert, and of layers without experts, are split over all ranks.

With pipeline parallelism, consecutive ranks form a stage, which holds consecutive layers. The
heads, channels and experts of these layers are cut over the ranks of the stage, and the vocabulary
is cut over all ranks.

    layers       0   1   2   3   4   5   6        7 layers in 2 stages of 2 ranks
    ranks 0-1    [0 ......... 4)                  layers 0-3, half of the heads on each rank
    ranks 2-3                    [4 ..... 7)      layers 4-6, half of the heads on each rank
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Literal

from parallel_llama.errors import UsageError
from parallel_llama.families.model_args import KVGroup, ModelArgs
from parallel_llama.families.weights import Axis, Param, cut_by_outputs

# Heads are cut between KV heads if the busiest rank does at most this multiple of the mean work.
# Otherwise they are cut between query heads, and two ranks may hold the same KV head.
MAX_KV_CUT_IMBALANCE = Fraction(113, 100)

# Experts are split over all ranks, which balances them for any routing, if each part has at least
# this many channels. The time of smaller products is mostly call overhead, so groups of ranks get
# different experts instead. Both ways exchange the same data between ranks.
MIN_EXPERT_CHANNELS = 256

# Keys per part of a query's softmax on the CPU: positions 0 to 127 of its sequence, 128 to 255, and
# so on. Parts are computed separately, by threads or ranks, and merged in order.
PART_KEYS = 128

# Queries per tile: enough to amortise a call, and few enough that the tiles at the start of a long
# prompt do not read the keys at its end.
MAX_QUERIES = 64

# With a KV cache sharded by token, every rank gathers attention results of all heads, which take
# much memory. With exact sums it gathers those of up to MAX_TILE_PARTS parts at once (or of one
# query with more parts), else those of up to MAX_GATHERED_ROWS rows.
MAX_TILE_PARTS = 8192
MAX_GATHERED_ROWS = 256

# Tokens in a tile of the vocabulary. In an exact log-sum-exp, one rank sums a whole tile.
VOCAB_TILE = 128

# How the KV cache is sharded: by head (a head may be replicated) or by token.
KVSplit = Literal["heads", "sequence"]

# With this many tokens, the products of a piece of a step take longer than reading the weights.
MIN_PIECE_TOKENS = 64
# With more pieces the stages are idle for less time, but each piece is sent to all ranks after
# every stage.
MAX_PIECES_PER_STAGE = 4


@dataclass(frozen=True)
class HeadRun:
    """Consecutive query heads of one rank, with the same number of query heads per KV head.

    Both ranges count the rank's own heads from 0, so they index its q, k and v directly.
    """

    heads: range
    kv_heads: range


@dataclass(frozen=True)
class Stage:
    """A stage of the pipeline: consecutive ranks, and the consecutive layers that they hold."""

    ranks: range
    layers: range


@dataclass(frozen=True)
class ExactCut:
    """The ranges of all ranks of a stage, along the axes that are all-gathered for exact sums.

    The ranges are in rank order.

    Args:
        heads: query heads.
        ffn: feed-forward channels.
        shared_ffn: channels of the shared expert.
        dense_ffn: channels of layers without experts, in a model with experts.
        outputs: outputs of wo and w2.
    """

    heads: tuple[range, ...]
    ffn: tuple[range, ...]
    shared_ffn: tuple[range, ...]
    dense_ffn: tuple[range, ...]
    outputs: tuple[range, ...]

    def channels(self, axis: Axis) -> tuple[range, ...]:
        """The channels of every rank along one of the three axes of channels."""
        channels: tuple[range, ...] = getattr(self, axis)
        return channels


@dataclass(frozen=True)
class Shard:
    """The shard of one rank: global half-open ranges of heads, ffn channels and vocabulary rows.

    Args:
        ffn: feed-forward channels; in a mixture of experts, the channels of each of `experts`.
        runs: the query heads, divided into runs (see `HeadRun`). With a KV cache sharded by token,
            the runs cover all query heads, for the tokens of this rank.
        stages: all stages of the pipeline, in order; without a pipeline there is one.
        shared_ffn: channels of the shared expert.
        dense_ffn: channels of layers without experts.
        peers: every rank's query heads, with a KV cache sharded by token.
        exact: shards wo and w2 by outputs. Every rank gathers their inputs, so that no sum is split
            over ranks.
    """

    rank: int
    heads: range
    kv_heads: range
    ffn: range
    vocab: range
    runs: tuple[HeadRun, ...]
    stages: tuple[Stage, ...]
    experts: range = range(0)
    shared_ffn: range = range(0)
    dense_ffn: range = range(0)
    peers: tuple[range, ...] = ()
    exact: ExactCut | None = None

    @property
    def stage(self) -> Stage:
        """The stage of this rank."""
        return next(stage for stage in self.stages if self.rank in stage.ranks)

    @property
    def stage_rank(self) -> int:
        """The number of this rank in its stage, from 0."""
        return self.rank - self.stage.ranks.start

    @property
    def layers(self) -> range:
        """The layers that this rank holds a part of."""
        return self.stage.layers

    def layers_of(self, kv_group: KVGroup) -> list[int]:
        """The layers of a KV group that this rank holds a part of; may be empty."""
        return [layer for layer in kv_group.layers if layer in self.layers]

    @property
    def n_local_heads(self) -> int:
        return len(self.heads)

    @property
    def kv_parts(self) -> int:
        """Number of ranks over which the tokens of a KV head are sharded."""
        return max(1, len(self.peers))

    def block_size(self, requested: int) -> int:
        """Tokens per block of the KV cache: `requested`, or more if a rank must hold whole parts.

        With exact sums and a cache sharded by token, one rank sums all PART_KEYS keys of a part.
        """
        if self.exact is None or self.kv_parts == 1:
            return requested
        return -(-requested // PART_KEYS) * PART_KEYS

    @property
    def n_local_kv_heads(self) -> int:
        return len(self.kv_heads)

    @property
    def outputs(self) -> range:
        """This rank's outputs of wo and w2, with an exact cut."""
        return range(0) if self.exact is None else self.exact.outputs[self.stage_rank]

    def cut(self, param: Param) -> Param:
        """The same weight, with its axis changed to the one along which this plan shards it."""
        return param if self.exact is None else cut_by_outputs(param)

    def extent(self, axis: Axis) -> range:
        """The range of this rank along an axis, in heads, channels or rows."""
        extent: range = getattr(self, axis)  # axes are named like the fields
        return extent

    def holds(self, param: Param) -> bool:
        """Whether this rank holds the weight; false for layers and experts of other ranks."""
        is_own_layer = param.layer is None or param.layer in self.layers
        return is_own_layer and (param.expert is None or param.expert in self.experts)

    def rows_of(self, param: Param) -> range:
        """The rows (or columns) of a weight on this rank; the whole weight if it is replicated.

        With an exact cut, `param` must be a result of `cut`.
        """
        if not self.holds(param):
            return range(0)
        if param.axis is None:
            return range(param.shape[param.dim])
        extent = self.extent(param.axis)
        return range(extent.start * param.unit, extent.stop * param.unit)


@dataclass(frozen=True)
class Placement:
    """How experts are distributed over ranks, and why.

    Args:
        kind: tensor, every rank holds some channels of every expert; expert, each expert is whole
            on one rank; mixed, each group of ranks holds some experts, and each rank of the group
            some of their channels.
    """

    kind: Literal["tensor", "expert", "mixed"]
    reason: str


@dataclass(frozen=True)
class ShardPlan:
    """The shards of all ranks.

    Args:
        balance: the work of the busiest rank divided by its fair share. A rank's work is its
            fraction of the query heads of all layers; its fair share is its fraction of `shares`.
            1.0 is perfect; at 1.25 the other ranks are idle for a fifth of the attention time.
        placement: None for a model without experts.
    """

    shards: tuple[Shard, ...]
    cut: Literal["kv_heads", "heads"]
    balance: float
    placement: Placement | None = None

    @property
    def tp_size(self) -> int:
        return len(self.shards)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the pipeline; without a pipeline there is one."""
        return self.shards[0].stages

    @property
    def kv_parts(self) -> int:
        """Number of ranks over which the tokens of a KV head are sharded."""
        return self.shards[0].kv_parts

    def alone(self, rank: int) -> "ShardPlan":
        """The plan with only the shard of this rank.

        Raises: UsageError for a KV cache sharded by token, where queries of one rank need keys of
        another.
        """
        if self.kv_parts > 1:
            raise UsageError(
                f"rank {rank} of {self.tp_size} cannot run alone with a KV cache sharded by "
                "sequence: its queries need keys of other ranks; shard the KV cache by heads"
            )
        return replace(self, shards=(self.shards[rank],))


def local_kv_heads(heads: range, heads_per_kv: int) -> range:
    """The global numbers of the KV heads that a rank needs for its query heads.

    If the query heads of one KV head are on two ranks, both ranks store the KV head.

    >>> local_kv_heads(range(5, 9), 3)
    range(1, 3)

    Source: grouped-query attention, arXiv 2305.13245.
    """
    return range(heads.start // heads_per_kv, -(-heads.stop // heads_per_kv))


def counted_kv_heads(heads: range, heads_per_kv: int) -> range:
    """The KV heads of a rank if each KV head counts once: on the rank with its first query head.

    >>> counted_kv_heads(range(0, 5), 3), counted_kv_heads(range(5, 9), 3)
    (range(0, 2), range(2, 3))
    """
    return range(-(-heads.start // heads_per_kv), -(-heads.stop // heads_per_kv))


def equal_runs(heads: range, heads_per_kv: int) -> tuple[HeadRun, ...]:
    """Split the query heads of a rank into at most three runs (head, body, tail).

    Grouped attention needs the same number of query heads for every KV head of a call. For example
    5 query heads of 2 KV heads are 3 + 2, so they take two calls.

    >>> [(run.heads, run.kv_heads) for run in equal_runs(range(2, 9), 3)]
    [(range(0, 1), range(0, 1)), (range(1, 7), range(1, 3))]
    """
    first = heads.start // heads_per_kv
    head_stop = min(heads.stop, -(-heads.start // heads_per_kv) * heads_per_kv)
    body_stop = max(head_stop, heads.stop // heads_per_kv * heads_per_kv)
    runs = []
    for start, stop in pairwise((heads.start, head_stop, body_stop, heads.stop)):
        if start < stop:
            kv_heads = local_kv_heads(range(start, stop), heads_per_kv)
            local_heads = range(start - heads.start, stop - heads.start)
            runs.append(HeadRun(local_heads, range(kv_heads.start - first, kv_heads.stop - first)))
    return tuple(runs)


def unit_size(size: int, n_heads: int, quant_group_size: int = 1) -> int:
    """Channels or rows in one unit of an axis of `size`; independent of the number of ranks.

    The quantisation group if there is one, else the largest power of two up to 128 that gives at
    least 4 n_heads units, else 1.

    >>> unit_size(1536, n_heads=9), unit_size(49152, n_heads=9), unit_size(30, n_heads=9)
    (32, 128, 1)
    """
    if quant_group_size > 1:
        return quant_group_size
    for unit in (128, 64, 32, 16, 8, 4, 2):
        if -(-size // unit) >= 4 * n_heads:
            return unit
    return 1


def apportion(n_units: int, weights: Sequence[int], at_least: int = 0) -> list[int]:
    """Distribute units over ranks in proportion to their weights, by largest remainders.

    The weights must have a sum above zero. The result sums to `n_units`.

    >>> apportion(9, [1, 1]), apportion(8, [6, 1, 1])
    ([5, 4], [6, 1, 1])
    """
    total = sum(weights)
    counts = [max(at_least, n_units * weight // total) for weight in weights]

    def excess(rank: int) -> tuple[int, int]:  # in units of 1 / total
        return counts[rank] * total - n_units * weights[rank], rank

    by_remainder = sorted(range(len(counts)), key=excess)
    while sum(counts) < n_units:
        for rank in by_remainder[: n_units - sum(counts)]:
            counts[rank] += 1
    while sum(counts) > n_units:  # at_least raised some counts
        givers = [rank for rank in range(len(counts)) if counts[rank] > at_least]
        counts[max(givers, key=excess)] -= 1
    return counts


def make_plan(
    args: ModelArgs,
    tp_size: int,
    shares: Sequence[float | Fraction] | None = None,
    quant_group_size: int = 1,
    ranks_per_expert: int | None = None,
    kv_split: KVSplit = "heads",
    exact: bool = False,
    pp: int = 1,
) -> ShardPlan:
    """The shard plan of a model on `tp_size` ranks.

    Args:
        shares: one number per rank, in any unit, such as its memory or its speed. Ranks get parts
            of the model in proportion to these numbers; by default equal parts.
        quant_group_size: number of consecutive ffn channels that must stay on one rank.
        ranks_per_expert: the maximum number of ranks over which an expert is split; by default as
            MIN_EXPERT_CHANNELS requires.
        kv_split: 'sequence' shards the KV cache by token, unless all ranks can have the same number
            of KV heads.
        exact: shard wo and w2 by outputs, shard every expert over all ranks, and cut the vocabulary
            only between tiles, so that no sum is split and results do not depend on the number of
            ranks.
        pp: number of stages of the pipeline. Ranks are cut into stages as evenly as possible; if
            `pp` does not divide `tp_size`, the first stages have one rank more. Layers are cut in
            proportion to the shares of the stages.

    Raises: UsageError if tp_size is not 1 to n_heads, `shares` is not one positive number per rank,
    `exact` is combined with a setting that splits sums, or `pp` stages cannot be made.
    """
    if pp != 1:
        return _pipeline(args, tp_size, shares, quant_group_size, kv_split, pp, exact=exact)
    if not 1 <= tp_size <= args.n_heads:
        raise UsageError(
            f"{args.n_heads} query heads cannot be split over {tp_size} ranks; use 1 to "
            f"{args.n_heads} ranks"
        )
    if exact:
        if ranks_per_expert not in (None, tp_size):
            raise UsageError(
                f"exact sums and ranks_per_expert={ranks_per_expert} of {tp_size} ranks cannot be "
                "combined: every rank needs a part of every expert; drop one"
            )
        ranks_per_expert = tp_size
    weights = _weights(tp_size, shares)
    cut, heads, balance = _cut_heads(args, weights)
    expert_ranks = _expert_ranks(args, tp_size, ranks_per_expert)
    experts = _cut_experts(args, expert_ranks, weights)

    def cut_channels(size: int, ranks: range) -> list[range]:
        unit = unit_size(size, args.n_heads, quant_group_size)
        return _cut_units(size, unit, weights[ranks.start : ranks.stop])

    ffn = [channels for ranks in expert_ranks for channels in cut_channels(args.ffn_dim, ranks)]
    shared_ffn = cut_channels(args.shared_ffn_dim, range(tp_size))
    dense_ffn = cut_channels(args.dense_ffn_dim, range(tp_size))
    vocab = _cut_vocab(args, weights, exact=exact)
    stages = (Stage(range(tp_size), range(args.n_layers)),)
    heads_per_kv = args.n_heads // args.n_kv_heads
    shards = tuple(
        Shard(
            rank,
            heads_of_rank,
            local_kv_heads(heads_of_rank, heads_per_kv),
            ffn[rank],
            vocab[rank],
            equal_runs(heads_of_rank, heads_per_kv),
            stages,
            experts[rank],
            shared_ffn[rank],
            dense_ffn[rank],
        )
        for rank, heads_of_rank in enumerate(heads)
    )
    if exact:
        outputs = _cut_units(args.dim, unit_size(args.dim, args.n_heads), weights)
        cuts = heads, ffn, shared_ffn, dense_ffn, outputs
        exact_cut = ExactCut(*map(tuple, cuts))
        shards = tuple(replace(shard, exact=exact_cut) for shard in shards)
    if kv_split == "sequence":
        shards = _shard_by_token(args, shards)
    placement = _placement(args, expert_ranks, ranks_per_expert) if args.n_experts else None
    return ShardPlan(shards, cut, balance, placement)


def count_pieces(n_tokens: int, n_stages: int) -> int:
    """The number of pieces in which the stages of a pipeline run a step."""
    if n_stages == 1:
        return 1
    return max(min(n_tokens // MIN_PIECE_TOKENS, MAX_PIECES_PER_STAGE * n_stages), 1)


def _pipeline(
    args: ModelArgs,
    tp_size: int,
    shares: Sequence[float | Fraction] | None,
    quant_group_size: int,
    kv_split: KVSplit,
    pp: int,
    *,
    exact: bool,
) -> ShardPlan:
    """The plan of several stages. Each stage has its own plan; all ranks share the vocabulary."""
    if not 1 <= pp <= min(tp_size, args.n_layers):
        more_ranks = "" if pp > args.n_layers else ", or more ranks"
        raise UsageError(
            f"{tp_size} ranks and {args.n_layers} layers cannot be split into {pp} stages; use 1 "
            f"to {min(tp_size, args.n_layers)} stages{more_ranks}"
        )
    if kv_split == "sequence":
        raise UsageError("stages and a KV cache sharded by sequence cannot be combined; drop one")
    largest = max(stage_sizes(tp_size, pp))
    if largest > args.n_heads:
        raise UsageError(
            f"{args.n_heads} query heads cannot be split over the {largest} ranks of a stage; use "
            f"at most {args.n_heads * pp} ranks, or more stages"
        )
    weights = _weights(tp_size, shares)
    ranks = consecutive(stage_sizes(tp_size, pp))
    totals = [sum(weights[group.start : group.stop]) for group in ranks]
    layers = consecutive(apportion(args.n_layers, totals, at_least=1))
    stages = tuple(map(Stage, ranks, layers))
    vocab = _cut_vocab(args, weights, exact=exact)
    plans = [
        make_plan(
            args,
            len(stage.ranks),
            weights[stage.ranks.start : stage.ranks.stop],
            quant_group_size,
            exact=exact,
        )
        for stage in stages
    ]
    shards = tuple(
        replace(shard, rank=rank, vocab=vocab[rank], stages=stages)
        for rank, shard in enumerate(shard for plan in plans for shard in plan.shards)
    )
    work = [len(shard.heads) * len(shard.layers) for shard in shards]
    all_kv_cuts = all(plan.cut == "kv_heads" for plan in plans)
    cut: Literal["kv_heads", "heads"] = "kv_heads" if all_kv_cuts else "heads"
    return ShardPlan(shards, cut, float(_balance(work, weights)), plans[0].placement)


def stage_sizes(tp_size: int, pp: int) -> list[int]:
    """The number of ranks in each of `pp` stages.

    >>> stage_sizes(5, 2)
    [3, 2]
    """
    return apportion(tp_size, [1] * pp)


def resolve_exact(requested: bool | None, args: ModelArgs, tp_size: int, device: str) -> bool:
    """Whether sums are exact: as `requested`, by default on the CPU; see docs/exactness.md.

    By default, sums are not exact if the experts are so small that the plan would give different
    experts to different ranks. On several hosts the caller passes False instead of None.

    Args:
        tp_size: the number of ranks that share a layer.

    Raises: UsageError for exact sums on a GPU.
    """
    if requested is None:
        has_all_experts = len(_expert_ranks(args, tp_size, None)) == 1  # on every rank
        return device == "cpu" and has_all_experts
    if requested and device != "cpu":
        raise UsageError(
            "exact sums need the CPU: on a GPU the order of a sum depends on the shape of its "
            "matrix; leave --exact out"
        )
    return requested


def why_unrecorded(args: ModelArgs, kv_parts: int, device: str) -> str | None:
    """Why decode steps run operator by operator, and the remedy if any; None if they are recorded.

    On CUDA, the attention of steps that are not recorded reads slots instead of block tables, and
    their tokens are drawn on the host.

    Args:
        kv_parts: the number of ranks over which the tokens of a KV head are sharded.
        device: 'cpu' or 'cuda'.
    """
    if kv_parts > 1:
        return (
            "decode steps run operator by operator: with a KV cache sharded by sequence the ranks "
            "exchange their parts of each attention; shard the KV cache by heads if it then fits"
        )
    if args.attention_sinks:
        where = f" beyond the window of {args.sliding_window} tokens" if device == "cpu" else ""
        return (
            f"decode steps run operator by operator{where} because of attention sinks; drop them "
            "if sequences fit in the context"
        )
    if device == "cpu" and (args.norm == "layer" or args.qk_layer_norm):
        return "decode steps run operator by operator: LayerNorm has no kernel for the CPU"
    if device == "cpu" and (args.scaled_inputs or args.qk_unit_norm):
        return (
            "decode steps run operator by operator: scaled inputs of experts and norms without "
            "weights have no kernel for the CPU"
        )
    if args.first_scaled_position is not None:
        where = f" from position {args.first_scaled_position} on" if device == "cpu" else ""
        return (
            f"decode steps run operator by operator{where}: the model scales queries by their "
            "positions, which recorded steps cannot do"
        )
    if device == "cuda" and args.window_chunks:
        return (
            "decode steps run operator by operator: attention within chunks has no kernel for a GPU"
        )
    scaling = args.rope_scaling
    if device == "cuda" and scaling is not None and scaling.kind == "dynamic":
        return (
            "decode steps run operator by operator: dynamic scaling makes rotary embeddings depend "
            "on the length of the sequence"
        )
    return None


def _shard_by_token(args: ModelArgs, shards: tuple[Shard, ...]) -> tuple[Shard, ...]:
    """Shard the KV cache by token, unless all ranks have the same number of KV heads."""
    max_kv_heads = max(shard.n_local_kv_heads for shard in shards)
    if max_kv_heads * len(shards) <= args.n_kv_heads:
        return shards
    if args.attention_sinks:
        raise UsageError("attention sinks cannot be combined with sharding by sequence; drop one")
    runs = equal_runs(range(args.n_heads), args.n_heads // args.n_kv_heads)
    all_kv_heads, peers = range(args.n_kv_heads), tuple(shard.heads for shard in shards)
    return tuple(replace(shard, kv_heads=all_kv_heads, runs=runs, peers=peers) for shard in shards)


def _weights(tp_size: int, shares: Sequence[float | Fraction] | None) -> list[int]:
    """Integers proportional to the shares of the ranks."""
    if shares is None:
        return [1] * tp_size
    if len(shares) != tp_size:
        raise UsageError(f"memory has {len(shares)} sizes for {tp_size} ranks; give one per rank")
    for rank, share in enumerate(shares):
        if not (math.isfinite(share) and share > 0):
            raise UsageError(f"memory of rank {rank} is {share}; give a number above 0")
    sizes = [Fraction(share) for share in shares]
    common = math.lcm(*(size.denominator for size in sizes))
    return [int(size * common) for size in sizes]


def _cut_heads(
    args: ModelArgs, weights: list[int]
) -> tuple[Literal["kv_heads", "heads"], list[range], float]:
    heads_per_kv = args.n_heads // args.n_kv_heads
    if len(weights) <= args.n_kv_heads:
        counts = [n * heads_per_kv for n in apportion(args.n_kv_heads, weights, at_least=1)]
        balance = _balance(counts, weights)
        if balance <= MAX_KV_CUT_IMBALANCE:
            return "kv_heads", consecutive(counts), float(balance)
    counts = apportion(args.n_heads, weights, at_least=1)
    return "heads", consecutive(counts), float(_balance(counts, weights))


def _expert_ranks(args: ModelArgs, tp_size: int, ranks_per_expert: int | None) -> list[range]:
    """The groups of ranks that hold the same experts; one group for a model without experts."""
    if not args.n_experts:
        return [range(tp_size)]
    max_ranks = ranks_per_expert or max(1, args.ffn_dim // MIN_EXPERT_CHANNELS)
    n_parts = min(-(-tp_size // max_ranks), args.n_experts)
    return consecutive(apportion(tp_size, [1] * n_parts))


def _cut_experts(args: ModelArgs, expert_ranks: list[range], weights: list[int]) -> list[range]:
    """The experts of each rank, in proportion to the weight of its group."""
    if not args.n_experts:
        return [range(0)] * len(weights)
    totals = [sum(weights[ranks.start : ranks.stop]) for ranks in expert_ranks]
    experts = consecutive(apportion(args.n_experts, totals, at_least=1))
    return [group for ranks, group in zip(expert_ranks, experts, strict=True) for _ in ranks]


def _placement(args: ModelArgs, expert_ranks: list[range], requested: int | None) -> Placement:
    sizes = sorted({len(ranks) for ranks in expert_ranks})
    n_ranks = expert_ranks[-1].stop
    n_channels = args.ffn_dim // n_ranks
    if n_ranks == 1:
        return Placement("tensor", "one rank has every expert")
    comparison = f"{n_channels} of an expert's {args.ffn_dim} channels on each of {n_ranks} ranks"
    if len(expert_ranks) == 1:
        reason = f"every rank works on every expert: {comparison} (minimum {MIN_EXPERT_CHANNELS})"
        return Placement("tensor", "as requested" if requested else reason)
    would_be_few = f"{comparison} would be fewer than {MIN_EXPERT_CHANNELS}"
    if sizes == [1]:
        reason = f"every rank has whole experts: {would_be_few}"
        return Placement("expert", "as requested" if requested else reason)
    reason = (
        f"groups of {' or '.join(map(str, sizes))} ranks hold some experts each: {would_be_few}"
    )
    return Placement("mixed", "as requested" if requested else reason)


def _balance(counts: list[int], weights: list[int]) -> Fraction:
    pairs = zip(counts, weights, strict=True)
    return max(Fraction(*pair) for pair in pairs) * Fraction(sum(weights), sum(counts))


def _cut_vocab(args: ModelArgs, weights: list[int], *, exact: bool) -> list[range]:
    """The vocabulary rows of each rank."""
    unit = VOCAB_TILE if exact else unit_size(args.vocab_size, args.n_heads)
    return _cut_units(args.vocab_size, unit, weights)


def _cut_units(size: int, unit: int, weights: list[int]) -> list[range]:
    """Ranges of channels or rows that end between units; the last unit may be short."""
    units = consecutive(apportion(-(-size // unit), weights))
    return [range(min(r.start * unit, size), min(r.stop * unit, size)) for r in units]


def consecutive(counts: Iterable[int]) -> list[range]:
    """Consecutive ranges of these sizes."""
    return [range(a, b) for a, b in pairwise(accumulate(counts, initial=0))]
