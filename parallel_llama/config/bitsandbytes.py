"""Finds the matrices of an HF folder that bitsandbytes quantised to int8 or to 4-bit codes.

The tensors in the files say which matrices are quantised, and how; `checkpoint.bitsandbytes`
decodes them.

Source: bitsandbytes 0.50, QuantState.as_dict and Linear8bitLt; transformers 5.24,
BitsAndBytesConfig.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.families import parameters, stored_slices
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.bounded_files import open_file
from parallel_llama.files.fields import Fields, without_repeats
from parallel_llama.files.safetensors_header import FileTensor

# A tensor with this prefix holds a JSON object; the rest of its name is the code.
QUANT_STATE = "weight.quant_state.bitsandbytes__"
MAX_STATE_BYTES = 4096

# The value of each 4-bit code, in units of its block's largest absolute value.
CODES = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(
        sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3)
    ),
}  # fmt: skip

# How many consecutive values, or quantised scales, share a scale; a block may span several rows.
_BLOCK_SIZES = 32, 64, 128, 256, 512, 1024, 2048, 4096

# The tensors of a matrix with 4 bits, besides its weight and its quant_state.
_OF_4_BITS = "absmax", "quant_map", "nested_absmax", "nested_quant_map"

_STATE_KEYS = (
    *("quant_type", "blocksize", "dtype", "shape"),
    *("nested_blocksize", "nested_dtype", "nested_offset"),
)
_AGAIN = "fetch the file again"


@dataclass(frozen=True)
class BitsAndBytes:
    """A quantization_config of bitsandbytes.

    `not_applied` names what bitsandbytes rounds and parallel_llama does not.
    """

    not_applied: tuple[str, ...]
    method: str = "bitsandbytes"


@dataclass(frozen=True)
class QuantState:
    """How a matrix with 4 bits is stored.

    Args:
        code: the key of CODES.
        block: the number of values that share a scale.
        nested_block: the number of quantised scales that share a scale; None if scales are float32.
        offset: the number that is added to quantised scales.
    """

    code: str
    block: int
    nested_block: int | None
    offset: float


def bitsandbytes_of(config: Fields) -> BitsAndBytes:
    """The quantisation that a quantization_config states. Raises: UsageError for a wrong type."""
    return BitsAndBytes(("activations",) if config.flag("load_in_8bit", False) else ())


def bitsandbytes_types(args: ModelArgs, tensors: Mapping[str, FileTensor]) -> dict[str, str]:
    """The types of an HF folder's quantised matrices, by Meta's names: int8 or a key of CODES.

    Raises: CheckpointError for a matrix with 4 bits without exactly one quant_state.
    """
    slices, types = stored_slices(args, "hf"), {}
    for param in parameters(args):
        stored_slice = slices[param.name]
        base, weight = stored_slice.name.removesuffix("weight"), tensors.get(stored_slice.name)
        if param.kind == "vector" or len(stored_slice.shape) != 2:
            continue
        codes = [code for code in CODES if base + QUANT_STATE + code in tensors]
        if codes or any(f"{base}weight.{suffix}" in tensors for suffix in _OF_4_BITS):
            if len(codes) != 1:
                raise CheckpointError(
                    f"{base + QUANT_STATE!r:.200}: needs exactly one tensor with this prefix and "
                    f"the suffix {' or '.join(CODES)}, and has {len(codes)}; {_AGAIN}"
                )
            if stored_slice.shape[1] % 2:
                raise CheckpointError(
                    f"{stored_slice.name!r:.200} has {stored_slice.shape[1]} inputs; the 4 bits "
                    "of bitsandbytes need an even number; use the unquantised model"
                )
            types[param.name] = codes[0]
        elif base + "SCB" in tensors or (weight is not None and weight.dtype == "I8"):
            types[param.name] = "int8"
    return types


def read_quant_state(
    path: Path, name: str, tensor: FileTensor, shape: tuple[int, ...]
) -> QuantState:
    """Reads the quant_state `name` of a matrix of this shape from a safetensors file.

    Raises: CheckpointError if it is damaged, or does not fit the matrix.
    """
    where = f"{path}: tensor {name!r:.200}"
    if tensor.dtype != "U8" or tensor.n_bytes > MAX_STATE_BYTES:
        raise CheckpointError(
            f"{where} has {tensor.n_bytes} bytes and the dtype {tensor.dtype}; it must have at "
            f"most {MAX_STATE_BYTES} bytes and the dtype U8; {_AGAIN}"
        )
    with open_file(path) as file:
        file.seek(tensor.offset)
        data = file.read(tensor.n_bytes)
    try:
        values = json.loads(data, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not JSON: {error}; {_AGAIN}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} is not a JSON object; {_AGAIN}")
    try:
        return _quant_state(Fields(values), name.rpartition("__")[2], shape)
    except UsageError as error:
        raise CheckpointError(f"{where}: {error}; {_AGAIN}") from error


def _quant_state(fields: Fields, code: str, shape: tuple[int, ...]) -> QuantState:
    fields.require_known(_STATE_KEYS)
    if (named := fields.string("quant_type")) != code:
        raise UsageError(f"quant_type={named[:80]!r}, expected {code!r}")
    if (file_shape := fields.integers("shape")) != shape:
        raise UsageError(f"shape={[*file_shape[:8]]}, expected {[*shape]} from config.json")
    is_nested = fields.has("nested_blocksize")
    if is_nested and (nested_dtype := fields.string("nested_dtype", "float32")) != "float32":
        raise UsageError(f"nested_dtype={nested_dtype[:80]!r} is not supported; float32 is")
    return QuantState(
        code,
        _block_size(fields, "blocksize"),
        _block_size(fields, "nested_blocksize") if is_nested else None,
        fields.number("nested_offset") if is_nested else 0.0,
    )


def _block_size(fields: Fields, key: str) -> int:
    if (size := fields.integer(key)) not in _BLOCK_SIZES:
        raise UsageError(f"{key}={size} is not supported; {', '.join(map(str, _BLOCK_SIZES))} are")
    return size
