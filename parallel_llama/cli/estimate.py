"""What the ranks of a plan need and have, and how few are enough. All sizes are bytes. No torch."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul

from parallel_llama.cli.model import BLOCK_SIZE
from parallel_llama.config import ModelArgs
from parallel_llama.dtypes import KVFormat, MatrixFormat, Precision, kv_format, make_precision
from parallel_llama.engine.block_group import STEP_TOKENS
from parallel_llama.engine.scheduler import MAX_RUNNING
from parallel_llama.errors import UsageError
from parallel_llama.families.model_args import layer_groups
from parallel_llama.memory import (
    blocks_held,
    default_cache_bytes,
    kv_bytes_per_token,
    most_blocks,
    pool_sizes,
    values_by_form,
    weight_bytes,
    working_bytes,
)
from parallel_llama.parallel.device_choice import DeviceKind
from parallel_llama.parallel.launch import MAX_RANKS
from parallel_llama.plan import KVSplit, ShardPlan, Share, make_plan

# The default of --block-size.
BLOCK_TOKENS: int = BLOCK_SIZE.initial


@dataclass(frozen=True)
class Workload:
    """What the ranks are to hold: a model, and `batch` sequences in the KV cache."""

    args: ModelArgs
    precision: Precision
    kv: KVFormat
    max_seq_len: int
    batch: int
    kv_split: KVSplit = "heads"
    device: DeviceKind = "cpu"

    @property
    def step_tokens(self) -> int:
        return STEP_TOKENS[self.device]

    def working(self, share: Share) -> int:
        """What a rank needs beside weights and KV cache: its process or libraries, and a step."""
        # A card keeps room for the largest batch; on the CPU the batch takes what it needs.
        n_drawn = MAX_RUNNING if self.device == "cuda" else min(self.batch, MAX_RUNNING)
        return working_bytes(
            self.args, share, self.precision, self.step_tokens, n_drawn, self.device
        )

    @property
    def tokens_each(self) -> tuple[int, ...]:
        """Tokens of a sequence that each group of layers keeps at once, at the most."""
        return tuple(
            blocks_held(self.max_seq_len, 1, group.window, self.step_tokens)
            for group in layer_groups(self.args)
        )

    @property
    def n_tokens(self) -> int:
        """Tokens of all sequences that the first group of layers keeps at once, at the most."""
        return self.tokens_each[0] * self.batch

    def pools(self, n_tokens: int) -> tuple[int, ...]:
        """Tokens that each group of layers has room for, where the first has so much."""
        return pool_sizes(self.args, n_tokens, 1, self.max_seq_len, self.step_tokens)

    def cache_bytes(self, per_group: Sequence[int]) -> int:
        """What --kv-cache-bytes must be, in whole blocks, where a token takes so many bytes."""
        full = layer_groups(self.args)[0]
        each = blocks_held(self.max_seq_len, BLOCK_TOKENS, full.window, self.step_tokens)
        n_blocks = self.batch * each
        sizes = pool_sizes(self.args, n_blocks, BLOCK_TOKENS, self.max_seq_len, self.step_tokens)
        n_bytes: int = BLOCK_TOKENS * sum(map(mul, sizes, per_group))
        return n_bytes

    @property
    def weights(self) -> int:
        """The model's own weights, each held once."""
        return estimate(self, 1).weights


@dataclass(frozen=True)
class PlanRequest:
    """A plan that is asked for, in the terms of the flags; `stored` are the files' own formats.

    `memory` is what every rank has, or what each of them has, in bytes; None if not known.
    """

    args: ModelArgs
    stored: Mapping[str, MatrixFormat]
    device: DeviceKind
    dtype: str
    quant: str
    kv_cache_dtype: str
    kv_split: KVSplit
    max_seq_len: int
    batch: int
    tp_size: int = 1
    memory: int | tuple[int, ...] | None = None

    @property
    def work(self) -> "Workload":
        """Raises: UsageError where the model cannot have what is asked for."""
        return Workload(
            self.args,
            make_precision(self.args, self.dtype, self.device, self.quant, self.stored),
            kv_format(self.kv_cache_dtype, self.dtype),
            self.max_seq_len,
            self.batch,
            self.kv_split,
            self.device,
        )

    def estimate(self) -> "Estimate":
        """Raises: UsageError as `work` and the function `estimate` do."""
        return estimate(self.work, self.tp_size, self.memory)


@dataclass(frozen=True)
class KVEstimate:
    """What a rank with some KV heads needs for tokens: one in each group of layers, and all."""

    per_group: tuple[int, ...]
    per_sequence: int
    needed: int

    @classmethod
    def of(cls, work: Workload, share: Share) -> "KVEstimate":
        per_group = kv_bytes_per_token(work.args, share, work.kv)
        needed = sum(map(mul, per_group, work.pools(work.n_tokens)))
        return cls(per_group, sum(map(mul, per_group, work.tokens_each)), needed)


@dataclass(frozen=True)
class RankEstimate:
    """What one rank needs for its share of a workload, and has; `memory` is None if not known."""

    share: Share
    weights: int
    kv: KVEstimate
    working: int
    memory: int | None

    @property
    def kv_per_token(self) -> int:
        """What a token takes in all layers, while it is in the window of those that have one."""
        return sum(self.kv.per_group)

    @property
    def needed(self) -> int:
        return self.weights + self.kv.needed + self.working


@dataclass(frozen=True)
class Estimate:
    """What all ranks of a plan need and have."""

    work: Workload
    plan: ShardPlan
    ranks: tuple[RankEstimate, ...]

    @property
    def weights(self) -> int:
        return sum(rank.weights for rank in self.ranks)

    @property
    def n_kv_heads(self) -> int:
        """KV heads on all ranks; one that several ranks hold whole counts for each."""
        return sum(share.n_local_kv_heads for share in self.plan.shares) // self.plan.kv_parts

    @property
    def kv_overhead(self) -> float:
        """KV heads held beyond one copy of each, as a share of that copy."""
        return self.n_kv_heads / self.work.args.n_kv_heads - 1

    @property
    def room_for_tokens(self) -> int | None:
        """Tokens that the first group of layers has room for on the tightest rank.

        None if memory is not known.
        """
        rooms = {
            (rank.kv.per_group, rank.memory - rank.weights - rank.working)
            for rank in self.ranks
            if rank.memory is not None
        }
        return min((most_blocks(self.work.pools, *each) for each in rooms), default=None)

    @property
    def fits(self) -> bool | None:
        room = self.room_for_tokens
        return None if room is None else room >= self.work.n_tokens

    @property
    def cache_bytes(self) -> int:
        """What --kv-cache-bytes must be on every rank for the workload to fit in."""
        return max(self.work.cache_bytes(rank.kv.per_group) for rank in self.ranks)

    @property
    def default_rooms(self) -> list[int] | None:
        """What each rank's KV cache may take where --kv-cache-bytes is not given.

        None if that depends on memory that is not known. Ranks on the CPU share a host's.
        """
        memory = [rank.memory for rank in self.ranks if rank.memory is not None]
        if self.work.device == "cpu":
            taken = sum(rank.weights + rank.working for rank in self.ranks)
            free = sum(memory) - taken if memory else sys.maxsize
            return [default_cache_bytes("cpu", free, 0, len(self.ranks))] * len(self.ranks)
        if not memory:
            return None
        return [
            default_cache_bytes("cuda", n_bytes - rank.weights, rank.working, 1)
            for n_bytes, rank in zip(memory, self.ranks, strict=True)
        ]

    @property
    def needs_cache_flag(self) -> bool:
        """Whether the workload runs only with --kv-cache-bytes, since the default is less."""
        rooms = self.default_rooms or []
        return any(
            self.work.cache_bytes(rank.kv.per_group) > room
            for rank, room in zip(self.ranks, rooms, strict=False)
        )

    @property
    def tightest(self) -> RankEstimate:
        """The rank with the least memory left, or that needs most where memory is not known."""
        return min(self.ranks, key=lambda rank: (rank.memory or 0) - rank.needed)


@dataclass(frozen=True)
class Comparison:
    """The estimates of a range of sizes, and why each of those after them has no plan.

    `memory` is what every rank has, None if not known.
    """

    work: Workload
    memory: int | None
    allowed: tuple[Estimate, ...]
    refused: dict[int, str]

    @property
    def smallest_that_fits(self) -> int | None:
        return next((found.plan.tp_size for found in self.allowed if found.fits), None)

    @property
    def fits(self) -> bool | None:
        """Whether any size fits; None if memory is not known."""
        return None if self.memory is None else self.smallest_that_fits is not None


def estimate(work: Workload, tp_size: int, memory: int | Sequence[int] | None = None) -> Estimate:
    """The plan of a workload; `memory` is what every rank has, or what each of them has.

    Raises: UsageError if there is no plan of so many ranks, or `memory` is not one for each.
    """
    each = [memory] * tp_size if isinstance(memory, int) else memory
    group_size = work.precision.group_size
    plan = make_plan(work.args, tp_size, each, quant_group=group_size, kv_split=work.kv_split)
    values = values_by_form(work.args, work.precision)
    kv: dict[int, KVEstimate] = {}  # by the number of KV heads

    def rank(share: Share) -> RankEstimate:
        if share.n_local_kv_heads not in kv:
            kv[share.n_local_kv_heads] = KVEstimate.of(work, share)
        weights = weight_bytes(share, values)
        memory = each[share.rank] if each else None
        held = kv[share.n_local_kv_heads]
        return RankEstimate(share, weights, held, work.working(share), memory)

    return Estimate(work, plan, tuple(map(rank, plan.shares)))


def compare(work: Workload, sizes: range, memory: int | None) -> Comparison:
    """The plans of a workload for each number of ranks in a range."""
    allowed: list[Estimate] = []
    refused: dict[int, str] = {}
    for tp_size in sizes:
        try:
            allowed.append(estimate(work, tp_size, memory))
        except UsageError as error:
            refused[tp_size] = str(error)
    return Comparison(work, memory, tuple(allowed), refused)


def fewest_that_fit(work: Workload, memory: int) -> tuple[Estimate, Estimate | None]:
    """The plan of the fewest ranks of that memory that fits, else of the most that there can be.

    Returns: that plan, and the one of one rank fewer, which does not fit.
    """
    fewer, found = None, estimate(work, 1, memory)
    # One by one: a rank more can mean that one rank holds a KV head more.
    for tp_size in range(2, min(work.args.n_heads, MAX_RANKS) + 1):
        if found.fits:
            break
        fewer, found = found, estimate(work, tp_size, memory)
    return found, fewer
