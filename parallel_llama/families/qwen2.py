"""Qwen 2 and 2.5: Llama with biases on the queries, keys and values.

Source: Qwen2Config of transformers 5.23; llama.cpp's qwen2, whose files keep HF's order of rows.
"""

from typing import Any

from parallel_llama.errors import UsageError
from parallel_llama.families.family import Family
from parallel_llama.families.model_args import ModelArgs


def _writes(args: ModelArgs) -> dict[str, Any]:
    if not args.attention_bias or args.has_wo_bias or args.mlp_bias:
        raise UsageError(
            "biases on other projections than wq, wk and wv: config.json of a Qwen2 has no words "
            "for them; use --format native"
        )
    return {"use_sliding_window": False}


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    base_architecture="Qwen2Model",
    reads=frozenset({"use_sliding_window", "max_window_layers"}),
    features=lambda _: {"attention_bias": True, "wo_bias": False},
    writes=_writes,
    window_switch="use_sliding_window",
    max_seq_len=32768,
    rotary_order={"meta": "interleaved", "hf": "half", "gguf": "half"},
)
