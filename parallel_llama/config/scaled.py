"""Finds the matrices of an HF folder that are integers or 8- or 4-bit floats with scales.

config.json says which scales a matrix has; `checkpoint.scaled` decodes the weights.

Source: compressed-tensors 0.20, its quant_config.py, quant_args.py and match.py, and for actorder
0.12; transformers 5.24, FineGrainedFP8Config, FbgemmFp8Config and Mxfp4Config.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from parallel_llama.config.inputs import InputScheme, fbgemm_inputs, fp8_inputs, input_scheme
from parallel_llama.config.patterns import compiled_pattern, repeats
from parallel_llama.dtypes import ScaledFormat
from parallel_llama.errors import CheckpointError, UsageError, listed
from parallel_llama.families import family_of, parameters, stored_slices
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.stored_slices import StoredSlice
from parallel_llama.families.weights import Param
from parallel_llama.files.fields import Fields, shown
from parallel_llama.files.safetensors_header import FileTensor

# A matrix is quantised if it has one of these tensors, or a weight in one of BYTE_DTYPES.
MARKS = "weight_packed", "weight_scale", "weight_scale_inv"
BYTE_DTYPES = "F8_E4M3", "I8"

# Tensors beside the weights: scales and zero points of activations and of the KV cache.
# `config.inputs` reads input_scale, activation_scale and input_zero_point; the others are ignored.
BESIDE_WEIGHTS = re.compile(
    r"\.(input_scale(_ub)?|input_global_scale|input_zero_point|activation_scale|output_scale"
    r"|output_zero_point|(q|k|v|kv)_scale|[qkv]_zero_point)$"
)

# Targets of groups that state how attention rounds queries, keys and values: LlamaAttention, or
# re:.*self_attn$.
_ATTENTION = re.compile(r"Attention|attn\$?$")

_FORMATS: dict[str, dict[str, tuple[int, ...]]] = {  # by type of number: the numbers of bits
    "pack-quantized": {"int": (4, 8)},
    "float-quantized": {"float": (8,)},
    "int-quantized": {"int": (4, 8)},
    "naive-quantized": {"int": (4, 8), "float": (8,)},
    "nvfp4-pack-quantized": {"float": (4,)},
    "mxfp4-pack-quantized": {"float": (4,)},
}

# The suffixes of the tensors of a stacked weight of experts in MXFP4, and the inputs that share a
# scale.
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
MXFP4_INPUTS = 32

# The strategy and the size of a group of each format with floats of 4 bits.
_FP4 = {"nvfp4-pack-quantized": ("tensor_group", 16), "mxfp4-pack-quantized": ("group", 32)}
_MAX_REPEATING = 64  # patterns with repetitions; each runs on every module
_STRATEGIES = "tensor", "channel", "group", "block"

# Values of actorder, the order in which a program quantised the columns of a matrix; and whether
# the groups follow that order.
_ACTORDERS = {"": False, "weight": False, "static": False, "group": True, "dynamic": True}


@dataclass(frozen=True)
class Scheme:
    """How a matrix [out, in] is stored.

    Args:
        is_float: whether it holds floats, e4m3 or (with 4 bits) e2m1; else integers.
        n_bits: bits of an integer or a float.
        block: rows and columns that share a scale; 0 stands for all.
        is_packed: whether several integers share a 32-bit word, without a sign.
        has_zeros: whether scales have zero points.
        scale: the suffix of the scale's name.
        any_order: whether weight_g_idx names the group of each input; else the inputs of a group
            are consecutive.
        inputs: how the inputs are rounded, if config.json asks for it.
    """

    is_float: bool
    n_bits: int
    block: tuple[int, int]
    is_packed: bool = False
    has_zeros: bool = False
    scale: str = "weight_scale"
    any_order: bool = False
    inputs: InputScheme | None = None

    @property
    def is_fp4(self) -> bool:
        return self.is_float and self.n_bits == 4

    @property
    def has_global_scale(self) -> bool:
        """Whether weights are 4-bit floats with e4m3 scales, which are divided by one number."""
        return self.is_fp4 and self.block == (1, 16)

    @property
    def name(self) -> str:
        if self.is_fp4:
            return "nvfp4" if self.has_global_scale else "mxfp4"
        order = " with actorder" if self.any_order else ""
        return ("fp8" if self.is_float else f"int{self.n_bits}") + order

    @property
    def has_groups(self) -> bool:
        """Whether the inputs of a row are in groups. Their order may be stated by weight_g_idx."""
        return self.block[0] == 1 and self.block[1] > 0 and not self.is_fp4


@dataclass(frozen=True)
class Schemes:
    """The schemes of an HF folder's matrices.

    Args:
        method: the quant_method.
        groups: pairs of a target (a name, pattern or class) and its scheme. If several targets of
            one kind match a module, the first applies.
        ignored: modules that are not quantised, by name, by class, or as a pattern that begins
            with re:.
        not_applied: what config.json says is quantised but is not rounded here: activations (inputs
            of matrices in an unsupported format), outputs of layers, the KV cache.
    """

    method: str
    groups: tuple[tuple[str, Scheme], ...]
    ignored: tuple[str, ...] = ()
    not_applied: tuple[str, ...] = ()

    @property
    def rounds_inputs(self) -> bool:
        """Whether the inputs of at least one matrix are rounded."""
        return any(scheme.inputs is not None for _, scheme in self.groups)

    def of(self, module: str, is_embedding: bool = False) -> Scheme | None:
        """The scheme of a module's weight; None if it is not quantised.

        A target that is the module's name comes first, then a pattern, then a class.
        """
        kind = "Embedding" if is_embedding else "Linear"
        if any(_matches(module, target) or target == kind for target in self.ignored):
            return None
        by_name = [scheme for target, scheme in self.groups if target == module]
        by_pattern = [scheme for target, scheme in self.groups if _matches(module, target)]
        by_class = [scheme for target, scheme in self.groups if target == kind]
        return next(iter((*by_name, *by_pattern, *by_class)), None)


def scaled_weights(
    schemes: Schemes, args: ModelArgs, tensors: Mapping[str, FileTensor]
) -> dict[str, Scheme]:
    """The schemes of an HF folder's quantised matrices, by Meta's names, given its `tensors`.

    The tensors decide whether a matrix is quantised: a target without scales is read unchanged.

    Raises: CheckpointError for a quantised matrix without a scheme.
    """
    slices, schemes_by_name = stored_slices(args, "hf"), {}
    for param in parameters(args):
        stored_slice = slices[param.name]
        base, weight = stored_slice.name.removesuffix("weight"), tensors.get(stored_slice.name)
        is_marked = any(base + mark in tensors for mark in MARKS)
        is_scaled = is_marked or (weight is not None and weight.dtype in BYTE_DTYPES)
        if param.kind == "vector" or len(stored_slice.shape) != 2 or not is_scaled:
            continue
        scheme = schemes.of(base[:-1], param.name == "tok_embeddings.weight")
        if scheme is None:
            raise CheckpointError(
                f"{stored_slice.name!r:.200} is quantised, and config.json lists its layer as "
                f"ignored or in no group; use the config.json that belongs to the weights"
            )
        if schemes.method == "fp8" and base + "weight_scale" in tensors:
            # AutoFP8 writes one scale for each matrix.
            inputs = scheme.inputs and scheme.inputs.by_token
            scheme = replace(scheme, block=(0, 0), scale="weight_scale", inputs=inputs)
        has_zeros = not scheme.is_packed and base + "weight_zero_point" in tensors
        schemes_by_name[param.name] = replace(
            scheme,
            has_zeros=scheme.has_zeros or has_zeros,
            # Matrices that were quantised without actorder have no weight_g_idx.
            any_order=scheme.any_order and base + "weight_g_idx" in tensors,
        )
    return schemes_by_name


def mxfp4_weights(args: ModelArgs, tensors: Collection[str]) -> list[str]:
    """Meta's names of the experts' matrices that an HF folder stores in MXFP4, given its tensors.

    The tensors decide: modules_to_not_convert is not needed.

    Raises: CheckpointError for a number of inputs that is not a multiple of MXFP4_INPUTS.
    """
    slices, names = stored_slices(args, "hf"), []
    for param in parameters(args):
        stored_slice = slices[param.name]
        marks = (stored_slice.name + end for end in (MXFP4_BLOCKS, MXFP4_SCALES))
        if not stored_slice.is_transposed or not any(mark in tensors for mark in marks):
            continue
        if (n_inputs := param.shape[1]) % MXFP4_INPUTS:
            raise CheckpointError(
                f"{stored_slice.name + MXFP4_BLOCKS!r:.200}: a matrix with {n_inputs} inputs "
                f"cannot have MXFP4, which needs a multiple of {MXFP4_INPUTS}; use the config.json "
                "that belongs to the weights"
            )
        names.append(param.name)
    return names


# The dtypes of scales in HF folders, by the names that `ScaledFormat` has for them.
_SCALES: dict[str, Any] = {
    **{name: name for name in ("F32", "BF16", "F16", "F8_E4M3", "U8")},
    "F8_E8M0": "U8",
}


def scaled_format(
    param: Param, scheme: Scheme, stored_slice: StoredSlice, args: ModelArgs, scale: FileTensor
) -> ScaledFormat | None:
    """The format in which a native folder stores a matrix of an HF folder without decoding it.

    Args:
        stored_slice: where the HF folder stores the matrix.
        scale: the tensor with its scales.

    Returns: None if the matrix must be decoded.
    """
    if scheme.is_packed or scheme.any_order or scale.dtype not in _SCALES:
        return None
    numbers: Any = "e2m1" if scheme.is_fp4 else "e4m3" if scheme.is_float else "int8"
    height, width = scheme.block
    if height > 1 and not _has_own_blocks(param, stored_slice, args, height):
        height = 1
    return ScaledFormat(numbers, (height, width), _SCALES[scale.dtype], scheme.has_zeros)


def _has_own_blocks(param: Param, stored_slice: StoredSlice, args: ModelArgs, height: int) -> bool:
    """Whether blocks of `height` rows of the stored tensor are also blocks of rows of the matrix.

    They are not if the rows of a head are reordered, as for rotary orders other than half-split, or
    if a block begins in one weight of the stored tensor and ends in another.
    """
    is_moved = param.axis in ("heads", "kv_heads") and param.dim == 0
    is_in_order = not is_moved or family_of(args).rotary_order["hf"] == "half"
    is_one_run = stored_slice.run == param.shape[0]
    return is_in_order and is_one_run and stored_slice.first % height == 0


def _compressed_tensors(config: Fields) -> Schemes:
    if config.mapping("transform_config") not in ({}, {"config_groups": {}}):
        raise UsageError("has 'transform_config': rotations of weights are not supported")
    sparsity = Fields(config.mapping("sparsity_config")).string("format", "dense")
    if sparsity != "dense":
        raise UsageError(f"sparsity_config has the format {sparsity[:80]!r}; dense is supported")
    default_format, groups, not_applied = config.string("format"), [], set()
    for name, values in config.mapping("config_groups").items():
        if not isinstance(values, dict):
            raise UsageError(f"config_groups: {shown(name)} must be an object with targets")
        group = Fields(values)
        if not group.has("weights") and any(map(_ATTENTION.search, group.strings("targets"))):
            not_applied.add("the KV cache")  # keys and values, and queries
            continue
        inputs = None
        if group.has("input_activations"):
            inputs = input_scheme(Fields(group.mapping("input_activations")))
            if inputs is None or not group.has("weights"):
                not_applied.add("activations")
        if group.has("output_activations"):
            not_applied.add("outputs of layers")
        if not group.has("weights"):
            continue
        scheme = _scheme(group.string("format", default_format), Fields(group.mapping("weights")))
        scheme = replace(scheme, inputs=inputs)
        groups += [(_target(target), scheme) for target in group.strings("targets")]
    if config.has("kv_cache_scheme"):
        not_applied.add("the KV cache")
    if not groups and "the KV cache" not in not_applied:
        raise UsageError(
            "config_groups has no group with weights, and there is no kv_cache_scheme; at least "
            "one is needed"
        )
    ignored = tuple(map(_target, config.strings("ignore")))
    targets = (*(target for target, _ in groups), *ignored)
    if sum(repeats(each) for each in targets if each.startswith("re:")) > _MAX_REPEATING:
        raise UsageError(
            f"targets and ignore have more than {_MAX_REPEATING} patterns with repetitions; name "
            "the modules instead"
        )
    return Schemes("compressed-tensors", tuple(groups), ignored, tuple(sorted(not_applied)))


def _scheme(form: str, weights: Fields) -> Scheme:
    """The scheme of a group's weights in one of _FORMATS."""
    if form not in _FORMATS:
        raise UsageError(f"the format {form[:80]!r} is not supported; {', '.join(_FORMATS)} are")
    kind, n_bits = weights.string("type", "int").lower(), weights.integer("num_bits", 8)
    if n_bits not in _FORMATS[form].get(kind, ()):
        can = [f"{name} with {n} bits" for name, widths in _FORMATS[form].items() for n in widths]
        raise UsageError(
            f"{form} with type={kind[:80]!r} and num_bits={n_bits} is not supported; supported: "
            f"{listed(can)}"
        )
    if weights.flag("dynamic", False):
        raise UsageError("weights have dynamic=true; they must have stored scales")
    has_zeros = not weights.flag("symmetric", True)
    if form in _FP4:
        return _fp4_scheme(form, weights, has_zeros)
    block, is_packed = _block(weights), form == "pack-quantized"
    if is_packed and block[0] != 1 and (has_zeros or block[0]):
        raise UsageError(
            f"{form} with strategy={weights.string('strategy', '')[:80]!r} and symmetric="
            f"{str(not has_zeros).lower()} is not supported; 'group' and 'channel' are, and "
            "'tensor' without zero points"
        )
    scheme = Scheme(kind == "float", n_bits, block, is_packed, has_zeros)
    return replace(scheme, any_order=_any_order(weights) and scheme.has_groups)


def _any_order(weights: Fields) -> bool:
    """Whether inputs of a group need not be consecutive."""
    if isinstance(weights.values.get("actorder"), bool):
        return weights.flag("actorder", False)
    order = weights.string("actorder", "").lower()
    if order not in _ACTORDERS:
        supported = ", ".join(filter(None, _ACTORDERS))
        raise UsageError(f"actorder={order[:80]!r} is not supported; {supported} are")
    return _ACTORDERS[order]


def _fp4_scheme(form: str, weights: Fields, has_zeros: bool) -> Scheme:
    strategy, size = _FP4[form]
    file_strategy = weights.string("strategy", strategy)
    n_inputs = weights.integer("group_size", size)
    if has_zeros or (file_strategy, n_inputs) != (strategy, size):
        raise UsageError(
            f"{form} with strategy={file_strategy[:80]!r}, group_size={n_inputs} and symmetric="
            f"{str(not has_zeros).lower()} is not supported; {strategy!r}, {size} and true are"
        )
    return Scheme(True, 4, (1, size))


def _block(weights: Fields) -> tuple[int, int]:
    size = weights.integer("group_size", 0)
    inferred = "group" if size > 0 else "channel" if size == -1 else "tensor"
    strategy = weights.string("strategy", inferred)
    if strategy == "block":
        structure = weights.values.get("block_structure")
        if isinstance(structure, str):  # the older form: 128x128
            sides = [int(side) if side.isdecimal() else 0 for side in structure[:40].split("x")]
            structure = sides
        return _sides("block_structure", structure)
    if strategy not in _STRATEGIES:
        raise UsageError(
            f"strategy={strategy[:80]!r} is not supported; {', '.join(_STRATEGIES)} are"
        )
    if strategy == "group" and size < 1:
        raise UsageError(f"strategy='group' with group_size={size}; it must be at least 1")
    return {"tensor": (0, 0), "channel": (1, 0), "group": (1, size)}[strategy]


def _sides(key: str, value: Any) -> tuple[int, int]:
    sides = Fields({key: value}).integers(key)
    if len(sides) != 2 or min(sides) < 1:
        raise UsageError(f"{key}={shown(value)}: must be the rows and columns of a block")
    return sides[0], sides[1]


def _fp8(config: Fields) -> Schemes:
    if (experts := config.string("expert_dtype", "fp8")) != "fp8":
        raise UsageError(f"expert_dtype={experts[:80]!r} is not supported; fp8 is")
    size = config.values.get("weight_block_size", [128, 128])
    block = (0, 0) if size is None else _sides("weight_block_size", size)
    inputs = fp8_inputs(config, block[1])
    schemes = _all_matrices("fp8", Scheme(True, 8, block, scale="weight_scale_inv", inputs=inputs))
    if config.has("kv_cache_scheme"):
        schemes = replace(schemes, not_applied=(*schemes.not_applied, "the KV cache"))
    return schemes


def _fbgemm_fp8(config: Fields) -> Schemes:
    return _all_matrices("fbgemm_fp8", Scheme(True, 8, (1, 0), inputs=fbgemm_inputs(config)))


def _mxfp4(_: Fields) -> Schemes:
    return Schemes("mxfp4", ())


def _all_matrices(method: str, scheme: Scheme) -> Schemes:
    """One scheme for every matrix that has scales, so lists of ignored modules are not needed."""
    groups = (("Linear", scheme), ("Embedding", scheme))
    return Schemes(method, groups, not_applied=() if scheme.inputs else ("activations",))


# By quant_method.
METHODS = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "mxfp4": _mxfp4,
}


def _target(target: str) -> str:
    """The target. Raises: UsageError for a pattern that `compiled_pattern` refuses."""
    if target.startswith("re:"):
        compiled_pattern(target.removeprefix("re:"))
    return target


def _matches(module: str, target: str) -> bool:
    pattern = target.removeprefix("re:")
    return target == module or (pattern != target and re.match(pattern, module) is not None)
