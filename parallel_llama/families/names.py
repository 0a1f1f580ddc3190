"""The names of weights in Meta's, HF's and GGUF's layouts; the model uses Meta's.

A name must match exactly one row, so that no weight is mistaken for another.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

Layout = Literal["meta", "hf", "gguf"]
RotaryOrder = Literal["interleaved", "half"]


@dataclass(frozen=True)
class Names:
    """The name of a weight in each layout; `*` stands for the same part in all three."""

    meta: str
    hf: str
    gguf: str

    def pattern(self, layout: Layout) -> str:
        pattern: str = getattr(self, layout)
        return pattern


def in_layers(*rows: tuple[str, str, str], hf_layers: str = "model.layers") -> tuple[Names, ...]:
    """Rows for weights of a layer, by their names within it; `hf_layers` is HF's list of layers."""
    return tuple(
        Names(f"layers.*.{meta}", f"{hf_layers}.*.{hf}", f"blk.*.{gguf}") for meta, hf, gguf in rows
    )


LLAMA_NAMES = (
    Names("tok_embeddings.weight", "model.embed_tokens.weight", "token_embd.weight"),
    Names("norm.weight", "model.norm.weight", "output_norm.weight"),
    Names("output.weight", "lm_head.weight", "output.weight"),
    *in_layers(
        ("attention_norm.weight", "input_layernorm.weight", "attn_norm.weight"),
        ("attention.wq.*", "self_attn.q_proj.*", "attn_q.*"),
        ("attention.wk.*", "self_attn.k_proj.*", "attn_k.*"),
        ("attention.wv.*", "self_attn.v_proj.*", "attn_v.*"),
        ("attention.wo.*", "self_attn.o_proj.*", "attn_output.*"),
        ("ffn_norm.weight", "post_attention_layernorm.weight", "ffn_norm.weight"),
        ("feed_forward.w1.*", "mlp.gate_proj.*", "ffn_gate.*"),
        ("feed_forward.w2.*", "mlp.down_proj.*", "ffn_down.*"),
        ("feed_forward.w3.*", "mlp.up_proj.*", "ffn_up.*"),
    ),
)

QK_NORM_NAMES = in_layers(
    ("attention.q_norm.weight", "self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("attention.k_norm.weight", "self_attn.k_norm.weight", "attn_k_norm.weight"),
)

# The biases of LayerNorm.
NORM_BIAS_NAMES = (
    Names("norm.bias", "model.norm.bias", "output_norm.bias"),
    *in_layers(
        ("attention_norm.bias", "input_layernorm.bias", "attn_norm.bias"),
        ("ffn_norm.bias", "post_attention_layernorm.bias", "ffn_norm.bias"),
    ),
)

# A feed-forward without a gate: up_proj is w1, and there is no w3.
UNGATED_NAMES = in_layers(
    ("feed_forward.w1.*", "mlp.up_proj.*", "ffn_up.*"), ("feed_forward.w3.*", "-", "-")
)

# In these families post_attention_layernorm normalises the output of attention.
POST_NORM_NAMES = in_layers(
    ("post_attention_norm.weight", "post_attention_layernorm.weight", "post_attention_norm.weight"),
    ("ffn_norm.weight", "pre_feedforward_layernorm.weight", "ffn_norm.weight"),
    ("post_ffn_norm.weight", "post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
)


def expert_names(hf: str, w1: str, w2: str, w3: str) -> tuple[Names, ...]:
    """Rows for a router and its experts; `hf` is HF's module, w1 to w3 are HF's weights."""
    ggufs = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}
    return in_layers(
        ("feed_forward.gate.weight", f"{hf}.gate.weight", "ffn_gate_inp.weight"),
        *(
            (
                f"feed_forward.experts.*.{meta}.weight",
                f"{hf}.experts.*.{name}.weight",
                f"{ggufs[meta]}_exps.weight",
            )
            for meta, name in (("w1", w1), ("w2", w2), ("w3", w3))
        ),
    )


def shared_expert_names(hf: str) -> tuple[Names, ...]:
    """Rows for a shared expert; `hf` is HF's module."""
    return in_layers(
        *(
            (f"feed_forward.shared_expert.{meta}.weight", f"{hf}.{name}.weight", f"{own}.weight")
            for meta, name, own in (
                ("w1", "gate_proj", "ffn_gate_shexp"),
                ("w2", "down_proj", "ffn_down_shexp"),
                ("w3", "up_proj", "ffn_up_shexp"),
            )
        )
    )


def names_with(*rows: Names) -> tuple[Names, ...]:
    """Llama's rows with these added; they replace rows for the same weights."""
    own = {row.meta for row in rows}
    return (*(row for row in LLAMA_NAMES if row.meta not in own), *rows)


# Some files contain these tables; the model computes its own from the configuration.
_ROTARY_TABLES: dict[Layout, tuple[str, ...]] = {
    "meta": ("rope.freqs", "layers.*.attention.inner_attention.rope.freqs"),
    "hf": (
        "model.rotary_emb.inv_freq",
        "model.layers.*.self_attn.rotary_emb.inv_freq",
        "transformer.rotary_pos_emb.inv_freq",
    ),
    "gguf": ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"),
}


def renamed(name: str, source: Layout, target: Layout, names: Sequence[Names] = LLAMA_NAMES) -> str:
    """The name in layout `target` of the weight called `name` in layout `source`.

    If several weights share a name in `target`, its pattern may have fewer `*` than that of
    `source`; the parts that are left over are dropped.

    >>> renamed("layers.3.attention.wq.bias", "meta", "hf")
    'model.layers.3.self_attn.q_proj.bias'

    Raises: KeyError unless exactly one row of the table matches, or if `name` holds several weights
    that have names of their own in `target`.
    """
    hits = [
        (row, match)
        for row in names
        if (match := _compiled(row.pattern(source)).fullmatch(name)) is not None
    ]
    if len(hits) != 1:
        raise KeyError(f"{name}: {len(hits)} rows of the name table match, need exactly 1")
    row, match = hits[0]
    parts = match.groups()
    *pieces, end = row.pattern(target).split("*")
    if len(pieces) > len(parts):
        raise KeyError(f"{name}: holds several weights, {row.pattern(target)}")
    return "".join(piece + part for piece, part in zip(pieces, parts, strict=False)) + end


def hf_full_name(name: str, names: Sequence[Names] = LLAMA_NAMES) -> str:
    """The name of a weight in HF's model with an output layer; base models omit the first part.

    >>> hf_full_name("norm.weight"), hf_full_name("lm_head.weight")
    ('model.norm.weight', 'lm_head.weight')
    """
    base = _base_models(tuple(names)).get(name.split(".")[0])
    return f"{base}.{name}" if base else name


@cache
def _base_models(names: tuple[Names, ...]) -> dict[str, str]:
    """Maps each part of HF's base model to the attribute that holds the base model."""
    paths = [row.hf.split(".") for row in names]
    parts = {path[1]: path[0] for path in paths if len(path) > 2}
    return {**parts, "rotary_emb": next(iter(parts.values()))}


_LAYER_LISTS: dict[Layout, str] = {
    "meta": r"layers\.([0-9]{1,9})\..*",
    "hf": r"model\.layers\.([0-9]{1,9})\..*",
    "gguf": r"blk\.([0-9]{1,9})\..*",
}


def layer_of(name: str, layout: Layout) -> int:
    """The number of a tensor's layer, for transformers' usual names; -1 outside of the layers.

    >>> layer_of("model.layers.46.eh_proj.weight", "hf"), layer_of("output.weight", "gguf")
    (46, -1)
    """
    match = re.fullmatch(_LAYER_LISTS[layout], name)
    return -1 if match is None else int(match[1])


def is_rotary_table(name: str, layout: Layout) -> bool:
    return any(_compiled(pattern).fullmatch(name) for pattern in _ROTARY_TABLES[layout])


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"([^.]+)"))
