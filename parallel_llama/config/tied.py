"""Decides whether the output and the embeddings of a Hugging Face folder are tied. Without torch.

config.json can tie them. As in transformers, the tensors of the files have priority: if both exist
and their values differ, the model is not tied; if only one exists, the model uses it for both.

Source: transformers 5.24, PreTrainedModel.tie_weights.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from parallel_llama.config.quantised import located_tensors
from parallel_llama.dtypes import STORED
from parallel_llama.errors import CheckpointError
from parallel_llama.families import family_of
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.bounded_files import open_file, reading
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.files.safetensors_header import FileTensor

# Bytes of each tensor that are compared at once. Pieces of 1 MiB take four times as long, because
# malloc maps new memory for each.
_AT_ONCE = 1 << 18

Located = Mapping[str, tuple[Path, FileTensor]]

logger = logging.getLogger(__name__)


def as_stored(files: ModelFiles, args: ModelArgs) -> ModelArgs:
    """The arguments of an HF folder, untied if its output has other values than its embeddings.

    Files of torch.save are not compared here, because only torch can locate their tensors;
    `checkpoint.hf_folder` refuses such files if the values differ.

    Raises: CheckpointError if the tensors cannot be read.
    """
    if not args.tied_embeddings or any(path.suffix != ".safetensors" for path in files.weights):
        return args
    try:
        tensors = located_tensors(files, args)
    except CheckpointError:
        return args  # the reader of the weights reports a damaged header
    if (why := why_untied(tensors, args)) is None:
        return args
    _warn(f"{files.path}: {why}, so they are not tied, as in transformers")
    return replace(args, tied_embeddings=False)


def why_untied(tensors: Located, args: ModelArgs) -> str | None:
    """How the files contradict a config.json that ties the output to the embeddings.

    Tensors of two dtypes count as different; if their values are equal, untying them only takes
    memory. Quantised tensors are not compared.

    Args:
        tensors: the tensors of the files by full name.

    Returns: None if the files have only one of the two tensors, or the same values in both.

    Raises: CheckpointError if the tensors cannot be read.
    """
    output, embeddings = _names(args)
    if not args.tied_embeddings or output not in tensors or embeddings not in tensors:
        return None
    both = tensors[output], tensors[embeddings]
    if any(tensor.dtype not in STORED for _, tensor in both) or not _differ(*both):
        return None
    return f"config.json ties {output} to {embeddings}, but the files have different values in them"


def with_embeddings(tensors: Located, args: ModelArgs) -> Located:
    """The tensors, with the output as embeddings if the files of a tied model lack embeddings.

    save_model of safetensors writes tensors that share memory only under the first of their names.
    """
    output, embeddings = _names(args)
    module = embeddings.removesuffix("weight")  # quantised embeddings have tensors of other names
    if not args.tied_embeddings or any(name.startswith(module) for name in tensors):
        return tensors
    if output not in tensors or tensors[output][1].dtype not in STORED:
        return tensors
    return {**tensors, embeddings: tensors[output]}


def _names(args: ModelArgs) -> tuple[str, str]:
    """HF's names of the output and of the embeddings."""
    family = family_of(args)
    output = family.name_in("hf", "output.weight", args)
    return output, family.name_in("hf", "tok_embeddings.weight", args)


def _differ(one: tuple[Path, FileTensor], other: tuple[Path, FileTensor]) -> bool:
    """Whether two tensors differ; reads them only up to the first difference."""
    (path, mine), (other_path, theirs) = one, other
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        return True
    if (path, mine.offset) == (other_path, theirs.offset):  # torch files may share a tensor's bytes
        return False
    pairs = zip(_pieces(*one), _pieces(*other), strict=True)
    return any(piece != other_piece for piece, other_piece in pairs)


def _pieces(path: Path, tensor: FileTensor) -> Iterator[bytes]:
    with open_file(path) as file, reading(path):
        file.seek(tensor.offset)
        for start in range(0, tensor.n_bytes, _AT_ONCE):
            yield file.read(min(_AT_ONCE, tensor.n_bytes - start))


@cache
def _warn(message: str) -> None:
    """Warns once per process, which may read the arguments of a model several times."""
    logger.warning("%s; to avoid this warning, set tie_word_embeddings to false", message)
