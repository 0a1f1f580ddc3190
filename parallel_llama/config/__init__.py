"""The model's arguments and its authors' sampling defaults, from any layout's files.

`ModelArgs` is read from Meta's or Mistral's params.json, HF's config.json, native.json or a GGUF
header, each in a module of its own. Unknown keys are refused, so that no setting that changes the
model is ignored; in config.json harmless ones are allowed (see `hf_keys`). No torch.
"""

from parallel_llama.config.generation import GenerationDefaults
from parallel_llama.config.layouts import (
    default_quant,
    load_generation_defaults,
    load_model_args,
    stored_formats,
)
from parallel_llama.families.model_args import ModelArgs, RopeScaling, context_length

__all__ = [
    "GenerationDefaults",
    "ModelArgs",
    "RopeScaling",
    "context_length",
    "default_quant",
    "load_generation_defaults",
    "load_model_args",
    "stored_formats",
]
