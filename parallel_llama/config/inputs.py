"""Reads from config.json how the inputs of quantised matrices are rounded.

The scale of a token's inputs never depends on other tokens. Scales that are not stored are computed
for each token, even where compressed-tensors computes one scale for all tokens of a batch.

Source: compressed-tensors 0.20, its quant_args.py and helpers.py; transformers 5.24,
FineGrainedFP8Config and FbgemmFp8Config; FBGEMM, quantize_fp8_per_row.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from parallel_llama.dtypes import InputFormat
from parallel_llama.errors import CheckpointError, DamagedWeights, UsageError
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.fields import Fields
from parallel_llama.files.safetensors_header import FileTensor
from parallel_llama.files.scalar import read_scalar

# The names of the tensor with the scale of all inputs, and of the tensor with its zero point.
_SCALES = "input_scale", "activation_scale"
_ZERO = "input_zero_point"

# Matrices with the same value run in one product, or in one call for all experts.
_SHARED = {"wq": "qkv", "wk": "qkv", "wv": "qkv", "w1": "w13", "w3": "w13", "w2": "w2"}

# The tensors of an HF folder by their full names, with their files.
Located = Mapping[str, tuple[Path, FileTensor]]


@dataclass(frozen=True)
class InputScheme:
    """The format of inputs, before a stored scale is known.

    Args:
        form: the format; without the scale if the scale is stored.
        is_stored: whether the files store one scale for all inputs of a matrix.
    """

    form: InputFormat
    is_stored: bool = False

    @property
    def by_token(self) -> "InputScheme":
        """The scheme with one scale for all inputs of a token."""
        return replace(self, form=replace(self.form, group=0))

    def of(self, base: str, tensors: Located) -> InputFormat:
        """The format of a matrix's inputs. The names of the matrix's tensors begin with `base`.

        Raises: CheckpointError if its scale is missing or is not a number; DamagedWeights if the
        scale cannot divide inputs.
        """
        if not self.is_stored:
            return self.form
        name = next((base + end for end in _SCALES if base + end in tensors), base + _SCALES[0])
        scale = _number(name, tensors)
        if not math.isfinite(scale) or scale == 0:
            raise DamagedWeights(
                f"{name!r:.200} is {scale:g}, which cannot divide inputs; the weights are damaged: "
                "fetch them again"
            )
        zero = _number(base + _ZERO, tensors) if self.form.has_zeros else 0.0
        if not -128 <= zero <= 127:
            raise DamagedWeights(
                f"{base + _ZERO!r:.200} is {zero:g}, expected -128 to 127; the weights are "
                "damaged: fetch them again"
            )
        return replace(self.form, scale=scale, zero=int(zero))


def input_scheme(activations: Fields) -> InputScheme | None:
    """The scheme of input_activations of compressed-tensors; None if it is not supported."""
    kind = activations.string("type", "int").lower()
    has_zeros = not activations.flag("symmetric", True)
    size, dynamic = activations.integer("group_size", 0), activations.values.get("dynamic") or False
    strategy = activations.string("strategy", "group" if size > 0 else "tensor")
    if kind not in ("int", "float") or (kind == "float" and has_zeros):
        return None
    if activations.integer("num_bits", 8) != 8 or activations.has("scale_dtype"):
        return None
    form = InputFormat("e4m3" if kind == "float" else "int8", has_zeros=has_zeros)
    if dynamic is False and strategy == "tensor":
        return InputScheme(form, is_stored=True)
    if dynamic is True and strategy in ("token", "tensor"):
        return InputScheme(form)
    if dynamic is True and strategy == "group" and size > 0:
        return InputScheme(replace(form, group=size))
    return None


def fp8_inputs(config: Fields, width: int) -> InputScheme | None:
    """The scheme of quant_method fp8; None if it is not supported.

    `width` is the number of columns of a block of weights, 0 for all.
    """
    scheme = config.string("activation_scheme", "dynamic").lower()
    if scheme not in ("dynamic", "static") or config.string("scale_fmt", "float") != "float":
        return None
    if scheme == "static":
        return InputScheme(InputFormat("e4m3"), is_stored=True)
    return InputScheme(InputFormat("e4m3", width))


def fbgemm_inputs(config: Fields) -> InputScheme:
    """The scheme of quant_method fbgemm_fp8."""
    if (upper_bound := config.number("activation_scale_ub", 1200.0)) <= 0:
        raise UsageError(f"activation_scale_ub={upper_bound:g} must be positive")
    return InputScheme(InputFormat("e4m3", most=upper_bound))


def why_differing_inputs(args: ModelArgs, inputs: Mapping[str, InputFormat]) -> str | None:
    """Why decode steps run operator by operator on a CPU, if each matrix rounds its own inputs.

    Returns: None if all matrices with the same input round it alike.
    """
    formats: dict[tuple[str, str], set[InputFormat | None]] = {}
    for param in parameters(args):
        path, leaf = param.name.rsplit(".", 2)[:2]
        if param.kind == "matrix" and leaf in _SHARED:
            layer, _, _ = path.partition(".experts.")
            formats.setdefault((layer, _SHARED[leaf]), set()).add(inputs.get(param.name))
    if all(len(rounding) == 1 for rounding in formats.values()):
        return None
    return (
        "decode steps run operator by operator: matrices that share an input, or the experts of a "
        "layer, have different scales of inputs, so each matrix rounds its own inputs"
    )


def _number(name: str, tensors: Located) -> float:
    if name not in tensors:
        raise CheckpointError(
            f"{name!r:.200} is missing, and config.json states that inputs have a stored scale; "
            "use the config.json that belongs to the weights"
        )
    return read_scalar(*tensors[name])
