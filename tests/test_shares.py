"""Shares of the model by speed, within the memory of each rank."""

from collections.abc import Sequence
from fractions import Fraction
from unittest.mock import patch

import pytest
from mixes import ARGS

from parallel_llama.dtypes import KVFormat, make_precision
from parallel_llama.errors import UsageError
from parallel_llama.memory import kv_bytes_per_token, values_by_form, weight_bytes, working_bytes
from parallel_llama.plan import ShardPlan, make_plan
from parallel_llama.shares import Shares, fill, plan_with_shares

PRECISION, FORM = make_precision(ARGS, "float64", "cpu"), KVFormat("float64")
N_TOKENS, STEP_TOKENS = 64, 512


def shares(memory: Sequence[int] | None, speeds: Sequence[float] | None) -> Shares | None:
    """The shares that `plan_with_shares` passes to `make_plan`."""
    n_ranks = len(memory or speeds or [1])
    with patch("parallel_llama.shares.make_plan", wraps=make_plan) as made:
        plan_with_shares(
            ARGS, n_ranks, memory, speeds, PRECISION, FORM, "heads",
            exact=True, device="cpu", max_seq_len=N_TOKENS, step_tokens=STEP_TOKENS,
            from_gguf=False,
        )  # fmt: skip
    own: Shares | None = made.call_args.args[2]
    return own


def needed(plan: ShardPlan) -> list[int]:
    values = values_by_form(ARGS, PRECISION, exact=True)
    return [
        weight_bytes(shard, values)
        + working_bytes(ARGS, shard, PRECISION, STEP_TOKENS, 1, "cpu", N_TOKENS, from_gguf=False)
        + N_TOKENS * sum(kv_bytes_per_token(ARGS, shard, FORM))
        for shard in plan.shards
    ]


def planned(own: Shares | None, n_ranks: int) -> ShardPlan:
    return make_plan(ARGS, n_ranks, own, exact=True)


@pytest.mark.parametrize(
    ("speeds", "most"),
    [
        ([2, 1], ["1", "1"]),
        ([2, 1], ["1/2", "1"]),
        ([5, 1, 1], ["1/3", "1/3", "1"]),
        ([5, 4, 3, 2, 1], ["1/10", "1", "1/4", "1", "1"]),
        ([3, 3, 3, 1, 1, 1, 1], ["1/8", "1/7", "1", "1", "1/100", "1", "1"]),
    ],
)
def test_ranks_below_their_limit_share_the_rest_by_speed(speeds, most):
    """No split is faster: every rank below its limit takes as long as the slowest rank."""
    limits = [Fraction(each) for each in most]
    found = fill(speeds, limits)
    assert sum(found) == 1
    times = [part / speed for part, speed in zip(found, speeds, strict=True)]
    for part, limit, time in zip(found, limits, times, strict=True):
        assert part == limit or time == max(times)
        assert part <= limit


def test_fill_returns_none_if_limits_are_too_small():
    assert fill([1, 1], [Fraction(1, 2), Fraction(49, 100)]) is None
    assert fill([1, 1], [Fraction(1), Fraction(0)]) is None


def test_shares_follow_memory_or_speeds_if_only_one_is_given():
    assert shares([3, 1], None) == [3, 1]
    assert shares(None, [2.5, 1]) == [2.5, 1]
    assert shares(None, None) is None
    assert shares([1 << 40, 1 << 39], [1, 3]) == [Fraction(1, 4), Fraction(3, 4)]


@pytest.mark.parametrize(
    "speeds", [(3, 1), (1, 5, 1), (4, 1, 1, 1, 2), (7, 1, 1, 1, 1, 1, 1)], ids=str
)
def test_a_fast_rank_with_little_memory_holds_what_fits(speeds):
    n_ranks = len(speeds)
    free = needed(planned(speeds, n_ranks))
    fastest = speeds.index(max(speeds))
    even = needed(planned(None, n_ranks))
    memory = [1 << 40] * n_ranks
    memory[fastest] = (free[fastest] + even[fastest]) // 2
    found = shares(memory, speeds)
    assert found is not None
    plan = planned(found, n_ranks)
    held = needed(plan)
    assert even[fastest] - 4096 < held[fastest] <= memory[fastest] < free[fastest]
    others = [part / speed for part, speed in zip(found, speeds, strict=True)]
    del others[fastest]
    assert max(others) == min(others)


def test_shares_follow_memory_if_no_shares_by_speed_fit():
    """Loading then fails with the same error about missing memory as without speeds."""
    assert shares([1000, 3000], [2, 1]) == [1000, 3000]


@pytest.mark.parametrize(
    ("speeds", "said"),
    [((1, 2, 3), "speeds has 3 numbers for 2 ranks"), ((1, 0), "the speed of rank 1 is 0")],
)
def test_speeds_that_are_not_one_positive_number_per_rank_are_refused(speeds, said):
    with pytest.raises(UsageError, match=said):
        shares([1, 1], speeds)
