"""Reads what a model's files state, whatever their layout: one `FileLayout` per layout.

`checkpoint.reading` has the readers of weights, under the same names of layouts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from parallel_llama.config import meta
from parallel_llama.config.generation import GenerationDefaults, folder_defaults, gguf_defaults
from parallel_llama.config.gguf import args_from_gguf
from parallel_llama.config.hf import args_from_hf
from parallel_llama.config.native import args_from_native
from parallel_llama.config.quantised import (
    decoded_types,
    gguf_formats,
    hf_decoded_types,
    hf_formats,
    hf_inputs,
    hf_not_applied,
    hf_scaled_formats,
    native_decoded_types,
    native_folder_formats,
    native_folder_inputs,
    native_folder_scaled,
)
from parallel_llama.config.tied import as_stored
from parallel_llama.dtypes import (
    GGUF_QUANTS,
    InputFormat,
    MatrixFormat,
    ScaledFormat,
    why_unquantised,
)
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.bounded_files import is_file
from parallel_llama.files.fields import naming, read_json_object
from parallel_llama.files.gguf_header import read_split_header
from parallel_llama.files.model_files import ModelFiles

CountVocab = Callable[[ModelFiles], int]


@dataclass(frozen=True)
class FileLayout:
    """How the files of one layout describe a model.

    Args:
        args: reads the model's arguments.
        defaults: reads the sampling defaults and special ids; none by default.
        formats: reads the formats of quantised matrices, by Meta's names; none by default.
        decoded_types: reads the types of quantised matrices that can only be decoded; none by
            default.
        scaled: reads the formats of matrices that are decoded when loaded, but that `reshard`
            writes to a native folder unchanged, by Meta's names; none by default.
        inputs: reads the formats to which the inputs of matrices are rounded, by Meta's names; none
            by default.
        not_applied: reads what the files say is quantised but is not rounded here (activations,
            outputs of layers, the KV cache); nothing by default.
    """

    args: Callable[[ModelFiles, CountVocab | None], ModelArgs]
    defaults: Callable[[ModelFiles], GenerationDefaults] = lambda _: GenerationDefaults()
    formats: Callable[[ModelFiles, ModelArgs], dict[str, MatrixFormat]] = lambda *_: {}
    decoded_types: Callable[[ModelFiles, ModelArgs], list[str]] = lambda *_: []
    scaled: Callable[[ModelFiles, ModelArgs], dict[str, ScaledFormat]] = lambda *_: {}
    inputs: Callable[[ModelFiles, ModelArgs], dict[str, InputFormat]] = lambda *_: {}
    not_applied: Callable[[ModelFiles], tuple[str, ...]] = lambda _: ()


def load_model_args(files: ModelFiles, count_vocab: CountVocab | None = None) -> ModelArgs:
    """The arguments of a model.

    Args:
        count_vocab: returns the vocabulary size of a Meta folder of Llama 1 or 2, whose params.json
            has the placeholder -1.

    Raises: UsageError for a model that is not supported, an unknown key or a value out of range;
    CheckpointError if the file is damaged.
    """
    return LAYOUTS[files.kind].args(files, count_vocab)


def load_generation_defaults(files: ModelFiles) -> GenerationDefaults:
    """The sampling defaults and special ids that a model's files state.

    Raises: UsageError for a value of the wrong type; CheckpointError if a file is damaged.
    """
    return LAYOUTS[files.kind].defaults(files)


def stored_formats(files: ModelFiles, args: ModelArgs) -> dict[str, MatrixFormat]:
    """The formats of the matrices that a model's files store quantised, by Meta's names.

    Raises: CheckpointError if a file is damaged.
    """
    return LAYOUTS[files.kind].formats(files, args)


def scaled_formats(files: ModelFiles, args: ModelArgs) -> dict[str, ScaledFormat]:
    """The formats, by Meta's names, of decoded matrices that a native folder stores unchanged.

    Raises: CheckpointError if a file is damaged.
    """
    return LAYOUTS[files.kind].scaled(files, args)


def input_formats(files: ModelFiles, args: ModelArgs) -> dict[str, InputFormat]:
    """The formats of matrix inputs, by Meta's names, if a model's files ask to round the inputs.

    Raises: CheckpointError if a file is damaged or lacks a scale; DamagedWeights for a scale that
    cannot divide inputs.
    """
    return LAYOUTS[files.kind].inputs(files, args)


def default_dtype(files: ModelFiles, args: ModelArgs, device: str) -> str:
    """A model's default dtype on 'cpu' or 'cuda'.

    A float64 model stays in float64. Other models have bfloat16 on CUDA. On the CPU, which computes
    in float32 from weights of 16 bits, they have the dtype that the files state. Two kinds of files
    have float32 instead: Meta's, because they state no dtype; and files with a matrix that can run
    as stored, because decoding such a matrix to float32 does not round it.

    Raises: CheckpointError if a file is damaged.
    """
    if args.dtype == "float64":
        return "float64"
    if device == "cuda":
        return "bfloat16"
    return "float32" if files.kind == "meta" or stored_formats(files, args) else args.dtype


def default_quant(files: ModelFiles, args: ModelArgs, dtype: str) -> str:
    """A model's default quantisation, one of `dtypes.QUANTS`: that of its files if it can run.

    Raises: CheckpointError if a file is damaged.
    """
    if files.quant is not None:
        return files.quant
    stays = not why_unquantised(args, dtype) and stored_formats(files, args)
    return "stored" if stays else "none"


def why_decoded(
    files: ModelFiles, args: ModelArgs, dtype: str, quant: str | None = None
) -> str | None:
    """Why quantised matrices of a model's files are decoded, a message for users.

    Args:
        quant: the requested quantisation; None for the default.

    Returns: None if no matrix is decoded, or decoding was requested.

    Raises: CheckpointError if a file is damaged.
    """
    if (quant or files.quant) not in (None, "stored") or dtype == "float64":
        return None
    if quant is None and stored_formats(files, args) and (why := why_unquantised(args, dtype)):
        return f"{files.path.name}: quantised matrices are decoded to {dtype}: {why}"
    if types := LAYOUTS[files.kind].decoded_types(files, args):
        reason = f"only {', '.join(GGUF_QUANTS)} stay as stored"
        if files.kind == "native":
            reason = "native folders keep matrices unchanged, but products need the decoded values"
        elif files.kind == "hf":
            reason = (
                "only 4-bit GPTQ and AWQ in consecutive groups of 32, 64 or 128, and 8-bit or "
                "packed 4-bit integers with 16-bit scales and no zero points (4-bit groups may "
                "have them) stay as stored"
            )
            if parts := LAYOUTS[files.kind].not_applied(files):
                reason += f"; not applied from config.json: the rounding of {' and '.join(parts)}"
        return f"{files.path.name}: matrices in {', '.join(types)} are decoded to {dtype}; {reason}"
    return None


def why_own_kv_scales(files: ModelFiles) -> str | None:
    """Why the KV cache does not use the scales in a model's files; None without such scales.

    Raises: CheckpointError if a file is damaged.
    """
    if "the KV cache" not in LAYOUTS[files.kind].not_applied(files):
        return None
    return (
        f"{files.path.name}: the KV cache is not quantised as config.json states, and its scales "
        "are not applied: a KV cache in int8 or fp8 has a scale for every key and value"
    )


def _json_args(
    read: Callable[[Mapping[str, Any]], ModelArgs], files: ModelFiles, _: CountVocab | None
) -> ModelArgs:
    values = read_json_object(files.config)
    with naming(files.config):
        return read(values)


def _hf_args(files: ModelFiles, count_vocab: CountVocab | None) -> ModelArgs:
    return as_stored(files, _json_args(args_from_hf, files, count_vocab))


def _gguf_args(files: ModelFiles, _: CountVocab | None) -> ModelArgs:
    header = read_split_header(files.weights)
    with naming(files.config):
        return args_from_gguf(header)


def _meta_args(files: ModelFiles, count_vocab: CountVocab | None) -> ModelArgs:
    """From params.json, and from the config.json beside it if `reshard` wrote both."""
    values, beside = read_json_object(files.config), files.path / "config.json"
    if is_file(beside) and meta.is_meta_config(config := read_json_object(beside)):
        with naming(beside):
            return meta.args_from_meta_config(config, values)
    return _params_args(values, files, count_vocab)


def _shape_args(files: ModelFiles, count_vocab: CountVocab | None) -> ModelArgs:
    """From a file of configs/models, in the keys of config.json or of params.json."""
    if "model_type" in (values := read_json_object(files.config)):
        return _json_args(args_from_hf, files, count_vocab)
    return _params_args(values, files, count_vocab)


def _params_args(
    values: Mapping[str, Any], files: ModelFiles, count_vocab: CountVocab | None
) -> ModelArgs:
    with naming(files.config):
        if meta.is_mistral_params(values):
            return meta.args_from_mistral_params(values)
        return meta.args_from_params(values, count_vocab and partial(count_vocab, files))


LAYOUTS = {
    "hf": FileLayout(
        _hf_args,
        folder_defaults,
        hf_formats,
        hf_decoded_types,
        hf_scaled_formats,
        hf_inputs,
        hf_not_applied,
    ),
    "meta": FileLayout(_meta_args, folder_defaults),
    "native": FileLayout(
        partial(_json_args, args_from_native),
        folder_defaults,
        native_folder_formats,
        native_decoded_types,
        native_folder_scaled,
        native_folder_inputs,
    ),
    "gguf": FileLayout(_gguf_args, gguf_defaults, gguf_formats, decoded_types),
    "config": FileLayout(_shape_args),
}
