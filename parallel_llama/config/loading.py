"""A model's arguments from whichever file states them."""

from collections.abc import Callable
from functools import partial

from parallel_llama.bounded_files import is_file
from parallel_llama.config.gguf_config import args_from_gguf
from parallel_llama.config.hf_config import args_from_hf
from parallel_llama.config.meta_config import args_from_meta_config, is_meta_config
from parallel_llama.config.model_args import ModelArgs
from parallel_llama.config.native_config import args_from_native
from parallel_llama.config.params_json import args_from_params
from parallel_llama.errors import UsageError
from parallel_llama.fields import read_json_object
from parallel_llama.gguf_header import read_gguf_header
from parallel_llama.model_files import ModelFiles


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
        if files.kind == "hf":
            return args_from_hf(read_json_object(files.config))
        if files.kind == "native":
            return args_from_native(read_json_object(files.config))
        if files.kind == "gguf":
            return args_from_gguf(read_gguf_header(files.config), files.config)
        params = read_json_object(files.config)
        beside = files.path / "config.json"
        if files.kind == "meta" and is_file(beside):
            values = read_json_object(beside)
            if is_meta_config(values):
                source = beside
                return args_from_meta_config(values, params)
        count = None if count_vocab is None else partial(count_vocab, files)
        return args_from_params(params, count)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from error
