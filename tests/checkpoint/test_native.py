"""Native folders: on any number of ranks, a rank reads its shard of a weight as one byte range."""

import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_samples import model_of, moved, shapes, write_model

from parallel_llama.checkpoint.native_folder import from_unit_major, unit_major_blocks
from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.config.layouts import load_model_args
from parallel_llama.config.native import args_from_native, native_config, native_units
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs, RopeScaling
from parallel_llama.files.model_files import find_model
from parallel_llama.plan import make_plan
from parallel_llama.reshard.safetensors_layout import NativeLayout

SMALL = ModelArgs(
    dim=36,
    n_layers=1,
    n_heads=9,
    n_kv_heads=3,
    head_dim=4,
    ffn_dim=301,
    vocab_size=101,
    attention_bias=True,
    mlp_bias=True,
    dtype="float32",
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("small")
    source = write_model(folder / "hf", SMALL)
    return source, moved(source, folder / "native", "native", 2)


class PlainReads:
    """Counts the reads of tensor data, and their bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        real = os.preadv

        def counted(descriptor, buffers, offset, *flags):
            count = real(descriptor, buffers, offset, *flags)
            self.sizes.append(count)
            return count

        monkeypatch.setattr(os, "preadv", counted)


@pytest.mark.slow
@settings(deadline=None, max_examples=25, derandomize=True)
@given(shapes(), st.sampled_from([1, 3]), st.integers(1, 8))
def test_every_shard_equals_the_slice_read_from_the_hf_folder(args, n_parts, tp_size):
    with TemporaryDirectory() as folder:
        hf = write_model(Path(folder) / "hf", args)
        native = moved(hf, Path(folder) / "native", "native", n_parts)
        one = open_checkpoint(find_model(str(hf)), args)
        other = open_checkpoint(find_model(str(native)), args)
        other.check(args)
        for shard in make_plan(args, min(tp_size, args.n_heads)).shards:
            for param in parameters(args):
                rows = shard.rows_of(param)
                expected, read = one.read(param, rows), other.read(param, rows)
                assert read.is_contiguous() and read.dtype == expected.dtype
                assert read.equal(expected), (param.name, rows)
        one.close()
        other.close()


@pytest.mark.parametrize("tp_size", [1, 2, 3, 5, 7, 9])
def test_rank_reads_its_shard_of_a_weight_in_one_exact_read(small, tp_size, monkeypatch):
    """In an HF folder, columns of wo and w2 need one short read per row."""
    checkpoint = open_checkpoint(find_model(str(small[1])), SMALL)
    reads = PlainReads(monkeypatch)
    for shard in make_plan(SMALL, tp_size).shards:
        for param in parameters(SMALL):
            reads.sizes.clear()
            tensor = checkpoint.read(param, shard.rows_of(param))
            assert reads.sizes == ([tensor.nbytes] if tensor.nbytes else []), param.name
    checkpoint.close()


@pytest.mark.parametrize("start", range(0, 301, 43))
@pytest.mark.parametrize("length", [1, 7, 64, 301])
def test_columns_that_start_inside_a_unit_can_be_read(small, start, length):
    one, other = (open_checkpoint(find_model(str(folder)), SMALL) for folder in small)
    param = next(p for p in parameters(SMALL) if p.name.endswith("w2.weight"))
    rows = range(start, min(start + length, 301))
    assert other.read(param, rows).equal(one.read(param, rows))
    one.close()
    other.close()


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 16))
def test_from_unit_major_inverts_unit_major_blocks(n_rows, n_columns, unit):
    value = torch.arange(n_rows * n_columns).view(n_rows, n_columns)
    blocks = list(unit_major_blocks(value, unit))
    assert from_unit_major(torch.cat(blocks), n_rows, unit).equal(value)


def test_unit_major_order_stores_the_columns_of_a_unit_together():
    value = torch.tensor([[1, 2, 3, 4, 9], [5, 6, 7, 8, 10]])
    flat = torch.cat(list(unit_major_blocks(value, 2)))
    assert flat.tolist() == [1, 2, 5, 6, 3, 4, 7, 8, 9, 10]


def test_the_folder_is_as_large_as_its_source(tmp_path):
    source = write_model(tmp_path / "hf", model_of(12 << 20))
    native = moved(source, tmp_path / "native", "native", 3)
    sizes = [sum(f.stat().st_size for f in path.iterdir()) for path in (source, native)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)


def test_unit_bytes_of_a_weight_add_up_to_its_size():
    layout = NativeLayout(SMALL, {p.name: torch.float32 for p in parameters(SMALL)}, 1)
    for param in parameters(SMALL):
        assert sum(layout.unit_bytes(param)[param.name]) == 4 * torch.Size(param.shape).numel()


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling("llama3", 8.0, 8192, 1.0, 4.0),
        RopeScaling("yarn", 4.0, 64, mscale=0.5, truncate=False),
        RopeScaling("dynamic", 2.5, 128),
        RopeScaling("factors", factors=(1.0, 8.25)),
    ],
)
def test_native_json_round_trips_all_model_args(scaling):
    args = ModelArgs(**{**vars(SMALL), "rope_scaling": scaling, "norm_eps": 1e-6})
    values = json.loads(json.dumps(native_config(args, {"heads": 4})))
    assert args_from_native(values) == args


def test_native_folder_has_the_model_args_of_its_source(small):
    assert load_model_args(find_model(str(small[1]))) == load_model_args(find_model(str(small[0])))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "parallel_llama native 4"}, "native 2', 'parallel_llama native 3' are"),
        ({"more": 1}, "unknown key 'more'"),
        ({"args": {**vars(SMALL), "n_head": 9}}, "did you mean 'n_heads'"),
        ({"args": {**vars(SMALL), "dim": "36"}}, "Expected `int`"),
        ({"args": {**vars(SMALL), "rope_scaling": {"kind": "x"}}}, "Invalid enum value"),
    ],
)
def test_invalid_native_json_is_refused_with_the_reason(change, reason):
    with pytest.raises(UsageError, match=reason):
        args_from_native({**native_config(SMALL, {}), **change})


def test_unit_size_of_zero_is_refused():
    with pytest.raises(UsageError, match="at least 1"):
        native_units({"units": {"heads": 0, "kv_heads": 4, "ffn": 1, "vocab": 1}}, ["heads"])


def test_a_missing_weight_file_is_named(small, tmp_path):
    folder = shutil.copytree(small[1], tmp_path / "native")
    (folder / "weights-00002-of-00002.safetensors").unlink()
    with pytest.raises(UsageError, match="missing weights-00002-of-00002"):
        find_model(str(folder))


def test_weight_files_of_two_different_sets_are_refused(small, tmp_path):
    folder = shutil.copytree(small[1], tmp_path / "native")
    (folder / "weights-00001-of-00001.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="sets of 00001, 00002 files"):
        find_model(str(folder))


def test_unit_size_that_contradicts_stored_shapes_is_refused(small, tmp_path):
    folder = shutil.copytree(small[1], tmp_path / "native")
    config = json.loads((folder / "native.json").read_text())
    config["units"]["heads"] = 2
    (folder / "native.json").write_text(json.dumps(config))
    files = find_model(str(folder))
    with pytest.raises(CheckpointError, match=r"misshapen: layers\.0\.attention\.wo"):
        open_checkpoint(files, load_model_args(files)).check(SMALL)
