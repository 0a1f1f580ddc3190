"""Weights that share a stored tensor are read and written in parts, and verified as one."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_samples import hf_name, weights_of, write_safetensors
from model_folders import add_manifest
from reshard_samples import moved, opened, same_bytes, tensors_of
from torch import Tensor

from parallel_llama.checkpoint.manifest import read_manifest
from parallel_llama.checkpoint.reading import load
from parallel_llama.checkpoint.verify import verify
from parallel_llama.config.layouts import load_model_args
from parallel_llama.dtypes import Precision
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.families import FAMILIES, parameters
from parallel_llama.families.llama import LLAMA
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import LLAMA_NAMES
from parallel_llama.files.model_files import find_model
from parallel_llama.plan import make_plan

QKV, UP = "model.layers.*.self_attn.query_key_value.*", "model.layers.*.mlp.gate_up_proj.*"
SHARED = {"attention.wq": QKV, "attention.wk": QKV, "attention.wv": QKV}
SHARED |= {"feed_forward.w1": UP, "feed_forward.w3": UP}

IN_A_ROW = replace(
    LLAMA,
    name="in_a_row",
    architecture="InARowForCausalLM",
    base_architecture="InARowModel",
    names=tuple(
        replace(row, hf=SHARED.get(row.meta.removeprefix("layers.*.")[:-2], row.hf))
        for row in LLAMA_NAMES
    ),
)
GROUPED = replace(
    IN_A_ROW,
    name="grouped",
    architecture="GroupedForCausalLM",
    base_architecture="GroupedModel",
    qkv_by_kv_head=frozenset({"hf"}),
)


@pytest.fixture(autouse=True)
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in (IN_A_ROW, GROUPED):
        monkeypatch.setitem(FAMILIES, family.name, family)


def args_of(family: str, n_heads: int = 9, n_kv_heads: int = 3) -> ModelArgs:
    return ModelArgs(
        dim=n_heads * 4,
        n_layers=2,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=4,
        ffn_dim=50,
        vocab_size=101,
        attention_bias=True,
        mlp_bias=True,
        dtype="float32",
        family=family,
    )


def fused(args: ModelArgs, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the HF folder, fused with torch alone."""
    tensors = {}
    for name, weight in weights.items():
        if ".wk." in name or ".wv." in name or ".w3." in name:
            continue
        if ".wq." in name:
            parts = [weights[name.replace(".wq.", part)] for part in (".wq.", ".wk.", ".wv.")]
            if args.family == "grouped":
                parts = [p.view(args.n_kv_heads, -1, *p.shape[1:]) for p in parts]
                joined = torch.cat(parts, 1).flatten(0, 1)
            else:
                joined = torch.cat(parts)
            tensors[hf_name(name).replace("q_proj", "query_key_value")] = joined
        elif ".w1." in name:
            joined = torch.cat([weight, weights[name.replace(".w1.", ".w3.")]])
            tensors[hf_name(name).replace("gate_proj", "gate_up_proj")] = joined
        else:
            tensors[hf_name(name)] = weight
    return tensors


def write(folder: Path, args: ModelArgs, tensors: dict[str, Tensor], n_files: int = 1) -> Path:
    folder.mkdir()
    write_safetensors(folder, tensors, n_files)
    config = {
        "architectures": [FAMILIES[args.family].architecture],
        "model_type": args.family,
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "intermediate_size": args.ffn_dim,
        "vocab_size": args.vocab_size,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "mlp_bias": True,
        "torch_dtype": args.dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("family", ["in_a_row", "grouped"])
@pytest.mark.parametrize("heads", [(9, 3), (7, 1), (6, 6)])
def test_every_rank_gets_its_rows_of_every_weight(family, heads, tmp_path):
    args = args_of(family, *heads)
    weights = weights_of(args)
    files = find_model(str(write(tmp_path / "hf", args, fused(args, weights), 3)))
    assert load_model_args(files) == args
    checkpoint = opened(files, args)
    for tp_size in (1, 2, 3, 5):
        for shard in make_plan(args, tp_size).shards:
            for param in parameters(args):
                rows = shard.rows_of(param)
                expected = weights[param.name].narrow(param.dim, rows.start, len(rows))
                assert torch.equal(checkpoint.read(param, rows), expected)
            loaded = load(checkpoint, args, shard, Precision.plain("float64"), torch.device("cpu"))
            assert [name for name, _ in loaded] == [param.name for param in parameters(args)]


@pytest.mark.parametrize("family", ["in_a_row", "grouped"])
@pytest.mark.parametrize("heads", [(9, 3), (7, 1), (6, 6)])
def test_reshard_through_every_layout_and_back_is_byte_identical(family, heads, tmp_path):
    args = args_of(family, *heads)
    hf = write(tmp_path / "hf", args, fused(args, weights_of(args)), 2)
    native = moved(hf, tmp_path / "native", "native", 3)
    meta = moved(native, tmp_path / "meta", "meta", 2)
    back = moved(meta, tmp_path / "back", "hf", 5)
    assert same_bytes(tensors_of(hf), tensors_of(back))
    manifests = [read_manifest(folder) for folder in (native, meta, back)]
    assert all(manifest.tensors == manifests[0].tensors for manifest in manifests)
    assert verify(str(back), against=str(hf)).ok


def test_reshard_writes_at_most_one_file_per_stored_tensor(tmp_path):
    args = args_of("grouped")
    hf = write(tmp_path / "hf", args, fused(args, weights_of(args)))
    n_tensors = len(tensors_of(hf))
    assert same_bytes(tensors_of(hf), tensors_of(moved(hf, tmp_path / "most", "hf", n_tensors)))
    with pytest.raises(UsageError, match=f"use --tp 1 to {n_tensors}"):
        moved(hf, tmp_path / "more", "hf", n_tensors + 1)


def test_one_tensor_cannot_hold_weights_of_two_dtypes(tmp_path):
    args = args_of("grouped")
    hf = write(tmp_path / "hf", args, fused(args, weights_of(args)))
    native = moved(hf, tmp_path / "native", "native")
    path = native / "weights-00001-of-00001.safetensors"
    tensors = tensors_of(native)
    tensors["layers.1.attention.wk.weight"] = tensors["layers.1.attention.wk.weight"].half()
    (native / "manifest.json").unlink()
    write_safetensors(native, tensors)
    (native / "model.safetensors").rename(path)
    with pytest.raises(UsageError, match=r"layers\.1.*float32 and of float16.*use --dtype"):
        moved(native, tmp_path / "mixed", "hf")
    moved(native, tmp_path / "one", "hf", dtype="bfloat16")


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text), text


def refused(folder: Path) -> str:
    files = find_model(str(folder))
    with pytest.raises(CheckpointError) as caught:
        opened(files, load_model_args(files))
    return str(caught.value)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda t: t[:-4], r"misshapen: .*query_key_value\.weight is \[56, 36\], expected \[60,"),
        (lambda t: t.view(3, 20, 36), r"is \[3, 20, 36\], expected \[60, 36\]"),
        (lambda t: t.flatten(), r"is \[2160\], expected \[60, 36\]"),
        (lambda _: None, r"missing: model\.layers\.0\.self_attn\.query_key_value\.weight;"),
    ],
)
def test_misshapen_or_missing_shared_tensor_is_refused(damage, expected, tmp_path):
    args = args_of("grouped")
    tensors = fused(args, weights_of(args))
    name = "model.layers.0.self_attn.query_key_value.weight"
    damaged = damage(tensors.pop(name))
    if damaged is not None:
        tensors[name] = damaged.clone()
    assert_matches(expected, refused(write(tmp_path / "hf", args, tensors)))


def test_unfused_tensors_are_reported_as_missing_and_extra(tmp_path):
    args = args_of("grouped")
    weights = {hf_name(name): weight for name, weight in weights_of(args).items()}
    text = refused(write(tmp_path / "hf", args, weights))
    assert_matches(r"missing: .*query_key_value.*extra: .*q_proj", text)


def test_n_kv_heads_that_does_not_divide_n_heads_is_refused(tmp_path):
    folder = write(tmp_path / "hf", args_of("grouped"), {"a": torch.zeros(1)})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2}))
    with pytest.raises(UsageError, match="use a divisor of n_heads"):
        load_model_args(find_model(str(folder)))


@pytest.mark.parametrize("family", ["in_a_row", "grouped"])
def test_damage_in_a_shared_tensor_names_the_damaged_weight(family, tmp_path):
    args = args_of(family)
    hf = write(tmp_path / "hf", args, fused(args, weights_of(args)))
    add_manifest(hf)
    assert verify(str(hf)).ok
    path = hf / "model.safetensors"
    data = bytearray(path.read_bytes())
    key = tensors_of(hf)["model.layers.1.self_attn.query_key_value.weight"]
    row = 14 if family == "grouped" else 38  # third row of key head 0, after 3 or 9 query heads
    at = data.index(key[row].numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    (line,) = verify(str(hf)).problems
    assert_matches(r"model\.safetensors: damaged in layers\.1\.attention\.wk\.weight, bytes", line)
    start, stop = map(int, re.findall(r"\d+", line.partition("bytes")[2]))
    assert start <= at < stop
