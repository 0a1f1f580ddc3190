"""Native folders of quantised weights have the integers that quantising at load time gives."""

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_samples import weights_of, write_gguf
from reshard_samples import hashes_of, model_of, moved, tensors_of, write_model
from tiny_folder import write_tokenizer

from parallel_llama import LLM, SamplingParams
from parallel_llama.checkpoint.manifest import read_manifest
from parallel_llama.checkpoint.native_folder import packed, unpacked
from parallel_llama.checkpoint.reading import load, open_checkpoint
from parallel_llama.checkpoint.verify import verify
from parallel_llama.cli.main import main
from parallel_llama.config.layouts import default_quant, load_model_args, stored_formats
from parallel_llama.dtypes import Precision, QuantFormat, make_precision
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.errors import CheckpointError, DamagedWeights, UsageError, WriteError
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.model_files import find_model
from parallel_llama.files.safetensors_header import read_safetensors_header
from parallel_llama.memory import values_by_form, weight_bytes
from parallel_llama.ops.quant import QuantMatrix
from parallel_llama.parallel.collectives import Solo
from parallel_llama.plan import make_plan
from parallel_llama.reshard import tensor_writer
from parallel_llama.reshard.tensor_writer import DirectFile
from tests.support.thread_ranks import run_on_threads

ARGS = ModelArgs(
    dim=96,
    n_layers=2,
    n_heads=9,
    n_kv_heads=3,
    head_dim=32,
    ffn_dim=320,
    vocab_size=211,
    max_seq_len=64,
    dtype="bfloat16",
)
# Every format, in weights that are cut by rows and by columns; the head is not quantised.
STORED = {
    "tok_embeddings.weight": "Q8_0",
    "wq.weight": "Q4_0",
    "wk.weight": "Q4_0",
    "wv.weight": "Q4_0",
    "wo.weight": "Q4_1",
    "w1.weight": "Q4_1",
    "w2.weight": "Q4_0",
    "w3.weight": "Q5_1",
    "output.weight": "F16",
}
QUANTS = ("int8", "int4", "fp8", "stored")
TP_SIZES = (1, 2, 3, 5, 7, 9)
CPU = torch.device("cpu")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 89, 79, 32, 38]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source of each of QUANTS."""
    home = tmp_path_factory.mktemp("sources")
    hf = write_model(home / "hf", ARGS, 2)
    write_tokenizer(hf)
    gguf = home / "stored.gguf"
    write_gguf(gguf, ARGS, weights_of(ARGS), STORED)
    return {"int8": hf, "int4": hf, "fp8": hf, "stored": gguf}


@pytest.fixture(scope="module")
def made(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A native folder of three files in each of QUANTS."""
    home = tmp_path_factory.mktemp("made")
    return {q: moved(sources[q], home / q, "native", 3, quant=q) for q in QUANTS}


def precision_of(path: Path, quant: str | None = None) -> Precision:
    files = find_model(str(path))
    args = load_model_args(files)
    found = stored_formats(files, args)
    return make_precision(
        args, "float32", "cpu", quant or default_quant(files, args, "float32"), found
    )


def runner_of(comm: Solo, path: Path, quant: str | None) -> ModelRunner:
    files, precision = find_model(str(path)), precision_of(path, quant)
    args = load_model_args(files)
    plan = make_plan(args, comm.size, quant_group_size=precision.quant_group_size)
    checkpoint = open_checkpoint(files, args)
    return ModelRunner.load(args, checkpoint, plan, comm, precision=precision, device=CPU)


def logits_of(comm: Solo, path: Path, quant: str | None = None) -> torch.Tensor:
    runner = runner_of(comm, path, quant)
    runner.reserve([4] * len(runner.kv_groups), 8)
    tables = [range(4)] * len(runner.kv_groups)
    return runner.logits(runner.forward([Chunk(TOKENS, 0, tables, len(TOKENS))]))


def loaded(path: Path, tp_size: int, quant: str | None = None) -> list[torch.Tensor]:
    """The tensors of all ranks, in the order in which the ranks load them."""
    files, precision = find_model(str(path)), precision_of(path, quant)
    args = load_model_args(files)
    checkpoint = open_checkpoint(files, args)
    tensors: list[torch.Tensor] = []
    for shard in make_plan(args, tp_size, quant_group_size=precision.quant_group_size).shards:
        for _, value in load(checkpoint, args, shard, precision, CPU):
            tensors += value.tensors if isinstance(value, QuantMatrix) else [value]
    checkpoint.close()
    return tensors


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


# The same bits


@pytest.mark.parametrize("quant", QUANTS)
def test_every_rank_loads_the_same_as_quantising_at_load(quant, sources, made):
    for tp_size in TP_SIZES:
        ours, theirs = loaded(made[quant], tp_size), loaded(sources[quant], tp_size, quant)
        assert any(tensor.dtype == torch.int8 for tensor in ours)
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("quant", QUANTS)
def test_changing_the_number_of_files_keeps_bits_and_hashes(quant, made, tmp_path):
    first, manifest = tensors_of(made[quant]), read_manifest(made[quant])
    source = made[quant]
    for n_files in (1, 5, 2, 7):
        source = moved(source, tmp_path / str(n_files), "native", n_files)
        assert len(list(source.glob("*.safetensors"))) == n_files
        tensors = tensors_of(source)
        assert tensors.keys() == first.keys()
        assert_same_bits(list(tensors.values()), [first[name] for name in tensors])
        again = read_manifest(source)
        assert again.tensors == manifest.tensors and again.units == manifest.units
        assert (source / "native.json").read_bytes() == (made[quant] / "native.json").read_bytes()


@pytest.mark.parametrize("quant", QUANTS)
def test_logits_are_those_of_weights_quantised_at_load(quant, sources, made):
    assert torch.equal(logits_of(Solo(), made[quant]), logits_of(Solo(), sources[quant], quant))
    ours = run_on_threads(3, logits_of, made[quant])
    assert_same_bits(ours, run_on_threads(3, logits_of, sources[quant], quant))


@pytest.mark.slow
def test_greedy_tokens_are_those_of_weights_quantised_at_load(sources, made):
    """The folder needs no flag, and runs on processes as well."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)

    def tokens(model: Path, tp_size: int, quant: str | None = None) -> list[int]:
        options = {"tp_size": tp_size, "quant": quant, "device": "cpu", "kv_cache_bytes": 4 << 20}
        with LLM(str(model), **options) as llm:
            assert llm.quant == (quant or "stored")
            return llm.generate([TOKENS], params)[0].tokens

    expected = tokens(sources["int4"], 1, "int4")
    assert len(expected) == 12
    assert tokens(made["int4"], 3) == expected


def test_unquantised_weights_are_stored_unchanged(sources, made):
    whole = tensors_of(sources["int8"])
    norm = tensors_of(made["int8"])["layers.1.ffn_norm.weight"]
    assert torch.equal(norm, whole["model.layers.1.post_attention_layernorm.weight"])
    assert tensors_of(made["stored"])["output.weight"].dtype == torch.float16


# Content of the files


def test_the_first_of_two_integers_is_the_lower_half_of_a_byte():
    integers = torch.tensor([[-8, 7, 0, -1] * 8], dtype=torch.int8)
    assert packed(integers, QuantFormat(4)).tolist() == [[0xF0, 0x78] * 8]
    rising = torch.arange(32, dtype=torch.int8)[None] % 16
    for form, values in ((QuantFormat(4), rising - 8), (QuantFormat(4, has_min=True), rising)):
        assert torch.equal(unpacked(packed(values, form), form), values)


def test_integers_scales_and_mins_are_stored_under_the_weight_name(made):
    tensors = tensors_of(made["stored"])
    shapes = {
        name.removeprefix("layers.0.attention."): (tensor.dtype, list(tensor.shape))
        for name, tensor in tensors.items()
        if name.startswith(("layers.0.attention.wk", "layers.0.attention.wo"))
    }
    assert shapes == {
        "wk.weight.integers": (torch.uint8, [96, 48]),
        "wk.weight.scales": (torch.float16, [96, 3]),
        "wo.weight.integers": (torch.uint8, [9, 96, 16]),  # by heads
        "wo.weight.scales": (torch.float16, [9, 96, 1]),
        "wo.weight.mins": (torch.float16, [9, 96, 1]),
    }


def test_fp8_weights_are_stored_as_float8_e4m3fn(made):
    tensors = tensors_of(made["fp8"])
    meant = {param.name: value for param, value in load_whole(made["fp8"])}
    floats = tensors["layers.0.feed_forward.w1.weight.floats"]
    assert floats.dtype == torch.float8_e4m3fn and list(floats.shape) == [320, 96]
    scales = tensors["layers.0.feed_forward.w1.weight.scales"].float().repeat_interleave(32, 1)
    assert torch.equal(floats.float() * scales, meant["layers.0.feed_forward.w1.weight"])
    assert list(tensors["layers.1.attention.wo.weight.floats"].shape) == [9, 96, 32]


def test_every_tensor_offset_is_aligned_to_its_dtype(made):
    for folder in made.values():
        for path in folder.glob("*.safetensors"):
            for tensor in read_safetensors_header(path).values():
                width = {"F32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}.get(tensor.dtype, 2)
                assert tensor.offset % width == 0


@pytest.mark.parametrize("quant", QUANTS)
def test_plan_shows_the_bytes_that_are_loaded(quant, made, capsys):
    argv = ["plan", "--model", str(made[quant]), "--nproc", "3", "--device", "cpu", "--json"]
    assert main(argv) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["quant"] == "stored"
    precision = precision_of(made[quant])
    plan = make_plan(ARGS, 3, quant_group_size=32, exact=True)
    values = values_by_form(ARGS, precision, exact=True)
    expected = [weight_bytes(shard, values) for shard in plan.shards]
    assert [rank["weight_bytes"] for rank in answer["ranks"]] == expected
    assert sum(expected) < sum(tensor.nbytes for tensor in loaded(made[quant], 3, "none"))


# Plain values again


@pytest.mark.parametrize("quant", QUANTS)
def test_quant_none_loads_the_decoded_values_on_every_rank(quant, sources, made):
    """With quant none, ranks cut between any two channels, also inside a quant group."""
    if quant == "stored":
        assert_same_bits(loaded(made[quant], 7, "none"), loaded(sources[quant], 7, "none"))
    whole = load_whole(made[quant])
    for tp_size in (1, 7):
        tensors = iter(loaded(made[quant], tp_size, "none"))
        for shard in make_plan(ARGS, tp_size).shards:
            for param, value in whole:
                rows = shard.rows_of(param)
                expected = value.narrow(param.dim, rows.start, len(rows))
                assert torch.equal(next(tensors), expected)


def load_whole(path: Path):
    """Every weight with its whole decoded value."""
    from parallel_llama.families import parameters

    files, precision = find_model(str(path)), precision_of(path)
    checkpoint = open_checkpoint(files, ARGS)
    (shard,) = make_plan(ARGS, 1).shards
    values = load(checkpoint, ARGS, shard, precision, CPU)
    return [
        (param, value.values() if isinstance(value, QuantMatrix) else value.float())
        for param, (_, value) in zip(parameters(ARGS), values, strict=True)
    ]


def test_hf_target_gets_decoded_values_in_the_requested_dtype(made, tmp_path):
    hf = moved(made["int8"], tmp_path / "hf", "hf", 1, dtype="float32")
    key = "model.layers.0.mlp.down_proj.weight"
    meant = {param.name: value for param, value in load_whole(made["int8"])}
    assert torch.equal(tensors_of(hf)[key], meant["layers.0.feed_forward.w2.weight"])


# Damage


def flipped(folder: Path, tensor: str, at: int) -> str:
    """Flip a bit of a byte of a tensor; returns the name of its file."""
    for path in folder.glob("weights-*"):
        found = read_safetensors_header(path).get(tensor)
        if found is not None:
            data = bytearray(path.read_bytes())
            data[found.offset + at] ^= 4
            path.write_bytes(data)
            return path.name
    raise AssertionError(tensor)


def assert_flip_is_found(folder: Path, tensor: str, at: int, unit: int) -> None:
    """A flipped bit of this byte is the only problem of the folder, with the tensor and unit."""
    name = flipped(folder, tensor, at)
    (problem,) = verify(str(folder)).problems
    place = re.escape(f"{name}: damaged in {tensor}, bytes ") + rf"\d+ to \d+ \(unit {unit}\)"
    assert re.fullmatch(place, problem), problem


@pytest.mark.parametrize(
    ("tensor", "at", "unit"),
    [
        ("layers.1.attention.wq.weight.integers", 96 * 32 // 2 * 4 + 5, 4),
        ("layers.1.attention.wo.weight.integers", 96 * 32 // 2 * 7, 7),
        ("layers.1.attention.wo.weight.scales", 96 * 2 * 3 - 1, 2),
        ("layers.1.attention.wo.weight.mins", 96 * 2 * 3 + 1, 3),
        ("layers.0.feed_forward.w1.weight.scales", 32 * 3 * 2 * 9 + 1, 9),
        ("tok_embeddings.weight.integers", 96 * 4, 1),
        ("layers.1.attention.wo.weight.floats", 96 * 32 * 7, 7),
    ],
)
def test_a_damaged_scale_or_number_is_named_and_refused(tensor, at, unit, made, tmp_path):
    source = {"wq": "int4", "w1": "int8"}.get(tensor.split(".")[3 if "layers" in tensor else 0])
    source = "fp8" if tensor.endswith("floats") else source
    folder = shutil.copytree(made[source or "stored"], tmp_path / "model")
    assert_flip_is_found(folder, tensor, at, unit)
    with pytest.raises(DamagedWeights, match="damaged"):
        LLM(str(folder), device="cpu", verify=True)


@pytest.mark.parametrize(
    ("quant", "part", "nan"), [("int8", "scales", b"\xff\x7f"), ("fp8", "floats", b"\xff")]
)
def test_nan_is_refused_without_a_manifest(quant, part, nan, made, tmp_path):
    folder = shutil.copytree(made[quant], tmp_path / "model")
    (folder / "manifest.json").unlink()
    for path in folder.glob("weights-*"):
        found = read_safetensors_header(path).get(f"layers.1.attention.wv.weight.{part}")
        if found is not None:
            data = bytearray(path.read_bytes())
            data[found.offset : found.offset + len(nan)] = nan
            path.write_bytes(data)
    with pytest.raises(DamagedWeights, match=r"layers\.1\.attention\.wv\.weight.*NaN or Inf"):
        loaded(folder, 1)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"norm.weight": "int8"}, "'norm.weight': not a matrix of the model"),
        ({"output.weight": "int3"}, "the format int3 is not supported; int8, int8 with minima"),
        ({"output.weight": ["int8"]}, "is not supported"),
        ({"output.weight": "int8 with minima"}, r"missing: output\.weight\.mins"),
        ({"output.weight": "int4"}, r"misshapen: output\.weight\.integers is \[211, 96\]"),
        ({"output.weight": "fp8"}, r"missing: output\.weight\.floats; extra: .*integers'"),
        ({"output.weight": "plain"}, r"missing: output\.weight; extra: 'output.weight.integers'"),
    ],
)
def test_native_json_with_wrong_quantised_formats_is_refused(change, expected, made, tmp_path):
    folder = shutil.copytree(made["int8"], tmp_path / "model")
    path = folder / "native.json"
    values = json.loads(path.read_text())
    stated = {**values["quantised"], **change}
    quantised = {name: form for name, form in stated.items() if form != "plain"}
    path.write_text(json.dumps({**values, "quantised": quantised}))
    with pytest.raises(CheckpointError, match=expected):
        loaded(folder, 1)


def test_units_that_cut_a_group_are_refused(made, tmp_path):
    folder = shutil.copytree(made["int8"], tmp_path / "model")
    values = json.loads((folder / "native.json").read_text())
    values["units"]["ffn"] = 8
    (folder / "native.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="units of ffn have size 8, not a multiple of the 32"):
        loaded(folder, 1)


def test_integers_of_another_dtype_are_refused(made, tmp_path):
    folder = shutil.copytree(made["int8"], tmp_path / "model")
    for path in folder.glob("weights-*"):
        path.write_bytes(path.read_bytes().replace(b'"dtype":"I8"', b'"dtype":"U8"'))
    with pytest.raises(CheckpointError, match=r"integers' has the dtype U8; supported: "):
        loaded(folder, 1)


@pytest.mark.parametrize("quant", QUANTS)
def test_written_folder_verifies_alone_or_against_its_gguf_file(quant, sources, made):
    against = str(sources[quant]) if quant == "stored" else None
    report = verify(str(made[quant]), against)
    assert report.ok, report.problems


# Half-written folders


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("share", [0.0, 0.4, 0.99])
def test_resume_continues_where_an_error_stopped_the_run(quant, share, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_writer, "FLUSH_BYTES", 1 << 20)
    source = write_model(tmp_path / "hf", model_of(12 << 20))
    counts: list[int] = []
    expected = moved(source, tmp_path / "whole", "native", 3, quant=quant, on_bytes=counts.append)
    total, target = sum(counts), tmp_path / "target"
    left = [int(total * share)]
    real = DirectFile.write

    def full(self: DirectFile, data: memoryview, offset: int) -> None:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, data, offset)

    monkeypatch.setattr(DirectFile, "write", full)
    with pytest.raises(WriteError, match="run again with --resume"):
        moved(source, target, "native", 3, quant=quant)
    monkeypatch.setattr(DirectFile, "write", real)
    assert not target.exists()
    other = "int4" if quant == "int8" else "int8"
    with pytest.raises(UsageError, match=rf"wq\.weight {quant}.*, and this one has {other}"):
        moved(source, target, "native", 3, quant=other, resume=True)
    again: list[int] = []
    moved(source, target, "native", 3, quant=quant, resume=True, on_bytes=again.append)
    assert sum(again) <= total * (1 - share) + (4 << 20)
    assert hashes_of(target) == hashes_of(expected)
    assert verify(str(target)).ok


# What cannot be done


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("hf x --format=hf --quant=int8", "--quant int8 and --format hf: .*use --format native"),
        ("hf x --format=meta --quant=int4", "--quant int4 and --format meta"),
        ("hf x --format=native --quant=stored", "use int8, int4 or fp8"),
        ("hf x --format=native --quant=int3", "--quant"),
        ("small x --format=native --quant=int8", "head_dim=4 is not a multiple of the 32"),
        ("small x.gguf --format=gguf --quant=q4_0 --dtype=bfloat16", "use unquantised weights"),
        ("int8 x --format=hf", "its weights are quantised; .* with --dtype, .* --format native"),
        ("int8 x --format=meta", "its weights are quantised"),
        ("int8 x --format=native --quant=none", "its weights are quantised"),
    ],
)
def test_unsupported_arguments_are_refused_and_nothing_is_written(
    argv, expected, sources, made, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("hf").symlink_to(sources["int8"])
    Path("int8").symlink_to(made["int8"])
    write_model(tmp_path / "small", replace(ARGS, dim=64, head_dim=4))
    assert main(["reshard", *argv.split(), "--tp=1"]) == 2
    assert re.search(expected, capsys.readouterr().err)
    assert not Path("x").exists() and not list(tmp_path.glob(".*"))
