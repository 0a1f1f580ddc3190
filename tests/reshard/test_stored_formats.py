"""Native folders hold every format that runs as stored, with the bits of the original files."""

import json
import shutil
from dataclasses import replace
from hashlib import sha256
from itertools import cycle
from pathlib import Path

import gguf
import pytest
import torch
from checkpoint_samples import weights_of, write_gguf
from packed_folders import write_packed
from reshard_samples import hashes_of, moved, tensors_of
from safetensors.torch import load_file, save_file
from scaled_folders import write_scaled
from test_quantised_folders import TOKENS, assert_flip_is_found, bits, precision_of
from thread_ranks import run_on_threads
from tiny_models import TinyModel, write_hf

from parallel_llama.checkpoint.native_folder import packed, unpacked
from parallel_llama.checkpoint.reading import load, open_checkpoint
from parallel_llama.checkpoint.verify import verify
from parallel_llama.cli.main import main
from parallel_llama.config.layouts import load_model_args, stored_formats
from parallel_llama.config.quantised import HF_QUANTS
from parallel_llama.dtypes import GGUF_QUANTS, QuantFormat
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.errors import UsageError
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.model_files import find_model
from parallel_llama.files.safetensors_header import read_safetensors_header
from parallel_llama.ops.quant import QuantMatrix
from parallel_llama.parallel.collectives import Solo
from parallel_llama.plan import make_plan
from parallel_llama.reshard.gguf_types import weight_types

# Heads of 32 and groups of 32 channels split blocks of 256.
ARGS = ModelArgs(
    dim=256,
    n_layers=5,
    n_heads=8,
    n_kv_heads=2,
    head_dim=32,
    ffn_dim=512,
    vocab_size=101,
    max_seq_len=64,
)
# The same for quant groups of 128; a row of w2 has five.
TINY = TinyModel(8, 2, 32, 256, ffn_dim=640, vocab_size=101)
KINDS = {
    "gguf": {*GGUF_QUANTS.values()},
    "gptq": {HF_QUANTS[128]},
    "awq": {HF_QUANTS[64]},
    "packed 4, group, zeros": {HF_QUANTS[32]},
    "packed 4, channel": {QuantFormat(4)},
    "int channel": {QuantFormat(8)},
}
CPU = torch.device("cpu")
# Matrices with all kinds of tensors, and with more inputs per scale than per unit.
W2 = {
    "gguf": "layers.3.feed_forward.w2.weight",  # Q4_K
    "gptq": "layers.0.feed_forward.w2.weight",
}


def gguf_types() -> dict[str, str]:
    """Every type once in wo or w2, whose columns are cut, and at least once in other matrices."""
    types, others = iter(GGUF_QUANTS), cycle(GGUF_QUANTS)
    return {
        param.name: next(types if param.name.endswith(("wo.weight", "w2.weight")) else others)
        for param in parameters(ARGS)
        if param.kind != "vector"
    }


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("originals")
    write_gguf(home / "model.gguf", ARGS, weights_of(ARGS), gguf_types())
    source = write_hf(TINY, home / "hf")
    made = {"gguf": home / "model.gguf"}
    for kind, size in (("gptq", 128), ("awq", 64)):
        made[kind] = write_packed(source, home / kind, kind, size)
    for kind in KINDS.keys() - made.keys():
        made[kind] = write_scaled(source, home / kind, kind)
    return made


@pytest.fixture(scope="module")
def natives(originals: dict[str, Path], tmp_path_factory: pytest.TempPathFactory):
    """A native folder of two files of each kind."""
    home = tmp_path_factory.mktemp("natives")
    return {
        kind: moved(path, home / kind, "native", 2, quant="stored")
        for kind, path in originals.items()
    }


def loaded(path: Path, tp_size: int, exact: bool) -> list[torch.Tensor]:
    """The tensors of all ranks, in the order in which the ranks load them."""
    files, precision = find_model(str(path)), precision_of(path)
    args = load_model_args(files)
    checkpoint = open_checkpoint(files, args)
    tensors: list[torch.Tensor] = []
    for shard in make_plan(args, tp_size, None, precision.quant_group_size, exact=exact).shards:
        for _, value in load(checkpoint, args, shard, precision, CPU):
            is_quantised = isinstance(value, QuantMatrix)
            tensors += value.tensors if is_quantised else [value]
            tensors += [torch.tensor([value.n_before])] if is_quantised else []
    checkpoint.close()
    return tensors


def logits_of(comm: Solo, path: Path) -> torch.Tensor:
    files, precision = find_model(str(path)), precision_of(path)
    args = load_model_args(files)
    plan = make_plan(args, comm.size, None, precision.quant_group_size, exact=True)
    checkpoint = open_checkpoint(files, args)
    runner = ModelRunner.load(args, checkpoint, plan, comm, precision=precision, device=CPU)
    runner.reserve([4] * len(runner.kv_groups), 8)
    tables = [range(4)] * len(runner.kv_groups)
    return runner.logits(runner.forward([Chunk(TOKENS, 0, tables, len(TOKENS))]))


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_loads_the_numbers_of_the_original(kind, originals, natives):
    """Also where a cut is inside a block: both ranks get the scale of the block."""
    files = find_model(str(natives[kind]))
    stored = stored_formats(files, load_model_args(files))
    assert {*stored.values()} == KINDS[kind]
    for tp_size, exact in ((1, False), (3, False), (3, True), (5, False)):
        assert_same(*(loaded(each[kind], tp_size, exact) for each in (natives, originals)))


@pytest.mark.parametrize("kind", ["gguf", "gptq"])
def test_logits_are_those_of_the_original_on_any_number_of_ranks(kind, originals, natives):
    expected = logits_of(Solo(), originals[kind])
    assert expected.isfinite().all()
    for tp_size in (1, 2, 3):
        ours = torch.cat(run_on_threads(tp_size, logits_of, natives[kind]), 1)
        assert torch.equal(bits(ours), bits(expected))


@pytest.mark.parametrize("kind", KINDS)
def test_hashes_are_those_of_the_original_for_any_number_of_files(
    kind, originals, natives, tmp_path
):
    report = verify(str(natives[kind]), str(originals[kind]))
    assert report.ok, report.problems
    there = moved(natives[kind], tmp_path / "there", "native", 5)
    back = moved(there, tmp_path / "back", "native", 2)
    mine, theirs = hashes_of(back), hashes_of(natives[kind])
    del mine["manifest.json"], theirs["manifest.json"]  # states the source
    assert mine == theirs


def block_hashes(path: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Type, shape and hash of every tensor, as the gguf package reads the file."""
    return {
        own.name: (own.tensor_type.name, tuple(own.shape), sha256(own.data.tobytes()).hexdigest())
        for own in gguf.GGUFReader(path).tensors
    }


@pytest.mark.parametrize("n_files", [1, 2, 3, 5])
@pytest.mark.parametrize("options", [{}, {"quant": "stored"}], ids=["default", "stored"])
def test_gguf_blocks_survive_a_round_trip_through_native(n_files, options, originals, tmp_path):
    """Also the rows of wq and wk, which a GGUF file reorders, and unquantised values."""
    native = moved(originals["gguf"], tmp_path / "native", "native", n_files, quant="stored")
    path = moved(native, tmp_path / "again.gguf", "gguf", **options)
    expected = block_hashes(originals["gguf"])
    assert {kind for kind, _, _ in expected.values()} == {*GGUF_QUANTS, "F32"}
    assert block_hashes(path) == expected
    report = verify(str(path), str(originals["gguf"]))
    assert report.ok, report.problems


def test_types_that_a_native_folder_decodes_become_plain_values(tmp_path):
    """IQ4_XS has no kernel, so a native folder has its values in float32."""
    types = {"wq.weight": "IQ4_XS", "w1.weight": "F16", "w3.weight": "BF16", "w2.weight": "Q3_K"}
    write_gguf(tmp_path / "model.gguf", ARGS, weights_of(ARGS), types)
    native = moved(tmp_path / "model.gguf", tmp_path / "native", "native", quant="stored")
    ours = block_hashes(moved(native, tmp_path / "again.gguf", "gguf"))
    theirs = block_hashes(tmp_path / "model.gguf")
    decoded = {name for name in theirs if name.endswith("attn_q.weight")}
    assert {ours[name][0] for name in decoded} == {"F32"}
    assert {n: own for n, own in ours.items() if n not in decoded} == {
        n: own for n, own in theirs.items() if n not in decoded
    }


def test_formats_without_a_gguf_type_are_refused_by_name(natives, tmp_path, capsys):
    for kind in ("gptq", "packed 4, group, zeros"):
        argv = ["reshard", str(natives[kind]), str(tmp_path / "x.gguf"), "--format", "gguf"]
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert "layers.0.attention.wq.weight: is in int4 with minima by" in error
        assert "--quant none with a --dtype" in error
    assert not [*tmp_path.iterdir()]


def test_factors_that_a_block_cannot_hold_are_refused_by_name(natives, tmp_path, capsys):
    """A folder can be damaged or made by other programs; its factors have 8 bits."""
    folder = shutil.copytree(natives["gguf"], tmp_path / "model")
    name = f"{W2['gguf']}.factors"
    path = next(p for p in folder.glob("*.safetensors") if name in read_safetensors_header(p))
    tensors = load_file(path)
    tensors[name].view(-1)[0] = 64
    save_file(tensors, path)
    argv = ["reshard", str(folder), str(tmp_path / "x.gguf"), "--format", "gguf"]
    assert main(argv) == 1
    message = f"{W2['gguf']}: a factor does not fit into 6 bits, as Q4_K stores it; the weights are"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.gguf").exists()


def test_rows_that_are_not_whole_blocks_are_refused_by_name():
    """A folder made by other programs can have a short last block."""
    args = replace(ARGS, ffn_dim=320, n_layers=1)
    formats = {"layers.0.feed_forward.w2.weight": GGUF_QUANTS["Q4_K"]}
    dtypes = {param.name: "float32" for param in parameters(args)}
    with pytest.raises(UsageError, match=r"w2\.weight: has rows of 320 values in int4.* of 256;"):
        weight_types(args, dtypes, formats, None)


def test_a_folder_is_about_as_large_as_the_gguf_file(originals, natives):
    held = sum(path.stat().st_size for path in natives["gguf"].glob("*.safetensors"))
    assert held < 1.1 * originals["gguf"].stat().st_size


@pytest.mark.parametrize("n_bits", [2, 3, 4, 5, 6])
def test_bit_planes_of_a_group_are_packed_in_the_documented_order(n_bits):
    """docs/resharding.md documents this order."""
    form = QuantFormat(n_bits)
    integers = torch.randint(-form.zero, form.zero, (3, 96), dtype=torch.int8)
    bytes_ = packed(integers, form)
    assert torch.equal(unpacked(bytes_, form), integers)
    for row, of_row in zip(integers.tolist(), bytes_.tolist(), strict=True):
        expected = []
        for start in range(0, 96, 32):
            group, first = [number + form.zero for number in row[start : start + 32]], 0
            for width in {2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2]}[n_bits]:
                own = [number >> first & ((1 << width) - 1) for number in group]
                for at in range(0, 32, 8 // width):
                    neighbours = own[at : at + 8 // width]
                    expected.append(sum(each << n * width for n, each in enumerate(neighbours)))
                first += width
        assert of_row == expected


def test_native_1_folder_with_one_byte_per_5_bit_integer_loads(tmp_path):
    """Older releases wrote Q5_0 and Q5_1 in this way; the other formats have not changed."""
    args, source = replace(ARGS, n_layers=1), tmp_path / "model.gguf"
    types = {"wo.weight": "Q5_1", "w1.weight": "Q5_0", "w2.weight": "Q5_0", "w3.weight": "Q4_1"}
    write_gguf(source, args, weights_of(args), types)
    folder = moved(source, tmp_path / "native", "native", quant="stored")
    config = json.loads((folder / "native.json").read_text())
    assert config["format"] == "parallel_llama native 2"
    tensors = tensors_of(folder)
    for weight, name in config["quantised"].items():
        if name.startswith("int5"):
            held = tensors[f"{weight}.integers"]
            integers = unpacked(
                held.flatten(0, -2), GGUF_QUANTS["Q5_1" if "mi" in name else "Q5_0"]
            )
            tensors[f"{weight}.integers"] = integers.unflatten(0, held.shape[:-1])
    save_file(tensors, next(folder.glob("*.safetensors")))
    config["format"] = "parallel_llama native 1"
    (folder / "native.json").write_text(json.dumps(config))
    for tp_size in (1, 3):
        assert_same(*(loaded(each, tp_size, exact=True) for each in (folder, source)))


def test_native_version_is_1_only_for_formats_of_older_releases(natives):
    for kind in KINDS:
        config = json.loads((natives[kind] / "native.json").read_text())
        is_old = kind in ("packed 4, channel", "int channel")
        assert config["format"] == f"parallel_llama native {1 if is_old else 2}"


@pytest.mark.parametrize("kind", W2)
@pytest.mark.parametrize("damage", ["missing", "misshapen", "dtype"])
def test_a_missing_or_damaged_tensor_is_named(damage, kind, natives, tmp_path, capsys):
    folder = shutil.copytree(natives[kind], tmp_path / "model")
    for part in ("integers", "scales", "mins", "factors"):
        name = f"{W2[kind]}.{part}"
        path = next(p for p in folder.glob("*.safetensors") if name in read_safetensors_header(p))
        whole, tensors = path.read_bytes(), load_file(path)
        tensor = tensors.pop(name)
        if damage == "misshapen":
            tensors[name] = tensor[1:].clone()
        elif damage == "dtype":
            tensors[name] = tensor.to(torch.int32)
        save_file(tensors, path)
        argv = ["reshard", str(folder), str(tmp_path / "x"), "--format", "native", "--tp", "1"]
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert name in error and (damage in error or "has the dtype I32" in error)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("part", "at", "unit"), [("scales", 512, 1), ("mins", 511, 0), ("factors", 256 * 16, 8)]
)
def test_a_flipped_bit_is_found_in_the_unit_of_the_tensor(part, at, unit, natives, tmp_path):
    """Scales have a unit for each block, and factors for each group of channels."""
    folder = shutil.copytree(natives["gguf"], tmp_path / "model")
    assert_flip_is_found(folder, f"{W2['gguf']}.{part}", at, unit)
