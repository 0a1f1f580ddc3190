"""The plan covers every axis once, keeps query heads with their KV heads, and is balanced."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_llama.dtypes import KVFormat, Precision
from parallel_llama.errors import UsageError
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.weights import Param
from parallel_llama.memory import (
    PROCESS_BYTES,
    blocks_held,
    bytes_passed_over,
    kv_bytes_per_token,
    most_blocks,
    pool_sizes,
    values_by_form,
    weight_bytes,
    working_bytes,
)
from parallel_llama.plan import (
    KVSplit,
    apportion,
    equal_runs,
    local_kv_heads,
    make_plan,
    unit_size,
)

HALF = Precision.plain("bfloat16")

HEADS = [(9, 3), (10, 2), (12, 4), (40, 10), (7, 1), (6, 6), (32, 8), (64, 8), (71, 1), (52, 52)]


def shape(n_heads: int, n_kv_heads: int, ffn_dim: int = 1536, vocab_size: int = 49152) -> ModelArgs:
    return ModelArgs(
        dim=n_heads * 8,
        n_layers=2,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=8,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
    )


@st.composite
def shapes(draw: st.DrawFn) -> ModelArgs:
    n_kv_heads = draw(st.integers(1, 12))
    return shape(
        n_kv_heads * draw(st.integers(1, 9)),
        n_kv_heads,
        draw(st.integers(1, 3000)),
        draw(st.integers(1, 3000)),
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[ModelArgs, int, list[float] | None]:
    args = draw(shapes())
    tp_size = draw(st.integers(1, args.n_heads))
    memory = st.lists(st.floats(0.5, 200), min_size=tp_size, max_size=tp_size)
    return args, tp_size, draw(st.none() | memory)


@given(plans())
def test_every_head_channel_and_row_has_exactly_one_owner(case):
    args, tp_size, memory = case
    shards = make_plan(args, tp_size, memory).shards
    for axis, size in (("heads", args.n_heads), ("ffn", args.ffn_dim), ("vocab", args.vocab_size)):
        owned = [index for shard in shards for index in shard.extent(axis)]
        assert owned == list(range(size))
    assert all(shard.n_local_heads >= 1 for shard in shards)


@given(plans())
def test_every_local_query_head_finds_its_own_kv_head_in_its_run(case):
    args, tp_size, memory = case
    heads_per_kv = args.n_heads // args.n_kv_heads
    for shard in make_plan(args, tp_size, memory).shards:
        assert 1 <= len(shard.runs) <= 3
        assert [i for run in shard.runs for i in run.heads] == list(range(shard.n_local_heads))
        for run in shard.runs:
            per_kv_head, rest = divmod(len(run.heads), len(run.kv_heads))
            assert rest == 0
            for place, local in enumerate(run.heads):
                kv_head = shard.kv_heads[run.kv_heads[place // per_kv_head]]
                assert kv_head == shard.heads[local] // heads_per_kv


@given(plans())
def test_ranges_are_cut_between_units(case):
    args, tp_size, memory = case
    for size, axis in ((args.ffn_dim, "ffn"), (args.vocab_size, "vocab")):
        unit = unit_size(size, args.n_heads)
        for shard in make_plan(args, tp_size, memory).shards:
            extent = shard.extent(axis)
            assert extent.start % unit == 0 or extent.start == size
            assert extent.stop % unit == 0 or extent.stop == size


@pytest.mark.parametrize("tp_size", [3, 4, 5, 6, 7])
@pytest.mark.parametrize("n_heads", [32, 64])
def test_models_with_eight_kv_heads_are_balanced_within_13_percent(n_heads, tp_size):
    plan = make_plan(shape(n_heads, 8), tp_size)
    mean = n_heads / tp_size
    assert max(shard.n_local_heads for shard in plan.shards) / mean <= 1.13
    assert plan.balance == pytest.approx(max(s.n_local_heads for s in plan.shards) / mean)


def test_cut_is_between_kv_heads_if_that_is_balanced():
    assert make_plan(shape(32, 8), 3).cut == "kv_heads"  # 3 + 3 + 2 KV heads: 1.125
    assert make_plan(shape(32, 8), 5).cut == "heads"  # 2 of 8 KV heads would be 1.25
    assert make_plan(shape(9, 3), 2).cut == "heads"
    assert make_plan(shape(9, 3), 3).cut == "kv_heads"


def test_each_kv_head_is_replicated_on_adjacent_ranks():
    plan = make_plan(shape(64, 8), 16)
    assert [shard.kv_heads.start for shard in plan.shards] == [r // 2 for r in range(16)]
    assert all(shard.n_local_kv_heads == 1 for shard in plan.shards)


def test_shards_are_proportional_to_memory():
    plan = make_plan(shape(64, 8, ffn_dim=28672), 3, [80, 80, 40])
    assert [shard.n_local_heads for shard in plan.shards] == [26, 25, 13]
    assert plan.balance == pytest.approx(26 / 64 / 0.4)
    first, second, third = (
        weight_bytes(s, values_by_form(shape(64, 8, 28672), HALF)) for s in plan.shards
    )
    assert third < 0.55 * first and abs(first - second) < 0.03 * first


@given(plans())
def test_only_the_proportions_of_the_memory_matter(case):
    args, tp_size, memory = case
    in_bytes = memory and [gib * 2**30 for gib in memory]
    assert make_plan(args, tp_size, in_bytes) == make_plan(args, tp_size, memory)


@pytest.mark.parametrize("tp_size", [0, -1, 10])
def test_impossible_tp_size_is_refused_with_valid_range(tp_size):
    with pytest.raises(UsageError, match=rf"cannot be split over {tp_size} ranks; use 1 to 9"):
        make_plan(shape(9, 3), tp_size)


@pytest.mark.parametrize("memory", [[80.0], [80, 0], [80, -1], [80, math.nan], [80, math.inf]])
def test_memory_that_is_not_one_positive_number_per_rank_is_refused(memory):
    with pytest.raises(UsageError, match="memory"):
        make_plan(shape(9, 3), 2, memory)


def test_a_tiny_model_may_leave_a_rank_without_ffn_or_vocabulary():
    plan = make_plan(shape(9, 3, ffn_dim=2, vocab_size=5), 9)
    assert sum(len(shard.vocab) == 0 for shard in plan.shards) == 4
    assert sum(len(shard.ffn) == 0 for shard in plan.shards) == 7


@pytest.mark.parametrize(
    ("size", "n_heads", "unit"),
    [(1536, 9, 32), (49152, 9, 128), (14336, 32, 64), (28672, 64, 64), (211, 9, 4), (35, 9, 1)],
)
def test_unit_is_largest_power_of_two_with_four_units_per_head(size, n_heads, unit):
    assert unit_size(size, n_heads) == unit
    assert unit == 128 or -(-size // (2 * unit)) < 4 * n_heads
    assert unit == 1 or -(-size // unit) >= 4 * n_heads


def test_quantisation_group_size_is_the_unit():
    assert unit_size(29568, 64, quant_group_size=128) == 128
    plan = make_plan(shape(64, 8, ffn_dim=29568), 2, quant_group_size=128)
    assert [len(shard.ffn) // 128 for shard in plan.shards] == [116, 115]


@given(st.integers(0, 500), st.lists(st.integers(1, 50), min_size=1, max_size=12))
def test_apportioned_counts_are_within_one_of_their_quota(n_units, weights):
    counts = apportion(n_units, weights)
    assert sum(counts) == n_units
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - n_units * weight / sum(weights)) < 1


@given(st.integers(1, 9), st.integers(0, 40), st.integers(1, 40))
def test_every_run_has_equally_many_heads_per_kv_head(heads_per_kv, start, length):
    heads = range(start, start + length)
    for run in equal_runs(heads, heads_per_kv):
        per_kv_head = len(run.heads) // len(run.kv_heads)
        assert per_kv_head * len(run.kv_heads) == len(run.heads)
    assert len(local_kv_heads(heads, heads_per_kv)) <= length // heads_per_kv + 2


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), HEADS)
def test_shard_bytes_add_up_to_model_and_replicated_weights(n_heads, n_kv_heads):
    args = shape(n_heads, n_kv_heads)
    whole = weight_bytes(make_plan(args, 1).shards[0], values_by_form(args, HALF)) // 2
    for tp_size in {1, 2, 3, 5, n_heads} & set(range(1, n_heads + 1)):
        shards = make_plan(args, tp_size).shards
        doubled = sum(shard.n_local_kv_heads for shard in shards) - n_kv_heads
        replicated = (2 * args.n_layers + 1) * args.dim * (tp_size - 1)  # the norms
        extra = doubled * 2 * args.n_layers * args.head_dim * args.dim + replicated
        assert sum(weight_bytes(shard, values_by_form(args, HALF)) for shard in shards) == 2 * (
            whole + extra
        )


@given(plans(), st.booleans(), st.booleans(), st.booleans())
def test_weight_bytes_equal_sum_over_parameters(case, attention_bias, mlp_bias, tied):
    args, tp_size, memory = case
    args = replace(
        args, attention_bias=attention_bias, mlp_bias=mlp_bias, tied_embeddings=tied, n_layers=3
    )
    for shard in make_plan(args, tp_size, memory).shards:
        values = 0
        for param in parameters(args):
            cut = len(shard.rows_of(param))
            values += math.prod(param.shape) // param.shape[param.dim] * cut
        assert weight_bytes(shard, values_by_form(args, HALF)) == 2 * values


def test_cost_of_weight_bytes_does_not_depend_on_n_layers(monkeypatch):
    """Regression: counting every layer of every shard took over a minute for a range of tp_size."""
    made = []
    monkeypatch.setattr(
        "parallel_llama.families.weights.Param",
        lambda *fields: made.append(fields) or Param(*fields),
    )
    shard = make_plan(shape(9, 3), 2).shards[0]
    counts = []
    for n_layers in (1, 4096):
        made.clear()
        weight_bytes(shard, values_by_form(replace(shape(9, 3), n_layers=n_layers), HALF))
        counts.append(len(made))
    assert counts[0] == counts[1] > 0


# Experts


MIXTRAL = ModelArgs(
    dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, ffn_dim=14336,
    vocab_size=32000, n_experts=8, n_active_experts=2,
)  # fmt: skip
QWEN3_30B = ModelArgs(
    dim=2048, n_layers=48, n_heads=32, n_kv_heads=4, head_dim=128, ffn_dim=768,
    vocab_size=151936, n_experts=128, n_active_experts=8,
)  # fmt: skip


@st.composite
def expert_plans(draw: st.DrawFn) -> tuple[ModelArgs, int, list[float] | None, int | None]:
    args, tp_size, memory = draw(plans())
    n_experts = draw(st.integers(1, 20))
    args = replace(args, n_experts=n_experts, n_active_experts=1)
    return args, tp_size, memory, draw(st.none() | st.integers(1, tp_size))


@given(expert_plans())
def test_every_channel_of_every_expert_has_exactly_one_owner(case):
    args, tp_size, memory, ranks_per_expert = case
    shards = make_plan(args, tp_size, memory, ranks_per_expert=ranks_per_expert).shards
    for expert in range(args.n_experts):
        owned = [channel for shard in shards if expert in shard.experts for channel in shard.ffn]
        assert owned == list(range(args.ffn_dim))
    assert all(shard.experts for shard in shards)


@given(expert_plans())
def test_weight_bytes_with_experts_equal_sum_over_parameters(case):
    args, tp_size, memory, ranks_per_expert = case
    for shard in make_plan(args, tp_size, memory, ranks_per_expert=ranks_per_expert).shards:
        values = 0
        for param in parameters(args):
            values += math.prod(param.shape) // param.shape[param.dim] * len(shard.rows_of(param))
        assert weight_bytes(shard, values_by_form(args, HALF)) == 2 * values


@pytest.mark.parametrize("tp_size", range(1, 33))
def test_experts_are_tensor_parallel_if_shards_are_wide_enough(tp_size):
    plan = make_plan(MIXTRAL, tp_size)
    assert plan.placement is not None and plan.placement.kind == "tensor"
    assert all(shard.experts == range(8) for shard in plan.shards)
    assert min(len(shard.ffn) for shard in plan.shards) >= 256


@pytest.mark.parametrize(
    ("tp_size", "kind", "experts", "channels"),
    [
        (3, "tensor", [128] * 3, [256] * 3),
        (5, "mixed", [77] * 3 + [51] * 2, [256] * 3 + [384] * 2),
        (8, "mixed", [48] * 6 + [32] * 2, [256] * 6 + [384] * 2),
    ],
)
def test_experts_are_split_over_ranks_to_keep_256_channels(tp_size, kind, experts, channels):
    plan = make_plan(QWEN3_30B, tp_size)
    assert plan.placement is not None and plan.placement.kind == kind
    assert [len(shard.experts) for shard in plan.shards] == experts
    assert [len(shard.ffn) for shard in plan.shards] == channels


def test_narrow_experts_are_whole_on_one_rank_each():
    plan = make_plan(replace(QWEN3_30B, ffn_dim=384), 3)
    assert plan.placement is not None and plan.placement.kind == "expert"
    assert plan.placement.reason == (
        "every rank has whole experts: 128 of an expert's 384 channels on each of 3 ranks would "
        "be fewer than 256"
    )
    assert [shard.experts for shard in plan.shards] == [range(43), range(43, 86), range(86, 128)]


def test_adjacent_ranks_share_an_expert_if_ranks_outnumber_experts():
    plan = make_plan(replace(QWEN3_30B, ffn_dim=128, n_experts=3, n_active_experts=1), 7)
    assert [shard.experts.start for shard in plan.shards] == [0, 0, 0, 1, 1, 2, 2]
    assert all(len(shard.experts) == 1 for shard in plan.shards)


def test_a_group_of_ranks_gets_experts_in_proportion_to_its_memory():
    plan = make_plan(QWEN3_30B, 4, [40, 20, 20, 20], ranks_per_expert=2)
    assert [len(shard.experts) for shard in plan.shards] == [77, 77, 51, 51]
    assert [len(shard.ffn) for shard in plan.shards] == [512, 256, 384, 384]
    bytes_held = [weight_bytes(s, values_by_form(QWEN3_30B, HALF)) for s in plan.shards]
    assert max(bytes_held[1:]) < 1.02 * min(bytes_held[1:])
    assert 1.95 < bytes_held[0] / bytes_held[1] < 2.05


def test_bytes_passed_over_are_embeddings_and_unused_experts():
    embeddings = 32000 * 4096
    expert = 3 * 4096 * 14336 * 32  # in all layers
    assert bytes_passed_over(MIXTRAL, 1, HALF) == 2 * (embeddings + 6 * expert)
    assert bytes_passed_over(MIXTRAL, 2, HALF) == 2 * (embeddings + 4.5 * expert)
    assert bytes_passed_over(MIXTRAL, 1000, HALF) == 2 * embeddings
    assert bytes_passed_over(replace(shape(9, 3), tied_embeddings=True), 1, HALF) == 0


def test_a_dense_model_has_no_placement_of_experts():
    plan = make_plan(shape(9, 3), 2)
    assert plan.placement is None
    assert all(shard.experts == range(0) for shard in plan.shards)


def test_kv_bytes_count_only_local_kv_heads():
    shard = make_plan(shape(9, 3), 2).shards[0]
    assert kv_bytes_per_token(shape(9, 3), shard, KVFormat("bfloat16")) == (2 * 2 * 2 * 8 * 2,)


def test_int8_and_fp8_kv_bytes_include_a_scale_per_row():
    shard = make_plan(shape(9, 3), 2).shards[0]
    for name in ("int8", "fp8"):
        assert kv_bytes_per_token(shape(9, 3), shard, KVFormat(name)) == (2 * 2 * 2 * (8 + 4),)


# Windows


@given(
    block_size=st.integers(1, 9),
    window=st.integers(1, 20),
    step_tokens=st.integers(1, 20),
    start=st.integers(0, 60),
)
def test_blocks_held_is_the_most_blocks_a_step_can_touch(block_size, window, step_tokens, start):
    seen = range(max(start - window + 1, 0), start + step_tokens)
    touched = len({position // block_size for position in seen})
    assert touched <= blocks_held(seen.stop, block_size, window, step_tokens)
    everywhere = range(window, window + block_size)
    most = max(len({p // block_size for p in range(at, at + len(seen))}) for at in everywhere)
    if start >= window:
        assert most == blocks_held(10_000, block_size, window, step_tokens)


HYBRID = replace(shape(9, 3), n_layers=6, sliding_window=64, full_layers=(5,))


@given(
    n_blocks=st.integers(0, 3000), block_size=st.integers(1, 16), max_seq_len=st.integers(1, 5000)
)
def test_window_pool_holds_at_least_as_many_long_sequences(n_blocks, block_size, max_seq_len):
    full, windowed = pool_sizes(HYBRID, n_blocks, block_size, max_seq_len, 32)
    assert full == n_blocks and n_blocks / 4 <= windowed <= n_blocks

    def held(n_tokens: int) -> tuple[int, int]:
        whole, ring = (blocks_held(n_tokens, block_size, window, 32) for window in (None, 64))
        return whole, ring

    whole, ring = held(max_seq_len)
    assert full // whole <= windowed // ring
    assert windowed >= held(n_blocks * block_size)[1]  # a sequence that fills the full pool


@given(st.integers(0, 100_000))
def test_the_most_blocks_fit_and_one_more_would_not(room):
    per_kv_group = kv_bytes_per_token(HYBRID, make_plan(HYBRID, 1).shards[0], KVFormat("int8"))
    assert len(per_kv_group) == 2 and per_kv_group[1] == 5 * per_kv_group[0]

    def sizes(n_blocks: int) -> tuple[int, ...]:
        return pool_sizes(HYBRID, n_blocks, 1, 500, 32)

    def taken(n_blocks: int) -> int:
        return sum(n * each for n, each in zip(sizes(n_blocks), per_kv_group, strict=True))

    most = most_blocks(sizes, per_kv_group, room)
    assert taken(most) <= room < taken(most + 1)


def test_parameters_have_meta_names_and_shard_axes():
    cuts = {param.name: (param.axis, param.dim) for param in parameters(shape(9, 3))}
    assert cuts["tok_embeddings.weight"] == ("vocab", 0)
    assert cuts["layers.1.attention.wq.weight"] == ("heads", 0)
    assert cuts["layers.1.attention.wv.weight"] == ("kv_heads", 0)
    assert cuts["layers.1.attention.wo.weight"] == ("heads", 1)
    assert cuts["layers.1.feed_forward.w2.weight"] == ("ffn", 1)
    assert cuts["layers.1.ffn_norm.weight"] == (None, 0)
    assert cuts["output.weight"] == ("vocab", 0)


def test_results_that_attention_gathers_from_all_ranks_are_counted():
    """Regression: with kv_split='sequence', long sequences took memory that no plan counted."""
    args, single = shape(32, 8), Precision.plain("float32")

    def working(max_seq_len: int, kv_split: KVSplit, *, exact: bool) -> int:
        shard = make_plan(args, 16, kv_split=kv_split, exact=exact).shards[0]
        return working_bytes(args, shard, single, 512, 1, "cpu", max_seq_len, from_gguf=False)

    lengths = 8192, 16384, 32768, 1 << 20, 1 << 21
    by_tokens = [working(length, "sequence", exact=True) for length in lengths]
    # The gathered results: 64 queries with 64 parts each, then at most 8,192 parts, or the parts of
    # one query. The results that this rank computes, and those of its heads, take 1/16 more each.
    n_parts = 4096, 8192, 8192, 8192, 16384
    expected = [n * 32 * (8 + 2) * 4 * 18 // 16 for n in n_parts]
    assert [n - by_tokens[0] for n in by_tokens] == [n - expected[0] for n in expected]
    rows = (2 * 512 + 16 * 256) * 32 * (8 + 1) * 4
    assert working(8192, "sequence", exact=False) > PROCESS_BYTES + rows
    assert len({working(length, "heads", exact=True) for length in lengths}) == 1


def test_kv_tokens_are_sharded_if_heads_would_be_replicated():
    """Every rank then holds an equal part of one copy of the KV cache."""
    form = KVFormat("float32")
    for n_heads, n_kv_heads, tp_size in [(9, 3, 2), (9, 3, 5), (7, 1, 4), (10, 2, 10)]:
        args = shape(n_heads, n_kv_heads)
        plan = make_plan(args, tp_size, kv_split="sequence")
        (one,) = kv_bytes_per_token(args, make_plan(args, 1).shards[0], form)
        assert plan.kv_parts == tp_size
        for shard in plan.shards:
            assert shard.kv_heads == range(n_kv_heads) and shard.heads in shard.peers
            assert kv_bytes_per_token(args, shard, form) == (-(-one // tp_size),)
    for n_heads, n_kv_heads, tp_size in [(9, 3, 1), (9, 3, 3), (8, 4, 2)]:  # nothing to save
        args = shape(n_heads, n_kv_heads)
        assert make_plan(args, tp_size, kv_split="sequence") == make_plan(args, tp_size)
