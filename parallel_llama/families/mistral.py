"""Mistral 7B and its kin: Llama with a sliding window in every layer, or with none.

Source: arXiv 2310.06825; MistralConfig of transformers 5.23. llama.cpp's files call it llama.
"""

from parallel_llama.families.family import Family, every_layer_has_the_window

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    base_architecture="MistralModel",
    full_layers=every_layer_has_the_window,
    defaults={"max_seq_len": 131072, "sliding_window": 4096},
)
