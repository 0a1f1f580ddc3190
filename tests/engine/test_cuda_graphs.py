"""Paged steps and recorded decode steps give the same results as all other steps.

No GPU is needed: the operators are torch's, and a recording that runs its step again, into the
tensors of the first run, replaces a CUDA graph.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from mixes import (
    ARGS,
    HYBRID,
    OF_FAMILIES,
    Mix,
    differences,
    make_engine,
    make_runner,
    random_mix,
    run_mix,
)
from recorded import Recorded
from thread_ranks import run_on_threads
from torch import Tensor

from parallel_llama.dtypes import Precision
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.recorded_steps import Logits
from parallel_llama.engine.step_buffer import Chunk, SamplingKey
from parallel_llama.families.model_args import ModelArgs, RopeScaling
from parallel_llama.memory import working_bytes
from parallel_llama.ops import Scores, TorchOps
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.plan import make_plan
from parallel_llama.request import SamplingParams
from parallel_llama.sampling.draw import SampledToken
from parallel_llama.sampling.pending import PendingDraws

GREEDY, PLAIN = [SamplingParams()], [SamplingParams(temperature=1.2, n=2)]
# Greedy tokens, and tokens drawn from the whole vocabulary.
BEST = [*GREEDY, *PLAIN, SamplingParams(temperature=0.4)]
FILTERED = [
    SamplingParams(temperature=1.5, top_k=9),
    SamplingParams(temperature=0.9, top_p=0.8, n=2),
    SamplingParams(temperature=3.0, min_p=0.1),
    *GREEDY,
]
ALL = [*BEST, SamplingParams(temperature=1.5, top_k=9), SamplingParams(logprobs=1)]
CARRIED = ["qwen3", "gemma2", "mistral", "mixtral", "falcon 40b", "palm", "gpt_oss"]


class PagedOps(TorchOps):
    """torch's operators, called with block tables as on a GPU."""

    is_paged = True


def paged_ops(args: ModelArgs) -> PagedOps:
    return PagedOps(Scores(args.attention_scale, args.attention_soft_cap, args.sink_logits))


def run(comm: Communicator, args: ModelArgs, seeds: range, *, records: bool) -> int:
    """Run mixes of requests, and check that each request has the result that it has alone.

    Returns: the number of steps that replayed a graph.
    """
    runner, recorded = make_runner(comm, args, ops=paged_ops(args)), Recorded()
    for seed in seeds:
        mix = random_mix(seed)
        engine = make_engine(runner, mix.n_blocks, mix.block_size, mix.step_tokens, mix.max_drafts)
        if records:
            runner.record(recorded)
        assert not differences(mix, run_mix(engine, mix), args), seed
    return recorded.n_replays


def asking(mix: Mix, ways: Sequence[SamplingParams]) -> Mix:
    """The same requests, with these sampling parameters in turn."""
    guests = []
    for number, guest in enumerate(mix.guests):
        params = replace(ways[number % len(ways)], max_tokens=guest.request.params.max_tokens)
        guests.append(replace(guest, request=replace(guest.request, params=params)))
    return replace(mix, guests=tuple(guests))


def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one item for each step that is launched ahead, on any rank."""
    launched: list[int] = []
    launch = ModelRunner.step_ahead

    def step_ahead(
        runner: ModelRunner,
        chunks: Sequence[Chunk],
        sampling_keys: Sequence[SamplingKey],
        tokens: Tensor,
    ) -> Logits:
        launched.append(len(chunks))
        return launch(runner, chunks, sampling_keys, tokens)

    monkeypatch.setattr(ModelRunner, "step_ahead", step_ahead)
    return launched


def run_ahead(comm: Communicator, seeds: range) -> list[str]:
    runner, found = make_runner(comm, ARGS, ops=paged_ops(ARGS)), list[str]()
    for seed in seeds:
        mix = asking(random_mix(seed), [*BEST, *FILTERED])
        engine = make_engine(runner, mix.n_blocks, mix.block_size, mix.step_tokens)
        found += differences(mix, run_mix(engine, mix))
    return found


@pytest.mark.parametrize(("local_rope_theta", "n_tables"), [(None, 1), (5e3, 2)])
def test_kv_groups_with_the_same_rope_share_one_rotary_table(local_rope_theta, n_tables):
    args = replace(HYBRID, local_rope_theta=local_rope_theta)
    rotations = make_runner(Solo(), args, ops=paged_ops(args))._rotations
    assert rotations is not None and len(rotations) == 2
    assert len(set(rotations)) == n_tables


@pytest.mark.parametrize("args", [ARGS, HYBRID], ids=["full", "windows"])
def test_rotary_tables_fit_the_cache_and_count_as_working_memory(args):
    """Regression: a context of 1M tokens took 512 MB for each table, and no plan counted them."""

    def table_bytes(context: int, n_blocks: int) -> int:
        own = replace(args, max_seq_len=context)
        runner = make_runner(Solo(), own, ops=paged_ops(own))
        runner.reserve([n_blocks] * len(runner.kv_groups), 4)
        assert runner._rotations is not None
        return sum(table.nbytes for table in set(runner._rotations))

    def working(context: int) -> int:
        own = replace(args, max_seq_len=context)
        shard, precision = make_plan(own, 1).shards[0], Precision.plain("float64")
        return working_bytes(own, shard, precision, 1, 1, "cuda", context, from_gguf=False)

    assert table_bytes(400, 100) - table_bytes(200, 100) == working(400) - working(200) > 0
    assert table_bytes(400, 10) == table_bytes(40, 10)


def test_steps_reach_the_context_that_yarn_extends():
    """Regression: tables and graphs ended at max_seq_len, and longer sequences read past them."""
    trained = replace(ARGS, max_seq_len=8)
    extended = replace(trained, rope_scaling=RopeScaling("yarn", 8.0, 8))  # to 64 tokens
    runner = make_runner(Solo(), extended, ops=paged_ops(extended))
    runner.reserve([40], 2)
    assert runner._rotations is not None
    assert [len(table) for table in runner._rotations] == [64]
    shard, precision = make_plan(ARGS, 1).shards[0], Precision.plain("float64")
    long, short = (
        working_bytes(args, shard, precision, 1, 1, "cuda", 8, from_gguf=False)
        for args in (extended, trained)
    )
    assert long - short == runner._rotations[0][8:].nbytes
    assert run(Solo(), extended, range(2), records=True) > 0


@pytest.mark.parametrize("args", [ARGS, HYBRID])
def test_results_in_a_mix_equal_results_alone_with_paged_operators(args):
    assert run(Solo(), args, range(4), records=False) == 0


@pytest.mark.parametrize(
    "args",
    [
        HYBRID,
        *(pytest.param(OF_FAMILIES[name], marks=pytest.mark.slow) for name in CARRIED),
        pytest.param(ARGS, marks=pytest.mark.slow),
    ],
)
def test_results_in_a_mix_equal_results_alone_with_recorded_steps(args):
    assert run(Solo(), args, range(4), records=True) > 20


@pytest.mark.parametrize("records", [False, True])
def test_a_runner_is_freed_with_its_last_reference(records):
    """Regression: graphs referred to the runner, and gc skips objects frozen at the start."""
    runner = make_runner(Solo(), ARGS, ops=paged_ops(ARGS))
    if records:
        runner.record(Recorded())
    runner.close()
    freed = weakref.ref(runner)
    gc.disable()
    try:
        del runner
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [3, 7])
def test_all_ranks_replay_recorded_steps(tp_size):
    assert min(run_on_threads(tp_size, run, ARGS, range(2), records=True)) > 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "records", "ways"),
    [
        (ARGS, False, PLAIN),
        (ARGS, True, ALL),
        (HYBRID, True, FILTERED),
        (HYBRID, False, ALL),
        (OF_FAMILIES["mixtral"], True, PLAIN),
        (OF_FAMILIES["mixtral"], False, FILTERED),
    ],
    ids=["plain", "all recorded", "windows", "windows all", "experts", "experts filtered"],
)
def test_steps_launched_before_tokens_are_read_change_no_result(monkeypatch, args, records, ways):
    """Requests end, are cancelled and arrive while their next step is already in flight."""
    launched = count_launches(monkeypatch)
    runner = make_runner(Solo(), args, ops=paged_ops(args))
    for seed in range(6):
        mix = asking(random_mix(seed), ways)
        engine = make_engine(runner, mix.n_blocks, mix.block_size, mix.step_tokens)
        if records:
            runner.record(Recorded())
        assert not differences(mix, run_mix(engine, mix), args), seed
    assert len(launched) > 15


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [2, 5])
def test_ranks_launch_the_same_steps_ahead(monkeypatch, tp_size):
    launched = count_launches(monkeypatch)
    for outcome in run_on_threads(tp_size, run_ahead, range(3)):
        assert not outcome
    assert len(launched) > 5 * tp_size and len(launched) % tp_size == 0


@pytest.mark.parametrize("tp_size", [1, 3])
def test_step_launched_from_an_undecided_token_is_run_again(monkeypatch, tp_size):
    """With 10 candidates some rows are undecided, which shows only when the draws are read."""
    monkeypatch.setattr("parallel_llama.sampling.pending.N_CANDIDATES", 10)
    settled: list[bool] = []
    read = PendingDraws.read

    def count(pending: PendingDraws) -> tuple[list[SampledToken], bool]:
        drawn = read(pending)
        settled.append(drawn[1])
        return drawn

    monkeypatch.setattr(PendingDraws, "read", count)
    launched = count_launches(monkeypatch)
    for outcome in run_on_threads(tp_size, run_ahead, range(3)):
        assert not outcome
    assert settled.count(False) > 5 * tp_size < settled.count(True) and len(launched) > 5 * tp_size


@pytest.mark.parametrize("rank", [0, 2])
def test_all_ranks_skip_graphs_that_one_rank_cannot_record(caplog, rank):
    """A rank that alone replayed a graph would wait for the other ranks."""

    def run_partly(comm: Communicator) -> tuple[list[str], list[int]]:
        runner, recorded = make_runner(comm, ARGS, ops=paged_ops(ARGS)), Recorded()
        asked: list[int] = []

        def record(step: Callable[[], Logits]) -> tuple[Logits, Callable[[], object]]:
            if comm.rank == rank and asked[-1] == 4:
                step()  # a step runs once before it is recorded
                raise RuntimeError("operation not permitted when stream is capturing")
            return recorded(step)

        mix = asking(random_mix(3), GREEDY)
        engine = make_engine(runner, mix.n_blocks, mix.block_size, mix.step_tokens)
        runner.record(record, asked.append)
        return differences(mix, run_mix(engine, mix)), asked

    for found, asked in run_on_threads(3, run_partly):
        assert not found and asked == [1, 2, 4]
    assert "decode steps that need a CUDA graph of 4 rows or more run without one" in caplog.text
