"""Written configurations, read back by the package, by transformers and by Meta's formula."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from parallel_llama.config.generation import GenerationDefaults
from parallel_llama.config.hf import args_from_hf, hf_config, llama3_from_factors
from parallel_llama.config.layouts import load_generation_defaults, load_model_args
from parallel_llama.config.meta import (
    args_from_meta_config,
    args_from_params,
    beyond_meta,
    meta_config,
    meta_ffn_dim,
    meta_params,
)
from parallel_llama.errors import UsageError
from parallel_llama.families.model_args import MAX_SIZES, ModelArgs, RopeScaling
from parallel_llama.files.model_files import find_model
from parallel_llama.model.rope import frequencies

LLAMA_3_1 = RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)
ARGS = ModelArgs(96, 2, 12, 4, 8, 250, 320, max_seq_len=512)
SHAPES = sorted((Path(__file__).parents[2] / "configs" / "models").glob("llama-[123]*.json"))

factor = st.floats(1.0, 64.0)
context = st.integers(8, 1 << 17)
optional = st.none() | st.floats(0.125, 4.0)
scaling = st.one_of(
    st.none(),
    st.builds(RopeScaling, st.just("linear"), factor),
    st.builds(RopeScaling, st.just("dynamic"), factor, st.just(512)),
    st.builds(
        RopeScaling,
        st.just("llama3"),
        factor,
        context,
        low_freq_factor=st.floats(0.5, 2.0),
        high_freq_factor=st.floats(3.0, 8.0),
    ),
    st.builds(
        RopeScaling,
        st.just("yarn"),
        factor,
        context,
        beta_fast=st.floats(1.5, 64.0),
        beta_slow=st.floats(0.125, 1.5),
        attention_factor=optional,
        mscale=optional,
        mscale_all_dim=optional,
        truncate=st.booleans(),
    ),
)
models = st.builds(
    replace,
    st.just(ARGS),
    head_dim=st.sampled_from([6, 8, 16]),
    n_kv_heads=st.sampled_from([1, 4, 12]),
    ffn_dim=st.integers(1, 4000),
    norm_eps=st.sampled_from([1e-5, 1e-6, 3e-6]),
    rope_theta=st.sampled_from([10000.0, 500000.0, 1e6]),
    rope_scaling=scaling,
    tied_embeddings=st.booleans(),
    attention_bias=st.booleans(),
    mlp_bias=st.booleans(),
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
)


def through_json(value: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(value))
    return result


@settings(max_examples=60, deadline=None, derandomize=True)
@given(models)
def test_written_configs_are_read_back_unchanged(args):
    assert args_from_hf(through_json(hf_config(args))) == args
    config, params = through_json(meta_config(args)), through_json(meta_params(args))
    assert args_from_meta_config(config, params) == args


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(models)
def test_config_survives_load_and_save_by_transformers(tmp_path, args):
    (tmp_path / "config.json").write_text(json.dumps(hf_config(args)))
    config = LlamaConfig.from_pretrained(tmp_path)
    assert config.hidden_size == args.dim and config.head_dim == args.head_dim
    config.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert args_from_hf(saved) == args


def test_special_ids_are_written_to_config_json():
    config = hf_config(ARGS, GenerationDefaults(eos_ids=(5, 7), bos_id=1))
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, [5, 7])
    config = hf_config(ARGS, GenerationDefaults(eos_ids=(5,)))
    assert (config["bos_token_id"], config["eos_token_id"]) == (None, 5)


def float32_factors(args: ModelArgs, scaling: RopeScaling) -> tuple[float, ...]:
    """The values of rope_freqs.weight: transformers' unscaled over its scaled frequencies."""
    config = LlamaConfig(**_rotary(args), rope_parameters=_rope(args, scaling))
    plain = LlamaConfig(**_rotary(args), rope_parameters=_rope(args, None))
    factors = LlamaRotaryEmbedding(plain).inv_freq / LlamaRotaryEmbedding(config).inv_freq
    return struct.unpack(f"<{len(factors)}f", struct.pack(f"<{len(factors)}f", *factors.tolist()))


def _rotary(args: ModelArgs) -> dict[str, Any]:
    return {
        "hidden_size": args.dim,
        "num_attention_heads": args.n_heads,
        "head_dim": args.head_dim,
        "max_position_embeddings": args.max_seq_len,
    }


def _rope(args: ModelArgs, scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default", "rope_theta": args.rope_theta}
    return {
        "rope_type": "llama3",
        "rope_theta": args.rope_theta,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama_3_scaling_is_recovered_from_gguf_factors(factor, head_dim):
    args = replace(ARGS, head_dim=head_dim, rope_theta=500000.0, max_seq_len=131072)
    expected = replace(LLAMA_3_1, factor=factor)
    factors = float32_factors(args, expected)
    assert llama3_from_factors(args, factors) == expected
    own = replace(args, rope_scaling=RopeScaling("factors", factors=factors))
    found = args_from_hf(through_json(hf_config(own)))
    assert found == replace(args, rope_scaling=expected)
    torch.testing.assert_close(frequencies(found, 0)[0], frequencies(own, 0)[0], rtol=1e-5, atol=0)


def test_factors_that_are_not_llama_3_scaling_are_refused():
    args = replace(ARGS, head_dim=128, rope_theta=500000.0)
    factors = list(float32_factors(args, LLAMA_3_1))
    middle = next(at for at, value in enumerate(factors) if 1.5 < value < 7)
    factors[middle] *= 1.001
    own = replace(args, rope_scaling=RopeScaling("factors", factors=tuple(factors)))
    for write in (hf_config, meta_config, meta_params):
        with pytest.raises(UsageError, match=r"not those of llama3 scaling.*--format native"):
            write(own)


@given(dim=st.integers(1, 20000), ratio=st.floats(0.0001, 900.0))
@example(dim=4096, ratio=14336 / 4096)
@example(dim=1, ratio=1.0)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_meta_formula_gives_exact_ffn_dim(dim, ratio):
    ffn_dim = min(max(1, int(dim * ratio)), MAX_SIZES["ffn_dim"])
    params = through_json(meta_params(replace(ARGS, dim=dim, ffn_dim=ffn_dim)))
    assert params["multiple_of"] == 1
    assert meta_ffn_dim(dim, 1, params["ffn_dim_multiplier"]) == ffn_dim


def test_ffn_dim_beyond_meta_formula_is_refused():
    with pytest.raises(
        UsageError, match=r"ffn_dim=300000 and dim=96: .* at most 1000 times 256; use"
    ):
        meta_params(replace(ARGS, ffn_dim=300000))


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
def test_meta_models_roundtrip_through_params_json(path):
    """Except the context length, which is an argument of Meta's program."""
    args = args_from_params(json.loads(path.read_text()))
    params = through_json(meta_params(args))
    again = args_from_params(params)
    assert replace(again, max_seq_len=args.max_seq_len) == args
    assert params.keys().isdisjoint({"max_seq_len", "rope_scaling_factor", "head_dim"})
    assert beyond_meta(args) == []


def test_use_scaled_rope_is_true_only_for_meta_scaling():
    for scaling, is_metas in (
        (None, True),
        (LLAMA_3_1, True),
        (replace(LLAMA_3_1, factor=32.0), False),
        (replace(LLAMA_3_1, original_max_seq_len=4096), False),
        (RopeScaling("linear", 8.0), False),
    ):
        args = replace(ARGS, rope_scaling=scaling)
        assert meta_params(args)["use_scaled_rope"] is (scaling is not None and is_metas)
        assert (beyond_meta(args) == []) is is_metas


def test_settings_params_json_cannot_express_are_listed():
    args = replace(ARGS, head_dim=16, attention_bias=True, rope_scaling=RopeScaling("linear", 2.0))
    assert beyond_meta(args) == [
        "head_dim=16 where dim / n_heads is 8",
        "biases of the attention",
        "linear rope scaling",
    ]


def meta_folder(folder: Path, params: dict[str, Any], config: dict[str, Any]) -> Path:
    (folder / "consolidated.00.pth").write_text("")
    (folder / "params.json").write_text(json.dumps(params))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_own_config_json_beside_params_json_is_used(tmp_path):
    args = replace(ARGS, tied_embeddings=True, mlp_bias=True, head_dim=10, max_seq_len=77)
    folder = meta_folder(tmp_path, meta_params(args), meta_config(args))
    files = find_model(str(folder))
    assert files.kind == "meta"
    assert load_model_args(files) == args


def test_foreign_config_json_beside_params_json_is_ignored(tmp_path):
    """Such a config.json may belong to other weights or to another architecture."""
    folder = meta_folder(tmp_path, meta_params(ARGS), {"model_type": "mistral"})
    expected = replace(ARGS, max_seq_len=4096)
    assert load_model_args(find_model(str(folder))) == expected


@pytest.mark.parametrize("key", ["dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size"])
def test_a_config_that_contradicts_params_json_is_refused(tmp_path, key):
    params = meta_params(ARGS)
    params[key] += 1
    folder = meta_folder(tmp_path, params, meta_config(ARGS))
    with pytest.raises(UsageError, match=rf"config\.json: has {key}=.*written together"):
        load_model_args(find_model(str(folder)))


def test_a_config_of_another_format_is_refused(tmp_path):
    config = meta_config(ARGS)
    config["parallel_llama"]["format"] = "parallel_llama meta 2"
    folder = meta_folder(tmp_path, meta_params(ARGS), config)
    with pytest.raises(UsageError, match=r"'parallel_llama meta 1' is$"):
        load_model_args(find_model(str(folder)))


def test_generation_config_beside_params_json_is_used(tmp_path):
    folder = meta_folder(tmp_path, meta_params(ARGS), meta_config(ARGS))
    assert load_generation_defaults(find_model(str(folder))) == GenerationDefaults()
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4], "do_sample": false}')
    defaults = load_generation_defaults(find_model(str(folder)))
    assert (defaults.eos_ids, defaults.temperature) == ((3, 4), 0.0)
