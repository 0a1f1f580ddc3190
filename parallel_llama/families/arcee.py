"""Arcee and Nemotron: a squared ReLU without a gate.

Otherwise, Arcee is Llama. Nemotron has a LayerNorm that scales by 1 + weight, and rotates half of
each head.

Source: ArceeConfig and NemotronConfig of transformers 5.24; Nemotron-4, arXiv 2402.16819; Primer,
arXiv 2109.08668; llama.cpp's arcee and nemotron.
"""

from typing import Any

from parallel_llama.families.family import (
    BIASES,
    HALF_IN_GGUF,
    ROTARY_PART,
    Family,
    GGUFForm,
    biases,
    rotary_dim_of,
    written_biases,
    written_rotary_part,
)
from parallel_llama.families.names import NORM_BIAS_NAMES, UNGATED_NAMES, names_with
from parallel_llama.files.fields import Fields

_RELU2 = {"gated": False, "activation": "relu2"}
_NORM = {"norm": "layer", "norm_bias": True, "norm_offset": 1.0}


def _features(fields: Fields) -> dict[str, Any]:
    activation = {} if fields.has("hidden_act") else {"activation": "relu2"}
    return {
        **biases(fields),
        "gated": False,
        **activation,
    }


ARCEE = Family(
    name="arcee",
    models="Arcee (AFM)",
    architecture="ArceeForCausalLM",
    base_architecture="ArceeModel",
    reads=BIASES,
    features=_features,
    writes=written_biases,
    defaults={"max_seq_len": 4096, "norm_eps": 1e-5},
    names=names_with(*UNGATED_NAMES),
    gguf=GGUFForm("arcee", lambda *_: _RELU2),
)

NEMOTRON = Family(
    name="nemotron",
    models="Nemotron-4, Minitron",
    architecture="NemotronForCausalLM",
    base_architecture="NemotronModel",
    reads=BIASES | {ROTARY_PART},
    features=lambda fields: {
        **_features(fields),
        **_NORM,
        "rotary_dim": rotary_dim_of(fields, 0.5),
    },
    writes=lambda args: {**written_biases(args), **written_rotary_part(args)},
    keys={"norm_eps": "norm_eps"},
    defaults={"max_seq_len": 4096, "norm_eps": 1e-5},
    names=names_with(*NORM_BIAS_NAMES, *UNGATED_NAMES),
    gguf=GGUFForm(
        "nemotron",
        lambda *_: {**_RELU2, **_NORM},
        has_layer_norm=True,
        rotates_part=True,
    ),
    rotary_order=HALF_IN_GGUF,
)
