"""Native folders hold fp8, MXFP4 and NVFP4 as they are stored in Hugging Face folders.

Matrices of both folders are decoded at load, to equal values.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mxfp4_folders import write_mxfp4
from packed_folders import meant_by
from reshard_samples import hashes_of, moved, tensors_of
from safetensors.torch import load_file, save_file
from scaled_folders import write_scaled
from test_quantised_folders import assert_flip_is_found
from test_stored_formats import assert_same, loaded
from thread_ranks import run_on_threads
from tiny_models import TinyModel, write_hf
from transformers_oracle import reference_logits

from parallel_llama.checkpoint import canonical, reading
from parallel_llama.checkpoint.reading import load, open_checkpoint
from parallel_llama.checkpoint.verify import verify
from parallel_llama.cli.main import main
from parallel_llama.config.layouts import load_model_args, scaled_formats, why_decoded
from parallel_llama.config.quantised import scaled_of
from parallel_llama.dtypes import Precision, ScaledFormat
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.errors import DamagedWeights, UsageError
from parallel_llama.families import parameters
from parallel_llama.files.model_files import find_model
from parallel_llama.files.safetensors_header import read_safetensors_header
from parallel_llama.parallel.collectives import Solo
from parallel_llama.plan import make_plan

KINDS = {
    "fp8": ScaledFormat("e4m3", (128, 128), "F32"),
    "fbgemm_fp8": ScaledFormat("e4m3", (1, 0), "F32"),
    "float tensor": ScaledFormat("e4m3", (0, 0), "BF16"),
    "float channel": ScaledFormat("e4m3", (1, 0), "BF16"),
    "nvfp4": ScaledFormat("e2m1", (1, 16), "F8_E4M3"),
    "mxfp4": ScaledFormat("e2m1", (1, 32), "U8"),
    "int tensor, zeros": ScaledFormat("int8", (0, 0), "F32", has_zeros=True),
    "gpt-oss": ScaledFormat("e2m1", (1, 32), "U8"),
}
# Heads of 24 and cuts between channels split blocks of 128 and groups of 16 and 32 inputs.
TINY = TinyModel(8, 2, 24, 160, ffn_dim=224, vocab_size=101)
EXPERTS = TinyModel(
    *(7, 1, 8, 64, 96, 53),
    family="gpt_oss",
    own={"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7, "pad_token_id": 0},
)
CUTS = ((1, False), (3, True), (5, False), (7, False))
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
# Rotary rows are interleaved. w1 and w3 are one tensor, in which blocks of 128 rows begin in w1 and
# end in w3.
GLM = TinyModel(
    *(8, 2, 24, 160), 224, 101, family="glm", own={"partial_rotary_factor": 0.5, "pad_token_id": 0}
)
# Weights that are stored by rows and by columns, and their names in the Hugging Face folder.
WEIGHTS = {
    "layers.0.attention.wq": "model.layers.0.self_attn.q_proj",
    "layers.1.attention.wo": "model.layers.1.self_attn.o_proj",
    "layers.1.feed_forward.w1": "model.layers.1.mlp.gate_proj",
    "layers.0.feed_forward.w2": "model.layers.0.mlp.down_proj",
}
W2 = "layers.0.feed_forward.w2.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("originals")
    source = write_hf(TINY, home / "hf")
    made = {kind: write_scaled(source, home / kind, kind) for kind in KINDS if kind != "gpt-oss"}
    made["gpt-oss"], _ = write_mxfp4(home / "gpt-oss", EXPERTS)
    made["glm"] = write_scaled(write_hf(GLM, home / "glm plain"), home / "glm", "fp8")
    return made


@pytest.fixture(scope="module")
def natives(originals: dict[str, Path], tmp_path_factory: pytest.TempPathFactory):
    """A native folder of two files of each kind, which is written without --quant."""
    home = tmp_path_factory.mktemp("natives")
    return {kind: moved(path, home / kind, "native", 2) for kind, path in originals.items()}


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(1) if not tensor.ndim else tensor.view(torch.uint8)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gpt-oss"])
def test_numbers_and_scales_are_those_of_the_original(kind, originals, natives):
    files = find_model(str(natives[kind]))
    args = load_model_args(files)
    assert {*scaled_formats(files, args).values()} == {KINDS[kind]}
    assert len(scaled_formats(files, args)) == 14
    theirs, ours = load_file(originals[kind] / "model.safetensors"), tensors_of(natives[kind])
    endings = {
        "weight": "integers" if kind.startswith("int") else "floats",
        "weight_packed": "floats",
        "weight_scale": "scales",
        "weight_scale_inv": "scales",
        "weight_zero_point": "zeros",
        "weight_global_scale": "divisor",
    }
    for name, stored in WEIGHTS.items():
        compared = set()
        for their_end, our_end in endings.items():
            tensor = theirs.get(f"{stored}.{their_end}")
            if tensor is None:
                continue
            held = ours[f"{name}.weight.{our_end}"]
            assert held.dtype == tensor.dtype
            rows = bytes_of(held)
            rows = rows.transpose(0, 1).flatten(1) if rows.ndim == 3 else rows  # units of columns
            assert torch.equal(rows.flatten(), bytes_of(tensor).flatten()), (name, our_end)
            compared.add(f"{name}.weight.{our_end}")
        assert compared == {key for key in ours if key.startswith(f"{name}.weight")}


@pytest.mark.parametrize("kind", [*KINDS, "glm"])
def test_every_rank_loads_the_values_of_the_original(kind, originals, natives):
    """Also where a cut is inside a block."""
    for tp_size, exact in ((3, True), (7, False)) if kind == "glm" else CUTS:
        assert_same(*(loaded(each[kind], tp_size, exact) for each in (natives, originals)))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "gpt-oss"])
def test_any_column_range_reads_the_columns_of_the_original(kind, originals, natives):
    """Also if the first or the last column shares a byte with a column of another rank."""
    ours, theirs = (find_model(str(each[kind])) for each in (natives, originals))
    args = load_model_args(ours)
    native, original = open_checkpoint(ours, args), open_checkpoint(theirs, args)
    for param in parameters(args):
        if param.name.endswith("w2.weight"):
            whole = original.read(param, range(param.shape[1]))
            for part in (range(3, 38), range(32, 47), range(95, 96), range(5, 5)):
                assert torch.equal(native.read(param, part), whole[:, part.start : part.stop])
    native.close()
    original.close()


@pytest.mark.parametrize("kind", ["fp8", "nvfp4", "gpt-oss"])
def test_logits_are_those_of_the_original_and_of_transformers(kind, originals, natives):
    meant = originals[kind].parent / "meant" if kind == "gpt-oss" else meant_by(originals[kind])
    expected = reference_logits(meant, TOKENS)
    for tp_size in (1, 3, 7):
        ours, theirs = (
            torch.cat(run_on_threads(tp_size, logits_of, each[kind]), 1)
            for each in (natives, originals)
        )
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)


def logits_of(comm: Solo, path: Path) -> torch.Tensor:
    files = find_model(str(path))
    args = load_model_args(files)
    checkpoint, plan = open_checkpoint(files, args), make_plan(args, comm.size)
    precision = Precision.plain("float64")
    cpu = torch.device("cpu")
    runner = ModelRunner.load(args, checkpoint, plan, comm, precision=precision, device=cpu)
    runner.reserve([4] * len(runner.kv_groups), 8)
    tables = [range(4)] * len(runner.kv_groups)
    return runner.logits(runner.forward([Chunk(TOKENS, 0, tables, len(TOKENS))]))


@pytest.mark.parametrize("kind", [*KINDS, "glm"])
def test_hashes_are_those_of_the_original_for_any_number_of_files(
    kind, originals, natives, tmp_path
):
    report = verify(str(natives[kind]), str(originals[kind]))
    assert report.ok, report.problems
    there = moved(natives[kind], tmp_path / "there", "native", 5)
    back = moved(there, tmp_path / "back", "native", 2, quant="stored")
    mine, theirs = hashes_of(back), hashes_of(natives[kind])
    del mine["manifest.json"], theirs["manifest.json"]  # states the source
    assert mine == theirs
    for folder in (natives[kind], back):
        config = json.loads((folder / "native.json").read_text())
        assert config["format"] == "parallel_llama native 3"  # older releases refuse it by name


@pytest.mark.parametrize("kind", ["fp8", "float tensor", "nvfp4", "int tensor, zeros"])
def test_resharding_in_pieces_of_rows_writes_the_same_files(
    kind, originals, natives, tmp_path, monkeypatch
):
    """A piece of a large matrix may begin inside a block, and the scale is written once."""
    monkeypatch.setattr(canonical, "ROW_PIECE_VALUES", 1)
    monkeypatch.setattr(reading, "PIECE_ALIGNMENT", 8)
    mine = hashes_of(moved(originals[kind], tmp_path / "native", "native", 2))
    assert mine == hashes_of(natives[kind])


def test_blocks_split_by_rotary_rows_or_fusion_become_row_scales(natives):
    files = find_model(str(natives["glm"]))
    forms = scaled_formats(files, load_model_args(files))
    ends = {"wq": (1, 128), "wo": (128, 128), "w1": (128, 128), "w3": (1, 128), "w2": (128, 128)}
    for end, block in ends.items():
        (form,) = {form for name, form in forms.items() if f".{end}." in name}
        assert form == ScaledFormat("e4m3", block, "F32")


@pytest.mark.parametrize("kind", ["fp8", "gpt-oss"])
def test_plan_has_the_figures_of_the_original(kind, originals, natives, capsys):
    """The plan counts the decoded bytes, in the dtype that config.json states."""
    answers = []
    for folder in (originals[kind], natives[kind]):
        argv = ["plan", "--model", str(folder), "--nproc", "3", "--device", "cpu", "--json"]
        assert main(argv) == 0
        answers.append(json.loads(capsys.readouterr().out)["ranks"])
    assert answers[0] == answers[1]
    files = find_model(str(natives[kind]))
    line = why_decoded(files, load_model_args(files), "bfloat16") or ""
    assert f"matrices in {'fp8' if kind == 'fp8' else 'mxfp4'} are decoded to bfloat16" in line


def test_quant_none_writes_decoded_values(natives, originals, tmp_path):
    plain = moved(natives["fp8"], tmp_path / "plain", "native", quant="none", dtype="float32")
    assert json.loads((plain / "native.json").read_text())["format"] == "parallel_llama native 1"
    assert_same(*(loaded(each, 1, exact=False) for each in (plain, originals["fp8"])))


@pytest.mark.parametrize(
    ("kind", "end", "value", "message"),
    [
        ("fp8", "scales", float("nan"), "has a scale that is NaN or Inf"),
        ("mxfp4", "scales", 255, "has a scale that is NaN or Inf"),
        ("nvfp4", "divisor", 0.0, "is 0, which cannot divide scales"),
        ("fp8", "floats", float("nan"), "values are NaN or Inf"),
    ],
)
def test_damaged_numbers_are_named(kind, end, value, message, natives, tmp_path):
    folder = shutil.copytree(natives[kind], tmp_path / "model")
    rewritten(folder, f"{W2}.{end}", lambda tensor: tensor.view(-1)[:1].fill_(value))
    files, where = find_model(str(folder)), W2 if end == "floats" else f"{W2}.{end}"
    args = load_model_args(files)
    (shard,), checkpoint = make_plan(args, 1).shards, open_checkpoint(files, args)
    with pytest.raises(DamagedWeights, match=f"{where}.*{message}"):
        list(load(checkpoint, args, shard, Precision.plain("float32"), torch.device("cpu")))


@pytest.mark.parametrize("damage", ["missing", "misshapen", "dtype"])
def test_a_missing_or_damaged_tensor_is_named(damage, natives, tmp_path, capsys):
    for kind, end in (("nvfp4", "floats"), ("nvfp4", "scales"), ("nvfp4", "divisor")):
        folder = shutil.copytree(natives[kind], tmp_path / end)
        change = {
            "missing": lambda _: None,
            "misshapen": lambda tensor: torch.cat((tensor, tensor)),
            "dtype": lambda tensor: tensor.view(torch.uint8).to(torch.int32),
        }[damage]
        shape_kept = damage != "dtype" or end != "divisor"
        rewritten(folder, f"{W2}.{end}", change if shape_kept else lambda tensor: tensor.int())
        argv = ["reshard", str(folder), str(tmp_path / "x"), "--format", "native", "--tp", "1"]
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert f"{W2}.{end}" in error and (damage in error or "has the dtype I32" in error)


def rewritten(folder: Path, name: str, change: Any) -> None:
    """Changes a tensor in place, or to what `change` returns; None removes it."""
    path = next(p for p in folder.glob("*.safetensors") if name in read_safetensors_header(p))
    tensors = load_file(path)
    tensor = tensors.pop(name)
    if (changed := change(tensor)) is not None:
        tensors[name] = tensor if changed.data_ptr() == tensor.data_ptr() else changed
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("part", "at", "unit"), [("floats", 160 * 2 * 3, 3), ("scales", 160 * 5 + 1, 5)]
)
def test_a_flipped_bit_is_found_in_the_unit_of_the_tensor(part, at, unit, natives, tmp_path):
    """A unit of floats has 4 channels in 2 bytes; a unit of scales has one block of 16 inputs."""
    folder = shutil.copytree(natives["nvfp4"], tmp_path / "model")
    assert_flip_is_found(folder, f"{W2}.{part}", at, unit)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers.7.x": {}}, "not a matrix of the model"),
        ({W2: {"numbers": "e5m2", "block": [1, 0], "scales": "F32"}}, "Invalid enum value 'e5m2'"),
        ({W2: {"numbers": "e4m3", "block": [1, -1], "scales": "F32"}}, "use 1 to 1073741824"),
        ({W2: {"numbers": "e4m3", "block": [1, 2**70], "scales": "F32"}}, "or 0 for all"),
        ({W2: {"numbers": "e4m3", "block": [1, 0], "scales": "U8"}}, "U8 is not supported"),
        ({W2: {"numbers": "e2m1", "block": [2, 16], "scales": "U8"}}, "U8 is not supported"),
        ({W2: {"numbers": "e4m3", "block": [1, 0], "scales": "F32", "x": 1}}, "unknown key 'x'"),
        ({W2: "fp8"}, "Expected `object`"),
    ],
)
def test_invalid_scaled_format_is_refused(change, reason, natives):
    args = load_model_args(find_model(str(natives["fp8"])))
    with pytest.raises(UsageError, match=reason):
        scaled_of({"scaled": change}, args)
