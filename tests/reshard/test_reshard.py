"""Resharding copies values unchanged: a round trip through any layout restores every byte."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_samples import FILES, moved, same_bytes, shapes, tensors_of, write_model
from safetensors.torch import save_file
from tiny_models import TINY_MODELS, write_hf
from transformers import AutoModelForCausalLM

from parallel_llama.checkpoint.manifest import read_manifest
from parallel_llama.checkpoint.verify import verify
from parallel_llama.cli.main import main
from parallel_llama.config.hf import hf_config, llama3_from_factors
from parallel_llama.config.layouts import load_generation_defaults, load_model_args
from parallel_llama.errors import DamagedWeights, UsageError
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs, RopeScaling
from parallel_llama.files.model_files import find_model
from parallel_llama.files.safetensors_header import read_safetensors_header

ARGS = ModelArgs(
    dim=36, n_layers=2, n_heads=9, n_kv_heads=3, head_dim=4, ffn_dim=50, vocab_size=101
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "hf", ARGS, 2)


@pytest.mark.slow
@settings(deadline=None, max_examples=25, derandomize=True)
@given(shapes(), st.sampled_from(FILES), st.sampled_from(FILES))
def test_hf_to_native_to_hf_is_the_same_byte_for_byte(args, n_native, n_hf):
    with TemporaryDirectory() as name:
        folder = Path(name)
        hf = write_model(folder / "hf", args, 2)
        native = moved(hf, folder / "native", "native", n_native)
        back = moved(native, folder / "back", "hf", n_hf)
        assert len(list(native.glob("*.safetensors"))) == n_native
        assert len(list(back.glob("*.safetensors"))) == n_hf
        assert same_bytes(tensors_of(hf), tensors_of(back))
        assert load_model_args(find_model(str(back))) == args
        one, other = read_manifest(native), read_manifest(back)
        assert one.tensors == other.tensors
        assert not verify(str(back), against=str(hf)).problems


@pytest.mark.slow
@settings(deadline=None, max_examples=12, derandomize=True)
@given(shapes(), st.integers(1, 8), st.integers(1, 8))
def test_hf_to_meta_to_native_to_meta_to_hf_restores_every_byte(args, n_files, other_n_files):
    with TemporaryDirectory() as name:
        folder = Path(name)
        hf = write_model(folder / "hf", args)
        meta = moved(hf, folder / "meta", "meta", n_files)
        native = moved(meta, folder / "native", "native", 3)
        again = moved(native, folder / "again", "meta", other_n_files)
        back = moved(again, folder / "back", "hf")
        assert same_bytes(tensors_of(hf), tensors_of(back))


# The other families are in tests/families/test_written.py.
LLAMAS = [name for name, tiny in TINY_MODELS.items() if tiny.family == "llama"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LLAMAS)
def test_transformers_computes_equal_logits_after_a_round_trip(name, tmp_path):
    """The configuration goes through native.json, where no rope setting may be lost."""
    hf = write_hf(TINY_MODELS[name], tmp_path / "hf")
    native = moved(hf, tmp_path / "native", "native", 2)
    back = moved(native, tmp_path / "back", "hf", 2)
    tokens = torch.arange(40)[None] % TINY_MODELS[name].vocab_size
    logits = []
    for folder in (hf, back):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        with torch.inference_mode():
            logits.append(model(tokens).logits)
    assert logits[0].equal(logits[1])


def test_every_tensor_keeps_its_own_dtype(tmp_path):
    hf = write_model(tmp_path / "hf", ARGS, norm=torch.float32, wq=torch.float64)
    back = moved(moved(hf, tmp_path / "native", "native", 2), tmp_path / "back", "hf")
    assert same_bytes(tensors_of(hf), tensors_of(back))
    assert not verify(str(back)).problems


def test_every_tensor_offset_is_aligned_to_its_dtype(tmp_path):
    """A bias of 51 values in bfloat16 before a norm in float32 would put the norm at 2 mod 4."""
    hf = write_model(tmp_path / "hf", replace(ARGS, ffn_dim=51, mlp_bias=True), norm=torch.float32)
    for layout in ("hf", "native"):
        (path,) = moved(hf, tmp_path / f"as {layout}", layout).glob("*.safetensors")
        for tensor in read_safetensors_header(path).values():
            assert tensor.offset % (4 if tensor.dtype == "F32" else 2) == 0, tensor.name


def test_dtype_converts_like_torch_and_manifest_keeps_source_hashes(tmp_path):
    hf = write_model(tmp_path / "hf", replace(ARGS, dtype="float32"))
    half = moved(hf, tmp_path / "half", "hf", dtype="bfloat16")
    expected = {name: tensor.bfloat16() for name, tensor in tensors_of(hf).items()}
    assert same_bytes(expected, tensors_of(half))
    assert load_model_args(find_model(str(half))).dtype == "bfloat16"
    whole = read_manifest(moved(hf, tmp_path / "whole", "hf"))
    manifest = read_manifest(half)
    assert manifest.source.tensors == {n: t.blake3 for n, t in whole.tensors.items()}
    assert whole.source.tensors == {}


def test_a_value_too_large_for_the_dtype_is_refused(tmp_path):
    hf = write_model(tmp_path / "hf", ARGS)
    weights = tensors_of(hf)
    weights["model.norm.weight"][3] = 1e30
    save_file(weights, hf / "model.safetensors")
    with pytest.raises(
        DamagedWeights, match=r"norm\.weight: a value of .* does not fit into float16"
    ):
        moved(hf, tmp_path / "half", "hf", dtype="float16")
    assert not (tmp_path / "half").exists()


def test_nan_and_inf_are_copied_unchanged(tmp_path):
    hf = write_model(tmp_path / "hf", ARGS)
    weights = tensors_of(hf)
    weights["model.norm.weight"][:2] = torch.tensor([float("nan"), -float("inf")])
    save_file(weights, hf / "model.safetensors")
    back = moved(moved(hf, tmp_path / "native", "native"), tmp_path / "back", "hf")
    assert same_bytes(weights, tensors_of(back))


@pytest.mark.parametrize("layout", ["hf", "native", "meta"])
def test_files_beside_the_weights_are_copied_and_in_the_manifest(source, layout, tmp_path):
    folder = shutil.copytree(source, tmp_path / "hf")
    beside = {
        "tekken.json": "{}",
        "tokenizer.json": "{}",
        "tokenizer.model.v3": "3",
        "tokenizer_config.json": '{"a": 1}',
        "chat_template.jinja": "{{ x }}",
        "additional_chat_templates/tools.jinja": "{{ y }}",
    }
    for name, text in beside.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "generation_config.json").write_text('{"do_sample": true, "top_p": 0.5}')
    target = moved(folder, tmp_path / "out", layout)
    assert {name: (target / name).read_text() for name in beside} == beside
    assert json.loads((target / "generation_config.json").read_text()) == {
        "do_sample": True,
        "top_p": 0.5,
        "eos_token_id": 2,
    }
    manifest = read_manifest(target)
    assert beside.keys() < manifest.files.keys()


def test_target_keeps_the_eos_ids_of_the_source(source, tmp_path):
    target = moved(source, tmp_path / "native", "native")
    before, after = (load_generation_defaults(find_model(str(f))) for f in (source, target))
    assert before.eos_ids == after.eos_ids == (2,)


def test_a_repeated_run_writes_the_same_bytes(source, tmp_path):
    one, other = (moved(source, tmp_path / name, "native", 2) for name in ("one", "other"))
    for path in one.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes(), path.name


def test_the_source_is_only_read(source, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in source.iterdir()}
    moved(source, tmp_path / "native", "native")
    assert {path: path.stat().st_mtime_ns for path in source.iterdir()} == before


def test_nothing_but_the_target_is_left(source, tmp_path):
    moved(source, tmp_path / "native", "native")
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


HF = "--tp=1 --format=hf"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (f"hf hf {HF}", "is the source itself"),
        (f"hf there {HF}", "already exists; give another name"),
        (f"hf hf/x {HF}", "is inside the source"),
        (f"hf link/x {HF}", "is inside the source"),
        (f"hf a/b {HF}", "create it first"),
        (f"no x {HF}", "not a path that exists"),
        (f"shape.json x {HF}", "without weights"),
        (f"hf x {HF} --dtype=bfloat", "did you mean 'bfloat16'"),
        ("hf x --tp=1 --format=nativ", "did you mean 'native'"),
        ("hf x --tp=10 --format=meta", "9 query heads .*--tp 1 to 9"),
        ("hf x --tp=900 --format=hf", "--tp 1 to 21"),
        ("hf x --tp=900 --format=native", "--tp 1 to 21"),
        *((f"hf x --tp {n} --format=hf", "not a whole number from 1") for n in (0, -1, 1.5, "two")),
        *((half, "reshard needs") for half in ("", "a", "a b", "a b --tp=1")),
        (f"a b c {HF}", "unexpected argument 'c'"),
    ],
)
def test_unsupported_arguments_are_refused_and_nothing_is_written(
    argv, expected, source, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(source, "hf")
    Path("there").mkdir()
    Path("link").symlink_to("hf")
    Path("shape.json").write_text('{"dim": 36, "n_layers": 1, "n_heads": 9, "vocab_size": 101}')
    before = sorted(tmp_path.rglob("*"))
    assert main(["reshard", *argv.split()]) == 2
    assert re.search(expected, capsys.readouterr().err)
    assert sorted(tmp_path.rglob("*")) == before


def test_too_little_disk_space_is_refused(source, tmp_path, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)._replace(free=17 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    target = str(tmp_path / "x")
    assert main(["reshard", str(source), target, "--tp=1", "--format=hf"]) == 0
    shutil.rmtree(target)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=16 << 20))
    assert main(["reshard", str(source), target, "--tp=1", "--format=hf"]) == 2
    text = capsys.readouterr().err
    assert f"{16 << 20} are free" in text and "write to another disk" in text


def test_json_reports_files_bytes_seconds_and_peak_memory(source, tmp_path, capsys):
    target = tmp_path / "x"
    argv = ["reshard", "--tp", "2", str(source), "--format=hf", str(target), "--json"]
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    paths = list(target.iterdir())
    assert report.keys() == {"files", "bytes", "seconds", "peak_rss_bytes"}
    assert report["files"] == len(paths)
    assert report["bytes"] == sum(path.stat().st_size for path in paths)
    assert report["peak_rss_bytes"] > 1 << 20


LLAMA_3_1 = replace(ARGS, dim=1152, head_dim=128, rope_theta=500000.0, max_seq_len=131072)


def llama3_factors(args: ModelArgs, factor: float, high: float = 4) -> tuple[float, ...]:
    """rope_freqs.weight as converters to GGUF compute it, in float32."""
    freqs = 1.0 / args.rope_theta ** (torch.arange(0, args.head_dim, 2).float() / args.head_dim)
    factors = []
    for freq in freqs:
        wavelength = 2 * torch.pi / freq
        if wavelength < 8192 / high:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (high - 1)
            factors.append(float(1 / ((1 - smooth) / factor + smooth)))
    return tuple(factors)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_factors_of_a_gguf_file_become_llama3_scaling(factor):
    scaling = RopeScaling("factors", factors=llama3_factors(LLAMA_3_1, factor))
    rope = hf_config(replace(LLAMA_3_1, rope_scaling=scaling))["rope_scaling"]
    assert rope == {
        "rope_type": "llama3",
        "factor": factor,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }


def test_rope_factors_of_llama_4_scout_become_llama3_scaling():
    """Regression: only the high_freq_factor of Llama 3.1 was tried."""
    factors = llama3_factors(LLAMA_3_1, 16.0, high=1)
    scaling = RopeScaling("factors", factors=factors)
    rope = hf_config(replace(LLAMA_3_1, rope_scaling=scaling))["rope_scaling"]
    assert (rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]) == (1.0, 1.0, 16.0)
    again = replace(LLAMA_3_1, rope_scaling=llama3_from_factors(LLAMA_3_1, factors))
    assert hf_config(again)["rope_scaling"] == rope


def test_unknown_rope_factors_are_refused_for_hf():
    factors = [*llama3_factors(LLAMA_3_1, 8.0)]
    factors[40] *= 1.01
    with pytest.raises(UsageError, match="use --format native"):
        hf_config(replace(LLAMA_3_1, rope_scaling=RopeScaling("factors", factors=tuple(factors))))


def test_a_manifest_names_every_unit_of_every_weight(source, tmp_path):
    manifest = read_manifest(moved(source, tmp_path / "native", "native"))
    names = [param.name for param in parameters(ARGS)]
    assert list(manifest.tensors) == list(manifest.units) == names
    assert len(manifest.units["layers.0.attention.wq.weight"]) == 9
    assert len(manifest.units["layers.0.attention.wo.weight"]) == 9
    assert len(manifest.units["layers.0.attention.wk.weight"]) == 3
    assert len(manifest.units["norm.weight"]) == 1


def test_manifest_has_no_unit_hashes_for_a_model_of_very_many_units(source, tmp_path, monkeypatch):
    """Regression: the manifest of a mixture of experts was larger than `verify` reads."""
    monkeypatch.setattr("parallel_llama.reshard.safetensors_layout.MAX_UNIT_HASHES", 100)
    folder = moved(source, tmp_path / "native", "native")
    assert read_manifest(folder).units == {}
    assert verify(str(folder)).problems == []
    tensor = "layers.1.feed_forward.w2.weight"
    (path,) = folder.glob("weights-*")
    at = read_safetensors_header(path)[tensor].offset + 5
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    (problem,) = verify(str(folder)).problems
    assert re.fullmatch(rf"{path.name}: damaged in {tensor}, bytes \d+ to \d+", problem)


@pytest.mark.parametrize("limit", ["MAX_TENSORS", "MAX_HEADER_BYTES"])
def test_files_with_more_tensors_than_can_be_read_are_refused(source, tmp_path, monkeypatch, limit):
    """Regression: the folder was written, and then no command could read it."""
    monkeypatch.setattr(f"parallel_llama.reshard.safetensors_layout.{limit}", 20)
    with pytest.raises(UsageError, match=r"have 21 tensors .*; use a --tp larger than 1"):
        moved(source, tmp_path / "native", "native")
    assert not (tmp_path / "native").exists()
