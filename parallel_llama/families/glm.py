"""ChatGLM 2 and 3, and GLM 4: Llama with biases on queries, keys and values, and partial rotation.

ChatGLM has its own keys, names and tokenizer code; GLM uses those of transformers. Both rotate the
first half of each head, in pairs of neighbours. GLM-4-0414 and GLM-Z1 have the model_type glm4, and
normalise the outputs of attention and feed-forward.

Source: arXiv 2406.12793; GlmConfig and Glm4Config of transformers 5.24; config.json of
THUDM/chatglm2-6b and 3.
"""

from typing import Any

from parallel_llama.errors import UsageError
from parallel_llama.families.family import (
    INTERLEAVED,
    ROTARY_PART,
    Family,
    GGUFForm,
    rope_fields,
    written_rotary_part,
)
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import Names, in_layers, names_with
from parallel_llama.files.fields import Fields


def _glm_features(fields: Fields) -> dict[str, Any]:
    head_dim = fields.integer("head_dim", 128)
    part = rope_fields(fields).number(ROTARY_PART, fields.number(ROTARY_PART, 0.5))
    return {
        "attention_bias": fields.flag("attention_bias", True),
        "wo_bias": False,
        "rotary_dim": None if part == 1 else int(head_dim * part),
    }


def _glm_writes(args: ModelArgs) -> dict[str, Any]:
    return {"attention_bias": args.attention_bias, **written_rotary_part(args)}


_GATE_AND_UP = (
    ("feed_forward.w1.*", "mlp.gate_up_proj.*", "ffn_up.*"),
    ("feed_forward.w3.*", "mlp.gate_up_proj.*", "ffn_up.*"),
)

GLM = Family(
    name="glm",
    models="GLM-4-hf",
    architecture="GlmForCausalLM",
    base_architecture="GlmModel",
    reads=frozenset({"attention_bias", ROTARY_PART}),
    features=_glm_features,
    writes=_glm_writes,
    defaults={"max_seq_len": 131072, "head_dim": 128, "norm_eps": 1.5625e-7, "n_kv_heads": 2},
    names=names_with(*in_layers(*_GATE_AND_UP)),
    gguf=GGUFForm("chatglm", rotates_part=True),
    rotary_order=INTERLEAVED,
)

GLM4 = Family(
    name="glm4",
    models="GLM-4-0414, GLM-Z1",
    architecture="Glm4ForCausalLM",
    base_architecture="Glm4Model",
    reads=GLM.reads,
    features=lambda fields: {**_glm_features(fields), "post_norms": True},
    writes=_glm_writes,
    defaults=GLM.defaults,
    names=names_with(
        *in_layers(
            *_GATE_AND_UP,
            (
                "post_attention_norm.weight",
                "post_self_attn_layernorm.weight",
                "post_attention_norm.weight",
            ),
            ("post_ffn_norm.weight", "post_mlp_layernorm.weight", "post_ffw_norm.weight"),
        )
    ),
    gguf=GGUFForm("glm4", lambda *_: {"post_norms": True}, rotates_part=True),
    rotary_order=INTERLEAVED,
)

# Switches of ChatGLM's code, with their values in all published models.
_FIXED: dict[str, Any] = {
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "multi_query_attention": True,
    "post_layer_norm": True,
    "rmsnorm": True,
    "original_rope": True,
}


def _chatglm_features(fields: Fields) -> dict[str, Any]:
    for key, value in _FIXED.items():
        if fields.flag(key, value) != value:
            raise UsageError(f"{key}={not value} is not supported; published models have {value}")
    rope_ratio = fields.number("rope_ratio", 1.0)
    if rope_ratio != 1 and "chatglm2" in fields.string("_name_or_path", "").lower():
        raise UsageError(
            f"rope_ratio={rope_ratio:g} of ChatGLM2 divides positions, which is not supported; "
            "use ChatGLM3 or GLM-4"
        )
    rope = rope_fields(fields)
    if (kind := rope.string("rope_type", rope.string("type", "default"))) != "default":
        raise UsageError(
            f"rope_type={kind[:80]!r} is not supported in 'chatglm': ChatGLM's code reads "
            "only rope_ratio; set rope_ratio instead"
        )
    return {
        "attention_bias": fields.flag("add_qkv_bias", True),
        "wo_bias": False,
        "rotary_dim": fields.integer("kv_channels", 128) // 2,
        "rope_theta": 10000.0 * rope_ratio,
        "activation": "silu",
    }


CHATGLM = Family(
    name="chatglm",
    models="ChatGLM 2 and 3, GLM-4",
    architecture="ChatGLMModel",
    base_architecture="ChatGLMForConditionalGeneration",
    base_has_output=True,
    reads=frozenset({*_FIXED, "add_qkv_bias", "rope_ratio"}),
    features=_chatglm_features,
    writes=lambda args: {
        **_FIXED,
        "add_qkv_bias": args.attention_bias,
        "rope_ratio": args.rope_theta / 10000.0,
    },
    keys={
        "n_layers": "num_layers",
        "n_kv_heads": "multi_query_group_num",
        "head_dim": "kv_channels",
        "ffn_dim": "ffn_hidden_size",
        "vocab_size": "padded_vocab_size",
        "norm_eps": "layernorm_epsilon",
        "max_seq_len": "seq_length",
    },
    defaults={"head_dim": 128},
    names=(
        Names(
            "tok_embeddings.weight",
            "transformer.embedding.word_embeddings.weight",
            "token_embd.weight",
        ),
        Names("norm.weight", "transformer.encoder.final_layernorm.weight", "output_norm.weight"),
        Names("output.weight", "transformer.output_layer.weight", "output.weight"),
        *in_layers(
            ("attention_norm.weight", "input_layernorm.weight", "attn_norm.weight"),
            ("attention.wq.*", "self_attention.query_key_value.*", "attn_qkv.*"),
            ("attention.wk.*", "self_attention.query_key_value.*", "attn_qkv.*"),
            ("attention.wv.*", "self_attention.query_key_value.*", "attn_qkv.*"),
            ("attention.wo.*", "self_attention.dense.*", "attn_output.*"),
            ("ffn_norm.weight", "post_attention_layernorm.weight", "ffn_norm.weight"),
            ("feed_forward.w1.*", "mlp.dense_h_to_4h.*", "ffn_up.*"),
            ("feed_forward.w3.*", "mlp.dense_h_to_4h.*", "ffn_up.*"),
            ("feed_forward.w2.*", "mlp.dense_4h_to_h.*", "ffn_down.*"),
            hf_layers="transformer.encoder.layers",
        ),
    ),
    gguf=GGUFForm("chatglm", needs="blk.0.attn_qkv.weight", rotates_part=True),
    rotary_order=INTERLEAVED,
)
