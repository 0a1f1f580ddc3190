"""Warm-up launches, and so compiles, every kernel that a request launches on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from mixes import ARGS, HYBRID, WINDOWED, make_engine, make_runner
from test_cuda_graphs import paged_ops
from thread_ranks import ThreadComm, run_on_threads
from torch import Tensor

from parallel_llama.checkpoint.checkpoint import random_checkpoint
from parallel_llama.dtypes import Precision
from parallel_llama.engine.engine import Engine
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.warm_up import warm_up
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.ops import Scores
from parallel_llama.parallel.collectives import ByDevice, Solo
from parallel_llama.plan import KVSplit, make_plan
from parallel_llama.request import Request, SamplingParams

SMALL = replace(ARGS, n_layers=1, dim=32, n_heads=5, n_kv_heads=1, head_dim=8, dtype="float32")
WAYS = [
    SamplingParams(max_tokens=2, ignore_eos=True),
    SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.9, top_p=0.8),
    SamplingParams(max_tokens=2, ignore_eos=True, temperature=1.1),
    SamplingParams(max_tokens=2, ignore_eos=True, logprobs=2, prompt_logprobs=1),
]


def serve(engine: Engine, n_prompt: int) -> int:
    """Run one request, then one for each of WAYS. Returns: the number of finished requests."""
    n_finished = 0
    for batch in (WAYS[1:2], WAYS):
        for number, params in enumerate(batch):
            engine.submit(Request(number, tuple(range(1, n_prompt + 1)), params, 0, frozenset()))
        while not engine.idle:
            n_finished += sum(each.completion is not None for each in engine.step())
    return n_finished


@contextmanager
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """What Triton would compile: kernels, the types of their tensors, and their constants."""
    from triton.runtime.interpreter import InterpretedFunction

    found: set[str] = set()
    run = InterpretedFunction.run

    def note(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        types = [str(each.dtype) if isinstance(each, Tensor) else "" for each in arguments]
        found.add(f"{kernel.fn.__name__} {types} {constants}")
        return run(kernel, *arguments, grid=grid, warmup=warmup, **constants)

    with monkeypatch.context() as patched:
        patched.setattr(InterpretedFunction, "run", note)
        yield found


@pytest.mark.slow
def test_requests_launch_no_kernel_beyond_those_of_the_warm_up(monkeypatch):
    """Regression: the first prompt, filtered token and logprobs waited 2 to 10 s to compile."""
    pytest.importorskip("triton", reason="kernels for CUDA devices need triton")
    from parallel_llama.ops.cuda import decode_attention
    from parallel_llama.ops.cuda_ops import CUDAOps

    monkeypatch.setattr(decode_attention, "_PROGRAMS", 4)  # the interpreter is slow
    runner = ModelRunner.load(
        SMALL,
        random_checkpoint(SMALL, seed=1),
        make_plan(SMALL, 1),
        Solo(),
        precision=Precision.plain("float32"),
        device=torch.device("cpu"),
        ops=CUDAOps(Scores()),
    )
    engine = make_engine(runner, n_blocks=24, block_size=8)
    with launched(monkeypatch) as at_start:
        warm_up(runner, lambda: None)
    with launched(monkeypatch) as later:
        assert serve(engine, 12) == 1 + len(WAYS)
    assert at_start and later - at_start == set()


@pytest.mark.parametrize("args", [ARGS, HYBRID, replace(WINDOWED, attention_sinks=3)])
@pytest.mark.parametrize("n_blocks", [1, 2, 64])
def test_warm_up_runs_with_the_smallest_cache(args: ModelArgs, n_blocks: int) -> None:
    runner, steps = make_runner(Solo(), args, ops=paged_ops(args)), list[int]()
    make_engine(runner, n_blocks, block_size=4)
    warm_up(runner, lambda: steps.append(1))
    assert len(steps) == 4


@pytest.mark.parametrize(("tp_size", "kv_split"), [(2, "heads"), (5, "heads"), (5, "sequence")])
def test_ranks_compile_without_waiting_for_each_other(tp_size: int, kv_split: KVSplit) -> None:
    """Regression: a rank with a cold Triton cache compiled for a minute and was reported late."""

    class Waited(Solo):
        def __init__(self, comm: ThreadComm) -> None:
            self.rank, self.size, self.comm = comm.rank, comm.size, comm
            self.n_exchanges = 0

        def all_reduce(self, x: Tensor) -> Tensor:
            self.n_exchanges += 1
            return self.comm.all_reduce(x)

        def all_gather(self, x: Tensor) -> Tensor:
            self.n_exchanges += 1
            return self.comm.all_gather(x)

        def broadcast(self, x: Tensor, src: int = 0, *, no_timeout: bool = False) -> Tensor:
            self.n_exchanges += 1
            return self.comm.broadcast(x, src, no_timeout=no_timeout)

        def barrier(self) -> None:
            self.comm.barrier()

    def run(comm: ThreadComm) -> tuple[int, int]:
        host, gpus = Waited(comm), Waited(comm)
        both = ByDevice(host, gpus, lambda: None, lambda x: x.dim() > 1)
        runner = make_runner(both, ARGS, kv_split=kv_split, ops=paged_ops(ARGS))
        engine = make_engine(runner, 64, block_size=4)
        before = host.n_exchanges + gpus.n_exchanges
        warm_up(runner, lambda: None)
        alone = host.n_exchanges + gpus.n_exchanges - before
        if comm.rank == 0:
            engine.submit(Request(0, (1, 2, 3), WAYS[0], 0, frozenset()))
        engine.step()
        return alone, host.n_exchanges + gpus.n_exchanges - before

    for alone, together in run_on_threads(tp_size, run):
        assert alone == 0 < together


def test_ranks_with_unequal_shares_of_the_vocabulary_warm_up():
    """Regression: the last rank drew a token beyond what it took for the size of the vocabulary."""
    args = replace(ARGS, vocab_size=1000)
    plan = make_plan(args, 2, shares=(80, 24))

    class Other(Solo):
        rank, size = 1, 2

    runner = ModelRunner.load(
        args,
        random_checkpoint(args, seed=1),
        plan,
        ByDevice(Other(), Other(), lambda: None),
        precision=Precision.plain("float64"),
        device=torch.device("cpu"),
        ops=paged_ops(args),
    )
    assert plan.shards[1].vocab.start > 2 * len(plan.shards[1].vocab)
    make_engine(runner, 64, block_size=4)
    warm_up(runner, lambda: None)
