"""Arcee and Nemotron: a squared ReLU without a gate.

Otherwise, Arcee is Llama. Nemotron has a LayerNorm that scales by 1 + weight, and rotates half of
each head.

Source: ArceeConfig and NemotronConfig of transformers 5.24; Nemotron-4, arXiv 2402.16819; Primer,
arXiv 2109.08668; llama.cpp's arcee and nemotron.
"""

from typing import Any

from parallel_llama.families.family import HALF_IN_GGUF, Family, GGUFForm, rotary_dim_of
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import NORM_BIAS_NAMES, UNGATED_NAMES, names_with
from parallel_llama.files.fields import Fields

_PART, _GGUF_EPS = "partial_rotary_factor", "attention.layer_norm_epsilon"
_BIASES = frozenset({"attention_bias", "mlp_bias"})
_RELU2 = {"gated": False, "activation": "relu2"}
_NORM = {"norm": "layer", "norm_bias": True, "norm_offset": 1.0}


def _features(fields: Fields) -> dict[str, Any]:
    activation = {} if fields.has("hidden_act") else {"activation": "relu2"}
    return {
        "attention_bias": fields.flag("attention_bias", False),
        "mlp_bias": fields.flag("mlp_bias", False),
        "gated": False,
        **activation,
    }


def _writes(args: ModelArgs) -> dict[str, Any]:
    return {"attention_bias": args.attention_bias, "mlp_bias": args.mlp_bias}


ARCEE = Family(
    name="arcee",
    architecture="ArceeForCausalLM",
    base_architecture="ArceeModel",
    reads=_BIASES,
    features=_features,
    writes=_writes,
    defaults={"max_seq_len": 4096, "norm_eps": 1e-5},
    names=names_with(*UNGATED_NAMES),
    gguf=GGUFForm("arcee", lambda *_: _RELU2),
)

NEMOTRON = Family(
    name="nemotron",
    architecture="NemotronForCausalLM",
    base_architecture="NemotronModel",
    reads=_BIASES | {_PART},
    features=lambda fields: {
        **_features(fields),
        **_NORM,
        "rotary_dim": rotary_dim_of(fields, 0.5),
    },
    writes=lambda args: {
        **_writes(args),
        _PART: (args.rotary_dim or args.head_dim) / args.head_dim,
    },
    keys={"norm_eps": "norm_eps"},
    defaults={"max_seq_len": 4096, "norm_eps": 1e-5},
    names=names_with(*NORM_BIAS_NAMES, *UNGATED_NAMES),
    gguf=GGUFForm(
        "nemotron",
        lambda fields, _: {
            **_RELU2,
            **_NORM,
            "norm_eps": fields.number(f"nemotron.{_GGUF_EPS}"),
        },
        frozenset({_GGUF_EPS}),
        rotates_part=True,
    ),
    rotary_order=HALF_IN_GGUF,
)
