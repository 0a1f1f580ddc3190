"""GPTQ's and AWQ's weights in HF folders: what config.json says of them, and which they are.

Source: the layers of AutoGPTQ 0.7 and AutoAWQ 0.2; transformers 5.23, quantization_config.py.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from parallel_llama.dtypes import GROUP_SIZE, GroupFormat, MatrixFormat
from parallel_llama.errors import CheckpointError, UsageError, listed
from parallel_llama.families import family_of, parameters, stored_places
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import hf_full_name
from parallel_llama.files.fields import Fields
from parallel_llama.files.json_text import read_json_object
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.files.safetensors_header import read_safetensors_header

# A weight is a scale times an integer less its group's zero: the zeros are factors of a minimum.
HF_GROUPS = {
    size: GroupFormat(4, has_min=True, block=size, min_factors=True) for size in (32, 64, 128)
}

# Integers of 4 bits in a word of 32.
PER_WORD = 8

# By how much zeros lie lower in the files than they are meant, in each format of either method;
# the first is meant where none is named.
_LOWERED = {"gptq": {"gptq": 1, "gptq_v2": 0}, "awq": {"gemm": 0}}
_FORMAT_KEYS = {
    "gptq": ("checkpoint_format", "format"),
    "awq": ("version", "format", "checkpoint_format"),
}

# Keys beside quantization_config by which other programs say that weights are quantised.
_OTHER_PROGRAMS = {"compression_config": "compressed-tensors", "quantization": "MLX"}

_INSTEAD = "use the unquantised model, or a GGUF file of it"


@dataclass(frozen=True)
class Packing:
    """How a folder keeps its quantised matrices.

    A word of GPTQ has eight inputs of one output, one of AWQ eight outputs of one input. Zeros are
    stored as `lowered` less than they are.
    """

    method: str  # gptq or awq
    form: GroupFormat
    lowered: int


def packing_of(values: Mapping[str, Any]) -> Packing | None:
    """What config.json says of quantised weights; None where it says that all are plain.

    What transformers read from a GGUF file it saves as plain values.

    Raises: UsageError for a method, or a kind of it, that is not read.
    """
    for key, program in _OTHER_PROGRAMS.items():
        if values.get(key):
            raise UsageError(
                f"has {key}, so its weights are quantised by {program}, which is not supported; "
                f"'gptq' and 'awq' are; {_INSTEAD}"
            )
    stated = Fields(Fields(values).mapping("quantization_config"))
    method = stated.text("quant_method", "unknown")
    if not stated.values or method == "gguf":
        return None
    if method not in _LOWERED:
        raise UsageError(
            f"quantization_config has quant_method={method[:80]!r}: a quantised checkpoint, which "
            f"is not supported; 'gptq' and 'awq' are; {_INSTEAD}"
        )
    try:
        return _packing(method, stated)
    except UsageError as error:
        raise UsageError(f"quantization_config of {method!r}: {error}; {_INSTEAD}") from error


def hf_packing(files: ModelFiles) -> Packing | None:
    """How a HF folder keeps its quantised matrices; None where config.json says that it has none.

    Raises: CheckpointError if they are of a kind that is not read, or not in safetensors files.
    """
    try:
        packing = packing_of(read_json_object(files.config))
    except UsageError as error:
        raise CheckpointError(f"{files.config}: {error}") from error
    pickled = next((path for path in files.weights if path.suffix != ".safetensors"), None)
    if packing is not None and pickled is not None:
        raise CheckpointError(
            f"{pickled}: weights of {packing.method!r} are read from safetensors; save them so"
        )
    return packing


def hf_formats(files: ModelFiles, args: ModelArgs) -> dict[str, MatrixFormat]:
    """The formats of the matrices that a HF folder has quantised.

    Raises: CheckpointError as `hf_packing`, or if a file is damaged.
    """
    packing = hf_packing(files)
    if packing is None:
        return {}
    names = family_of(args).names
    held = {hf_full_name(n, names) for path in files.weights for n in read_safetensors_header(path)}
    return dict.fromkeys(packed_weights(args, held), packing.form)


def packed_weights(args: ModelArgs, held: Collection[str]) -> list[str]:
    """Those that a folder has quantised, by Meta's names; it holds tensors of these names.

    What is quantised is said by the tensors alone, for no two programs say alike what is not.

    Raises: CheckpointError for a matrix that cannot be.
    """
    places, packed = stored_places(args, "hf"), []
    for param in parameters(args):
        place = places[param.name]
        base = place.name.removesuffix("weight")
        if param.kind == "vector" or len(place.shape) != 2 or base + "qweight" not in held:
            continue
        n_outputs, n_inputs = place.shape
        if n_inputs % GROUP_SIZE or n_outputs % PER_WORD:
            raise CheckpointError(
                f"{base}qweight: is of {n_outputs} outputs and {n_inputs} inputs; those are read "
                f"of which {PER_WORD} divides the first and {GROUP_SIZE} the second; {_INSTEAD}"
            )
        packed.append(param.name)
    return packed


def _packing(method: str, stated: Fields) -> Packing:
    if (bits := stated.integer("bits")) != 4:
        raise UsageError(f"bits={bits}: weights of 4 bits are read")
    if (size := stated.integer("group_size", 128)) not in HF_GROUPS:
        raise UsageError(f"group_size={size}: groups of {', '.join(map(str, HF_GROUPS))} are read")
    if stated.flag("desc_act", False):
        raise UsageError("desc_act=true: groups are read whose inputs lie side by side")
    if not stated.flag("zero_point", True):
        raise UsageError("zero_point=false: groups are read that have zeros")
    lowered = _LOWERED[method]
    form = _form(method, stated) or next(iter(lowered))
    if form not in lowered:
        raise UsageError(f"the format {form[:80]!r}: one of {', '.join(lowered)} is read")
    return Packing(method, HF_GROUPS[size], lowered[form])


def _form(method: str, stated: Fields) -> str:
    """The one format that is named; empty if none is."""
    named = {stated.text(key).lower() for key in _FORMAT_KEYS[method] if stated.has(key)}
    if stated.flag("is_marlin_format", False):
        named.add("marlin")
    if stated.text("backend", "") == "llm-awq":  # a program that has a format of its own
        named.add("llm-awq")
    if len(named) > 1:
        raise UsageError(f"the formats {listed(map(repr, sorted(named)))}: there can be but one")
    return next(iter(named), "")
