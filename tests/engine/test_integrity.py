"""Flipped bits in weights, KV cache and residual streams, and wrong products, are found."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from bits import flip
from mixes import ARGS, HYBRID, OF_FAMILIES, make_engine, make_runner, random_mix, run_mix
from thread_ranks import run_on_threads
from torch import Tensor

from parallel_llama.checkpoint.checkpoint import random_checkpoint
from parallel_llama.dtypes import KVFormat, make_precision
from parallel_llama.engine import integrity, rank_rpc
from parallel_llama.engine.engine import Engine
from parallel_llama.engine.integrity import IntegrityCheck
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.product_check import ProductCheck
from parallel_llama.errors import NumericalError
from parallel_llama.model.transformer import Transformer
from parallel_llama.model.weights import stored_weights
from parallel_llama.ops.cpu.jit import openmp
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.parallel.failures import IntegrityError
from parallel_llama.plan import make_plan
from parallel_llama.request import Request, SamplingParams

pytestmark = pytest.mark.skipif(openmp() is None, reason="kernels need torch's own GNU OpenMP")

SEVERAL = ("mistral with sinks",)
_N_STEPS, _FAULT_AT, _FAULTY = 240, 40, 1


@pytest.fixture(autouse=True)
def _compare_for_as_long_as_steps_take(monkeypatch):
    """Comparing all memory of a tiny model then takes only a few steps."""
    monkeypatch.setattr(integrity, "_TIME_FRACTION", 1.0)


def run_with_fault(
    comm: Communicator, fault: Callable[[Engine], object], failed_at: list[int], exact: bool
) -> None:
    """Run a request, with a fault on rank _FAULTY from step _FAULT_AT on."""
    engine = make_engine(make_runner(comm, exact=exact), integrity_check=True)
    if comm.rank == 0:
        engine.submit(
            Request(0, (3, 1, 4, 1, 5) * 8, SamplingParams(max_tokens=_N_STEPS), 0, frozenset())
        )
    for step in range(_N_STEPS):
        if step == _FAULT_AT and comm.rank == _FAULTY % comm.size:
            fault(engine)
        try:
            engine.step()
        except IntegrityError:
            failed_at.append(step)
            raise


def run_request(engine: Engine, prompt: Iterable[int], max_tokens: int = 3) -> None:
    """Run one request on a single rank."""
    engine.submit(Request(0, tuple(prompt), SamplingParams(max_tokens=max_tokens), 0, frozenset()))
    while not engine.idle:
        engine.step()


def steps_until_found(
    fault: Callable[[Engine], object], named: str, size: int = 3, *, exact: bool = False
) -> int:
    """The number of steps from a fault to its error; the error's message matches `named`."""
    failed_at: list[int] = []
    with pytest.raises(IntegrityError, match=named):
        run_on_threads(size, run_with_fault, fault, failed_at, exact)
    return failed_at[0] - _FAULT_AT


WEIGHTS: dict[str, Callable[[Transformer], Tensor]] = {
    r"layers\.1\.attention\.wqkv\.weight": lambda model: model.layers[1].attention.wq.weight.values,
    r"layers\.0\.feed_forward\.w2\.weight": lambda model: (
        model.layers[0].feed_forward.w2.weight.values
    ),
    r"layers\.1\.ffn_norm\.weight": lambda model: model.layers[1].ffn_norm.weight.values,
    r"tok_embeddings\.weight": lambda model: model.tok_embeddings.weight.values,
}


@pytest.mark.parametrize("named", WEIGHTS)
def test_flipped_lowest_bit_of_a_weight_is_found_and_named(named):
    n_steps = steps_until_found(
        lambda engine: flip(WEIGHTS[named](engine.runner.model), 0),
        f"rank 1 of 3: {named} has changed in memory",
    )
    assert n_steps < 50


def test_flipped_lowest_bit_of_a_cached_key_is_found():
    n_steps = steps_until_found(
        lambda engine: flip(engine.runner.caches[0].k[1, 0, 12], 0),
        "rank 1 of 3: block 0 of its KV cache has changed in memory",
    )
    assert n_steps < 50


def test_rank_with_a_different_residual_stream_is_named():
    def diverge(engine: Engine) -> None:
        record = engine._integrity.record_step
        engine._integrity.record_step = lambda slots, residual: record(
            slots, memoryview(bytes(byte ^ 1 for byte in residual))
        )

    n_steps = steps_until_found(diverge, "rank 1 of 3 differs from the others in the residual")
    assert n_steps < 96


def test_a_rank_that_multiplies_wrongly_is_found():
    """All ranks receive the same wrong results, so their residual streams are equal."""

    def multiply_wrongly(engine: Engine) -> None:
        ops = engine.runner.model.ops
        linear = ops.linear

        def wrong(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            y = linear(x, weight, bias)
            flip(y, 0)
            return y

        ops.linear = wrong

    named = "rank 1 of 3 differs from the others in products with layers"
    assert steps_until_found(multiply_wrongly, named, exact=True) < 192


def test_rank_that_produces_nan_is_named_at_once():
    """No memory has changed, and NaN reaches all ranks before the next comparison."""

    def overflow(engine: Engine) -> None:
        engine.runner._calls._steps[1, False] = None  # steps of one row run operator by operator
        ops = engine.runner.model.ops
        linear = ops.linear

        def wrong(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            y = linear(x, weight, bias)
            y[:, :1] = torch.nan
            return y

        ops.linear = wrong

    named = "rank 1 of 3 differs from the others in products with layers"
    assert steps_until_found(overflow, named, exact=True) < 2


def test_nan_in_checkpoint_weights_raises_a_numerical_error():
    """Rank 1 gives NaN another sign, as other kernels may."""

    def run(comm: Communicator) -> None:
        runner = make_runner(comm, exact=True)
        for weight in stored_weights(runner.model).values():
            weight.values.view(-1)[::5] = torch.nan
        ops = runner.model.ops
        linear = ops.linear

        def negative_nan(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            y = linear(x, weight, bias)
            return torch.where(y.isnan(), -y, y)

        if comm.rank == 1:
            ops.linear = negative_nan
        engine = make_engine(runner, integrity_check=True)
        if comm.rank == 0:
            engine.submit(Request(0, (3, 1, 4), SamplingParams(max_tokens=3), 0, frozenset()))
        engine.step()

    with pytest.raises(NumericalError):
        run_on_threads(3, run)


@pytest.mark.parametrize("form", ["none", "int8", "int4", "fp8"])
def test_products_of_sound_ranks_have_the_same_bits(form):
    def compare_all_products(comm: Communicator) -> int:
        args, kinds = replace(ARGS, dim=288, head_dim=32, ffn_dim=416, dtype="float32"), 7
        precision = make_precision(args, "float32", "cpu", form, None)
        plan = make_plan(args, comm.size, None, precision.quant_group_size, exact=True)
        checkpoint, device = random_checkpoint(args, seed=1), torch.device("cpu")
        runner = ModelRunner.load(args, checkpoint, plan, comm, precision=precision, device=device)
        check = ProductCheck(runner.model, comm)
        for _ in range(3 * kinds * args.n_layers):
            check.receive(comm.all_gather(check.message()), torch.arange(1.0, 289.0))
        return check.n_multiplied

    assert min(run_on_threads(3, compare_all_products)) > 20


@pytest.mark.parametrize("args", [ARGS, HYBRID, *map(OF_FAMILIES.get, SEVERAL)])
@pytest.mark.parametrize("kv_format", [None, KVFormat("int8")])
def test_integrity_check_passes_for_any_use_of_the_cache(args, kv_format):
    """Prefixes are shared, blocks are reused, drafts are rejected and requests preempted."""
    runner = make_runner(Solo(), args, kv_format)
    for mix in map(random_mix, range(2)):
        engine = make_engine(
            runner, mix.n_blocks, mix.block_size, mix.step_tokens, mix.max_drafts,
            integrity_check=True,
        )  # fmt: skip
        check = engine._integrity

        def compare(_: float, check: IntegrityCheck = check) -> None:
            for sums in check._blocks:
                while sums._pending:
                    sums.compute_next()
            check.compare_memory()

        check.after_step = compare
        run_mix(engine, mix)
        assert any(sums._sums for sums in check._blocks)


@pytest.mark.parametrize("work", [run_request, rank_rpc.score_sequence])
def test_blocks_that_a_failed_forward_pass_wrote_are_not_compared(work):
    """The step added no new sums, so the blocks would be compared with sums of older tokens."""
    engine = make_engine(make_runner(Solo()), n_blocks=4, integrity_check=True)
    run_request(engine, range(50))
    engine._integrity._update_blocks()
    for sums in engine._integrity._blocks:
        while sums._pending:
            sums.compute_next()
    interrupted = OSError("interrupted")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="interrupted"):
        patch.setattr(engine._integrity, "record_step", Mock(side_effect=interrupted))
        work(engine, [*range(50, 100)])
    engine._integrity.compare_memory()


def test_sound_steps_pass_and_all_memory_is_compared():
    engine = make_engine(make_runner(Solo()), integrity_check=True)
    run_request(engine, range(90), max_tokens=100)
    assert engine._integrity.n_rounds > 1


def test_a_weight_that_makes_numbers_overflow_is_named_at_once():
    def overflow(engine: Engine) -> None:
        engine.runner.model.norm.weight.values.fill_(torch.inf)

    assert steps_until_found(overflow, r"rank 0 of 1: norm\.weight has changed", size=1) == 0


def test_nan_with_unchanged_memory_raises_a_numerical_error():
    runner = make_runner(Solo())
    runner.model.norm.weight.values.fill_(torch.nan)
    engine = make_engine(runner, integrity_check=True)
    with pytest.raises(NumericalError):
        run_request(engine, (3, 1, 4))
