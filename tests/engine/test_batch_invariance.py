"""A request's result has the same bits in any batch, with any chunks, and with a cached prefix.

Log-probabilities are compared, because tokens alone would hide another order of summation. With
weights of 4 and 8 bits such a difference is large, because it changes how inputs are rounded.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle

import pytest
import torch
from mixes import make_engine
from thread_ranks import run_on_threads

from parallel_llama.checkpoint.checkpoint import random_checkpoint
from parallel_llama.dtypes import KVFormat, Precision
from parallel_llama.engine.engine import Engine
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.ops import cpu_ops
from parallel_llama.ops.cpu import jit
from parallel_llama.ops.cpu.jit import openmp
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.plan import make_plan
from parallel_llama.request import Completion, Request, SamplingParams

pytestmark = pytest.mark.skipif(openmp() is None, reason="kernels need torch's own GNU OpenMP")

ARGS = ModelArgs(
    dim=96,
    n_layers=2,
    n_heads=6,
    n_kv_heads=3,
    head_dim=32,
    ffn_dim=160,
    vocab_size=101,
    dtype="float32",
)
MODELS = {
    "plain": ARGS,
    "window": replace(ARGS, sliding_window=40),
    "windows in some layers": replace(ARGS, sliding_window=130, full_layers=(1,)),
    "experts": replace(ARGS, n_experts=5, n_active_experts=2),
    "soft cap": replace(ARGS, attention_soft_cap=2.0, qk_norm=True),
}
FORMATS = [
    ("float32", "none", None),
    ("float64", "none", None),
    ("bfloat16", "none", None),
    ("float16", "none", None),
    ("float32", "int8", None),
    ("float32", "int4", None),
    ("float32", "fp8", None),
    ("float32", "int8", "bfloat16"),
    ("float32", "int4", "int8"),
    ("float32", "none", "fp8"),
]


@pytest.fixture(autouse=True)
def no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix tiles (AMX), which only chunks of many rows use, sum in another order."""
    monkeypatch.setattr(cpu_ops, "make_gemm_amx", lambda: None)
    monkeypatch.setattr(cpu_ops, "make_prefill_attention_amx", lambda *_: None)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restores the number of threads, which tests change."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_runner(
    comm: Communicator, args: ModelArgs, dtype: str, quant: str, kv_dtype: str | None
) -> ModelRunner:
    precision = Precision.on("cpu", dtype, quant)
    return ModelRunner.load(
        args,
        random_checkpoint(args, seed=1),
        make_plan(args, comm.size, quant_group_size=precision.quant_group_size),
        comm,
        precision=precision,
        device=torch.device("cpu"),
        kv_format=KVFormat(kv_dtype or dtype),
    )


def make_prompt(rng: random.Random, n: int) -> tuple[int, ...]:
    """A prompt with a part that repeats, so that some drafts are right."""
    part = [rng.randrange(101) for _ in range(7)]
    return tuple([rng.randrange(101) for _ in range(n - n // 3)] + (part * n)[: n // 3])


def make_request(index: int, prompt: Sequence[int], n: int = 8) -> Request:
    params = SamplingParams(max_tokens=n, logprobs=1)
    return Request(index, tuple(prompt), params, seed=0, stop_ids=frozenset())


def run(engine: Engine, requests: Sequence[Request]) -> dict[int, Completion]:
    if engine.comm.rank == 0:
        for request in requests:
            engine.submit(request)
    answers = {}
    outputs = engine.step()
    while not engine.idle:
        outputs += engine.step()
    for each in outputs:
        if each.completion is not None:
            answers[each.index] = each.completion
    return answers


def differences(
    comm: Communicator,
    args: ModelArgs,
    formats: tuple[str, str, str | None],
    seed: int,
    n_mixes: int,
) -> list[str]:
    """The mixes in which a request's result differs from its result alone; every rank calls it."""
    runner, rng, found = make_runner(comm, args, *formats), random.Random(seed), []
    for mix in range(n_mixes):
        prompt = make_prompt(rng, rng.randint(25, 170))
        torch.set_num_threads(1)
        alone = run(make_engine(runner, 256), [make_request(0, prompt)])[0]
        torch.set_num_threads(rng.randint(1, 2))
        block_size, step_tokens = rng.choice([1, 4, 16]), rng.choice([3, 11, 40, 64, 200])
        engine = make_engine(runner, 900 // block_size, block_size, step_tokens, rng.choice([0, 8]))
        n_hit = len(prompt) - rng.randint(1, 20)
        if rng.random() < 0.6:  # the common prefix is found in the cache
            run(engine, [make_request(0, prompt[:n_hit] + make_prompt(rng, 9), 1)])
        others = [make_prompt(rng, rng.randint(1, 70)) for _ in range(rng.randint(0, 4))]
        requests = [make_request(number, each) for number, each in enumerate(others, 1)]
        requests.insert(rng.randint(0, len(requests)), make_request(0, prompt))
        got = run(engine, requests)[0]
        if (got.tokens, got.logprobs) != (alone.tokens, alone.logprobs):
            how = f"{len(prompt)} tokens, {step_tokens} a step, {engine.scheduler.n_prefix_tokens}"
            found.append(f"mix {mix}: {how} found, {len(others)} others")
    return found


@cache
def _models() -> list[tuple[str, tuple[str, str, str | None]]]:
    others = [(name, FORMATS[4 * (at % 2)]) for at, name in enumerate(list(MODELS)[1:])]
    return [*(("plain", each) for each in FORMATS), *others]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "formats"), _models(), ids=str)
def test_logprobs_are_bitwise_equal_in_any_batch_and_chunking(name, formats):
    assert differences(Solo(), MODELS[name], formats, seed=0, n_mixes=3) == []


@pytest.mark.parametrize("formats", [FORMATS[0], FORMATS[4], FORMATS[8]], ids=str)
@pytest.mark.parametrize("tp_size", [3])
def test_logprobs_are_bitwise_equal_in_any_batch_on_several_ranks(tp_size, formats):
    results = run_on_threads(tp_size, differences, ARGS, formats, 1, 3)
    assert results == [[]] * tp_size


class _Limits:
    """Replaces a `ThreadLimit`: gives successive kernels these limits on their threads in turn."""

    def __init__(self, *limits: int) -> None:
        self._limits = cycle(limits)

    def run(self, n_threads: int, kernel: Callable[[int], object]) -> None:
        kernel(min(n_threads, next(self._limits)))


@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
def test_logprobs_are_bitwise_equal_when_kernels_use_fewer_threads(
    quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers prefill, and decode steps that were recorded for all threads."""
    torch.set_num_threads(3)
    runner = make_runner(Solo(), ARGS, "float32", quant, None)
    answers = []
    for limits in [(3,), (1,), (2,), (1, 3, 2, 1, 2)]:
        monkeypatch.setattr(jit._TEAM, "limit", _Limits(*limits))
        requests = [make_request(n, make_prompt(random.Random(n), 40 * n)) for n in (1, 2, 3)]
        found = run(make_engine(runner, 900), requests)
        answers.append({n: (each.tokens, each.logprobs) for n, each in found.items()})
    assert answers == [answers[0]] * 4
