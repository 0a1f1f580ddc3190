"""Qwen 2 and 2.5: Llama with biases on the queries, keys and values.

Source: Qwen2Config of transformers 5.23; llama.cpp's qwen2, whose files keep HF's order of rows.
"""

from collections.abc import Iterable
from typing import Any

from parallel_llama.families.family import Family, GGUFForm
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.fields import Fields


def full_layers(fields: Fields, n_layers: int) -> Iterable[int]:
    """The layers up to max_window_layers, which transformers sets to 28 where nothing is said."""
    return range(max(0, min(fields.integer("max_window_layers", 28), n_layers)))


def writes_window(args: ModelArgs) -> dict[str, Any]:
    """What config.json says of the window."""
    n_full = len(args.full_layers)
    return {"use_sliding_window": args.sliding_window is not None, "max_window_layers": n_full}


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    base_architecture="Qwen2Model",
    reads=frozenset({"use_sliding_window", "max_window_layers"}),
    features=lambda _: {"attention_bias": True, "wo_bias": False},
    writes=writes_window,
    full_layers=full_layers,
    window_switch="use_sliding_window",
    defaults={"max_seq_len": 32768, "sliding_window": 4096},
    gguf=GGUFForm("qwen2"),
    rotary_order={"meta": "interleaved", "hf": "half", "gguf": "half"},
)
