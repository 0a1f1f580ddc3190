"""A model whose weights are kept in fewer bits: the same answer on any number of ranks."""

from dataclasses import replace

import pytest
import torch

from parallel_llama.checkpoint import load, random_checkpoint
from parallel_llama.config import ModelArgs
from parallel_llama.dtypes import Precision
from parallel_llama.engine.model_runner import Chunk, ModelRunner
from parallel_llama.errors import UsageError
from parallel_llama.ops.groups import quantise
from parallel_llama.parallel.collectives import Solo
from parallel_llama.plan import make_plan, make_precision, values_by_form, weight_bytes
from tests.support.thread_ranks import run_on_threads

ARGS = ModelArgs(
    dim=96, n_layers=2, n_heads=9, n_kv_heads=3, head_dim=32, ffn_dim=320, vocab_size=101
)
CPU = torch.device("cpu")
PRECISIONS = {
    "bfloat16": Precision.on("cpu", "bfloat16"),
    "float16": Precision.on("cpu", "float16"),
    "int8": Precision.on("cpu", "float32", "int8"),
    "int4": Precision.on("cpu", "float32", "int4"),
}
EACH = pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 89, 79, 32, 38]


def runner_of(comm, precision, args=ARGS, checkpoint=None):
    return ModelRunner.load(
        args,
        checkpoint or random_checkpoint(args, seed=1),
        make_plan(args, comm.size, quant_group=precision.group_size),
        comm,
        precision=precision,
        device=CPU,
    )


def logits_of(comm, precision, args=ARGS, checkpoint=None):
    runner = runner_of(comm, precision, args, checkpoint)
    runner.reserve([4] * len(runner.groups), 8)
    hidden = runner.forward([Chunk(TOKENS, 0, [range(4)] * len(runner.groups), len(TOKENS))])
    return runner.logits(hidden)


class Kept:
    """Random weights with the values that a precision keeps of them, in float64."""

    def __init__(self, precision, args=ARGS):
        self._source, self._precision = random_checkpoint(args, seed=1), precision

    def check(self, args):
        self._source.check(args)

    def read(self, param, rows, order="half"):
        values = self._source.read(param, rows, order)
        form = self._precision.form_of(param.kind, param.name)
        if form.name.startswith("int"):
            return quantise(values, form).values().double()
        return values.to(getattr(torch, form.dtype)).double()


@EACH
def test_what_is_computed_is_the_model_with_the_weights_that_are_kept(precision):
    """Quantised products round their inputs to 8 bits as well, which costs most of the distance."""
    exact = logits_of(Solo(), Precision.plain("float64"), checkpoint=Kept(precision))
    ours = logits_of(Solo(), precision)
    is_narrow = precision.quant != "none"
    error = (ours - exact).norm() / exact.norm()
    assert error < (0.02 if is_narrow else 1e-5)


@EACH
def test_every_number_of_ranks_gives_the_same_logits(precision):
    whole = logits_of(Solo(), precision)
    for tp_size in (2, 3, 5, 7, 9):
        parts = run_on_threads(tp_size, logits_of, precision)
        logits = torch.cat(parts, 1)
        assert (logits - whole).norm() < 5e-3 * whole.norm()
        assert torch.equal(logits.argmax(1), whole.argmax(1))


@EACH
def test_a_decoded_row_is_the_same_in_any_company(precision):
    runner = runner_of(Solo(), precision)
    prompts = [TOKENS[:length] for length in (15, 4, 9, 1, 12)]

    def decoded(numbers):
        runner.reserve([4 * len(prompts)], 8)
        tables = [[range(4 * number, 4 * number + 4)] for number in range(len(prompts))]
        for number in numbers:
            tokens = prompts[number]
            runner.forward([Chunk(tokens, 0, tables[number], len(tokens))])
        chunks = [
            Chunk([7], len(prompts[number]), tables[number], len(prompts[number]))
            for number in numbers
        ]
        return runner.logits(runner.forward(chunks))

    together = decoded(range(len(prompts)))
    for number in range(len(prompts)):
        assert torch.equal(decoded([number])[0], together[number])


@EACH
def test_what_is_read_has_the_bytes_that_the_plan_promises(precision):
    for tp_size in (1, 2, 5, 9):
        for share in make_plan(ARGS, tp_size, quant_group=precision.group_size).shares:
            counts = []
            list(load(random_checkpoint(ARGS, 1), ARGS, share, precision, CPU, counts.append))
            assert sum(counts) == weight_bytes(share, values_by_form(ARGS, precision))


def test_what_cannot_be_quantised_is_refused_with_the_remedy():
    with pytest.raises(UsageError, match=r"head_dim=16 is no multiple of the 32.*bfloat16"):
        make_precision(replace(ARGS, head_dim=16), "float32", "cpu", "int8")
    with pytest.raises(UsageError, match=r"quant='int3': use one of none, int8, int4"):
        make_precision(ARGS, "float32", "cpu", "int3")
    with pytest.raises(UsageError, match="on the CPU alone"):
        make_precision(ARGS, "bfloat16", "cuda", "int8")
