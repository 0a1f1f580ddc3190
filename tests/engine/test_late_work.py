"""Decode steps on a device that runs queued work late give the tokens of work done at once.

The device is a model of streams, events, graphs and copies; see `late_device`. The engine, its
runner, buffers, graphs and pending draws are the real ones. Each order of the work is a legal one
that a random generator picks.
"""

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from late_device import CUDA, LateDevice, LateOps, Order
from mixes import ARGS as WIDE_ARGS
from mixes import NEVER, Guest, Mix, Outcome, make_engine, make_runner, run_mix
from torch import Tensor

from parallel_llama.checkpoint.checkpoint import random_checkpoint
from parallel_llama.dtypes import Precision
from parallel_llama.engine import model_runner, recorded_steps
from parallel_llama.engine.engine import Engine
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.step_buffer import Chunk, StepBuffer
from parallel_llama.errors import NumericalError
from parallel_llama.ops import Scores, TorchOps
from parallel_llama.parallel.collectives import Solo
from parallel_llama.parallel.cuda_graphs import GraphRecorder
from parallel_llama.plan import make_plan
from parallel_llama.request import Request, SamplingParams
from parallel_llama.sampling.draw import SampledToken
from parallel_llama.sampling.pending import PendingDraws

ARGS = replace(WIDE_ARGS, n_layers=1, dim=12, n_heads=3, n_kv_heads=1, ffn_dim=16)

# Temperatures so low that the logits count beside the noise.
PLAIN = (
    SamplingParams(),
    SamplingParams(temperature=0.2),
    SamplingParams(temperature=0.2, top_k=9),
)
# Ten candidates do not suffice for this one, so its steps are run again.
UNDECIDED = SamplingParams(temperature=0.2, top_p=0.999)
WAYS = [*PLAIN, UNDECIDED, UNDECIDED, SamplingParams(logprobs=1)]
Outcomes = dict[tuple[int, int], Outcome]


class Engines:
    """Engines of one runner on the device; counts steps launched ahead, and rows drawn again."""

    def __init__(self, gpu: LateDevice) -> None:
        self.gpu, self.n_ahead, self.n_again = gpu, 0, 0
        self.runner = ModelRunner.load(
            ARGS,
            random_checkpoint(ARGS, seed=1),
            make_plan(ARGS, 1),
            Solo(),
            precision=Precision.plain("float64"),
            device=CUDA,
            ops=LateOps(gpu, Scores()),
        )

    def engine(self, mix: Mix, order: Order, *, records: bool) -> Engine:
        """An engine for a mix; its graphs are captured in the order."""
        self.gpu.order = order
        engine = make_engine(self.runner, mix.n_blocks, mix.block_size, mix.step_tokens)
        if records:
            self.runner.record()
            assert self.runner._graphs is not None and len(self.runner._graphs._graphs) == 2
        return engine

    def run(self, engine: Engine, mix: Mix, order: Order) -> Outcomes:
        """The outcomes of a mix, with an empty prefix cache."""
        self.gpu.order = order
        engine.resume(self.runner, engine.capacity, ())
        found = run_mix(engine, mix)
        self.gpu.synchronize()
        return found


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    gpu = LateDevice()
    monkeypatch.setattr(recorded_steps, "BUCKETS", (1, 2))
    monkeypatch.setattr("parallel_llama.sampling.pending.N_CANDIDATES", 10)
    monkeypatch.setattr(model_runner, "set_cuda_options", lambda: None)
    monkeypatch.setattr(model_runner, "use_device", lambda _: gpu.calls().__enter__())
    with gpu.installed(monkeypatch):
        engines = Engines(gpu)
        step_ahead, read = ModelRunner.step_ahead, PendingDraws.read

        def count_ahead(*args: Any) -> Any:
            engines.n_ahead += args[0] is engines.runner
            return step_ahead(*args)

        def count_again(pending: PendingDraws) -> tuple[list[SampledToken], bool]:
            is_on_device = pending._copied is not None
            drawn = read(pending)
            engines.n_again += is_on_device and not drawn[1]
            return drawn

        monkeypatch.setattr(ModelRunner, "step_ahead", count_ahead)
        monkeypatch.setattr(PendingDraws, "read", count_again)
        yield engines


def mix_of(seed: int, ways: Sequence[SamplingParams] = WAYS) -> Mix:
    """Two or three short requests, which come, end and are cancelled while steps are in flight."""
    rng = random.Random(seed)
    guests = tuple(
        Guest(
            Request(
                index,
                tuple(rng.randrange(ARGS.vocab_size) for _ in range(rng.randint(1, 4))),
                replace(rng.choice(ways), max_tokens=rng.randint(3, 6)),
                seed=rng.randrange(2),
                stop_ids=frozenset(range(0, rng.choice([0, 30]), 2)),
            ),
            comes=rng.choice([0, 0, rng.randrange(4)]),
            cancelled=rng.choice([NEVER, NEVER, rng.randrange(1, 7)]),
        )
        for index in range(rng.randint(2, 3))
    )
    return Mix(rng.choice([12, 24]), rng.choice([1, 2, 4]), rng.choice([3, 16]), 0, guests)


def differing(
    engines: Engines,
    seed: int,
    n_orders: int,
    *,
    records: bool,
    captures_late: bool = False,
    ways: Sequence[SamplingParams] = WAYS,
) -> Iterator[str]:
    """Yields the orders in which a mix has other outcomes than on the CPU.

    The first order is that of the program. With `captures_late` the graphs are captured in each
    order anew.
    """
    mix = mix_of(seed, ways)
    expected = run_mix(plain_engine(mix), mix)
    engine = engines.engine(mix, Order(None), records=records)
    for number in range(n_orders):
        order = Order(None if number == 0 else 1000 * seed + number)
        if captures_late:
            engine = engines.engine(mix, order, records=records)
        found = engines.run(engine, mix, order)
        if found != expected:
            yield f"mix {seed}, order {order.seed}: {found}, not {expected}"


def plain_engine(mix: Mix) -> Engine:
    """An engine on the CPU, without a model of a device."""
    ops = PagedOps(Scores())
    runner = make_runner(Solo(), ARGS, ops=ops)
    return make_engine(runner, mix.n_blocks, mix.block_size, mix.step_tokens)


class PagedOps(TorchOps):
    """torch's operators on block tables."""

    is_paged = True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("records", "n_mixes", "n_orders"), [(False, 5, 8), (True, 9, 12)], ids=["plain", "graphs"]
)
def test_any_order_of_queued_work_gives_the_tokens_of_the_cpu(engines, records, n_mixes, n_orders):
    """Requests arrive, end and are cancelled while a step runs ahead, and some steps run again."""
    for seed in range(n_mixes):
        found = list(differing(engines, seed, n_orders, records=records))
        assert not found, found[0]
    assert engines.n_ahead > 100 and engines.n_again > 5 and engines.gpu.n_waits > 100


@pytest.mark.slow
def test_graphs_captured_while_work_is_queued_give_the_same_tokens(engines):
    for seed in range(3):
        found = list(differing(engines, seed, 8, records=True, captures_late=True))
        assert not found, found[0]


def drawn_without_reading(engines: Engines, order: Order) -> list[Any]:
    """The tokens of decode steps. The results of all steps are read after the last one."""
    engines.gpu.order = Order(None)
    engines.runner.reserve([4], 4)
    engines.runner.record()
    engines.gpu.order = order
    kept = []
    for number in range(9):
        chunk = Chunk((7 * number + 1,), number, [range(4)], 1)
        logits, _ = engines.runner.step([chunk], [0], sampling_keys=[(number, 1.0)])
        assert logits.drawn is not None
        kept.append(logits.drawn.clone())
    found = [each.tolist() for each in kept]
    engines.gpu.synchronize()
    return found


def differing_unread(engines: Engines) -> Iterator[int]:
    """Yields the orders in which unread steps have other results than in program order."""
    expected = drawn_without_reading(engines, Order(None))
    for seed in range(20):
        if drawn_without_reading(engines, Order(seed)) != expected:
            yield seed


def test_steps_may_run_before_the_results_of_earlier_steps_are_read(engines):
    """Regression: the third step filled a buffer that the first step's copy had not read."""
    assert not list(differing_unread(engines))
    assert engines.gpu.n_waits > 20


def never_wait_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host fills a buffer that a copy has not read."""
    init = StepBuffer.__init__

    def make(buffer: StepBuffer, *args: Any) -> None:
        init(buffer, *args)
        for event in buffer._copied:
            monkeypatch.setattr(event, "synchronize", lambda: None)

    monkeypatch.setattr(StepBuffer, "__init__", make)


def fill_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for the copy before the last, and overwrites what the last one reads."""
    init = StepBuffer.__init__

    def make(buffer: StepBuffer, *args: Any) -> None:
        init(buffer, *args)
        buffer._host = buffer._host[:1].expand(2, -1)
        buffer._host_parts = buffer._host_parts[:1] * 2

    monkeypatch.setattr(StepBuffer, "__init__", make)


def read_draws_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads tokens that are still on the device."""
    read = PendingDraws.read

    def read_early(pending: PendingDraws) -> tuple[list[SampledToken], bool]:
        pending._copied = None
        return read(pending)

    monkeypatch.setattr(PendingDraws, "read", read_early)


def keep_no_copy_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is sampled again from logits that the next step has overwritten."""
    init = PendingDraws.__init__

    def make(pending: PendingDraws, logits: Tensor, *args: Any) -> None:
        init(pending, logits, *args)
        if len(pending._filtered) == len(logits):
            pending._logits = logits

    monkeypatch.setattr(PendingDraws, "__init__", make)


def warm_up_before_the_inputs_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture's stream does not wait for the caller's stream."""
    init = GraphRecorder.__init__

    def make(recorder: GraphRecorder) -> None:
        init(recorder)
        monkeypatch.setattr(recorder._stream, "wait_stream", lambda _: None)

    monkeypatch.setattr(GraphRecorder, "__init__", make)


@pytest.mark.parametrize(
    ("break_it", "records", "captures_late", "ways"),
    [
        (fill_one_buffer, True, False, PLAIN),
        (read_draws_at_once, False, False, PLAIN),
        (read_draws_at_once, True, False, PLAIN),
        (keep_no_copy_of_the_logits, True, False, [UNDECIDED]),
        (warm_up_before_the_inputs_are_there, True, True, PLAIN),
    ],
)
def test_removing_a_wait_gives_other_tokens_or_an_error(
    monkeypatch, engines, break_it, records, captures_late, ways
):
    break_it(monkeypatch)
    options = {"records": records, "captures_late": captures_late, "ways": ways}
    tries = (differing(engines, seed, 15, **options) for seed in range(8))
    try:
        assert any(found for each in tries for found in each)
    # Values that were not yet written raise, such as a token id that is NaN or beyond 32 bits.
    except (IndexError, NumericalError, OverflowError, RuntimeError, ValueError, struct.error):
        assert engines.gpu.order.seed is not None


@pytest.mark.parametrize("break_it", [never_wait_for_the_copy, fill_one_buffer])
def test_removing_a_wait_breaks_steps_with_unread_results(monkeypatch, engines, break_it):
    break_it(monkeypatch)
    try:
        assert any(True for _ in differing_unread(engines))
    except (IndexError, RuntimeError):
        assert engines.gpu.order.seed is not None
