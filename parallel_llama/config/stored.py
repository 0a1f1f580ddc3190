"""The formats in which a model's files have its weights, where those are quantised in groups."""

from parallel_llama.config.gguf import gguf_formats
from parallel_llama.config.hf_groups import hf_formats
from parallel_llama.config.native import native_formats
from parallel_llama.dtypes import MatrixFormat
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.json_text import read_json_object
from parallel_llama.files.model_files import ModelFiles


def stored_formats(files: ModelFiles, args: ModelArgs) -> dict[str, MatrixFormat]:
    """The formats of the matrices that a model's files have quantised in groups; else none.

    Raises: CheckpointError if a file is damaged.
    """
    if files.kind == "gguf":
        return gguf_formats(files, args)
    if files.kind == "hf":
        return hf_formats(files, args)
    if files.kind != "native":
        return {}
    try:
        return native_formats(read_json_object(files.config), args)
    except UsageError as error:
        raise CheckpointError(f"{files.config}: {error}") from error


def default_quant(files: ModelFiles, args: ModelArgs) -> str:
    """Which of `dtypes.QUANTS` it is where none is asked for.

    A folder has been quantised on purpose, and stays so; GGUF files are decoded.
    """
    return "stored" if files.kind != "gguf" and stored_formats(files, args) else "none"
