"""Loading one rank's tensors: random weights, conversion, errors, and the cost of a load."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from checkpoint_cost import cost_of_rank, write_random_folder
from checkpoint_samples import TINY, interleaved, weights_of, write_hf

from parallel_llama.checkpoint.checkpoint import random_checkpoint
from parallel_llama.checkpoint.prefetch import workers
from parallel_llama.checkpoint.reading import (
    PIECE_VALUES,
    load,
    open_checkpoint,
    pieces_of,
    quantised,
)
from parallel_llama.dtypes import Precision, QuantFormat
from parallel_llama.errors import CheckpointError, DamagedWeights
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.weights import Param
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.memory import values_by_form, weight_bytes
from parallel_llama.ops.cpu.jit import openmp
from parallel_llama.ops.formats import dtype_name
from parallel_llama.ops.quant import quantise
from parallel_llama.plan import make_plan

CPU = torch.device("cpu")


def loaded(checkpoint, shard, dtype=torch.float32, on_bytes=lambda _: None):
    precision = Precision.plain(dtype_name(dtype))
    return list(load(checkpoint, TINY, shard, precision, CPU, on_bytes))


@pytest.mark.parametrize("piece_values", [1, 1 << 25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rank_loads_its_shard_in_order_and_counts_its_bytes(
    tmp_path, monkeypatch, piece_values, dtype
):
    monkeypatch.setattr("parallel_llama.checkpoint.reading.PIECE_VALUES", piece_values)
    monkeypatch.setattr("parallel_llama.checkpoint.reading.PIECE_ALIGNMENT", 7)
    weights = weights_of(TINY)
    checkpoint = open_checkpoint(write_hf(tmp_path, weights), TINY)
    for shard in make_plan(TINY, 4).shards:
        counts = []
        tensors = loaded(checkpoint, shard, dtype, counts.append)
        assert [name for name, _ in tensors] == [param.name for param in parameters(TINY)]
        for (name, tensor), param in zip(tensors, parameters(TINY), strict=True):
            rows = shard.rows_of(param)
            whole = interleaved(name, weights[name], TINY.head_dim)  # as the model needs wq and wk
            whole = whole.narrow(param.dim, rows.start, len(rows)).to(dtype)
            if isinstance(tensor, list):
                assert piece_values == 1 and param.dim == 0 and len(tensor) > 1
                tensor = torch.cat(tensor)
            assert tensor.dtype == dtype and tensor.is_contiguous()
            assert torch.equal(tensor, whole)
        assert sum(counts) == weight_bytes(
            shard, values_by_form(TINY, Precision.plain(dtype_name(dtype)))
        )


def test_shard_without_rows_is_an_empty_tensor(tmp_path):
    args = replace(TINY, ffn_dim=3)
    checkpoint = open_checkpoint(write_hf(tmp_path, weights_of(args)), args)
    shapes = {
        tuple(tensor.shape)
        for shard in make_plan(args, 9).shards
        for name, tensor in load(checkpoint, args, shard, Precision.plain("float32"), CPU)
        if name == "layers.0.feed_forward.w2.weight"
    }
    assert shapes == {(36, 0), (36, 1)}


def test_pieces_are_bounded_aligned_and_cover_all_rows():
    param = Param("w", (5000, 1 << 17), "ffn")
    pieces = pieces_of(param, range(300, 4000), PIECE_VALUES)
    assert [row for piece in pieces for row in piece] == list(range(300, 4000))
    assert all(
        len(piece) <= 256 and (at == 0 or piece.start % 256 == 0) for at, piece in enumerate(pieces)
    )
    assert pieces_of(Param("w", (100, 8), "ffn"), range(3, 50), PIECE_VALUES) == [range(3, 50)]


@pytest.fixture
def three_threads():
    """Three threads for torch's operations, in this thread and in new threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def n_threads_of_a_new_thread():
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(torch.get_num_threads).result()


@pytest.mark.skipif(openmp() is None, reason="kernels need torch's own GNU OpenMP")
@pytest.mark.usefixtures("three_threads")
def test_torch_is_single_threaded_only_in_worker_threads():
    with workers() as threads:
        together = Barrier(3)  # so that all three workers run

        def n_own_threads(_):
            together.wait(timeout=30)
            return torch.get_num_threads()

        assert list(threads.map(n_own_threads, range(3))) == [1, 1, 1]
        assert torch.get_num_threads() == n_threads_of_a_new_thread() == 3


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("form", [QuantFormat(8), QuantFormat(4, has_min=True)])
def test_quantising_in_pieces_by_threads_equals_quantising_whole(monkeypatch, form):
    monkeypatch.setattr("parallel_llama.checkpoint.reading.QUANTISED_AT_ONCE", 7 * 64)
    param = Param("layers.0.feed_forward.w2.weight", (100, 64), "ffn")
    values = torch.randn(param.shape, generator=torch.Generator().manual_seed(0))
    found, wanted = quantised(param, values, form), quantise(values, form)
    assert all(map(torch.equal, found.tensors, wanted.tensors)) and len(found.tensors) > 1
    values[93, 5] = torch.nan
    with pytest.raises(DamagedWeights, match=f"{param.name}: 1 of 448 values"):
        quantised(param, values, form)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["layers.1.feed_forward.w2.weight", "norm.weight"])
def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path, name, value):
    weights = weights_of(TINY)
    weights[name].view(-1)[-1] = value
    checkpoint = open_checkpoint(write_hf(tmp_path, weights), TINY)
    with pytest.raises(CheckpointError, match=rf"{name}: 1 of \d+ values are NaN or Inf"):
        for shard in make_plan(TINY, 3).shards:
            loaded(checkpoint, shard)


def test_a_value_too_large_for_the_wanted_dtype_is_refused(tmp_path):
    weights = weights_of(TINY)
    weights["norm.weight"][0] = 1e6
    checkpoint = open_checkpoint(write_hf(tmp_path, weights), TINY)
    shard = make_plan(TINY, 1).shards[0]
    loaded(checkpoint, shard, torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"norm.weight: a value of 1e\+06 does not fit"):
        loaded(checkpoint, shard, torch.float16)


def test_a_checkpoint_of_another_model_is_refused_before_a_weight_is_read(tmp_path):
    checkpoint = open_checkpoint(write_hf(tmp_path, weights_of(TINY)), TINY)
    other = replace(TINY, ffn_dim=51)
    with pytest.raises(CheckpointError, match="misshapen"):
        next(
            load(checkpoint, other, make_plan(other, 1).shards[0], Precision.plain("float32"), CPU)
        )


def test_configuration_without_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="without weights"):
        open_checkpoint(ModelFiles("config", tmp_path, tmp_path, (), None), TINY)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path):
    files = write_hf(tmp_path, weights_of(TINY))
    files.weights[0].unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read: No such file"):
        open_checkpoint(files, TINY)


def test_disk_error_while_reading_names_the_file(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(write_hf(tmp_path, weights_of(TINY)), TINY)

    def failing(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("parallel_llama.checkpoint.byte_ranges.os.preadv", failing)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read: Input/output"):
        loaded(checkpoint, make_plan(TINY, 1).shards[0])


def test_random_weights_do_not_depend_on_the_number_of_ranks():
    args = replace(TINY, ffn_dim=200, vocab_size=300, dtype="bfloat16")
    checkpoint = random_checkpoint(args, seed=3)
    wholes = {
        p.name: checkpoint.read(p, range(p.shape[p.dim]), "interleaved") for p in parameters(args)
    }
    for tp_size in range(2, 10):
        for shard in make_plan(args, tp_size).shards:
            for name, tensor in load(checkpoint, args, shard, Precision.plain("bfloat16"), CPU):
                param = next(p for p in parameters(args) if p.name == name)
                rows = shard.rows_of(param)
                assert torch.equal(tensor, wholes[name].narrow(param.dim, rows.start, len(rows)))


def test_random_weights_differ_by_seed_name_and_chunk_with_expected_std():
    args = replace(TINY, dim=576, vocab_size=300)
    checkpoint = random_checkpoint(args, seed=3)
    params = {param.name: param for param in parameters(args)}
    embeddings = params["tok_embeddings.weight"]
    first = checkpoint.read(embeddings, range(64))
    assert torch.equal(first, random_checkpoint(args, 3).read(embeddings, range(64)))
    assert not torch.equal(first, random_checkpoint(args, 4).read(embeddings, range(64)))
    assert not torch.equal(first, checkpoint.read(embeddings, range(64, 128)))
    assert not torch.equal(first, checkpoint.read(params["output.weight"], range(64)))
    assert abs(first.std().item() - 0.02) < 0.001
    norm = checkpoint.read(params["norm.weight"], range(576))
    assert abs(norm.mean().item() - 1) < 0.03 and 0.08 < norm.std().item() < 0.12


@pytest.mark.slow
def test_load_reads_each_byte_once_and_needs_little_extra_memory(tmp_path):
    """Column slices (wo, w2) must not read whole rows, nor float32 be converted as one tensor."""
    args = ModelArgs(
        dim=256, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=32, ffn_dim=1024, vocab_size=65536
    )
    n_bytes = write_random_folder(tmp_path, args, torch.float32)
    costs = [cost_of_rank(tmp_path, args, 2, rank, piece_values=1 << 20) for rank in range(2)]
    assert n_bytes <= sum(cost.read_bytes for cost in costs) <= 1.05 * n_bytes
    for cost in costs:
        # A tensor converted as a whole would be 32 MiB; pieces and imports take 8 to 13.
        assert cost.shard_bytes < cost.peak_bytes < cost.shard_bytes + (20 << 20)
