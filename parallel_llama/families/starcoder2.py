"""StarCoder 2: LayerNorm, GELU without a gate, biases, and a sliding window in all layers.

GGUF files do not state the window, and llama.cpp has none.

Source: Starcoder2Config of transformers 5.24; arXiv 2402.19173; llama.cpp's starcoder2.
"""

from typing import Any

from parallel_llama.families.family import (
    HALF_IN_GGUF,
    Family,
    GGUFForm,
    every_layer_has_the_window,
)
from parallel_llama.families.names import NORM_BIAS_NAMES, in_layers, names_with
from parallel_llama.files.fields import Fields

_ALWAYS = {"norm": "layer", "norm_bias": True, "gated": False}


def _features(fields: Fields) -> dict[str, Any]:
    has_bias = fields.flag("use_bias", True)
    activation = {} if fields.has("hidden_act") else {"activation": "gelu_tanh"}
    return {**_ALWAYS, "attention_bias": has_bias, "mlp_bias": has_bias, **activation}


STARCODER2 = Family(
    name="starcoder2",
    models="StarCoder 2",
    architecture="Starcoder2ForCausalLM",
    base_architecture="Starcoder2Model",
    reads=frozenset({"use_bias"}),
    features=_features,
    writes=lambda args: {"use_bias": args.mlp_bias},
    full_layers=every_layer_has_the_window,
    keys={"norm_eps": "norm_epsilon"},
    defaults={
        "max_seq_len": 4096,
        "n_kv_heads": 2,
        "norm_eps": 1e-5,
        "sliding_window": None,
        "tied_embeddings": True,
    },
    names=names_with(
        *NORM_BIAS_NAMES,
        *in_layers(
            ("feed_forward.w1.*", "mlp.c_fc.*", "ffn_up.*"),
            ("feed_forward.w2.*", "mlp.c_proj.*", "ffn_down.*"),
        ),
    ),
    gguf=GGUFForm(
        "starcoder2",
        lambda *_: {**_ALWAYS, "activation": "gelu_tanh"},
        has_layer_norm=True,
    ),
    rotary_order=HALF_IN_GGUF,
)
