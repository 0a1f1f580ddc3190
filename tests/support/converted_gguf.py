"""Writes the model of an HF folder as a GGUF file, as llama.cpp's converter does for each family.

Names are those of the gguf package. The order of rows, the norms and the header are written without
code of this package.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from tiny_models import interleaved
from torch import Tensor

# transformers' model_type to llama.cpp's architecture, where they differ.
ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "glm": "chatglm",
    "granitemoehybrid": "granite",
    "ministral3": "mistral3",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "cohere": "command-r",
    "llama4_text": "llama4",
}


# The model_types whose rows of q and k are in interleaved order in the file.
_INTERLEAVED = (
    "llama", "mistral", "mixtral", "smollm3", "granite", "granitemoehybrid", "ministral3", "arcee",
)  # fmt: skip
# The key of the epsilon of LayerNorm in config.json.
_LAYER_NORM_EPS = {
    "nemotron": "norm_eps",
    "stablelm": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
    "command-r": "layer_norm_eps",
    "cohere2": "layer_norm_eps",
}


def rounded(folder: Path) -> Path:
    """Rounds the weights of a float64 folder so that a float32 GGUF file holds them exactly."""
    config = json.loads((folder / "config.json").read_text())
    path = folder / "model.safetensors"
    weights = {}
    for name, weight in load_file(path).items():
        offset = _norm_offset(config, name)
        weights[name] = (weight + offset).float().double() - offset
    save_file(weights, path)
    return folder


def convert(
    folder: Path,
    path: Path,
    quantised: str | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
    part_tensors: int = 0,
    **fields: Any,
) -> Path:
    """Writes the GGUF file; names that contain `quantised` use `kind`, and `fields` are added.

    With `part_tensors`, the file is split into parts of so many tensors. Returns: the first part.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=part_tensors)
    _write_header(writer, config, arch)
    for key, value in fields.items():
        full_key = f"{arch}.{key.replace('__', '.')}"
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(full_key, value)
    n_layers = n_layers_of(config)
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(architecture, n_layers)
    for name, weight in _converted(load_file(folder / "model.safetensors"), config).items():
        # The converter gives this vector a name that ends as a bias does.
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, name
        values, quantization = weight.float().numpy(), gguf.GGMLQuantizationType.F32
        if quantised is not None and quantised in mapped:
            quantization = kind
            values = gguf.quants.quantize(values, quantization)
        writer.add_tensor(mapped, values, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if part_tensors:
        return min(path.parent.glob(f"{path.stem}-*-of-*.gguf"))
    return path


def n_layers_of(config: dict[str, Any]) -> int:
    """The number of layers of the file; those of MTP count in GGUF files."""
    n_layers: int = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
    return n_layers


def _write_header(writer: gguf.GGUFWriter, config: dict[str, Any], arch: str) -> None:
    n_heads = config["num_attention_heads"]
    writer.add_block_count(n_layers_of(config))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(_n_kv_heads(config))
    if arch == "falcon":
        writer.add_tensor_data_layout("jploski")
        writer.add_feed_forward_length(config["ffn_hidden_size"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    elif arch in _LAYER_NORM_EPS:
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_layer_norm_eps(config[_LAYER_NORM_EPS[arch]])
    else:
        # Llama 4 names the channels of layers without experts like this.
        keys = "intermediate_size_mlp", "shared_intermediate_size", "intermediate_size"
        ffn_dim = next(config[key] for key in keys if key in config)
        writer.add_feed_forward_length(ffn_dim)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if arch not in ("gemma", "gemma2", "falcon"):
        rope = config["rope_parameters"]
        if local := rope.get("sliding_attention"):
            writer.add_rope_freq_base_swa(local["rope_theta"])
        rope = rope.get("full_attention", rope)
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            if "beta_fast" in rope:
                writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
                writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
            if "attention_factor" in rope:
                writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
            if "mscale_all_dim" in rope:
                writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            if "llama_4_scaling_beta" in rope:
                writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    keys = "num_experts", "num_local_experts", "n_routed_experts"
    n_experts = next((config[key] for key in keys if config.get(key)), 0)
    if n_experts:
        writer.add_expert_count(n_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if arch == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_sliding_window(config["sliding_window"])
    if arch == "llama4":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    if arch in ("qwen2moe", "qwen3moe"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if arch == "glm4moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_nextn_predict_layers(config["num_nextn_predict_layers"])
    if arch in ("command-r", "cohere2"):
        writer.add_logit_scale(config["logit_scale"])
        if config["rope_parameters"]["rope_type"] == "default":
            writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if arch == "cohere2":
        writer.add_sliding_window(config["sliding_window"])
    if arch in ("gemma2", "gemma3") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if arch in ("exaone4", "olmo2") and config.get("sliding_window") is not None:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([t == "sliding_attention" for t in config["layer_types"]])
    if arch == "phi3":
        writer.add_sliding_window(config["sliding_window"] or 0)
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        if config["rope_parameters"]["rope_type"] == "longrope":
            writer.add_rope_scaling_attn_factors(config["rope_parameters"]["attention_factor"])
            for name in ("long", "short"):
                factors = torch.tensor(config["rope_parameters"][f"{name}_factor"])
                writer.add_tensor(f"rope_factors_{name}.weight", factors.float().numpy())
    if arch in ("nemotron", "stablelm", "phi3", "chatglm", "glm4", "glm4moe"):
        head_dim = config.get("head_dim") or config["hidden_size"] // n_heads
        part = config["rope_parameters"]["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(part * head_dim))
    if arch == "stablelm":
        writer.add_parallel_residual(config["use_parallel_residual"])
    if arch == "granite":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    n_tokens = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", "0", *(f"t{n}" for n in range(n_tokens - 2))][:n_tokens])
    writer.add_token_merges(["t 0"])


def _converted(weights: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of the file with HF's names, or the names of merged experts."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    tensors: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, weight in weights.items():
        if config["model_type"] == "gpt_oss" and (".experts." in name or name.endswith("sinks")):
            tensors |= _of_gpt_oss(name, weight)
        elif config["model_type"] == "llama4_text" and ".experts." in name:
            stacked = weight.transpose(1, 2)
            kinds = ("gate_proj", "up_proj") if "gate_up_proj" in name else ("down_proj",)
            for kind, part in zip(kinds, stacked.chunk(len(kinds), 1), strict=True):
                own = name.replace("gate_up_proj", kind)
                tensors[f"{own}.weight"] = part.contiguous()
        elif ".experts." in name:
            before, _, after = name.partition(".experts.")
            number, _, leaf = after.partition(".")
            experts.setdefault(f"{before}.experts.{leaf}", {})[int(number)] = weight
        elif config["model_type"] == "falcon" and "query_key_value" in name:
            n_kv_heads = _n_kv_heads(config)
            groups = weight.view(n_kv_heads, -1, head_dim, *weight.shape[1:])
            parts = groups[:, :-2], groups[:, -2], groups[:, -1]
            tensors[name] = torch.cat([part.reshape(-1, *weight.shape[1:]) for part in parts])
        elif "shared_mlp.input_linear" in name:
            for kind, part in zip(("gate", "up"), weight.chunk(2), strict=True):
                tensors[name.replace("shared_mlp.input_linear", f"mlp.{kind}_proj")] = part
        elif "shared_mlp.output_linear" in name:
            tensors[name.replace("shared_mlp.output_linear", "mlp.down_proj")] = weight
        elif config["model_type"] in _INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
            tensors[name] = interleaved(weight, head_dim)
        else:
            tensors[name] = weight + _norm_offset(config, name)
    for name, parts in experts.items():
        tensors[name] = torch.stack([parts[number] for number in sorted(parts)])
    return tensors


def _of_gpt_oss(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A stacked weight of gpt-oss's experts, gate and up apart and matrices as [out, in]."""
    if name.endswith("sinks"):
        return {f"{name}.weight": weight}
    suffix = ".bias" if name.endswith("_bias") else ".weight"
    name = name.removesuffix("_bias")
    weight = weight if suffix == ".bias" else weight.transpose(1, 2)
    if name.endswith("down_proj"):
        return {name + suffix: weight.contiguous()}
    gate, up = (name.replace("gate_up", part) + suffix for part in ("gate", "up"))
    return {gate: weight[:, ::2].contiguous(), up: weight[:, 1::2].contiguous()}


def _n_kv_heads(config: dict[str, Any]) -> int:
    if config["model_type"] != "falcon":
        n_kv_heads: int = config["num_key_value_heads"]
        return n_kv_heads
    return config["num_kv_heads"] if config["new_decoder_architecture"] else 1


def _norm_offset(config: dict[str, Any], name: str) -> float:
    has_offset = config["model_type"].startswith(("gemma", "nemotron"))
    return 1.0 if has_offset and name.endswith("norm.weight") else 0.0
