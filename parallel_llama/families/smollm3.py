"""SmolLM3: Llama without rotary embeddings in every fourth layer.

config.json may also give a sliding window to the layers without rotary embeddings.

Source: SmolLM3Config of transformers 5.24; NoPE, arXiv 2305.19466; llama.cpp's smollm3, which
always leaves every fourth layer unrotated.
"""

from collections.abc import Iterable
from typing import Any

from parallel_llama.families.family import (
    BIASES,
    ROTATED,
    ROTATED_INTERVAL,
    Family,
    GGUFForm,
    biases,
    layer_types,
    unrotated_layers,
    written_biases,
    written_rotated,
)
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.fields import Fields


def _features(fields: Fields) -> dict[str, Any]:
    return {
        **biases(fields),
        "unrotated_layers": unrotated_layers(fields, fields.integer("num_hidden_layers")),
    }


def _full_layers(fields: Fields, n_layers: int) -> Iterable[int]:
    return sorted(set(range(n_layers)) - set(unrotated_layers(fields, n_layers)))


def _writes(args: ModelArgs) -> dict[str, Any]:
    return {
        **written_biases(args),
        **written_rotated(args),
        "use_sliding_window": args.sliding_window is not None,
        "layer_types": layer_types(args),
    }


SMOLLM3 = Family(
    name="smollm3",
    models="SmolLM3",
    architecture="SmolLM3ForCausalLM",
    base_architecture="SmolLM3Model",
    reads=BIASES | {ROTATED, ROTATED_INTERVAL, "use_sliding_window"},
    features=_features,
    writes=_writes,
    full_layers=_full_layers,
    window_switch="use_sliding_window",
    defaults={
        "max_seq_len": 32768,
        "n_kv_heads": 4,
        "rope_theta": 2e6,
        "sliding_window": None,
        "tied_embeddings": True,
    },
    gguf=GGUFForm(
        "smollm3",
        lambda fields, _: {
            "unrotated_layers": tuple(range(3, fields.integer("smollm3.block_count"), 4))
        },
    ),
)
