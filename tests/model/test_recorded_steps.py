"""A recorded decode step gives the same bits as its operators one by one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from mixes import ARGS, HYBRID, OF_FAMILIES, WINDOWED, make_engine, make_runner, random_mix, run_mix
from test_precisions import ARGS as KEPT_ARGS
from test_precisions import PRECISIONS, runner_of
from thread_ranks import run_on_threads
from torch import Tensor

from parallel_llama.dtypes import KVFormat
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.recorded_steps import Logits
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.ops import TorchOps
from parallel_llama.ops.cpu.jit import openmp
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.plan import why_unrecorded

T = TypeVar("T")

pytestmark = pytest.mark.skipif(openmp() is None, reason="kernels need torch's own GNU OpenMP")

CARRIED = {
    "llama": ARGS,
    "mistral": WINDOWED,
    "windows in some layers": HYBRID,
    "qwen2": OF_FAMILIES["qwen2"],
    "qwen3": OF_FAMILIES["qwen3"],
    "glm": OF_FAMILIES["glm"],
    "gemma": OF_FAMILIES["gemma"],
    "mixtral": OF_FAMILIES["mixtral"],
    "qwen2_moe": OF_FAMILIES["qwen2_moe"],
    "glm4_moe": OF_FAMILIES["glm4_moe"],
    "gpt_oss": OF_FAMILIES["gpt_oss"],
    "biases everywhere": replace(ARGS, attention_bias=True, mlp_bias=True),
    "post norms": replace(ARGS, post_norms=True, norm_offset=1.0, attention_soft_cap=2.0),
    "post norms only": replace(ARGS, pre_norms=False, post_norms=True),
    "norms across heads": replace(ARGS, qk_norm=True, qk_norm_across_heads=True),
    "squared ReLU": replace(ARGS, gated=False, activation="relu2", mlp_bias=True),
    "unrotated layers": replace(ARGS, unrotated_layers=(1,), residual_scale=0.3),
    "chunks of attention": replace(WINDOWED, window_chunks=True),
    "parallel blocks": replace(ARGS, parallel_block=True, shared_norm=True, mlp_bias=True),
}
NOT_CARRIED = {
    "falcon 40b": OF_FAMILIES["falcon 40b"],
    "palm": OF_FAMILIES["palm"],
    "llama4": OF_FAMILIES["llama4"],
    "norms without weights": replace(ARGS, qk_unit_norm=True),
}


class Both:
    """Runs every step as a recorded step if possible, then by its operators, on the same cache.

    Replaces the runner's recorded steps.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.calls = runner, runner._calls
        self.n_recorded = 0
        self.refuses = False

    def logits(self, *arguments: Any) -> Logits | None:
        logits = None if self.refuses else self.calls.logits(*arguments)
        self.n_recorded += logits is not None
        return logits

    def hidden(self, *arguments: Any) -> Tensor | None:
        hidden = None if self.refuses else self.calls.hidden(*arguments)
        self.n_recorded += hidden is not None
        return hidden

    def forward(self, chunks: Sequence[Chunk], rows: Sequence[int] | None = None) -> Tensor:
        """Replaces `ModelRunner.forward`."""
        hidden, expected = self._both_ways(lambda: ModelRunner.forward(self.runner, chunks, rows))
        assert torch.equal(hidden, expected)
        return hidden

    def step(self, *arguments: Any) -> tuple[Logits, Tensor]:
        """Replaces `ModelRunner.step`."""

        def values() -> tuple[Logits, Tensor]:
            logits, hidden = ModelRunner.step(self.runner, *arguments)
            return replace(logits, values=logits.values.clone()), hidden

        (logits, hidden), (expected, others) = self._both_ways(values)
        assert torch.equal(logits.values, expected.values) and torch.equal(hidden, others)
        if logits.largest is not None:
            first = self.runner.shard.vocab.start
            largest = TorchOps().largest(expected.values, first)
            assert torch.equal(torch.from_numpy(logits.largest), largest)
        return logits, hidden

    def _both_ways(self, run: Callable[[], T]) -> tuple[T, T]:
        ours = run()
        kept = [cache._kv.clone() for cache in self.runner.caches]
        self.refuses = True
        expected = run()
        self.refuses = False
        for cache, before in zip(self.runner.caches, kept, strict=True):
            assert torch.equal(_bytes(cache._kv), _bytes(before))
        return ours, expected


def both_of(runner: ModelRunner) -> Both:
    """Makes the runner run every step both ways, until the runner gets new caches."""
    both = Both(runner)
    runner._calls, runner.forward, runner.step = both, both.forward, both.step
    return both


def _bytes(kv: Tensor) -> Tensor:
    return kv.view(torch.uint8)


def run_both_ways(
    comm: Communicator,
    args: ModelArgs,
    seeds: range,
    kv_format: KVFormat | None = None,
) -> int:
    """Runs mixes of requests, each step both ways. Returns: the number of recorded steps."""
    runner = make_runner(comm, args, kv_format)
    n_recorded = 0
    for seed in seeds:
        mix = random_mix(seed)
        engine = make_engine(runner, mix.n_blocks, mix.block_size, mix.step_tokens, mix.max_drafts)
        both = both_of(runner)
        run_mix(engine, mix)
        n_recorded += both.n_recorded
    return n_recorded


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("llama", "mixtral") else pytest.mark.slow) for n in CARRIED],
)
def test_recorded_step_is_bitwise_equal_to_its_operators(name):
    """Batches grow and shrink; requests are preempted, hit the prefix cache, and have drafts."""
    assert run_both_ways(Solo(), CARRIED[name], range(4)) > 50


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "fp8"])
def test_recorded_step_with_narrow_kv_cache_is_bitwise_equal(kind):
    assert run_both_ways(Solo(), ARGS, range(2), KVFormat(kind)) > 20


@pytest.mark.parametrize("tp_size", [3, 7])
def test_recorded_steps_are_bitwise_equal_on_thread_ranks(tp_size):
    """Threads have no shared memory segment, so all_reduce is a host call of the recorded step."""
    for n_recorded in run_on_threads(tp_size, run_both_ways, ARGS, range(2)):
        assert n_recorded > 20


@pytest.mark.parametrize(
    ("name", "tp_size"), [("biases everywhere", 2), ("qwen2_moe", 3), ("norms across heads", 3)]
)
def test_recorded_steps_are_bitwise_equal_on_process_ranks(ranks, name, tp_size):
    for n_recorded in ranks(tp_size).run(run_both_ways, CARRIED[name], range(2)):
        assert n_recorded > 20


@pytest.mark.parametrize("name", NOT_CARRIED)
def test_models_that_kernels_do_not_cover_run_unrecorded(name):
    assert run_both_ways(Solo(), NOT_CARRIED[name], range(2)) == 0
    assert why_unrecorded(NOT_CARRIED[name], 1, "cpu") is not None


def decode_steps(runner: ModelRunner, n_sequences: int, n_tokens: int, block_size: int) -> int:
    """Decodes sequences in scattered blocks, each step both ways. Returns: the recorded steps."""
    n_blocks = -(-n_tokens // block_size)
    runner.reserve([n_sequences * n_blocks], block_size)
    both = both_of(runner)
    for at in range(n_tokens):
        chunks = [
            Chunk(
                [(7 * at + number) % 101],
                at,
                [range(number, n_sequences * n_blocks, n_sequences)],
                1,
            )
            for number in range(n_sequences)
        ]
        runner.forward(chunks)
    return both.n_recorded


@pytest.mark.parametrize("n_sequences", [1, 2, 7, 31, 32])
def test_steps_with_up_to_32_rows_are_recorded(n_sequences):
    assert decode_steps(make_runner(Solo()), n_sequences, 5, 2) == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", PRECISIONS)
def test_recorded_steps_accept_weights_of_any_format(name):
    args = replace(KEPT_ARGS, attention_bias=True, qk_norm=True)
    runner = runner_of(Solo(), PRECISIONS[name], args)
    assert decode_steps(runner, 3, 4, 2) == 4


def test_steps_with_more_than_32_rows_are_not_recorded():
    assert decode_steps(make_runner(Solo()), 33, 2, 2) == 0


@pytest.mark.parametrize(
    ("features", "n_recorded"),
    [({"unrotated_layers": (1,)}, 3), ({"scales_all_queries": True}, 4)],
)
def test_steps_are_recorded_until_queries_are_scaled(features, n_recorded):
    args = replace(ARGS, query_scale=0.3, query_scale_step=4, **features)
    assert decode_steps(make_runner(Solo(), args), 3, 8, 2) == n_recorded
    assert f"from position {n_recorded} on" in (why_unrecorded(args, 1, "cpu") or "")


def test_context_may_outgrow_the_buffers_of_a_recorded_step(monkeypatch):
    """Buffers for keys and for ranges of slots: here each block is a range of its own."""
    monkeypatch.setattr("parallel_llama.ops.cpu.attention_plan._LEAST_KEYS", 2)
    monkeypatch.setattr("parallel_llama.ops.cpu.attention_plan._LEAST_RANGES", 1)
    assert decode_steps(make_runner(Solo()), 3, 40, 1) == 40


def test_new_cache_records_new_steps():
    """A step recorded for the previous cache would write into memory with a new owner."""
    runner = make_runner(Solo())
    for n_blocks in (4, 8, 2):
        runner.reserve([n_blocks], 4)
        both = both_of(runner)
        for at in range(8):
            runner.forward([Chunk([at], at, [range(n_blocks)], 1)])
        assert both.n_recorded == 8


def test_result_of_a_step_is_not_overwritten_by_the_next():
    runner = make_runner(Solo())
    runner.reserve([1], 16)
    first = runner.forward([Chunk([3], 0, [[0]], 1)])
    before = first.clone()
    runner.forward([Chunk([4], 1, [[0]], 1)])
    assert torch.equal(first, before)
