"""The types of the tensors of a written GGUF file. No torch."""

from collections.abc import Iterable, Mapping

from parallel_llama.dtypes import (
    GGUF_QUANTS,
    STORED,
    STORED_NAMES,
    DTypeName,
    QuantFormat,
    why_unquantised,
)
from parallel_llama.errors import UsageError
from parallel_llama.families import parameters, stored_slices
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.gguf_header import read_split_header
from parallel_llama.files.model_files import ModelFiles

# The types that --quant can select for the matrices of layers, by llama.cpp's names. The gguf
# package quantises the matrices. The embedding and the head are then in Q8_0, because their errors
# reach the logits directly.
BLOCK_TYPES = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1"}
_OUTER_TYPE = "Q8_0"

# The types that hold the integers and scales of a format unchanged.
TYPES_OF_FORMATS = {form: name for name, form in GGUF_QUANTS.items()}


def copies_tensors(source: ModelFiles, quant: str | None, dtype: str | None) -> bool:
    """Whether all tensors of a GGUF file are copied unchanged, which is the default.

    Raises: UsageError for --quant stored with a dtype.
    """
    if source.kind != "gguf" or quant not in (None, "stored"):
        return False
    if quant is not None and dtype is not None:
        raise UsageError(
            f"--quant stored and --dtype {dtype}: tensors are copied unchanged from one GGUF file "
            "to another; drop one"
        )
    return dtype is None


def require_blocks(args: ModelArgs, quant: str) -> None:
    """Raises: UsageError if the matrices cannot be quantised in blocks of 32 values."""
    if reason := why_unquantised(args, "float32"):
        raise UsageError(f"--quant {quant}: {reason}")


def copied_types(source: ModelFiles, args: ModelArgs) -> dict[str, str]:
    """The types of a GGUF file's tensors, by Meta's names.

    Raises: UsageError for a vector (a norm or a bias) that is stored in blocks: tensors are copied
    row by row, and each value of a vector is a row.
    """
    tensors, slices = read_split_header(source.weights).tensors, stored_slices(args, "gguf")
    types = {param.name: tensors[slices[param.name].name].dtype for param in parameters(args)}
    for param in parameters(args):
        if len(param.shape) == 1 and (kind := types[param.name]) not in STORED:
            raise UsageError(
                f"{source.path}: tensor {slices[param.name].name!r} is a vector in {kind}, and "
                "llama.cpp needs vectors in F32; use --quant none with a --dtype"
            )
    return types


def weight_types(
    args: ModelArgs,
    dtypes: Mapping[str, DTypeName],
    formats: Mapping[str, QuantFormat],
    quant: str | None,
) -> dict[str, str]:
    """The types of written tensors, by Meta's names; `dtypes` is for unquantised matrices.

    Vectors and routers are F32, as llama.cpp needs.

    Raises: UsageError for a matrix in float64, for rows that are not whole blocks, and for weights
    of several types in one tensor of the file.
    """
    types: dict[str, str] = {}
    for param in parameters(args):
        if param.kind == "vector":
            types[param.name] = "F32"
        elif form := formats.get(param.name):
            if param.shape[1] % form.block:
                raise UsageError(
                    f"{param.name}: has rows of {param.shape[1]} values in {form.name}, and a row "
                    f"of a GGUF file has whole blocks of {form.block}; use --quant none with a "
                    "--dtype"
                )
            types[param.name] = TYPES_OF_FORMATS[form]
        elif quant in BLOCK_TYPES:
            types[param.name] = BLOCK_TYPES[quant] if param.kind == "matrix" else _OUTER_TYPE
        elif dtypes[param.name] == "float64":
            raise UsageError(
                f"{param.name}: is in float64, which llama.cpp does not read; use --dtype float32, "
                "bfloat16 or float16"
            )
        else:
            types[param.name] = STORED_NAMES[dtypes[param.name]]
    _require_one_type(args, types)
    return types


def _require_one_type(args: ModelArgs, types: Mapping[str, str]) -> None:
    """Raises: UsageError if a stored tensor, such as one of all experts, would have two types."""
    slices, firsts = stored_slices(args, "gguf"), dict[str, str]()
    for name, kind in types.items():
        tensor = slices[name].name
        first = firsts.setdefault(tensor, name)
        if types[first] != kind:
            raise UsageError(
                f"{name}: would be {kind}, and {first} would be {types[first]}; a GGUF file stores "
                f"both in {tensor!r}, which has one type; use --dtype, with --quant none if the "
                "source is quantised"
            )


# llama.cpp's numbers for the type of most matrices.
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}


def file_type(types: Iterable[str]) -> int | None:
    """llama.cpp's number for a file with tensors of these types; None if the mixture has no number.

    >>> file_type(["F32", "Q8_0", "Q4_0"])
    2
    """
    kinds = {*types} - {"F32"}
    if len(kinds) > 1:
        kinds -= {_OUTER_TYPE}
    return _FILE_TYPES.get(kinds.pop() if kinds else "F32") if len(kinds) < 2 else None
