"""The whole engine on the kernels: the launches of a step, and the results of requests."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from meta_models import meta_runner
from mixes import ARGS, HYBRID, OF_FAMILIES, make_engine
from recorded import Recorded
from thread_ranks import ThreadComm, run_on_threads
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="kernels for CUDA devices need triton")

from parallel_llama.checkpoint.checkpoint import random_checkpoint
from parallel_llama.dtypes import Precision
from parallel_llama.engine import recorded_steps
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.recorded_steps import Logits
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.ops import Scores, TorchOps
from parallel_llama.ops.cuda_ops import CUDAOps
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.parallel.cuda_graphs import require_capturable
from parallel_llama.plan import make_plan
from parallel_llama.request import Request, SamplingParams
from parallel_llama.sampling.draw import SamplingRow, row_sampling_key
from parallel_llama.sampling.pending import PendingDraws

N_NEW = 3
SMALL = replace(ARGS, n_layers=1, dim=32, n_heads=5, n_kv_heads=1, head_dim=8, dtype="float32")
WINDOWED = replace(HYBRID, n_layers=2, dim=32, n_heads=4, n_kv_heads=2, head_dim=8, dtype="float32")
# Expert outputs are normed, so that they are not negligible beside random numbers.
_EXPERTS = {"ffn_dim": 9, "n_experts": 4, "n_active_experts": 2, "post_norms": True}
MIXTURE = replace(SMALL, n_layers=1, dim=24, **_EXPERTS)
BIASED = OF_FAMILIES["gpt_oss"]


class Traffic(TorchDispatchMode):
    """Counts copies between devices; copies to the host leave their targets unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        places = {each.device.type for each in tensors}
        wanted = kwargs.get("device")
        if wanted is not None and tensors:
            places.add(torch.device(wanted).type)
        if len(places) > 1:
            goes_up = (wanted and torch.device(wanted).type == "meta") or tensors[0].is_meta
            self.counts[f"{func} {'up' if goes_up else 'down'}"] += 1
            if not goes_up and func is torch.ops.aten.copy_.default:
                return args[0]
        return func(*args, **kwargs)


class Literals(TorchFunctionMode):
    """Refuses tensors made on the device from Python numbers: each would be a blocking copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor):
            assert not result.is_meta, "a literal on the device"
        return result


@pytest.mark.parametrize(
    "args", [ARGS, HYBRID, MIXTURE, BIASED], ids=["full", "windows", "experts", "biases"]
)
@pytest.mark.parametrize("top_k", [0, 20])
def test_decode_step_copies_once_each_way_plus_filters_and_never_waits(args, top_k):
    """On the meta device, an operator that waits for values, such as `nonzero`, is an error.

    One row is greedy and two are sampled; top_k takes one more copy. The first step runs before
    recording and may copy more.
    """
    runner = meta_runner(args, CUDAOps)
    tables = [list(range(n, n + 20)) for n in range(3)]
    chunks = [
        Chunk((7,), 30 + n, [table] * len(runner.kv_groups), 9) for n, table in enumerate(tables)
    ]
    settings = [SamplingParams(temperature=each, top_k=top_k) for each in (0.0, 0.7, 1.5)]
    draws = [SamplingRow(params, 0, 0, 31 + n) for n, params in enumerate(settings)]
    sampling_keys = [row_sampling_key(draw.params, 0, 0, draw.position) for draw in draws]
    runner.step(chunks, range(3))
    with Literals(), Traffic() as traffic:
        logits, _ = runner.step(chunks, range(3), sampling_keys=sampling_keys)
        assert logits.drawn is not None
        vocab, ops = range(args.vocab_size), runner.model.ops
        pending = PendingDraws(logits.values, logits.drawn, vocab, len(vocab), draws, Solo(), ops)
        assert pending.tokens.is_meta
    ups = {"aten._to_copy.default up": 1} if top_k else {}
    assert traffic.counts == {"aten.copy_.default up": 1, "aten.copy_.default down": 1, **ups}


class Ungrouped(CUDAOps):
    """One product per expert, as for quantised experts: the host reads each expert's row count."""

    routed_linear, routed_product = TorchOps.routed_linear, TorchOps.routed_product


def record_on_meta(args: ModelArgs, ops: type[CUDAOps]) -> list[int]:
    """The numbers of rows whose steps can be captured."""
    runner, found = meta_runner(args, ops), list[int]()

    def record(step: Callable[[], Logits]) -> tuple[Logits, Callable[[], object]]:
        with suppress(NotImplementedError):  # the meta device gives no values
            step()
        require_capturable(step)
        logits = step()
        found.append(len(logits.values))
        return logits, step

    runner.record(record)
    return found


@pytest.mark.parametrize(
    "args", [ARGS, HYBRID, MIXTURE, BIASED], ids=["full", "windows", "experts", "biases"]
)
def test_every_decode_step_can_be_captured(args):
    assert record_on_meta(args, CUDAOps) == list(recorded_steps.BUCKETS)


def test_step_that_waits_for_the_device_is_rejected_before_capture(caplog):
    """Regression: the capture failed at its end, and the allocator still assumed a capture."""
    assert record_on_meta(MIXTURE, Ungrouped) == []
    assert "graph of 1 rows or more run without one: the operator aten." in caplog.text
    assert "waits for the device" in caplog.text


def make_runner_of(
    comm: Communicator, args: ModelArgs, ops: TorchOps, ranks_per_expert: int | None
) -> ModelRunner:
    plan = make_plan(args, comm.size, ranks_per_expert=ranks_per_expert)
    on_gpu = ops.is_paged and torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    checkpoint, precision = random_checkpoint(args, seed=1), Precision.plain("float32")
    return ModelRunner.load(
        args, checkpoint, plan, comm, precision=precision, device=device, ops=ops
    )


def answers(
    comm: Communicator,
    args: ModelArgs,
    make_ops: Callable[[Scores], TorchOps],
    n_new: int,
    ranks_per_expert: int | None = None,
) -> dict[int, tuple[int, ...]]:
    """The tokens of three requests with different lengths and sampling; the last arrives later."""
    ops = make_ops(Scores(args.attention_scale, args.attention_soft_cap, args.sink_logits))
    runner = make_runner_of(comm, args, ops, ranks_per_expert)
    engine, graphs = make_engine(runner, n_blocks=12, block_size=4), Recorded()
    if ops.is_paged:
        runner.record(graphs)
    prompts = tuple(range(3, 11)), (5,), tuple(range(9, 12))
    requests = []
    ways = (0.0, 0), (1.2, 20), (0.8, 0)
    for n, (prompt, (temperature, top_k)) in enumerate(zip(prompts, ways, strict=True)):
        params = SamplingParams(
            max_tokens=n_new, ignore_eos=True, temperature=temperature, top_k=top_k
        )
        requests.append(Request(n, prompt, params, 0, frozenset()))
    found, step = {}, 0
    while step < 3 or not engine.idle:
        if comm.rank == 0 and step in (0, 2):
            for request in requests[:2] if step == 0 else requests[2:]:
                engine.submit(request)
        for output in engine.step():
            if output.completion is not None:
                found[output.index] = output.completion.tokens
        step += 1
    assert bool(graphs.n_replays) == ops.is_paged
    return found


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Lock]:
    """A lock held by the rank that runs, because Triton's interpreter is not thread-safe."""
    turn, exchange = threading.Lock(), ThreadComm._exchange

    def exchange_in_turns(comm: ThreadComm, x: torch.Tensor) -> torch.Tensor:
        turn.release()
        try:
            return exchange(comm, x)
        finally:
            turn.acquire()

    monkeypatch.setattr(ThreadComm, "_exchange", exchange_in_turns)
    yield turn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "tp_size", "ranks_per_expert"),
    [(SMALL, 2, None), (WINDOWED, 1, None), (MIXTURE, 2, 1)],
    ids=["3 and 2 heads", "windows", "experts dealt out"],
)
def test_requests_get_the_same_tokens_as_on_cpu(
    monkeypatch, turns, args, tp_size, ranks_per_expert
):
    """Prompts in chunks and decode steps in graphs; 5 query heads on 2 ranks are 3 and 2."""
    monkeypatch.setattr(recorded_steps, "BUCKETS", (2, 4))

    def run(comm: Communicator) -> dict[int, tuple[int, ...]]:
        with turns:
            return answers(comm, args, CUDAOps, N_NEW, ranks_per_expert)

    expected = answers(Solo(), args, TorchOps, N_NEW)
    assert sorted(expected) == [0, 1, 2]
    assert run_on_threads(tp_size, run) == [expected] * tp_size
