"""The model's arguments and its authors' sampling defaults, from any layout's files.

`ModelArgs` is read from Meta's or Mistral's params.json, HF's config.json, native.json or a GGUF
header, each in a module of its own. Unknown keys are refused, so that no setting that changes the
model is ignored; in config.json harmless ones are allowed (see `hf_keys`). No torch.
"""

from parallel_llama.config.layouts import load_model_args

__all__ = ["load_model_args"]
