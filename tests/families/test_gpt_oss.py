"""gpt-oss compared with transformers: plain and MXFP4 folders, and GGUF files."""

import errno
import json
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from converted_gguf import convert, rounded
from family_models import GPT_OSS, GPT_OSS_OWN, GPT_OSS_YARN
from mixes import OF_FAMILIES
from mxfp4_folders import MATRICES, write_mxfp4
from parity_steps import (
    assert_equal_bits,
    assert_parity,
    cut_logits,
    logits_of_models,
)
from reshard_samples import hashes_of, moved, through_every_layout
from safetensors.torch import load_file, save_file
from thread_ranks import run_on_threads
from tiny_models import TinyModel, write_hf
from torch import Tensor
from transformers import AutoConfig
from transformers_oracle import loaded_logits, reference_logits

from parallel_llama.checkpoint.reading import load, open_checkpoint
from parallel_llama.checkpoint.verify import verify
from parallel_llama.config.layouts import default_dtype, load_model_args, why_decoded
from parallel_llama.dtypes import Precision
from parallel_llama.errors import CheckpointError, DamagedWeights, UsageError, WriteError
from parallel_llama.families.model_args import with_sinks
from parallel_llama.files.model_files import find_model
from parallel_llama.files.safetensors_header import read_safetensors_header
from parallel_llama.plan import PART_KEYS, make_plan
from parallel_llama.reshard import tensor_writer
from parallel_llama.reshard.tensor_writer import DirectFile


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_hf(tiny, tmp_path_factory.mktemp("hf"), seed=3)
        for name, tiny in GPT_OSS.items()
    }


@pytest.mark.parametrize("name", GPT_OSS)
def test_logits_match_transformers_at_each_tp_size(name, folders):
    folder, tokens = folders[name], GPT_OSS[name].tokens
    assert_parity(folder, tokens, reference_logits(folder, tokens), (1, 2, 3, 5, 7))


@pytest.mark.parametrize("name", GPT_OSS)
def test_exact_sums_give_the_same_bits_on_any_number_of_ranks(name, folders):
    folder, tokens = folders[name], GPT_OSS[name].tokens
    # On 7 ranks, some have no channel of an expert.
    assert_equal_bits(folder, tokens, (3, 7), PART_KEYS)


@pytest.mark.parametrize("name", GPT_OSS)
def test_reshard_through_every_layout_keeps_transformers_logits(name, folders, tmp_path):
    folder, tokens = through_every_layout(folders[name], tmp_path), GPT_OSS[name].tokens
    logits, expected = loaded_logits(folder, tokens), reference_logits(folders[name], tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "cut",
    [
        {"ranks_per_expert": 1},
        {"ranks_per_expert": 2},
        {"shares": [10, 1, 6]},
        {"kv_split": "sequence"},
        {"kv_split": "sequence", "exact": True},
    ],
    ids=["expert", "mixed", "uneven", "sequence", "exact sequence"],
)
def test_logits_match_transformers_for_every_split(folders, cut):
    """The bias of w2 and each sink count once, even if several ranks share an expert or a head."""
    name = "7/1"
    folder, tokens = folders[name], GPT_OSS[name].tokens
    expected = reference_logits(folder, tokens)
    for logits in run_on_threads(3, cut_logits, folder, tokens, cut, PART_KEYS):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def test_reshard_resumes_between_two_interleaved_weights(folders, tmp_path, monkeypatch):
    """The journal may record w1 of an expert; its bytes are written together with those of w3."""
    source, expected = folders["7/1"], moved(folders["7/1"], tmp_path / "expected", "hf")
    monkeypatch.setattr(tensor_writer, "FLUSH_BYTES", 0)  # each tensor is recorded at once
    real = DirectFile.write
    for n_written in range(16, 21):
        left, target = [n_written], tmp_path / str(n_written)

        def write(self, data, offset, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(self, data, offset)

        with monkeypatch.context() as patched, pytest.raises(WriteError, match="--resume"):
            patched.setattr(DirectFile, "write", write)
            moved(source, target, "hf")
        moved(source, target, "hf", resume=True)
        assert hashes_of(target) == hashes_of(expected)
        assert not verify(str(target)).problems


def test_verify_names_expert_of_flipped_bit_in_stacked_tensor(folders, tmp_path):
    folder = moved(folders["7/1"], tmp_path / "model", "hf")
    path = folder / "model.safetensors"
    header = read_safetensors_header(path)
    for name, weights in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
        tensor = header[f"model.layers.1.mlp.experts.{name}"]
        data = bytearray(path.read_bytes())
        data[tensor.offset + tensor.n_bytes * 5 // 10] ^= 1  # of expert 2 of 5
        path.write_bytes(data)
        problems = " ".join(verify(str(folder)).problems)
        named = [
            w for w in ("w1", "w2", "w3") if f"1.feed_forward.experts.2.{w}.weight" in problems
        ]
        assert len(named) == 1 and named[0] in weights and "experts.3" not in problems
        data[tensor.offset + tensor.n_bytes * 5 // 10] ^= 1
        path.write_bytes(data)
        assert not verify(str(folder)).problems


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"swiglu_limit": 0.0}, "swiglu_limit=0.0: use a finite number above 0"),
        ({"gated": False}, "activation='clamped_swiglu' needs gated"),
        ({"n_experts": 0, "n_active_experts": 0}, "expert_bias needs n_experts"),
        ({"sigmoid_router": True}, "expert_bias and sigmoid_router cannot be combined"),
        ({"attention_sinks": 3}, "attention_sinks and sink_logits cannot be combined"),
    ],
)
def test_invalid_model_args_are_refused(changed, expected):
    with pytest.raises(UsageError, match=expected):
        replace(OF_FAMILIES["gpt_oss"], **changed)


def test_attention_sinks_are_refused_if_model_has_sink_logits():
    args = replace(OF_FAMILIES["gpt_oss"], full_layers=())
    with pytest.raises(UsageError, match="attention_sinks=4: the model has sinks of its own"):
        with_sinks(args, 4, 64)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_local_experts": 0}, "num_local_experts=0: use 1 or more"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported in 'gpt_oss'"),
        ({"swiglu_limit": -1}, "swiglu_limit=-1"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 layers"),
        ({"num_experts_per_tok": 9}, "n_active_experts=9 and n_experts=5"),
    ],
)
def test_invalid_or_unsupported_config_is_refused(folders, tmp_path, values, expected):
    path = shutil.copytree(folders["7/1"], tmp_path / "copy") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    with pytest.raises(UsageError, match=expected):
        load_model_args(find_model(str(path.parent)))


def test_openai_config_is_read_as_transformers_reads_it(folders, tmp_path):
    """The config has no RoPE settings or layer_types, and has OpenAI's own key names too."""
    path = shutil.copytree(folders["7/1"], tmp_path / "copy") / "config.json"
    config = json.loads(path.read_text())
    left_out = "layer_types", "rope_parameters", "swiglu_alpha", "swiglu_limit", "head_dim"
    config = {key: value for key, value in config.items() if key not in left_out}
    config |= {"experts_per_token": 2, "initial_context_length": 4096}
    path.write_text(json.dumps(config))
    args, theirs = load_model_args(find_model(str(path.parent))), AutoConfig.from_pretrained(path)
    assert args.head_dim == theirs.head_dim and args.rope_theta == theirs.default_theta
    kinds = [("sliding", "full")[layer in args.full_layers] for layer in range(args.n_layers)]
    assert [f"{kind}_attention" for kind in kinds] == theirs.layer_types
    stated, scaling = theirs.rope_parameters, args.rope_scaling
    assert (scaling.kind, scaling.factor) == (stated["rope_type"], stated["factor"])
    assert scaling.original_max_seq_len == stated["original_max_position_embeddings"]
    assert scaling.truncate is stated["truncate"] is False
    assert (args.swiglu_alpha, args.swiglu_limit) == (theirs.swiglu_alpha, theirs.swiglu_limit)


# Ranks split these channels inside blocks of 32 inputs.
PACKED = TinyModel(
    7,
    1,
    8,
    64,
    ffn_dim=96,
    vocab_size=53,
    n_layers=2,
    family="gpt_oss",
    own=GPT_OSS_OWN,
    rope=GPT_OSS_YARN,
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_mxfp4(tmp_path_factory.mktemp("mxfp4"), PACKED)


def loaded(folder: Path, tp_size: int, **cut: Any) -> list[list[Tensor]]:
    """The weights of each rank, in float64."""
    files = find_model(str(folder))
    args = load_model_args(files)
    checkpoint, precision = open_checkpoint(files, args), Precision.plain("float64")
    shards = make_plan(args, tp_size, **cut).shards
    cpu = torch.device("cpu")
    ranks = [[*load(checkpoint, args, shard, precision, cpu)] for shard in shards]
    checkpoint.close()
    return [[value for _, value in rank if isinstance(value, Tensor)] for rank in ranks]


@pytest.mark.parametrize("exact", [False, True])
def test_mxfp4_weights_equal_transformers_dequantised_weights(packed, exact):
    """Ranks split channels inside blocks, and bfloat16 holds the decoded values."""
    for tp_size in (1, 2, 3, 5, 7):
        ours, theirs = (loaded(folder, tp_size, exact=exact) for folder in packed)
        for rank, expected in zip(ours, theirs, strict=True):
            assert len(rank) == len(expected) > 20
            assert all(map(torch.equal, rank, expected))


def test_mxfp4_logits_match_transformers_with_decoded_weights(packed):
    folder, tokens = packed[0], PACKED.tokens
    assert_parity(folder, tokens, reference_logits(packed[1], tokens), (1, 3))
    files = find_model(str(folder))
    args = load_model_args(files)
    assert "mxfp4 are decoded to bfloat16" in (why_decoded(files, args, "bfloat16") or "")


def test_reshard_writes_mxfp4_weights_as_plain_values(packed, tmp_path):
    """The values are written in the stored order, so transformers reads the folder."""
    tensors = load_file(through_every_layout(packed[1], tmp_path) / "model.safetensors")
    folder = moved(packed[0], tmp_path / "plain", "hf")
    written = load_file(folder / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name].double(), each) for name, each in tensors.items())


def test_mxfp4_config_without_dtype_defaults_to_bfloat16(packed, tmp_path):
    """OpenAI's config.json has no torch_dtype; float32 would take twice the memory."""
    path = shutil.copytree(packed[0], tmp_path / "copy") / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in config.items() if "dtype" not in k}))
    files = find_model(str(path.parent))
    assert default_dtype(files, load_model_args(files), "cpu") == "bfloat16"


def mutated(tensors: Mapping[str, Tensor], draw: random.Random) -> tuple[str, dict[str, Tensor]]:
    """A damaged copy, and the name of the damaged tensor."""
    name = draw.choice(sorted(n for n in tensors if n.endswith(("_blocks", "_scales"))))
    value, others = tensors[name].clone(), {n: each for n, each in tensors.items() if n != name}
    kinds = ["missing", "renamed", "dtype", "flat", "longer", "shorter", "swapped"]
    kind = draw.choice(kinds + ["NaN"] * name.endswith("_scales"))
    if kind in ("missing", "renamed"):
        return name, {**others, **({name + "2": value} if kind == "renamed" else {})}
    if kind == "dtype":
        dtypes = torch.int8, torch.float8_e4m3fn, torch.int16, torch.bfloat16, torch.float32
        value = value.to(draw.choice(dtypes))
    elif kind == "flat":
        value = value.flatten(0, draw.choice(range(1, value.dim())))
    elif kind in ("longer", "shorter"):
        dim = draw.randrange(value.dim())
        more = value.narrow(dim, 0, 1)
        shorter = value.narrow(dim, 1, value.shape[dim] - 1)
        value = torch.cat((value, more), dim) if kind == "longer" else shorter
    elif kind == "swapped":
        value = value.transpose(*((0, 1) if value.shape[0] != value.shape[1] else (1, 2)))
    else:
        value.view(-1)[draw.randrange(value.numel())] = 255
    return name, {**others, name: value.contiguous()}


def test_random_mxfp4_damage_is_refused_with_tensor_name(tmp_path):
    tiny = replace(PACKED, dim=32, ffn_dim=32, n_layers=1)
    folder, _ = write_mxfp4(tmp_path, tiny)
    tensors, draw = load_file(folder / "model.safetensors"), random.Random(1)
    for _ in range(200):
        name, damaged = mutated(tensors, draw)
        save_file(damaged, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises((CheckpointError, DamagedWeights)) as caught:
            loaded(folder, 1)
        assert name in str(caught.value) and len(str(caught.value)) < 2000


def test_mxfp4_experts_without_quantization_config_are_refused(packed, tmp_path):
    path = shutil.copytree(packed[0], tmp_path / "copy") / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in config.items() if k != "quantization_config"}))
    with pytest.raises(CheckpointError, match="_proj_blocks' is part of a quantised weight"):
        loaded(path.parent, 1)


def test_mxfp4_inputs_not_multiple_of_32_are_refused(packed, tmp_path):
    path = shutil.copytree(packed[0], tmp_path / "copy") / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "intermediate_size": 95}))
    with pytest.raises(CheckpointError, match=r"down_proj_blocks': .* 95 inputs .* multiple of 32"):
        loaded(path.parent, 1)


def test_mxfp4_gguf_logits_match_transformers_with_decoded_weights(tmp_path):
    """llama.cpp stores gate and up rows apart, and orders inputs in a block differently."""
    folder = rounded(write_hf(PACKED, tmp_path / "hf", seed=4))
    kind = gguf.GGMLQuantizationType.MXFP4
    file = convert(folder, tmp_path / "tiny.gguf", "_exps.weight", kind)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(MATRICES)]:
        rows = weights[name].transpose(1, 2).contiguous().float().numpy()
        decoded = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
        weights[name] = torch.from_numpy(decoded).double().transpose(1, 2).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    expected = reference_logits(folder, PACKED.tokens)
    for (logits,) in run_on_threads(3, logits_of_models, [(file, PACKED.tokens)]):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
