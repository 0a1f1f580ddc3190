"""Falcon and PaLM: attention and feed-forward in parallel, LayerNorm, few KV heads.

Falcon has GELU without a gate and one tensor for queries, keys and values. The 7B has one KV head
and one norm per block. The 40B and 180B have grouped-query attention and two norms per block; the
11B has grouped-query attention and one norm. PaLM's weights were never published; its config.json
and weight names here are Llama's.

Source: Falcon, arXiv 2311.16867; FalconConfig of transformers 5.23; llama.cpp's falcon, whose files
store all queries, then all keys, then all values. PaLM, arXiv 2204.02311, sections 2 and 5.
"""

from collections.abc import Collection
from typing import Any

from parallel_llama.errors import UsageError
from parallel_llama.families.family import HALF_IN_GGUF, Family, GGUFForm
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import Names, in_layers
from parallel_llama.files.fields import Fields

_NEW, _PARALLEL, _N_NORMS = "new_decoder_architecture", "parallel_attn", "num_ln_in_parallel_attn"
_KEYS = {
    "n_kv_heads": "num_kv_heads",
    "head_dim": "",
    "ffn_dim": "ffn_hidden_size",
    "norm_eps": "layer_norm_epsilon",
    "activation": "activation",
}
_ALWAYS = {"norm": "layer", "norm_bias": True, "gated": False}


def _features(fields: Fields) -> dict[str, Any]:
    if fields.flag("alibi", False):
        raise UsageError("alibi=true: its position biases (ALiBi) are not implemented")
    is_new, is_parallel = fields.flag(_NEW, False), fields.flag(_PARALLEL, True)
    n_norms, most = fields.integer(_N_NORMS, 2 if is_new else 1), 2 if is_new else 1
    if is_new and not is_parallel:
        raise UsageError(
            f"{_NEW}=true and {_PARALLEL}=false: its blocks are always parallel; set "
            f"{_PARALLEL}=true"
        )
    if not 1 <= n_norms <= most:
        raise UsageError(
            f"{_N_NORMS}={n_norms}: use 1 to {most} where {_NEW} is {str(is_new).lower()}"
        )
    has_bias = fields.flag("bias", False)
    activation = {} if fields.has("activation") else {"activation": "gelu"}
    return {
        **_ALWAYS,
        "n_kv_heads": _n_kv_heads(fields, is_new),
        "ffn_dim": fields.integer(_KEYS["ffn_dim"], 4 * fields.integer("hidden_size")),
        "attention_bias": has_bias,
        "mlp_bias": has_bias,
        "parallel_block": is_parallel,
        "shared_norm": is_parallel and n_norms == 1,
        **activation,
    }


def _n_kv_heads(fields: Fields, is_new: bool) -> int:
    """In the old form multi_query decides: one KV head, or one per query head."""
    n_heads = fields.integer("num_attention_heads")
    if is_new:
        return fields.integer(_KEYS["n_kv_heads"], n_heads)
    return 1 if fields.flag("multi_query", True) else n_heads


def _gguf_features(_fields: Fields, names: Collection[str]) -> dict[str, Any]:
    return {
        **_ALWAYS,
        "activation": "gelu",
        "parallel_block": True,
        "shared_norm": "blk.0.attn_norm_2.weight" not in names,
    }


def _writes(args: ModelArgs) -> dict[str, Any]:
    is_first_form = args.n_kv_heads in (1, args.n_heads) and (
        args.shared_norm or not args.parallel_block
    )
    n_norms = {} if is_first_form else {_N_NORMS: 1 if args.shared_norm else 2}
    return {
        _NEW: not is_first_form,
        "multi_query": args.n_kv_heads == 1,
        _PARALLEL: args.parallel_block,
        **n_norms,
        "bias": args.mlp_bias,
        "alibi": False,
    }


def _in_layers(*rows: tuple[str, str, str]) -> tuple[Names, ...]:
    both = ((f"{meta}.*", f"{hf}.*", f"{gguf}.*") for meta, hf, gguf in rows)  # weight and bias
    return in_layers(*both, hf_layers="transformer.h")


def _norm_names(args: ModelArgs) -> tuple[Names, ...]:
    if args.shared_norm:
        return _in_layers(("attention_norm", "input_layernorm", "attn_norm"))
    if args.parallel_block:
        return _in_layers(
            ("attention_norm", "ln_attn", "attn_norm_2"), ("ffn_norm", "ln_mlp", "attn_norm")
        )
    return _in_layers(
        ("attention_norm", "input_layernorm", "attn_norm"),
        ("ffn_norm", "post_attention_layernorm", "ffn_norm"),
    )


def _palm_features(fields: Fields) -> dict[str, Any]:
    return {
        "norm": "layer",
        "parallel_block": True,
        "shared_norm": True,
        "logit_scale": fields.integer("hidden_size") ** -0.5,
    }


FALCON = Family(
    name="falcon",
    models="Falcon",
    architecture="FalconForCausalLM",
    base_architecture="FalconModel",
    reads=frozenset({"alibi", "bias", "multi_query", _NEW, _N_NORMS, _PARALLEL}),
    features=_features,
    writes=_writes,
    keys=_KEYS,
    defaults={"ffn_dim": 0, "norm_eps": 1e-5, "tied_embeddings": True},
    names=(
        Names("tok_embeddings.weight", "transformer.word_embeddings.weight", "token_embd.weight"),
        Names("norm.*", "transformer.ln_f.*", "output_norm.*"),
        Names("output.weight", "lm_head.weight", "output.weight"),
        *_in_layers(
            ("attention.wq", "self_attention.query_key_value", "attn_qkv"),
            ("attention.wk", "self_attention.query_key_value", "attn_qkv"),
            ("attention.wv", "self_attention.query_key_value", "attn_qkv"),
            ("attention.wo", "self_attention.dense", "attn_output"),
            ("feed_forward.w1", "mlp.dense_h_to_4h", "ffn_up"),
            ("feed_forward.w2", "mlp.dense_4h_to_h", "ffn_down"),
        ),
    ),
    more_names=_norm_names,
    qkv_by_kv_head=frozenset({"hf"}),
    gguf=GGUFForm("falcon", _gguf_features, has_layer_norm=True),
    rotary_order=HALF_IN_GGUF,
)

PALM = Family(
    name="palm",
    models="PaLM",
    architecture="PaLMForCausalLM",
    base_architecture="PaLMModel",
    features=_palm_features,
    keys={"norm_eps": "layer_norm_eps"},
    defaults={"tied_embeddings": True, "n_kv_heads": 1},
)
