"""Qwen 3: Qwen 2 with norms of every head's queries and keys in place of the biases.

Source: arXiv 2505.09388; Qwen3Config of transformers 5.23.
"""

from parallel_llama.families.family import Family, GGUFForm
from parallel_llama.families.names import QK_NORM_NAMES, names_with
from parallel_llama.families.qwen2 import QWEN2, writes_window

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    base_architecture="Qwen3Model",
    reads=QWEN2.reads | {"attention_bias"},
    features=lambda fields: {
        "qk_norm": True,
        "attention_bias": fields.flag("attention_bias", False),
    },
    writes=lambda args: {**writes_window(args), "attention_bias": args.attention_bias},
    full_layers=QWEN2.full_layers,
    window_switch=QWEN2.window_switch,
    defaults={**QWEN2.defaults, "head_dim": 128},
    names=names_with(*QK_NORM_NAMES),
    gguf=GGUFForm("qwen3", lambda *_: {"qk_norm": True}),
    rotary_order=QWEN2.rotary_order,
)
