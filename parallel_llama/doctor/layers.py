"""Checks a model's files, and computes some of its layers on all ranks and on a single rank."""

import time
from collections.abc import Callable, Iterator

import msgspec
import torch
from torch import Tensor

from parallel_llama.checkpoint.file_manifest import Report, damaged_files, present_files
from parallel_llama.checkpoint.manifest import MANIFEST, read_manifest
from parallel_llama.checkpoint.reading import load
from parallel_llama.doctor.check import Check
from parallel_llama.doctor.records import HARDWARE, agreed, exchange
from parallel_llama.doctor.tiny_model import layer_names
from parallel_llama.doctor.trace import (
    Difference,
    Trace,
    Traced,
    TracedSolo,
    describe,
    first_difference,
)
from parallel_llama.engine.available_memory import available_memory
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.setup import ModelSetup
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.errors import CheckpointError, counted, listed
from parallel_llama.families import parameters
from parallel_llama.families.weights import Param
from parallel_llama.files.bounded_files import is_folder
from parallel_llama.files.model_files import fingerprint
from parallel_llama.memory import values_by_form, weight_bytes
from parallel_llama.model.layers import Backend
from parallel_llama.model.transformer import Transformer
from parallel_llama.model.weights import WeightLoader
from parallel_llama.ops import Scores, choose_ops
from parallel_llama.ops.formats import kv_dtype, matrix_forms, torch_dtype
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.rank_env import ranks_here
from parallel_llama.plan import ShardPlan, make_plan

# Limits on the bytes that a rank hashes and on the time for layers, which keep the command quick.
_MAX_HASHED_BYTES = 1 << 30
_MAX_LAYERS_S = 3.0
_DIGESTS_BYTES = 1 << 20  # for names and digests of several thousand files
_TOLERANCE = 2e-2  # of sums that are not exact, in bfloat16, relative to the largest value
_N_TOKENS = 16


def files(comm: Communicator, setup: ModelSetup) -> Check:
    """Compares the files between ranks, and at most 1 GiB per rank with the manifest.

    Collective: two all_gathers, and a barrier between them.
    """
    own_digests = fingerprint(setup.inputs.files)
    by_rank = exchange(comm, own_digests, dict[str, str], _DIGESTS_BYTES)
    first = by_rank[0] or {}
    for rank, other in enumerate(by_rank):
        if other is None:
            seen = f"the digests of rank {rank} arrive damaged"
            return Check("files", "fail", seen, HARDWARE)
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            seen = f"rank {rank} and rank 0 differ in {listed(names, 3)}"
            remedy = f"copy the model from rank 0's host: rsync -a {setup.inputs.files.path} HOST:"
            return Check("files", "fail", seen, remedy)
    check = _manifest(setup, own_digests, lambda _: comm.keepalive())
    comm.barrier()  # where a rank that still hashes does not count as late
    return agreed(comm, check)


def _manifest(setup: ModelSetup, digests: dict[str, str], on_bytes: Callable[[int], None]) -> Check:
    """Hashes this rank's part of the files of its host, without files above the limit."""
    path = setup.inputs.files.path
    remedy = f"parallel-llama verify {path}"
    try:
        setup.checkpoint.check(setup.args)
        manifest = read_manifest(path) if is_folder(path) else None
    except CheckpointError as error:
        return Check("files", "fail", str(error), remedy)
    if manifest is None:
        seen = f"samples of {len(digests)} files equal on all ranks; structure valid; no {MANIFEST}"
        return Check("files", "pass", seen)
    local_rank, n_local = ranks_here(setup.size)
    by_size = sorted(manifest.files, key=lambda name: manifest.files[name].bytes)
    chosen: list[str] = []
    n_bytes = 0
    for name in by_size[local_rank::n_local]:
        n_bytes += manifest.files[name].bytes
        if n_bytes > _MAX_HASHED_BYTES:
            break
        chosen.append(name)
    report = Report()
    damaged = damaged_files(path, manifest, chosen, present_files(path), report, on_bytes)
    faults = report.problems + [f"{path / name}: damaged" for name in damaged]
    if faults:
        return Check("files", "fail", listed(faults, 3), remedy)
    n_left = len(by_size[local_rank::n_local]) - len(chosen)
    suffix = f"; {n_left} not hashed, to save time ({remedy} hashes all)" if n_left else ""
    return Check("files", "pass", f"{counted(len(chosen), 'file')} equal to {MANIFEST}{suffix}")


def layers(comm: Communicator, setup: ModelSetup) -> Check:
    """Computes layers on all ranks, and again on one rank, which compares every exchange.

    The ranks take turns to compute a layer alone. The first and the last layer are checked, and as
    many other layers as time allows.

    Collective: one all_gather; then for each layer a broadcast, the collectives of the layer, and
    one or two all_gathers.
    """
    if comm.size == 1:
        return Check("layers", "skip", "one rank has nothing to compare with")
    alone = make_plan(
        setup.args,
        1,
        quant_group_size=setup.precision.quant_group_size,
        exact=setup.exact,
    )
    values = values_by_form(setup.args, setup.precision, exact=setup.exact)
    per_layer = weight_bytes(alone.shards[0], values) // setup.args.n_layers
    fits = Check("layers", "pass", "a layer fits into the free memory")
    if per_layer > available_memory() // 4:
        fits = Check("layers", "skip", "a layer takes too much of the free memory")
    fits = agreed(comm, fits)  # ranks may have different free memory
    if fits.status != "pass":
        return fits
    x = _embedded(setup)
    deadline, done = time.monotonic() + _MAX_LAYERS_S, 0
    for number, layer in enumerate(_layers_to_check(setup.args.n_layers)):
        has_time = torch.tensor([number < 2 or time.monotonic() < deadline])
        if not comm.broadcast(has_time)[0]:
            break
        checker = number % comm.size
        traced = Traced(comm)
        _compute(setup, setup.plan, traced, layer, x)
        difference, n_exchanges = _compare_with_one_rank(
            comm, setup, alone, layer, x, traced.trace, checker
        )
        if difference is not None:
            # A second rank also computes the layer alone, to tell which rank is wrong.
            second = (checker + 1) % comm.size
            second_difference, _ = _compare_with_one_rank(
                comm, setup, alone, layer, x, traced.trace, second
            )
            names = layer_names(layer, n_exchanges)
            if second_difference is None:
                product = (
                    names[difference.exchange]
                    if difference.exchange < len(names)
                    else f"layer {layer}"
                )
                seen = f"rank {checker} computes or receives {product} differently"
            else:
                seen = describe({checker: difference, second: second_difference}, names)
            return Check("layers", "fail", seen, HARDWARE)
        done += 1
    how = "equal bits" if setup.exact else "within the tolerance"
    seen = f"{done} of {setup.args.n_layers} layers on {comm.size} ranks and on one: {how}"
    return Check("layers", "pass", seen)


class _Comparison(msgspec.Struct, frozen=True):
    difference: Difference | None
    n_exchanges: int


def _compare_with_one_rank(
    comm: Communicator,
    setup: ModelSetup,
    alone: ShardPlan,
    layer: int,
    x: Tensor,
    trace: Trace,
    checker: int,
) -> tuple[Difference | None, int]:
    """Compares the layer with what rank `checker` computes alone; every rank returns the result.

    Collective: one all_gather.
    """
    comparison = _Comparison(None, len(trace.results))
    if comm.rank == checker:
        solo = TracedSolo()
        _compute(setup, alone, solo, layer, x)
        tolerance = 0.0 if setup.exact else _TOLERANCE
        comparison = _Comparison(first_difference(solo.trace, trace, tolerance), len(trace.results))
    result = exchange(comm, comparison, _Comparison)[checker]
    if result is None:
        return Difference(0, (checker,)), len(trace.results)
    return result.difference, result.n_exchanges


def _compute(
    setup: ModelSetup, plan: ShardPlan, comm: Traced | TracedSolo, layer: int, x: Tensor
) -> None:
    """Reads one layer and runs it on x."""
    args, precision = setup.args, setup.precision
    shard, dtype = plan.shards[comm.rank], torch_dtype(precision.computed)
    ops = choose_ops(
        dtype,
        setup.device,
        args.head_dim,
        {len(run.heads) // len(run.kv_heads) for run in shard.runs},
        Scores(args.attention_scale, args.attention_soft_cap, args.sink_logits),
        kv_dtype(setup.kv_format),
        matrix_forms(precision),
        exact=shard.exact is not None,
    )
    model = Transformer(args, shard, Backend(comm, ops, dtype))
    loader = WeightLoader(model, args, shard)
    start = f"layers.{layer}."

    def is_wanted(param: Param) -> bool:
        return param.name.startswith(start) or param.name.startswith("norm.")

    weights = load(setup.checkpoint, args, shard, precision, setup.device, is_wanted=is_wanted)
    for name, value in weights:
        loader.assign(name, value)
    runner = ModelRunner(args, plan, comm, model, setup.kv_format)
    runner.reserve([1] * len(runner.kv_groups), _N_TOKENS)
    tokens = [0] * len(x)
    chunk = Chunk(tokens, 0, [[0]] * len(runner.kv_groups), len(tokens))
    with torch.inference_mode():
        model.layers[layer](x.clone(), None, runner.batch([chunk]), runner.caches)


def _embedded(setup: ModelSetup) -> Tensor:
    """The embeddings of some tokens; only their rows are read. Shapes: [T, dim]."""
    params = {param.name: param for param in parameters(setup.args)}
    embedding = params["tok_embeddings.weight"]
    step = max(1, setup.args.vocab_size // _N_TOKENS)
    chosen = range(step // 2, setup.args.vocab_size, step)[:_N_TOKENS]
    rows = [setup.checkpoint.read(embedding, range(token, token + 1)) for token in chosen]
    dtype = torch_dtype(setup.precision.computed)
    return torch.cat(rows).to(setup.device, dtype) * setup.args.embedding_scale


def _layers_to_check(n_layers: int) -> Iterator[int]:
    """The first layer, the last, the middle, the quarters and so on, each once."""
    seen: set[int] = set()
    n_parts = 1
    while len(seen) < n_layers:
        for part in range(n_parts + 1):
            layer = part * (n_layers - 1) // n_parts
            if layer not in seen:
                seen.add(layer)
                yield layer
        n_parts *= 2
