"""The model's arguments and its authors' sampling defaults, whichever file they come from.

`ModelArgs` is filled from Meta's params.json, from HF's config.json or from a GGUF header. Unknown
keys are refused, so that a setting that changes the model is never dropped in silence; in
config.json, where every program leaves its own, only those that might count (see `hf_keys`).
Nothing here knows how the model is cut (see `plan`), and no torch is imported.
"""

from parallel_llama.config.generation import GenerationDefaults, load_generation_defaults
from parallel_llama.config.loading import load_model_args
from parallel_llama.config.model_args import ModelArgs, RopeScaling, context_length

__all__ = [
    "GenerationDefaults",
    "ModelArgs",
    "RopeScaling",
    "context_length",
    "load_generation_defaults",
    "load_model_args",
]
