"""The share of a model that each rank gets: by memory, or by speed within its memory.

Pure arithmetic: no torch, and no device is queried. The `plan` command and the engine call the same
function, so a run has the plan that `plan` shows.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from operator import mul

from parallel_llama.dtypes import KVFormat, Precision
from parallel_llama.errors import UsageError
from parallel_llama.families.model_args import ModelArgs, kv_groups
from parallel_llama.memory import (
    blocks_held,
    kv_bytes_per_token,
    values_of_stages,
    weight_bytes,
    working_bytes,
)
from parallel_llama.plan import KVSplit, ShardPlan, make_plan

# A share that does not fit into the memory of its rank is lowered by at least this step.
_STEP = Fraction(1, 1024)

Shares = Sequence[float | Fraction]


def plan_with_shares(
    args: ModelArgs,
    tp_size: int,
    memory: Sequence[float] | None,
    speeds: Sequence[float] | None,
    precision: Precision,
    kv_format: KVFormat,
    kv_split: KVSplit,
    *,
    exact: bool,
    device: str,
    max_seq_len: int,
    step_tokens: int,
    pp: int = 1,
    from_gguf: bool,
) -> ShardPlan:
    """The plan of all ranks, with shares of the model by memory or speed.

    Without `memory` and `speeds`, the shares are equal. Without `speeds`, they are proportional to
    `memory`. With `speeds`, they are proportional to the speeds, but no rank gets more than fits
    into its memory; the other ranks get the rest, in proportion to their speeds. The memory of a
    rank must hold its weights, the tensors of a step, and the KV cache of a sequence of
    `max_seq_len` tokens. If no shares meet this, the KV cache need only hold one token. If no
    shares meet that either, they are proportional to `memory`.

    Args:
        memory: the bytes of each rank, None for no limit.
        speeds: the speed of each rank in any unit, None if the speeds are not known.
        device: 'cpu' or 'cuda'.
        pp: the number of stages of the pipeline.
        from_gguf: as in `working_bytes`.

    Raises: UsageError if `speeds` is not one positive number per rank, or as `make_plan`.
    """

    def planned(shares: Shares | None, n_ranks: int, n_stages: int) -> ShardPlan:
        return make_plan(
            args,
            n_ranks,
            shares,
            quant_group_size=precision.quant_group_size,
            kv_split=kv_split,
            exact=exact,
            pp=n_stages,
        )

    if speeds is None:
        return planned(memory, tp_size, pp)
    if len(speeds) != tp_size:
        raise UsageError(f"speeds has {len(speeds)} numbers for {tp_size} ranks; give one per rank")
    for rank, speed in enumerate(speeds):
        if not (math.isfinite(speed) and speed > 0):
            raise UsageError(f"the speed of rank {rank} is {speed}; give a number above 0")
    if memory is None:
        return planned(speeds, tp_size, pp)
    make_plan(args, tp_size, memory, pp=pp)  # raises for a wrong list

    def needed(n_tokens: int, shares: Shares) -> list[int]:
        """The bytes that each rank needs with these shares."""
        plan = planned(shares, len(shares), min(pp, len(shares)))
        values = values_of_stages(args, precision, plan)
        windows = [kv_group.window for kv_group in kv_groups(args)]
        cache_tokens = [blocks_held(n_tokens, 1, window, step_tokens) for window in windows]
        return [
            weight_bytes(shard, values[shard.stage])
            + working_bytes(
                args,
                shard,
                precision,
                step_tokens,
                1,
                device,
                max_seq_len,
                from_gguf=from_gguf,
            )
            + sum(map(mul, kv_bytes_per_token(args, shard, kv_format), cache_tokens))
            for shard in plan.shards
        ]

    for n_tokens in (max_seq_len, 1):
        (total,) = needed(n_tokens, [1])
        shares = _within(speeds, memory, total, partial(needed, n_tokens))
        if shares is not None:
            return planned(shares, tp_size, pp)
    return planned(memory, tp_size, pp)


def fill(speeds: Sequence[float], max_shares: Sequence[Fraction]) -> list[Fraction] | None:
    """Divides 1 in proportion to the speeds, with no share above its maximum (water filling).

    Returns: None if the maxima add up to less than 1, or one is not above 0.

    >>> [str(share) for share in fill([2, 1, 1], [Fraction(1, 4), Fraction(1), Fraction(1)])]
    ['1/4', '3/8', '3/8']
    """
    if sum(max_shares) < 1 or min(max_shares) <= 0:
        return None
    rates = [Fraction(speed) for speed in speeds]
    # `level` is the time that every rank below its maximum works for. While it grows, the ranks
    # reach their maxima in the order `by_level`.
    by_level = sorted(range(len(rates)), key=lambda rank: max_shares[rank] / rates[rank])
    left, total_rate = Fraction(1), sum(rates)
    level = Fraction(0)
    for rank in by_level:
        level = left / total_rate
        if level * rates[rank] <= max_shares[rank]:
            break
        left -= max_shares[rank]
        total_rate -= rates[rank]
    return [min(cap, level * rate) for cap, rate in zip(max_shares, rates, strict=True)]


def _within(
    speeds: Sequence[float],
    memory: Sequence[float],
    total: int,
    needed: Callable[[Sequence[Fraction]], Sequence[int]],
) -> list[Fraction] | None:
    """Shares by speed that fit into the memory of every rank; None if no such shares exist.

    A rank gets whole units, so its maximum is found by lowering it until the units fit.

    Args:
        total: the bytes of a single rank that holds the whole model.
    """
    max_shares = [Fraction(1)] * len(speeds)
    while (shares := fill(speeds, max_shares)) is not None:
        missing = [
            Fraction(needs) - Fraction(has)
            for needs, has in zip(needed(shares), memory, strict=True)
        ]
        if max(missing) <= 0:
            return shares
        for rank, n_bytes in enumerate(missing):
            if n_bytes > 0:
                max_shares[rank] = shares[rank] - max(n_bytes / total, _STEP)
    return None
