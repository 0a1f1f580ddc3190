"""Arguments from params.json, config.json and GGUF, compared with those of other programs."""

import contextlib
import json
import logging
import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_builder import BF16, F16, F32, GGUF, Q8_0, TINY_FIELDS, Tensor, mutations
from transformers import AutoConfig, GenerationConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from parallel_llama.config.generation import GenerationDefaults
from parallel_llama.config.layouts import load_generation_defaults, load_model_args
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs, RopeScaling, context_length
from parallel_llama.files.model_files import ModelFiles, find_model
from parallel_llama.model.rope import frequencies

ARGS = ModelArgs(64, 2, 8, 2, 8, 160, 320)

PARAMS: dict[str, Any] = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 2,
    "vocab_size": 320,
    "multiple_of": 32,
    "norm_eps": 1e-5,
}
_GEMMA2 = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}


def from_params(values: Mapping[str, Any], vocab_size: int | None = None) -> ModelArgs:
    return _loaded(values, "params.json", "consolidated.00.pth", vocab_size)


def from_hf(values: Mapping[str, Any]) -> ModelArgs:
    return _loaded(values, "config.json", "model.safetensors")


def _loaded(
    values: Mapping[str, Any], config: str, weights: str, vocab_size: int | None = None
) -> ModelArgs:
    count = None if vocab_size is None else lambda _: vocab_size
    return load_model_args(_folder(values, config, weights), count)


def _folder(values: Mapping[str, Any], config: str, weights: str) -> ModelFiles:
    path = TEMPORARY[0]
    for old in path.iterdir():
        old.unlink()
    (path / weights).write_text("")
    (path / config).write_text(json.dumps(values))
    return find_model(str(path))


def from_gguf(content: GGUF) -> ModelArgs:
    path = TEMPORARY[0] / "m.gguf"
    path.write_bytes(content.to_bytes())
    return load_model_args(find_model(str(path)))


def gguf(tensors: list[Tensor] | None = None, **fields: Any) -> GGUF:
    """The tiny file with changed fields: `__` stands for a dot, and None removes a field."""
    merged = {**TINY_FIELDS, **{key.replace("__", "."): item for key, item in fields.items()}}
    kept = {key: item for key, item in merged.items() if item is not None}
    return GGUF(fields=kept) if tensors is None else GGUF(fields=kept, tensors=tensors)


TEMPORARY: list[Path] = []


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    TEMPORARY[:] = [folder]


# name: (ffn_dim, parameters, context)
PUBLISHED = {
    "gpt-oss-20b": (2880, 20_914_757_184, 131072),
    "llama-1-7b": (11008, 6_738_415_616, 2048),
    "llama-1-13b": (13824, 13_015_864_320, 2048),
    "llama-1-30b": (17920, 32_528_943_616, 2048),
    "llama-1-65b": (22016, 65_285_660_672, 2048),
    "llama-2-7b": (11008, 6_738_415_616, 4096),
    "llama-2-13b": (13824, 13_015_864_320, 4096),
    "llama-2-70b": (28672, 68_976_648_192, 4096),
    "llama-3-8b": (14336, 8_030_261_248, 8192),
    "llama-3-70b": (28672, 70_553_706_496, 8192),
    "llama-3.1-8b": (14336, 8_030_261_248, 131072),
    "llama-3.1-70b": (28672, 70_553_706_496, 131072),
    "llama-3.1-405b": (53248, 405_853_388_800, 131072),
    # Meta stores the output weight although it equals the embeddings; tied, the models have
    # 1.236e9 and 3.213e9 parameters.
    "llama-3.2-1b": (8192, 1_498_482_688, 131072),
    "llama-3.2-3b": (8192, 3_606_752_256, 131072),
    "mistral-7b-v0.1": (14336, 7_241_732_096, 32768),
    "mistral-7b-v0.3": (14336, 7_248_023_552, 32768),
    "mixtral-8x7b": (14336, 46_702_792_704, 32768),
    "mixtral-8x22b": (16384, 140_630_071_296, 65536),
    "qwen2.5-7b": (18944, 7_615_616_512, 131072),
    "qwen1.5-moe-a2.7b": (1408, 14_315_784_192, 8192),
    "qwen3-8b": (12288, 8_190_735_360, 40960),
    "qwen3-30b-a3b": (768, 30_532_122_624, 40960),
    "gemma-7b": (24576, 8_537_680_896, 8192),
    "gemma-2-9b": (14336, 9_241_705_984, 8192),
    "gemma-3-1b": (6912, 999_885_952, 32768),
    # As transformers counts its models of these shapes.
    "falcon-7b": (18176, 6_921_720_704, 2048),
    "falcon-40b": (32768, 41_303_293_952, 2048),
    "command-r7b": (14336, 8_028_033_024, 8192),
    "llama-4-scout": (8192, 107_769_861_120, 10_485_760),  # 109e9 with the vision part
    "falcon-180b": (59392, 178_557_088_768, 2048),
    "palm-8b": (16384, 8_632_012_800, 2048),  # in the paper 8.63, 62.50 and 540.35 billion
    "palm-62b": (32768, 62_495_662_080, 2048),
    "palm-540b": (73728, 540_356_474_880, 2048),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_the_published_sizes(name):
    args = load_model_args(find_model(name))
    n_parameters = sum(math.prod(param.shape) for param in parameters(args))
    assert (args.ffn_dim, n_parameters, args.max_seq_len) == PUBLISHED[name]


def test_every_shape_is_checked():
    folder = Path(__file__).parents[2] / "configs" / "models"
    assert {path.stem for path in folder.glob("*.json")} == set(PUBLISHED)


# ModelArgs


@pytest.mark.parametrize(
    "name", ["dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size"]
)
@pytest.mark.parametrize("value", [0, -1, 2**31])
def test_a_size_out_of_range_is_refused(name, value):
    with pytest.raises(UsageError, match=rf"{name}={value}: use a whole number from 1 to"):
        replace(ARGS, **{name: value})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_kv_heads": 3}, "n_heads=8 and n_kv_heads=3"),
        ({"n_kv_heads": 16}, "use a divisor of n_heads"),
        ({"head_dim": 7}, "head_dim=7: rotary pairs need an even number"),
        ({"norm_eps": -1e-5}, "norm_eps=-1e-05"),
        ({"norm_eps": math.inf}, "norm_eps=inf"),
        ({"norm_eps": math.nan}, "norm_eps=nan"),
        ({"rope_theta": 1.0}, "rope_theta=1"),
        ({"rope_theta": math.inf}, "rope_theta=inf"),
        (
            {"n_layers": 4096, "n_experts": 17, "n_active_experts": 2},
            "n_experts=17 in each of 4096 layers: use at most 65536 in all",
        ),
        ({"attention_scale": 0.0}, "attention_scale=0.0"),
        ({"attention_soft_cap": math.inf}, "attention_soft_cap=inf"),
        ({"max_seq_len": 0}, "max_seq_len=0"),
        ({"dtype": "int8"}, "dtype='int8'.*bfloat16"),
        ({"rope_scaling": RopeScaling("factors", factors=(1.0,))}, "1 factors and head_dim=8"),
        ({"head_dim": 2, "rope_scaling": RopeScaling("dynamic", 2.0)}, "head_dim=2"),
        ({"rotary_dim": 2, "rope_scaling": RopeScaling("dynamic", 2.0)}, "rotary_dim=2 has one"),
        (
            {"rotary_dim": 4, "rope_scaling": RopeScaling("factors", factors=(1.0, 2.0))},
            "rotary_dim=4 and a factor for each frequency",
        ),
    ],
)
def test_invalid_model_args_are_refused(changed, message):
    with pytest.raises(UsageError, match=message):
        replace(ARGS, **changed)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "linear", "factor": 0.0}, "factor=0"),
        ({"kind": "linear", "factor": math.nan}, "factor=nan"),
        ({"kind": "llama3", "factor": 8.0}, "needs the length of the trained context"),
        ({"kind": "yarn", "factor": 8.0, "original_max_seq_len": 0}, "0 tokens"),
        ({"kind": "yarn", "original_max_seq_len": 8, "beta_slow": -1.0}, "beta_slow=-1"),
        ({"kind": "yarn", "original_max_seq_len": 8, "attention_factor": 0.0}, "attention_factor"),
        (
            {"kind": "llama3", "original_max_seq_len": 8, "low_freq_factor": 4.5},
            "must not be smaller",
        ),
        ({"kind": "factors", "factors": (1.0, math.inf)}, r"factors\[1\]=inf"),
    ],
)
def test_invalid_rope_scaling_is_refused(values, message):
    with pytest.raises(UsageError, match=message):
        RopeScaling(**values)


# params.json


def test_params_json_is_read():
    args = from_params({**PARAMS, "ffn_dim_multiplier": 1.3, "rope_theta": 500000})
    assert args == ModelArgs(
        dim=64, n_layers=2, n_heads=8, n_kv_heads=2, head_dim=8, ffn_dim=224, vocab_size=320,
        norm_eps=1e-5, rope_theta=500000.0, max_seq_len=8192,
    )  # fmt: skip


def test_missing_keys_of_llama_1_params_json_have_defaults():
    args = from_params({"dim": 64, "n_layers": 2, "n_heads": 8, "vocab_size": 5, "norm_eps": 1e-6})
    assert (args.n_kv_heads, args.rope_theta, args.ffn_dim) == (8, 10000.0, 256)


@pytest.mark.parametrize("stated", [-1, None])
def test_placeholder_vocab_size_is_replaced_or_refused(stated):
    """Llama 1 and 2 ship vocab_size=-1, and Meta's program asks the tokenizer."""
    values = {**PARAMS, "vocab_size": stated}
    assert from_params(values, vocab_size=32000).vocab_size == 32000
    with pytest.raises(UsageError, match=r"params\.json: vocab_size=-1 is a placeholder"):
        from_params(values)
    assert from_params(PARAMS, vocab_size=7).vocab_size == 320


@pytest.mark.parametrize(
    ("changed", "context"),
    [
        ({}, 4096),
        ({"norm_eps": 1e-6}, 2048),
        ({"rope_theta": 1e6}, 16384),
        ({"rope_theta": 5e5}, 8192),
        ({"rope_theta": 5e5, "use_scaled_rope": True}, 131072),
        ({"rope_theta": 5e5, "use_scaled_rope": True, "max_seq_len": 77}, 77),
    ],
)
def test_context_of_meta_folder_is_stated_or_inferred(changed, context):
    assert from_params({**PARAMS, **changed}).max_seq_len == context


def test_use_scaled_rope_gives_llama_3_1_or_3_2_scaling():
    """Both state only use_scaled_rope, but 3.2 1B and 3B were trained with 32 instead of 8."""
    scaled = {**PARAMS, "use_scaled_rope": True}
    assert from_params(scaled).rope_scaling == RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)
    assert from_params({**PARAMS, "use_scaled_rope": False}).rope_scaling is None
    shape_1b = {**scaled, "dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8}
    assert from_params(shape_1b).rope_scaling == RopeScaling("llama3", 32.0, 8192, 1.0, 4.0)
    stated = from_params({**shape_1b, "rope_scaling_factor": 16, "rope_high_freq_factor": 2})
    assert stated.rope_scaling == RopeScaling("llama3", 16.0, 8192, 1.0, 2.0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_kv_head": 2}, "unknown key 'n_kv_head'; did you mean 'n_kv_heads'"),
        ({"zzz": 1}, "unknown key 'zzz'$"),
        ({"dim": None}, "lacks the key 'dim'"),
        ({"dim": "64"}, "dim='64' is not a whole number"),
        ({"dim": 64.0}, "dim=64.0 is not a whole number"),
        ({"dim": True}, "dim=True is not a whole number"),
        ({"dim": 65}, "dim=65 and n_heads=8"),
        ({"n_heads": 0}, "n_heads=0"),
        ({"n_layers": 10**30}, "n_layers=1000000000000000000000000000000 is too large"),
        ({"multiple_of": 0}, "multiple_of=0"),
        ({"ffn_dim_multiplier": "1"}, "ffn_dim_multiplier='1' is not a number"),
        ({"ffn_dim_multiplier": math.inf}, "not a finite number"),
        ({"ffn_dim_multiplier": -1}, "ffn_dim_multiplier=-1.0: use"),
        ({"ffn_dim_multiplier": 1e308}, "ffn_dim_multiplier=1e.308: use"),
        ({"norm_eps": [1] * 1000}, "norm_eps=<list of 1000>"),
        ({"use_scaled_rope": 1}, "neither true nor false"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"quantization_args": {"scheme": "x"}}, "a quantised checkpoint"),
        ({"lora_args": {"rank": 1}}, "LoRA"),
        ({"moe_args": {}}, "experts"),
        ({"vision_chunk_size": 448}, "image model"),
    ],
)
def test_invalid_or_unsupported_params_json_is_refused(changed, message):
    with pytest.raises(UsageError, match=f"params.json: .*{message}"):
        from_params({**PARAMS, **changed})


@pytest.mark.parametrize("text", ["", "[]", "{", '{"dim": 1, "dim": 2}', '{"dim": ' + "9" * 5000])
def test_malformed_params_json_raises_checkpoint_error(text):
    files = _folder(PARAMS, "params.json", "consolidated.00.pth")
    files.config.write_text(text)
    with pytest.raises(CheckpointError, match=r"params\.json"):
        load_model_args(files)


# config.json

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
_YARN_OF_64 = {**_YARN, "original_max_position_embeddings": 64}
_MSCALES = {"beta_fast": 2.0, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {**_LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 64},
    "llama3 without its trained context": {**_LLAMA3, "rope_theta": 500.0},
    "yarn": _YARN_OF_64,
    "yarn with a factor of null": {**_YARN, "factor": None, "original_max_position_embeddings": 32},
    "yarn with mscales": {**_YARN_OF_64, **_MSCALES, "truncate": False},
    "yarn with one mscale": {**_YARN_OF_64, "mscale": 3.0},
    "yarn with an attention factor": {**_YARN_OF_64, "attention_factor": 1.7},
    "yarn with a truncate of null": {**_YARN_OF_64, "truncate": None},
}


def agrees_with_transformers(files: ModelFiles) -> None:
    """Asserts that our arguments and RoPE frequencies equal those of transformers' model."""
    args = load_model_args(files)
    config = LlamaConfig.from_pretrained(files.path)
    assert isinstance(config.rope_parameters, dict)
    theirs = LlamaRotaryEmbedding(config)
    ours, scale = frequencies(args, args.max_seq_len)
    torch.testing.assert_close(ours.float(), theirs.inv_freq, rtol=2e-6, atol=0)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-12)
    expected = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "ffn_dim": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "max_seq_len": config.max_position_embeddings,
        "tied_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("whole", [False, True], ids=["saved", "every key"])
def test_config_saved_by_transformers_is_read_like_transformers(rope, whole):
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=100,
        vocab_size=77,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=dict(ROPES[rope]),
        dtype="float16",
    )
    files = _folder({}, "config.json", "model.safetensors")
    config.to_json_file(files.config, use_diff=not whole)
    agrees_with_transformers(files)
    assert load_model_args(files).dtype == "float16"


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_keys_before_transformers_5_are_read_like_transformers(rope, key):
    scaling = dict(ROPES[rope])
    theta = scaling.pop("rope_theta")
    scaling[key] = scaling.pop("rope_type")
    values = {**HF, "rope_theta": theta, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
    agrees_with_transformers(_folder(values, "config.json", "model.safetensors"))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"rope_scaling": None, "rope_parameters": None, "rope_theta": 7.0},
        {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}},
        {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 9.0}},
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 9.0},
        },
        {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}},
        {"original_max_position_embeddings": 32, "rope_parameters": ROPES["llama3"]},
        {"original_max_position_embeddings": 32, "rope_parameters": ROPES["yarn"]},
        {"original_max_position_embeddings": 32, "rope_parameters": ROPES["dynamic"]},
        {"rope_parameters": {**ROPES["dynamic"], "original_max_position_embeddings": 32}},
        {"rope_parameters": {**ROPES["default"], "factor": 4.0}},
        {"num_key_value_heads": None, "head_dim": None},
    ],
    ids=str,
)
def test_values_stated_twice_have_precedence_of_transformers(changed):
    agrees_with_transformers(_folder({**HF, **changed}, "config.json", "model.safetensors"))


def test_missing_keys_of_config_json_have_transformers_defaults():
    args = from_hf({k: v for k, v in HF.items() if k != "max_position_embeddings"})
    assert (args.norm_eps, args.max_seq_len, args.dtype) == (1e-6, 2048, "float32")
    assert not (args.tied_embeddings or args.attention_bias or args.mlp_bias)


@pytest.mark.parametrize(
    ("model_type", "n_heads", "n_kv_heads"),
    [
        ("mistral", 32, 8),
        ("qwen2", 64, 32),
        ("qwen3", 64, 32),
        ("gemma", 32, 16),
        ("gemma2", 8, 4),
        ("gemma3_text", 8, 4),
    ],
)
def test_missing_kv_heads_have_the_default_of_the_family(model_type, n_heads, n_kv_heads):
    """Regression: these families had as many KV heads as query heads."""
    kept = {k: v for k, v in HF.items() if k not in ("architectures", "num_key_value_heads")}
    values = {**kept, "model_type": model_type, "hidden_size": 256, "num_attention_heads": n_heads}
    config = AutoConfig.for_model(**values)
    assert from_hf(values).n_kv_heads == config.num_key_value_heads == n_kv_heads


@pytest.mark.parametrize(
    ("model_type", "stated", "expected"),
    [
        ("gemma", {"hidden_act": "gelu"}, "gelu_tanh"),  # as in the first files
        ("gemma", {"hidden_act": "silu", "hidden_activation": "gelu"}, "silu"),
        ("gemma", {"hidden_act": None}, "gelu_tanh"),
        ("gemma2", {"hidden_activation": "gelu"}, "gelu"),
        ("gemma2", {"hidden_act": "silu"}, "gelu_tanh"),
        ("gemma3_text", {"hidden_activation": "silu"}, "silu"),
        ("gemma3_text", {"hidden_activation": "gelu_pytorch_tanh"}, "gelu_tanh"),
    ],
)
def test_activation_of_gemma_is_read_like_transformers(model_type, stated, expected):
    """Regression: every name was read as gelu_pytorch_tanh."""
    values = {**HF, "model_type": model_type, "architectures": None, **stated}
    assert from_hf(values).activation == expected


@pytest.mark.parametrize(
    ("model_type", "key"), [("gemma", "hidden_act"), ("gemma2", "hidden_activation")]
)
def test_unknown_activation_of_gemma_is_refused(model_type, key):
    values = {**HF, "model_type": model_type, "architectures": None, key: "geglu"}
    with pytest.raises(UsageError, match=f"{key}='geglu' is not supported; supported: silu"):
        from_hf(values)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "'MistralForCausalLM' and model_type='llama'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "supported: LlamaForCausalLM"),
        (
            {"model_type": "gpt_neox", "architectures": None},
            "model_type='gpt_neox' is not supported; supported: 'llama', 'llama4_text', 'mistral'",
        ),
        ({"model_type": "mpt"}, "model_type='mpt' is not supported: .*ALiBi"),
        ({"model_type": "deepseek_v3"}, "'deepseek_v3' is not supported: its latent attention"),
        ({"model_type": None, "architectures": None}, "neither model_type nor"),
        ({"model_type": "ernie4_5_moe"}, "mixture of experts"),
        ({"num_kv_heads": 3}, "unknown key 'num_kv_heads'; did you mean 'num"),
        ({"rope_teta": 1.0}, "unknown key 'rope_teta'; did you mean 'rope_theta'"),
        ({"hidden_size": None}, "lacks the key 'hidden_size'"),
        ({"intermediate_size": None}, "lacks the key 'intermediate_size'"),
        ({"vocab_size": None}, "lacks the key 'vocab_size'"),
        ({"hidden_size": 63}, "hidden_size=63 and num_attention_heads=8"),
        ({"hidden_size": 0}, "dim=0: use a whole number from 1"),
        *(
            (
                {**_GEMMA2, "query_pre_attn_scalar": scalar},
                f"query_pre_attn_scalar={scalar}: use a number above 0",
            )
            for scalar in (0, -4)
        ),
        ({"model_type": "palm", "architectures": None, "hidden_size": 0}, "dim=0: use"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported; supported: silu"),
        ({"attention_bias": "no"}, "neither true nor false"),
        ({"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'"),
        ({"torch_dtype": 16}, "torch_dtype=16 is not a string"),
        *(
            (
                {"quantization_config": {"quant_method": method, "bits": 4}},
                f"quant_method='{method}', which is not supported.*use the unquantised model, or",
            )
            for method in ("hqq", "fp_quant")
        ),
        ({"quantization_config": {"load_in_4bit": True}}, "quant_method='unknown'"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": "yes"}},
            "of 'bitsandbytes': load_in_8bit='yes' is neither true nor false; use the unquantised",
        ),
        # Regression: the error advised to remove the key, but the weights stay quantised.
        *(
            (
                {key: {"bits": 4}},
                f"has {key}, where {program} .*only quantization_config.*use the unquantised",
            )
            for key, program in (
                ("compression_config", "compressed-tensors"),
                ("quantization", "MLX"),
            )
        ),
        *(
            (
                {"quantization_config": {"quant_method": method, "bits": 4, **stated}},
                f"of '{method}': {expected}.*; use the unquantised model, or a GGUF file of it",
            )
            for method, stated, expected in (
                ("gptq", {"bits": 3}, "bits=3 is not supported; 2, 4, 8 are"),
                ("awq", {"bits": 8}, "bits=8 is not supported; 4 is"),
                ("gptq", {"bits": None, "w_bit": 4}, "lacks the key 'bits'"),
                ("gptq", {"group_size": 0}, "group_size=0: use at least 1, or -1"),
                ("awq", {"group_size": 256}, "group_size=256 .*32, 64, 128 are"),
                ("awq", {"desc_act": True}, "desc_act=true"),
                ("awq", {"zero_point": False}, "zero_point=false"),
                ("gptq", {"checkpoint_format": "marlin"}, ".*'marlin'.*; supported: gptq, gptq_v2"),
                ("gptq", {"is_marlin_format": True}, "the format 'marlin'"),
                ("awq", {"version": "gemv"}, "the format 'gemv' .*; supported: gemm"),
                ("awq", {"version": "GEMM", "format": "marlin"}, ".*formats 'gemm', 'marlin'"),
                ("awq", {"version": None, "backend": "llm-awq"}, "the format 'llm-awq'"),
                ("gptq", {"format": "gptq", "checkpoint_format": "gptq_v2"}, ".*'gptq', 'gptq_v2'"),
                ("awq", {"bits": "4"}, "bits='4' is not a whole number"),
            )
        ),
        ({"sliding_window": 128}, "sliding_window=128: 'llama' .*=256; .*remove the key"),
        ({"sliding_window": 128, "use_sliding_window": False}, "sliding_window=128"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types has 'sliding_attention'"),
        ({"layer_types": ["full_attention"] * 3}, "3 layers and num_hidden_layers=2"),
        ({"architectures": ["LlamaModel"]}, "a base model without a head"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' is not an object"),
        ({"rope_scaling": {"type": "ntk"}}, "'ntk'.*default, linear, dynamic, llama3"),
        ({"rope_scaling": {"type": "longrope"}}, "has 0 factors .* each of the"),
        ({"rope_scaling": {"type": "linaer", "factor": 2}}, "did you mean 'linear'"),
        ({"rope_scaling": {"type": "linear", "facto": 2}}, "'facto'; did you mean 'factor'"),
        ({"rope_scaling": {"type": "linear"}}, "lacks the key 'factor'"),
        ({"rope_scaling": {"type": "dynamic", "factor": None}}, "lacks the key 'factor'"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "lacks the key 'low_freq_factor'"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2' is not a number"),
        ({"rope_scaling": {"full_attention": {}}}, "unknown key 'full_attention'"),
        (
            {"rope_parameters": {**ROPES["yarn"], "original_max_position_embeddings": -1}},
            "original_max_position_embeddings=-1",
        ),
    ],
)
def test_invalid_or_unsupported_config_json_is_refused(changed, message):
    with pytest.raises(UsageError, match=f"config.json: .*{message}"):
        from_hf({**HF, **changed})


ELSEWHERE: dict[str, Any] = {
    "alibi": True,
    "attention_chunk_size": 8192,
    "attention_multiplier": 0.0078125,
    "attn_logit_softcapping": 50.0,
    "clip_qkv": 8.0,
    "embedding_multiplier": 12.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "is_causal": False,
    "logit_scale": 0.0625,
    "logits_scaling": 8.0,
    "no_rope_layers": [1, 0],
    "num_experts": 8,
    "num_local_experts": 8,
    "parallel_residual": True,
    "qk_norm": True,
    "query_pre_attn_scalar": 256,
    "residual_multiplier": 0.22,
    "rope_interleaved": True,
    "sliding_window_pattern": 4,
    "use_parallel_residual": True,
    "use_qk_norm": True,
    "use_sliding_window": True,
}


@pytest.mark.parametrize("key", ELSEWHERE)
def test_keys_of_other_architectures_are_refused_unless_disabled(key):
    """transformers' Llama ignores nearly all of these keys, which the weights were trained with."""
    with pytest.raises(UsageError, match=rf"config\.json: {key}=.* not supported.* remove it"):
        from_hf({**HF, key: ELSEWHERE[key]})
    off = {"hidden_activation": "silu", "is_causal": True}
    one = ("embedding_multiplier", "logit_scale", "logits_scaling", "residual_multiplier")
    for value in (None, off.get(key, 1.0 if key in one else False)):
        assert from_hf({**HF, key: value}) == from_hf(HF)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("num_key_value_head", "num_key_value_heads"),
        ("num_kv_heads", "num_key_value_heads"),
        ("rope_thetha", "rope_theta"),
        ("rope_scalings", "rope_scaling"),
        ("tie_embeddings", "tie_word_embeddings"),
        ("rms_norm_epsilon", "rms_norm_eps"),
        ("max_position_embedding", "max_position_embeddings"),
        ("sliding_windows", "sliding_window"),
        ("attn_logit_softcap", "attn_logit_softcapping"),
        ("residual_multipliers", "residual_multiplier"),
    ],
)
def test_misspelled_known_key_is_refused_with_suggestion(key, meant):
    with pytest.raises(UsageError, match=f"unknown key '{key}'; did you mean '{meant}'"):
        from_hf({**HF, key: 3})
    assert from_hf({**HF, key: None}) == from_hf(HF)


def test_unknown_keys_are_ignored_with_one_warning(caplog):
    """Regression: any unknown key was refused, but training programs add keys of their own."""
    unknown = {
        "mm_vision_tower": "x",
        "max_window_layers": 28,
        "eos_tokens_id": 3,
        "lora": {"r": 8},
    }
    with caplog.at_level(logging.WARNING, logger="parallel_llama"):
        assert from_hf({**HF, **unknown, "_anything": 1, "use_cache": True}) == from_hf(HF)
    (record,) = caplog.records
    assert record.getMessage() == (
        "config.json has unknown keys, which are ignored: 'mm_vision_tower', 'max_window_layers', "
        "'eos_tokens_id' (near 'eos_token_id'), 'lora'"
    )


@pytest.mark.parametrize(
    "values",
    [
        {**_GEMMA2, "sliding_window": 64, "sliding_window_size": 64},
        {
            "model_type": "starcoder2", "architectures": None, "norm_epsilon": 1e-5,
            "norm_type": "layer_norm", "mlp_type": "default", "use_bias": True,
        },
        {
            "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
            "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
            "norm_topk_prob": True, "qkv_bias": False, "shared_expert_intermediate_size": 0,
            "use_qk_norm": True,
        },
    ],
    ids=["Gemma 2", "StarCoder2", "Qwen3-Coder"],
)  # fmt: skip
def test_keys_of_published_models_are_accepted(values):
    from_hf({**HF, **values})


def test_qwen3_without_the_norm_of_q_and_k_is_refused():
    with pytest.raises(UsageError, match="use_qk_norm=False is not supported"):
        from_hf({**HF, "model_type": "qwen3", "architectures": None, "use_qk_norm": False})


def test_yarn_extends_the_context_that_the_file_states():
    """Qwen's model cards add YaRN to config.json, and leave max_position_embeddings as it is."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    args = from_hf({**HF, "max_position_embeddings": 320, "rope_scaling": scaling})
    assert context_length(args) == context_length(args, 1024) == 1024
    with pytest.raises(UsageError, match="context is 1024 tokens"):
        context_length(args, 1025)


def test_config_with_too_many_keys_is_refused():
    with pytest.raises(UsageError, match="has 100009 keys; at most 1000"):
        from_hf({**HF, **{f"num_heads_{number}": 1 for number in range(100_000)}})


def test_auto_map_code_is_ignored_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="parallel_llama"):
        from_hf({**HF, "auto_map": {"AutoModel": "m.M"}})
    assert "auto_map" in caplog.text


def test_keys_of_another_rope_type_are_ignored_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="parallel_llama"):
        args = from_hf({**HF, "rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 3}})
    assert args.rope_scaling == RopeScaling("linear", 2.0)
    assert "ignores beta_fast" in caplog.text


def test_yarn_keys_of_vllm_are_ignored_with_a_warning(caplog):
    """Regression: DeepSeek-R1-0528-Qwen3-8B was refused with a wrong remedy."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    with caplog.at_level(logging.WARNING, logger="parallel_llama"):
        args = from_hf({**HF, "rope_scaling": {**yarn, "attn_factor": 0.878}})
    assert args == from_hf({**HF, "rope_scaling": yarn})
    assert "rope scaling 'yarn' ignores attn_factor" in caplog.text


# GGUF


def test_a_gguf_header_is_read():
    assert from_gguf(gguf()) == ModelArgs(
        dim=8, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=4, ffn_dim=12, vocab_size=5,
        norm_eps=struct.unpack("f", struct.pack("f", 1e-5))[0], rope_theta=10000.0,
        max_seq_len=64, tied_embeddings=True, dtype="float32",
    )  # fmt: skip


def test_the_embedded_model_is_read():
    args = load_model_args(find_model("smollm2"))
    assert (args.dim, args.n_layers, args.n_heads, args.n_kv_heads) == (576, 30, 9, 3)
    assert (args.vocab_size, args.tied_embeddings, args.dtype) == (49152, True, "float32")
    assert sum(math.prod(param.shape) for param in parameters(args)) == 134_515_008
    assert load_generation_defaults(find_model("smollm2")).eos_ids == (2,)


def test_smollm2_has_sampling_defaults_of_its_authors():
    """Greedy, SmolLM2 repeats sentences; the GGUF file states no sampling parameters."""
    files = find_model("smollm2")
    assert load_generation_defaults(files).sampling == {"temperature": 0.2, "top_p": 0.9}
    alone = find_model(str(files.path))
    assert load_generation_defaults(alone).sampling == {}


def test_optional_gguf_keys_are_read_or_have_defaults():
    assert from_gguf(gguf(llama__attention__head_count_kv=None)).n_kv_heads == 2
    assert from_gguf(gguf(llama__rope__dimension_count=None)).head_dim == 4
    assert from_gguf(gguf(llama__vocab_size=7)).vocab_size == 7
    wide = gguf(
        llama__attention__key_length=6,
        llama__attention__value_length=6,
        llama__rope__dimension_count=6,
        llama__rope__freq_base=500000.0,
        llama__expert_count=0,
    )
    assert (from_gguf(wide).head_dim, from_gguf(wide).rope_theta) == (6, 500000.0)


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [
        ([F32], "float32"),
        ([F16, F16], "float16"),
        ([BF16], "bfloat16"),
        ([F16, F32], "float32"),
        ([Q8_0], "float32"),
    ],
)
def test_gguf_dtype_is_taken_from_the_matrices(kinds, dtype):
    """The norms are float32 in every file."""
    tensors = [Tensor(f"t{i}", (2, 32), kind) for i, kind in enumerate(kinds)]
    assert from_gguf(gguf([*tensors, Tensor("norm", (8,), F32)])).dtype == dtype


def test_biases_and_output_weight_are_detected_from_tensors():
    args = from_gguf(gguf([Tensor("output.weight", (5, 8)), Tensor("blk.0.attn_k.bias", (4,))]))
    assert (args.tied_embeddings, args.attention_bias, args.mlp_bias) == (False, True, False)
    assert from_gguf(gguf([Tensor("blk.0.ffn_down.bias", (8,))])).mlp_bias


def test_rope_factors_are_read_from_their_tensor():
    """GGUF carries Llama 3.1's scaling as one divisor per rotary pair."""
    tensors = [
        Tensor("first", (3,)),
        Tensor("rope_freqs.weight", (2,), data=struct.pack("<2f", 1.0, 8.0)),
    ]
    scaling = from_gguf(gguf(tensors)).rope_scaling
    assert scaling == RopeScaling("factors", factors=(1.0, 8.0))


@pytest.mark.parametrize("arch", ["gemma2", "gemma3"])
def test_gguf_layer_count_is_checked_before_listing_layers(arch):
    """Regression: the sliding-window layers were listed first, in any amount of memory."""
    own = {key.replace("llama.", f"{arch}."): value for key, value in TINY_FIELDS.items()}
    own |= {"general.architecture": arch, f"{arch}.attention.sliding_window": 4}
    path = TEMPORARY[0] / "m.gguf"
    path.write_bytes(GGUF(fields={**own, f"{arch}.block_count": 2**31}).to_bytes())
    with pytest.raises(UsageError, match="n_layers=2147483648: use a whole number"):
        load_model_args(find_model(str(path)))


@pytest.mark.parametrize("name", ["gemma-2-9b", "gemma-3-1b", "qwen2.5-7b"])
def test_config_json_layer_count_is_checked_before_listing_layers(name):
    values = json.loads(find_model(name).config.read_text())
    values |= {"num_hidden_layers": 2**62, "layer_types": None}
    if values["model_type"] == "qwen2":
        values |= {"use_sliding_window": True, "max_window_layers": 2**61}
    with pytest.raises(UsageError, match=f"n_layers={2**62}: use a whole number"):
        from_hf({**values, "sliding_window": 16})


def test_rope_scaling_is_read_from_gguf_keys():
    linear = RopeScaling("linear", 4.0)
    assert from_gguf(gguf(llama__rope__scaling__factor=4.0)).rope_scaling == linear
    assert from_gguf(gguf(llama__rope__scale_linear=4.0)).rope_scaling == linear
    kind: dict[str, Any] = {"llama__rope__scaling__type": "linear"}
    assert from_gguf(gguf(**kind, llama__rope__scaling__factor=4.0)).rope_scaling == linear
    assert from_gguf(gguf(**kind)).rope_scaling is None
    assert from_gguf(gguf(llama__rope__scaling__factor=1.0)).rope_scaling is None
    yarn = gguf(
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=16,
        llama__rope__scaling__attn_factor=2.0,
    )
    scaling = from_gguf(yarn).rope_scaling
    assert scaling.attention_factor == pytest.approx(2 * (1 + 0.1 * math.log(4)))
    assert replace(scaling, attention_factor=None) == RopeScaling("yarn", 4.0, 16)
    # Regression: llama.cpp's converter writes attn_factor, which transformers ignores, as this key.
    del yarn.fields["llama.rope.scaling.attn_factor"]
    yarn.fields["llama.rope.scaling.yarn_attn_factor"] = 0.878
    assert from_gguf(yarn).rope_scaling == RopeScaling("yarn", 4.0, 16)
    yarn.fields["llama.rope.scaling.attn_factor"] = 2.0
    yarn.fields["llama.rope.scaling.yarn_attn_factor"] = 1.25
    with pytest.raises(UsageError, match=r"attn_factor=2\.0 and .*1\.25 cannot be combined"):
        from_gguf(yarn)


def test_number_of_kv_heads_may_be_listed_by_layer_in_gguf():
    """llama.cpp's converter lists it for Granite 4."""
    assert from_gguf(gguf(llama__attention__head_count_kv=[1, 1])).n_kv_heads == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"general__architecture": "mpt"},
            "'mpt' is not supported; supported: .*'falcon', 'gemma', 'gemma2', .*'llama', ",
        ),
        ({"general__architecture": None}, "lacks the key 'general.architecture'"),
        ({"llama__embedding_length": None}, "lacks the key 'llama.embedding_length'"),
        ({"llama__block_count": "1"}, "is not a whole number"),
        ({"llama__attention__head_count_kv": [1, 2]}, r"\[1, 2\]: layers with different numbers"),
        ({"llama__expert_count": 8}, "lacks the key 'llama.expert_used_count'"),
        ({"llama__rope__dimension_count": 2}, "dimension_count=2 must equal .* 4"),
        ({"llama__attention__value_length": 8}, "value_length=8 must equal .* 4"),
        ({"llama__attention__head_count": 3}, "llama.attention.head_count=3"),
        ({"llama__attention__head_count": 0}, "llama.attention.head_count=0"),
        ({"llama__rope__freq_bas": 1.0}, "did you mean 'llama.rope.freq_base'"),
        ({"llama__attention__sliding_window": 4}, "unknown key"),
        ({"llama__rope__scaling__type": "longrope"}, "'longrope'.*none, linear, yarn"),
        ({"llama__rope__scaling__attn_factor": 2.0}, "attn_factor of 2.0"),
        ({"llama__rope__scaling__factor": math.nan}, "not a finite number"),
        ({"tokenizer__ggml__tokens": None}, "lacks the key 'llama.vocab_size'"),
        ({"split__count": 3}, "one of 3 parts"),
    ],
)
def test_invalid_or_unsupported_gguf_file_is_refused(fields, message):
    with pytest.raises(UsageError, match=f"m.gguf: .*{message}"):
        from_gguf(gguf(**fields))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (Tensor("rope_freqs.weight", (2,), F16), "F16"),
        (Tensor("rope_freqs.weight", (1, 2)), r"shape \[1, 2\]"),
        (Tensor("rope_freqs.weight", (3,), data=struct.pack("<3f", 1, 1, 1)), "3 factors"),
        (Tensor("rope_freqs.weight", (2,), data=struct.pack("<2f", 1, math.nan)), "=nan"),
        (Tensor("rope_freqs.weight", (2,)), "=0"),
        (Tensor("rope_freqs.weight", (100_000,)), "100000 values; at most"),
    ],
)
def test_invalid_rope_factors_are_refused(tensor, message):
    with pytest.raises(UsageError, match=message):
        from_gguf(gguf([tensor]))


def test_mutated_gguf_files_load_or_raise_project_errors():
    """The header reader cannot check all numbers, so the model arguments must refuse bad ones."""
    content = gguf([Tensor("rope_freqs.weight", (2,), data=struct.pack("<2f", 1, 8))])
    path = TEMPORARY[0] / "m.gguf"
    refused = 0
    for data in mutations(content.to_bytes() + bytes(600), 300):
        path.write_bytes(data)
        try:
            load_model_args(find_model(str(path)))
            load_generation_defaults(find_model(str(path)))
        except (UsageError, CheckpointError):
            refused += 1
    assert 100 < refused < 300


WRONG = [None, True, -1, 0, 10**400, 1.5, math.nan, -math.inf, "x", [], [[]], {}, {"a": 1}]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:8])
def test_wrong_value_of_any_key_is_read_or_raises_usage_error(wrong):
    path = TEMPORARY[0] / "config.json"
    (path.parent / "model.safetensors").write_text("")
    whole = {
        **LlamaConfig(**{key: item for key, item in HF.items() if key != "model_type"}).to_dict(),
        "sliding_window": None,
        "rope_parameters": None,
        "rope_scaling": ROPES["yarn with mscales"],
    }
    for key in whole:
        path.write_text(json.dumps({**whole, key: wrong}))
        _read_all(path.parent)
    for key in whole["rope_scaling"]:
        path.write_text(
            json.dumps({**whole, "rope_scaling": {**whole["rope_scaling"], key: wrong}})
        )
        _read_all(path.parent)


def _read_all(folder: Path) -> None:
    for read in (load_model_args, load_generation_defaults):
        with contextlib.suppress(UsageError):
            read(find_model(str(folder)))


# sampling defaults


def defaults(config: Mapping[str, Any], generation: Any = None) -> GenerationDefaults:
    files = _folder({**HF, **config}, "config.json", "model.safetensors")
    if generation is not None:
        (files.path / "generation_config.json").write_text(json.dumps(generation))
    return load_generation_defaults(files)


def test_sampling_defaults_that_transformers_saves_are_read():
    files = _folder(HF, "config.json", "model.safetensors")
    GenerationConfig(
        do_sample=True,
        temperature=0.6,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        eos_token_id=[128001, 128008, 128009],
        bos_token_id=128000,
    ).save_pretrained(files.path)
    assert load_generation_defaults(files) == GenerationDefaults(
        0.6, 0.9, 40, 0.1, 1.1, (128001, 128008, 128009), 128000
    )


@pytest.mark.parametrize("do_sample", [False, None])
def test_without_do_sample_the_default_is_greedy(do_sample):
    """As in transformers, where only the repetition penalty then has an effect."""
    stated = {"temperature": 0.6, "top_k": 5, "repetition_penalty": 1.1}
    found = defaults({}, {"do_sample": do_sample, **stated})
    assert found == GenerationDefaults(temperature=0.0, repetition_penalty=1.1)


def test_do_sample_without_temperature_has_temperature_1():
    assert defaults({}, {"do_sample": True}) == GenerationDefaults(temperature=1.0)


def test_special_ids_fall_back_to_config_json():
    ids = {"eos_token_id": 2, "bos_token_id": 1}
    assert defaults(ids) == GenerationDefaults(eos_ids=(2,), bos_id=1)
    found = defaults(ids, {"eos_token_id": [7, 8, 7]})
    assert (found.eos_ids, found.bos_id) == ((7, 8), 1)
    assert defaults({"eos_token_id": None, "bos_token_id": -1}) == GenerationDefaults()


def test_unsupported_sampling_is_left_out_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="parallel_llama"):
        defaults({}, {"typical_p": 1.0, "num_beams": 1, "repetition_penalty": 1.1})
        assert not caplog.text
        defaults({}, {"typical_p": 0.9, "num_beams": 4})
    assert "typical_p, num_beams" in caplog.text


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"do_sample": "yes"}, "do_sample='yes'"),
        ({"do_sample": True, "temperature": "hot"}, "temperature='hot'"),
        ({"eos_token_id": ["a"]}, "eos_token_id='a'"),
        ({"eos_token_id": -2}, "eos_token_id=-2 is not a token id"),
        ({"eos_token_id": 1.5}, "eos_token_id=1.5"),
    ],
)
def test_sampling_defaults_of_the_wrong_type_are_refused(generation, message):
    with pytest.raises(UsageError, match=f"generation_config.json: {message}"):
        defaults({}, generation)


def test_generation_config_that_is_not_an_object_is_refused():
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        defaults({}, [])


def test_special_ids_and_sampling_are_read_from_gguf():
    path = TEMPORARY[0] / "m.gguf"
    content = gguf(
        tokenizer__ggml__eot_token_id=3,
        tokenizer__ggml__eom_token_id=3,
        general__sampling__temp=0.5,
        general__sampling__top_k=20,
    )
    path.write_bytes(content.to_bytes())
    found = load_generation_defaults(find_model(str(path)))
    assert found == GenerationDefaults(temperature=0.5, top_k=20, eos_ids=(1, 3), bos_id=0)


def test_unsigned_minus_one_as_a_special_id_of_a_gguf_file_means_none():
    """Regression: such a file was refused."""
    path = TEMPORARY[0] / "m.gguf"
    none = {f"tokenizer__ggml__{name}_token_id": 2**32 - 1 for name in ("bos", "eos", "eot")}
    path.write_bytes(gguf(**none).to_bytes())
    assert load_generation_defaults(find_model(str(path))) == GenerationDefaults()


def test_metas_files_state_no_defaults():
    files = _folder(PARAMS, "params.json", "consolidated.00.pth")
    assert load_generation_defaults(files) == GenerationDefaults()


def test_layer_types_apply_only_to_families_with_mixed_layers():
    """A Gemma 3 with few layers has no full-attention layer by default, but can list some."""
    values = {
        **HF,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    args = from_hf(values)
    assert (args.sliding_window, args.full_layers) == (16, (0,))
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    with pytest.raises(UsageError, match=r"layer_types has .* which every layer of 'mistral' has"):
        from_hf({**values, **mistral})


_KEYS_OF_TEXT = ["dtype", "torch_dtype", "hidden_act", "model_type", "architectures", "layer_types"]


@pytest.mark.parametrize("key", [*_KEYS_OF_TEXT, "hidden_size", "rope_scaling", "x" * 100_000])
def test_error_message_shortens_long_values(key):
    """Regression: a dtype of 100,000 characters was printed whole."""
    value: Any = "x" * 100_000
    if key in ("architectures", "layer_types"):
        value = [value]
    if key == "rope_scaling":
        value = {"rope_type": value}
    try:
        from_hf({**HF, key: value})
    except UsageError as error:
        assert len(str(error)) < 1000
    else:
        assert len(key) > 100  # an unknown key is ignored


@pytest.mark.parametrize("kind", [UsageError, CheckpointError])
def test_the_message_of_an_error_keeps_its_beginning_and_end(kind):
    message = str(kind("model.safetensors: " + "x" * 100_000 + "; fetch it again"))
    assert len(message) <= 2000
    assert message.startswith("model.safetensors: x") and message.endswith("x; fetch it again")
    assert str(kind("y" * 2000)) == "y" * 2000


def test_attn_logit_softcapping_of_gemma_3_is_refused():
    """Regression: the soft cap was applied, although transformers ignores it for Gemma 3."""
    gemma3 = {**HF, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
    with pytest.raises(UsageError, match=r"attn_logit_softcapping=2\.0 is not supported"):
        from_hf({**gemma3, "attn_logit_softcapping": 2.0})
    assert from_hf({**gemma3, "attn_logit_softcapping": None}) == from_hf(gemma3)
    assert from_hf({**gemma3, "final_logit_softcapping": 3.0}).logit_soft_cap == 3
