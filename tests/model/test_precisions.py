"""Quantised models: logits agree on any number of ranks, and sizes match the plan."""

from dataclasses import replace

import pytest
import torch

from parallel_llama.checkpoint.checkpoint import random_checkpoint
from parallel_llama.checkpoint.reading import load
from parallel_llama.dtypes import (
    GGUF_QUANTS,
    QUANT_GROUP_SIZE,
    Precision,
    QuantFormat,
    make_precision,
)
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.errors import UsageError
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.memory import values_by_form, weight_bytes
from parallel_llama.model.layers import Backend
from parallel_llama.model.transformer import Transformer
from parallel_llama.model.weights import WeightLoader
from parallel_llama.ops import TorchOps
from parallel_llama.ops.quant import QuantMatrix, quantise
from parallel_llama.parallel.collectives import Solo
from parallel_llama.plan import make_plan
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
    "fp8": Precision.on("cpu", "float32", "fp8"),
}
EACH = pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 89, 79, 32, 38]


def runner_of(comm, precision, args=ARGS, checkpoint=None):
    return ModelRunner.load(
        args,
        checkpoint or random_checkpoint(args, seed=1),
        make_plan(args, comm.size, quant_group_size=precision.quant_group_size),
        comm,
        precision=precision,
        device=CPU,
    )


def logits_of(comm, precision, args=ARGS, checkpoint=None):
    runner = runner_of(comm, precision, args, checkpoint)
    runner.reserve([4] * len(runner.kv_groups), 8)
    hidden = runner.forward([Chunk(TOKENS, 0, [range(4)] * len(runner.kv_groups), len(TOKENS))])
    return runner.logits(hidden)


@pytest.mark.parametrize("quant", ["none", "int8", "int4", "fp8"])
def test_precision_keeps_the_requested_quant(quant):
    assert Precision.on("cpu", "float32", quant).quant == quant


class Kept:
    """Random weights, quantised to a precision and dequantised to float64."""

    def __init__(self, precision, args=ARGS):
        self._source, self._precision = random_checkpoint(args, seed=1), precision

    def check(self, args):
        self._source.check(args)

    def read(self, param, rows, order="half"):
        values = self._source.read(param, rows, order)
        form = self._precision.form_of(param.kind, param.name)
        if isinstance(form, QuantFormat):
            return quantise(values, form).values().double()
        return values.to(getattr(torch, form.dtype)).double()


@EACH
def test_logits_match_float64_model_of_stored_weights(precision):
    """Integer products round their inputs to 8 bits, which causes most of the error."""
    exact = logits_of(Solo(), Precision.plain("float64"), checkpoint=Kept(precision))
    ours = logits_of(Solo(), precision)
    has_integers = precision.quant.startswith("int")
    error = (ours - exact).norm() / exact.norm()
    assert error < (0.02 if has_integers else 1e-5)


@EACH
def test_logits_agree_on_every_number_of_ranks(precision):
    whole = logits_of(Solo(), precision)
    for tp_size in (2, 3, 5, 7, 9):
        parts = run_on_threads(tp_size, logits_of, precision)
        logits = torch.cat(parts, 1)
        assert (logits - whole).norm() < 5e-3 * whole.norm()
        assert torch.equal(logits.argmax(1), whole.argmax(1))


@EACH
def test_decoded_row_is_bitwise_equal_alone_and_in_batch(precision):
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
def test_loaded_bytes_match_the_plan(precision):
    for tp_size in (1, 2, 5, 9):
        for shard in make_plan(ARGS, tp_size, quant_group_size=precision.quant_group_size).shards:
            counts = []
            list(load(random_checkpoint(ARGS, 1), ARGS, shard, precision, CPU, counts.append))
            assert sum(counts) == weight_bytes(shard, values_by_form(ARGS, precision))


SHARED = replace(
    ARGS,
    ffn_dim=64,
    n_experts=3,
    n_active_experts=2,
    shared_ffn_dim=192,
    shared_gate=True,
    dense_layers=(1,),
    dense_ffn_dim=320,
)


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_shared_expert_and_dense_layers_are_quantised(quant):
    """The gate of the shared expert is not quantised: it decides like a router, with one row."""
    precision = PRECISIONS[quant]
    exact = logits_of(Solo(), Precision.plain("float64"), SHARED, Kept(precision, SHARED))
    ours = torch.cat(run_on_threads(3, logits_of, precision, SHARED), 1)
    assert (ours - exact).norm() < 0.02 * exact.norm()
    shard, counts = make_plan(SHARED, 3, quant_group_size=32).shards[1], []
    list(load(random_checkpoint(SHARED, 1), SHARED, shard, precision, CPU, counts.append))
    assert sum(counts) == weight_bytes(shard, values_by_form(SHARED, precision))


def test_router_bias_is_kept_in_float32_or_wider():
    """A bias that is rounded to bfloat16 would choose other experts on a GPU."""
    name = "layers.0.feed_forward.gate.bias"
    for computed in ("float64", "float32", "bfloat16"):
        form = Precision.on("cuda", computed).form_of("vector", name)
        assert form.dtype == ("float64" if computed == "float64" else "float32")


def test_shared_or_dense_width_that_splits_a_group_is_refused():
    for name in ("shared_ffn_dim", "dense_ffn_dim"):
        with pytest.raises(UsageError, match=f"{name}=200 is not a multiple of the 32"):
            make_precision(replace(SHARED, **{name: 200}), "float32", "cpu", "int4")


# Ranks cut inside blocks of 256, and queries, keys and values have two formats.
WIDE = ModelArgs(
    dim=256, n_layers=2, n_heads=8, n_kv_heads=2, head_dim=32, ffn_dim=768, vocab_size=101
)
IN_Q6_K = ("wv.weight", "w2.weight", "embeddings.weight", "output.weight")
STORED = {
    param.name: GGUF_QUANTS["Q6_K" if param.name.endswith(IN_Q6_K) else "Q4_K"]
    for param in parameters(WIDE)
    if param.kind != "vector"
}


def in_blocks(values, form):
    """A matrix in blocks of 256, each part of a group scaled to its extremes."""
    parts = values.float().view(
        len(values), -1, 256 // QUANT_GROUP_SIZE * form.n_parts, QUANT_GROUP_SIZE // form.n_parts
    )
    least = -parts.amin(-1).clamp(max=0) if form.has_min else torch.zeros(parts.shape[:-1])
    steps = (parts.amax(-1) + least) / 15 if form.has_min else parts.abs().amax(-1) / 31
    scales, mins = ((each.amax(-1) / 63).to(torch.float16) for each in (steps, least))
    factors = [
        (each / of_block.float()[..., None]).round().nan_to_num(0)
        for each, of_block in ((steps, scales), (least, mins))
    ]
    whole = [
        each * of_block.float()[..., None]
        for each, of_block in zip(factors, (scales, mins), strict=True)
    ]
    rounded = ((parts + whole[1][..., None]) / whole[0][..., None]).round()
    integers = rounded.clamp(-form.zero, (1 << form.n_bits) - 1 - form.zero)
    own = torch.stack(factors, -1) if form.has_min else factors[0]
    return QuantMatrix(
        form,
        integers.to(torch.int8).view(values.shape),
        scales,
        -mins if form.has_min else None,
        own.to(torch.int8).flatten(1),
    )


class StoredInBlocks(Kept):
    """Weights as in a file of quantised blocks, which are used unchanged."""

    def _whole(self, param, form):
        return in_blocks(self._source.read(param, range(param.shape[param.dim])), form)

    def groups(self, param, rows, form, _):
        whole = self._whole(param, form)
        if param.dim == 1:
            return whole.columns(rows)
        return whole.map_tensors(lambda of_rows: of_rows[rows.start : rows.stop])

    def read(self, param, rows, order="half"):
        form = STORED.get(param.name)
        if form is None:
            return self._source.read(param, rows, order)
        return self._whole(param, form).values().narrow(param.dim, rows.start, len(rows))


@pytest.mark.slow
def test_logits_of_stored_blocks_agree_on_every_number_of_ranks():
    precision = make_precision(WIDE, "float32", "cpu", "stored", STORED)
    stored = StoredInBlocks(precision, WIDE)
    exact = logits_of(Solo(), Precision.plain("float64"), WIDE, stored)
    whole = logits_of(Solo(), precision, WIDE, stored)
    assert (whole - exact).norm() < 0.02 * exact.norm()
    for tp_size in range(2, 9):
        logits = torch.cat(run_on_threads(tp_size, logits_of, precision, WIDE, stored), 1)
        assert (logits - whole).norm() < 0.01 * whole.norm()
        assert torch.equal(logits.argmax(1), whole.argmax(1))


def test_unsupported_quantisation_is_refused_with_a_remedy():
    with pytest.raises(UsageError, match=r"head_dim=16 is not a multiple of the 32.*bfloat16"):
        make_precision(replace(ARGS, head_dim=16), "float32", "cpu", "int8")
    with pytest.raises(UsageError, match=r"quant='int3': use one of none, int8, int4"):
        make_precision(ARGS, "float32", "cpu", "int3")
    with pytest.raises(UsageError, match="in float32, not in float64; use float32"):
        make_precision(ARGS, "float64", "cpu", "int8")


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_quantised_model_keeps_its_device_and_dtype(name):
    """On the meta device: its tensors cannot be combined with those of another device."""
    meta, precision = torch.device("meta"), make_precision(ARGS, "bfloat16", "cuda", name)
    assert precision.computed == "bfloat16"
    comm, plan = Solo(), make_plan(ARGS, 1, quant_group_size=precision.quant_group_size)
    model = Transformer(ARGS, plan.shards[0], Backend(comm, TorchOps(), torch.bfloat16))
    loader = WeightLoader(model, ARGS, plan.shards[0])
    for weight, values in load(random_checkpoint(ARGS, 1), ARGS, plan.shards[0], precision, meta):
        loader.assign(weight, values)
    x = model.embedded(torch.zeros(3, dtype=torch.int64, device=meta))
    feed_forward = model.layers[0].feed_forward
    for result in (x, feed_forward(x), model.logits(x)):
        assert result.device == meta
    assert x.dtype == feed_forward(x).dtype == torch.bfloat16
