"""The share of a model that each rank gets: by memory, or by speed within its memory.

Pure numbers: no torch, and no device is queried. The `plan` command and the engine call the same
function, so that a run gets the shares that `plan` shows.
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
from parallel_llama.plan import KVSplit, make_plan

# The smallest step by which the share of a rank without room is lowered.
_STEP = Fraction(1, 1024)

Shares = Sequence[float | Fraction]


def choose_shares(
    args: ModelArgs,
    tp_size: int,
    memory: Sequence[float] | None,
    speeds: Sequence[float] | None,
    precision: Precision,
    form: KVFormat,
    kv_split: KVSplit,
    *,
    exact: bool,
    device: str,
    max_seq_len: int,
    step_tokens: int,
    pp: int = 1,
) -> Shares | None:
    """The shares of all ranks, in any unit, for `make_plan`; None for equal shares.

    If `speeds` is given, shares are proportional to the speeds, but no rank gets more than fits
    into its memory; the other ranks get the rest, in proportion to their speeds. The memory of a
    rank must hold its weights, the tensors of a step, and the KV cache of a sequence of
    `max_seq_len` tokens. If no shares meet this, the KV cache need only hold one token. If no
    shares meet that either, they are proportional to `memory`.

    Args:
        memory: the bytes of each rank, None for no limit.
        speeds: the speed of each rank in any unit, None if the speeds are not known.
        device: 'cpu' or 'cuda'.
        pp: the number of stages of the pipeline.

    Raises: UsageError if `speeds` is not one positive number per rank, or as `make_plan`.
    """
    if speeds is None:
        return memory
    if len(speeds) != tp_size:
        raise UsageError(f"speeds has {len(speeds)} numbers for {tp_size} ranks; give one per rank")
    for rank, speed in enumerate(speeds):
        if not (math.isfinite(speed) and speed > 0):
            raise UsageError(f"the speed of rank {rank} is {speed}; give a number above 0")
    if memory is None:
        return speeds
    make_plan(args, tp_size, memory, pp=pp)  # raises for a wrong list

    def needed(n_tokens: int, shares: Shares) -> list[int]:
        """The bytes that each rank needs with these shares."""
        plan = make_plan(
            args,
            len(shares),
            shares,
            quant_group_size=precision.quant_group_size,
            kv_split=kv_split,
            exact=exact,
            pp=min(pp, len(shares)),
        )
        values = values_of_stages(args, precision, plan)
        held = [blocks_held(n_tokens, 1, each.window, step_tokens) for each in kv_groups(args)]
        return [
            weight_bytes(shard, values[shard.stage])
            + working_bytes(args, shard, precision, step_tokens, 1, device)
            + sum(map(mul, kv_bytes_per_token(args, shard, form), held))
            for shard in plan.shards
        ]

    for n_tokens in (max_seq_len, 1):
        (total,) = needed(n_tokens, [1])
        found = _within(speeds, memory, total, partial(needed, n_tokens))
        if found is not None:
            return found
    return memory


def fill(speeds: Sequence[float], most: Sequence[Fraction]) -> list[Fraction] | None:
    """Parts of 1 in proportion to the speeds, but no part above its maximum (water filling).

    None if the maxima do not sum up to 1.

    >>> [str(part) for part in fill([2, 1, 1], [Fraction(1, 4), Fraction(1), Fraction(1)])]
    ['1/4', '3/8', '3/8']
    """
    if sum(most) < 1 or min(most) <= 0:
        return None
    rates = [Fraction(speed) for speed in speeds]
    # Every rank that is not at its maximum works for the time `level`.
    by_level = sorted(range(len(rates)), key=lambda rank: most[rank] / rates[rank])
    left, speed = Fraction(1), sum(rates)
    level = Fraction(0)
    for rank in by_level:
        level = left / speed
        if level * rates[rank] <= most[rank]:
            break
        left -= most[rank]
        speed -= rates[rank]
    return [min(cap, level * rate) for cap, rate in zip(most, rates, strict=True)]


def _within(
    speeds: Sequence[float],
    memory: Sequence[float],
    total: int,
    needed: Callable[[Sequence[Fraction]], Sequence[int]],
) -> list[Fraction] | None:
    """Shares by speed that fit into the memory of every rank; None if no such shares exist.

    Units are whole, so the maximum of a rank is found by lowering it until its units fit.

    Args:
        total: the bytes of a single rank that holds the whole model.
    """
    most = [Fraction(1)] * len(speeds)
    while (shares := fill(speeds, most)) is not None:
        missing = [
            Fraction(each) - Fraction(has) for each, has in zip(needed(shares), memory, strict=True)
        ]
        if max(missing) <= 0:
            return shares
        for rank, n_bytes in enumerate(missing):
            if n_bytes > 0:
                most[rank] = shares[rank] - max(n_bytes / total, _STEP)
    return None
