"""The model's arguments and its authors' sampling defaults, whichever file they come from.

`ModelArgs` is filled from Meta's or Mistral's params.json, from HF's config.json or from a GGUF
header, each read and written in a module of its own. Unknown keys are refused, so that a setting
that changes the model is never dropped in silence; in config.json, where every program leaves its
own, only those that might count (see `hf_keys`). Nothing here knows how the model is cut (see
`plan`), and no torch is imported.
"""

from collections.abc import Callable
from functools import partial

from parallel_llama.config.generation import GenerationDefaults, load_generation_defaults
from parallel_llama.config.gguf import args_from_gguf
from parallel_llama.config.hf import args_from_hf
from parallel_llama.config.meta import args_from_meta_config, args_from_params, is_meta_config
from parallel_llama.config.mistral import args_from_mistral_params, is_mistral_params
from parallel_llama.config.native import args_from_native
from parallel_llama.config.stored import default_quant, stored_formats
from parallel_llama.errors import UsageError
from parallel_llama.families.model_args import ModelArgs, RopeScaling, context_length
from parallel_llama.files.bounded_files import is_file
from parallel_llama.files.gguf_header import read_gguf_header
from parallel_llama.files.json_text import read_json_object
from parallel_llama.files.model_files import ModelFiles

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


def load_model_args(
    files: ModelFiles, count_vocab: Callable[[ModelFiles], int] | None = None
) -> ModelArgs:
    """The arguments of a model.

    `count_vocab` is asked for the vocabulary size of Meta folders of Llama 1 and 2, whose
    params.json leaves it open (-1).

    Raises: UsageError for a model that is not supported, an unknown key or a value out of range;
    CheckpointError if the file is damaged.
    """
    source = files.config
    try:
        if files.kind == "gguf":
            return args_from_gguf(read_gguf_header(source), source)
        values = read_json_object(source)
        if files.kind == "hf" or (files.kind == "config" and "model_type" in values):
            return args_from_hf(values)
        if files.kind == "native":
            return args_from_native(values)
        beside = files.path / "config.json"
        if files.kind == "meta" and is_file(beside):
            config = read_json_object(beside)
            if is_meta_config(config):
                source = beside
                return args_from_meta_config(config, values)
        if is_mistral_params(values):
            return args_from_mistral_params(values)
        return args_from_params(values, count_vocab and partial(count_vocab, files))
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from error
