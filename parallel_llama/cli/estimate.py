"""What the ranks of a plan need and have, and how few are enough. All sizes are bytes. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel_llama.config import ModelArgs
from parallel_llama.dtypes import DenseFormat, KVFormat
from parallel_llama.errors import UsageError
from parallel_llama.parallel.launch import MAX_RANKS
from parallel_llama.plan import ShardPlan, Share, kv_bytes_per_token, make_plan, values_per_unit


@dataclass(frozen=True)
class Workload:
    """What the ranks are to hold: a model in a dtype, and `batch` sequences in the KV cache."""

    args: ModelArgs
    dtype: str
    kv: KVFormat
    max_seq_len: int
    batch: int

    @property
    def n_tokens(self) -> int:
        return self.max_seq_len * self.batch

    @property
    def weights(self) -> int:
        """The model's own weights, each held once."""
        return estimate(self, 1).weights


@dataclass(frozen=True)
class RankEstimate:
    """What one rank needs for its share of a workload, and has; `memory` is None if not known."""

    share: Share
    weights: int
    kv_per_token: int
    needed: int
    memory: int | None

    @property
    def room_for_tokens(self) -> int | None:
        if self.memory is None:
            return None
        return max(0, (self.memory - self.weights) // self.kv_per_token)


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
        """KV heads on all ranks; one that several ranks hold counts for each."""
        return sum(share.n_local_kv_heads for share in self.plan.shares)

    @property
    def kv_overhead(self) -> float:
        """KV heads held beyond one copy of each, as a share of that copy."""
        return self.n_kv_heads / self.work.args.n_kv_heads - 1

    @property
    def room_for_tokens(self) -> int | None:
        """Tokens of KV cache that the tightest rank has room for; None if memory is not known."""
        rooms = [rank.room_for_tokens for rank in self.ranks]
        return min((room for room in rooms if room is not None), default=None)

    @property
    def fits(self) -> bool | None:
        room = self.room_for_tokens
        return None if room is None else room >= self.work.n_tokens


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
    plan = make_plan(work.args, tp_size, each)
    form = DenseFormat(work.dtype)
    per_unit = values_per_unit(work.args)

    def rank(share: Share) -> RankEstimate:
        weights = form.n_bytes(share.n_values(per_unit))
        kv_per_token = kv_bytes_per_token(work.args, share, work.kv)
        needed = weights + kv_per_token * work.n_tokens
        return RankEstimate(
            share, weights, kv_per_token, needed, each[share.rank] if each else None
        )

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
