"""Finds which matrices a model's files store quantised, and in which formats.

It reads headers and configuration files only, without torch; `checkpoint.quantised` decodes the
weights.

Source: the layers of AutoGPTQ 0.7 and AutoAWQ 0.2; transformers 5.23, quantization_config.py;
`dynamic` in the README of GPTQModel 7.7.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallel_llama.config.bitsandbytes import BitsAndBytes, bitsandbytes_of, bitsandbytes_types
from parallel_llama.config.native import native_inputs, native_scaled
from parallel_llama.config.patterns import compiled_pattern
from parallel_llama.config.scaled import (
    METHODS,
    MXFP4_INPUTS,
    Scheme,
    Schemes,
    mxfp4_weights,
    scaled_format,
    scaled_weights,
)
from parallel_llama.dtypes import (
    GGUF_QUANTS,
    QUANT_FORMATS,
    QUANT_GROUP_SIZE,
    STORED,
    InputFormat,
    MatrixFormat,
    QuantFormat,
    ScaledFormat,
)
from parallel_llama.errors import CheckpointError, UsageError, listed
from parallel_llama.families import family_of, parameters, stored_slices
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.fields import Fields, naming, read_json_object
from parallel_llama.files.gguf_header import read_split_header
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.files.safetensors_header import FileTensor, read_safetensors_header

# GPTQ, AWQ and 4 bits of compressed-tensors: a weight is scale * (integer - zero point). The zero
# points are stored as the integers that multiply the minima, see `min_factors`.
HF_QUANTS = {
    size: QuantFormat(4, has_min=True, block=size, min_factors=True) for size in (32, 64, 128)
}

# Integers without zero points.
_INTEGERS: dict[int, QuantFormat] = {4: QuantFormat(4), 8: QuantFormat(8)}

# Formats of a native folder that run as stored, by their names in native.json.
NATIVE_QUANTS = {
    form.name: form
    for form in (
        *(QuantFormat(8), QuantFormat(8, has_min=True)),
        *GGUF_QUANTS.values(),
        *HF_QUANTS.values(),
        *_INTEGERS.values(),
        *QUANT_FORMATS.values(),
    )
}

# By method: the numbers of bits of its integers.
_BITS = {"gptq": (2, 4, 8), "awq": (4,)}

# By method: its formats, the default first, and the number to add to each stored zero point.
_ZERO_OFFSETS = {"gptq": {"gptq": 1, "gptq_v2": 0}, "awq": {"gemm": 0}}
_FORMAT_KEYS = {
    "gptq": ("checkpoint_format", "format"),
    "awq": ("version", "format", "checkpoint_format"),
}

# Keys with which programs other than transformers mark quantised weights.
_OTHER_PROGRAMS = {"compression_config": "compressed-tensors", "quantization": "MLX"}

_INSTEAD = "use the unquantised model, or a GGUF file of it"
_METHODS = (*_ZERO_OFFSETS, *METHODS, "bitsandbytes")
_SUPPORTED = f"supported: {', '.join(map(repr, _METHODS))}"


@dataclass(frozen=True)
class Packing:
    """How an HF folder packs its quantised matrices.

    A 32-bit word holds consecutive inputs of one output in GPTQ, and eight outputs of one input in
    AWQ.

    Args:
        method: gptq or awq.
        form: the format in which matrices run as stored; None to decode them.
        zero_offset: the number that was subtracted from zero points before they were stored.
        n_bits: bits of an integer.
        group_size: inputs that share a scale and a zero point; 0 for all inputs of an output.
        any_order: whether g_idx names the group of each input; else the inputs of a group are
            consecutive.
        rules: the rules of `dynamic` that override settings: the text of each, the pattern of its
            module names, and the settings of these modules.
    """

    method: str
    form: QuantFormat | None
    zero_offset: int
    n_bits: int
    group_size: int
    any_order: bool = False
    rules: tuple[tuple[str, re.Pattern[str], Fields], ...] = ()

    @property
    def per_word(self) -> int:
        return 32 // self.n_bits

    def of_module(self, name: str) -> "Packing":
        """The packing of a module; the first rule that matches the start of its name applies.

        Raises: CheckpointError if the settings of that rule are not supported.
        """
        for text, pattern, settings in self.rules:
            if pattern.match(name):
                try:
                    return _packing(self.method, settings)
                except UsageError as error:
                    raise CheckpointError(
                        f"{name}: by the rule {text!r:.200} of dynamic in quantization_config: "
                        f"{error}; {_INSTEAD}"
                    ) from error
        return self


def gguf_formats(files: ModelFiles, args: ModelArgs) -> dict[str, MatrixFormat]:
    """The formats of the matrices that a GGUF model has in `GGUF_QUANTS`, by Meta's names.

    Raises: CheckpointError if a file is damaged.
    """
    kinds = _gguf_types(files, args)
    return {name: GGUF_QUANTS[kind] for name, kind in kinds.items() if kind in GGUF_QUANTS}


def decoded_types(files: ModelFiles, args: ModelArgs) -> list[str]:
    """The quantised types of a GGUF model's matrices that are not in `GGUF_QUANTS`, sorted.

    Raises: CheckpointError if a file is damaged.
    """
    return sorted({*_gguf_types(files, args).values()} - {*GGUF_QUANTS, *STORED})


def _gguf_types(files: ModelFiles, args: ModelArgs) -> dict[str, str]:
    """The types of the matrices of a GGUF model, by Meta's names."""
    types = {name: t.dtype for name, t in read_split_header(files.weights).tensors.items()}
    slices = stored_slices(args, "gguf")
    stored_names = {p.name: slices[p.name].name for p in parameters(args) if p.kind != "vector"}
    return {name: types[stored] for name, stored in stored_names.items() if stored in types}


def native_folder_formats(files: ModelFiles, args: ModelArgs) -> dict[str, MatrixFormat]:
    """The formats of a native folder's quantised matrices, by Meta's names.

    Raises: CheckpointError if native.json is damaged.
    """
    values = read_json_object(files.config)
    with naming(files.config, CheckpointError):
        return {**native_formats(values, args)}


def native_folder_scaled(files: ModelFiles, args: ModelArgs) -> dict[str, ScaledFormat]:
    """The formats of a native folder's matrices that are decoded while loading, by Meta's names.

    Raises: CheckpointError if native.json is damaged.
    """
    values = read_json_object(files.config)
    with naming(files.config, CheckpointError):
        return scaled_of(values, args)


def native_folder_inputs(files: ModelFiles, args: ModelArgs) -> dict[str, InputFormat]:
    """The formats of inputs that a native folder states, by Meta's names of the matrices.

    Raises: CheckpointError if native.json is damaged.
    """
    values = read_json_object(files.config)
    with naming(files.config, CheckpointError):
        return native_inputs(values, _matrices(args))


def native_decoded_types(files: ModelFiles, args: ModelArgs) -> list[str]:
    """The types of a native folder's matrices that are decoded while loading, sorted.

    Raises: CheckpointError if native.json is damaged.
    """
    return sorted({form.kind for form in native_folder_scaled(files, args).values()})


def scaled_of(values: Mapping[str, Any], args: ModelArgs) -> dict[str, ScaledFormat]:
    """The formats of scaled weights that native.json states, by Meta's names.

    Raises: UsageError as `native_scaled`, and for a matrix that `quantised` has too.
    """
    formats = native_scaled(values, _matrices(args))
    if twice := [repr(name) for name in Fields(values).mapping("quantised") if name in formats]:
        raise UsageError(f"quantised and scaled: both have {listed(twice)}; write the folder again")
    return formats


def _matrices(args: ModelArgs) -> list[str]:
    return [p.name for p in parameters(args) if p.kind != "vector" and len(p.shape) == 2]


def native_formats(values: Mapping[str, Any], args: ModelArgs) -> dict[str, QuantFormat]:
    """The formats that native.json states, by Meta's names.

    Raises: UsageError for an unknown format, and for a name that is not a matrix of the model.
    """
    names_of_formats = Fields(values).mapping("quantised")
    matrices = {
        param.name
        for param in parameters(args)
        if param.kind != "vector" and param.shape[1] % QUANT_GROUP_SIZE == 0
    }
    if strange := [repr(name[:80]) for name in names_of_formats if name not in matrices]:
        raise UsageError(
            f"quantised: {listed(strange)}: not a matrix of the model with a multiple of "
            f"{QUANT_GROUP_SIZE} inputs"
        )
    unknown = {str(form)[:80] for form in names_of_formats.values() if form not in [*NATIVE_QUANTS]}
    if unknown:
        raise UsageError(
            f"quantised: the format {listed(sorted(unknown))} is not supported; "
            f"{', '.join(NATIVE_QUANTS)} are"
        )
    return {name: NATIVE_QUANTS[form] for name, form in names_of_formats.items()}


def hf_formats(files: ModelFiles, args: ModelArgs) -> dict[str, MatrixFormat]:
    """The formats of an HF folder's quantised matrices, by Meta's names.

    Raises: CheckpointError as `hf_packing`, or if a file is damaged.
    """
    packing = hf_packing(files)
    if isinstance(packing, Packing):
        packings = packed_weights(args, _tensors(files, args), packing)
        return {name: own.form for name, own in packings.items() if own.form is not None}
    if isinstance(packing, Schemes):
        forms, _ = _scaled_forms(packing, files, args)
        return dict(forms)
    return {}


def hf_scaled_formats(files: ModelFiles, args: ModelArgs) -> dict[str, ScaledFormat]:
    """The formats, by Meta's names, of decoded matrices that a native folder stores as they are.

    Raises: CheckpointError as `hf_packing`, or if a file is damaged.
    """
    packing = hf_packing(files)
    if not isinstance(packing, Schemes):
        return {}
    slices, tensors = stored_slices(args, "hf"), _tensors(files, args)
    _, decoded = _scaled_forms(packing, files, args)
    formats = {}
    for param in parameters(args):
        if (scheme := decoded.get(param.name)) is not None:
            stored_slice = slices[param.name]
            scale = tensors.get(stored_slice.name.removesuffix("weight") + scheme.scale)
            if scale and (form := scaled_format(param, scheme, stored_slice, args, scale)):
                formats[param.name] = form
    if packing.method == "mxfp4":
        mxfp4 = ScaledFormat("e2m1", (1, MXFP4_INPUTS), "U8")
        formats |= dict.fromkeys(mxfp4_weights(args, tensors), mxfp4)
    return formats


def hf_decoded_types(files: ModelFiles, args: ModelArgs) -> list[str]:
    """The quantised types of an HF folder's matrices that do not stay as stored, sorted.

    Raises: CheckpointError as `hf_packing`, or if a file is damaged.
    """
    packing = hf_packing(files)
    if isinstance(packing, BitsAndBytes):
        return sorted({*bitsandbytes_types(args, _tensors(files, args)).values()})
    if isinstance(packing, Packing):
        packings = packed_weights(args, _tensors(files, args), packing).values()
        return sorted({_decoded_name(own) for own in packings if own.form is None})
    if not isinstance(packing, Schemes):
        return []
    _, decoded = _scaled_forms(packing, files, args)
    types = {scheme.name for scheme in decoded.values()}
    if packing.method == "mxfp4" and mxfp4_weights(args, _tensors(files, args)):
        types.add("mxfp4")
    return sorted(types)


def _decoded_name(packing: Packing) -> str:
    details = " with desc_act" if packing.any_order else ""
    if not details and packing.n_bits == 4:
        details = f" in groups of {packing.group_size}" if packing.group_size else " by row"
    return f"{packing.method.upper()} int{packing.n_bits}{details}"


def _scaled_forms(
    schemes: Schemes, files: ModelFiles, args: ModelArgs
) -> tuple[dict[str, QuantFormat], dict[str, Scheme]]:
    """The matrices that can stay as stored, and those that must be decoded, by Meta's names."""
    slices, tensors = stored_slices(args, "hf"), _tensors(files, args)
    stored, decoded = {}, {}
    for name, scheme in scaled_weights(schemes, args, tensors).items():
        stored_slice = slices[name]
        scale = tensors.get(stored_slice.name.removesuffix("weight") + scheme.scale)
        form = stored_form(scheme, stored_slice.shape[1])
        if form is not None and scale is not None and is_kept(scale):
            stored[name] = form
        else:
            decoded[name] = scheme
    return stored, decoded


def is_kept(scale: FileTensor) -> bool:
    """Whether a matrix can stay as stored with scales of this dtype, which become float16."""
    return scale.dtype in ("F16", "BF16")


def stored_form(scheme: Scheme, n_inputs: int) -> QuantFormat | None:
    """The format in which a matrix stays as stored if its scales have 16 bits; None to decode it.

    fp8 is decoded, because a CPU multiplies fp8 more slowly than the decoded values.
    """
    height, width = scheme.block
    if scheme.is_float or n_inputs % QUANT_GROUP_SIZE or width % QUANT_GROUP_SIZE:
        return None
    if scheme.any_order:
        return None
    if scheme.is_packed and scheme.n_bits == 4 and height == 1 and width in HF_QUANTS:
        return HF_QUANTS[width]
    # These formats have a scale per group, so a scale of several groups is repeated.
    is_simple = not scheme.has_zeros and (scheme.is_packed or scheme.n_bits == 8)
    return _INTEGERS[scheme.n_bits] if is_simple else None


def hf_inputs(files: ModelFiles, args: ModelArgs) -> dict[str, InputFormat]:
    """The formats of inputs that config.json asks to round, by Meta's names of the matrices.

    The inputs of the embedding are token ids, which are not rounded.

    Raises: CheckpointError as `hf_packing`; both errors of `InputScheme.of`.
    """
    packing = hf_packing(files)
    if not isinstance(packing, Schemes) or not packing.rounds_inputs:
        return {}
    slices, located = stored_slices(args, "hf"), located_tensors(files, args)
    return {
        name: scheme.inputs.of(slices[name].name.removesuffix("weight"), located)
        for name, scheme in scaled_weights(packing, args, _tensors(files, args)).items()
        if scheme.inputs is not None and name != "tok_embeddings.weight"
    }


def hf_not_applied(files: ModelFiles) -> tuple[str, ...]:
    """What an HF folder's config.json says is quantised, but is not rounded here.

    Raises: CheckpointError as `hf_packing`.
    """
    packing = hf_packing(files)
    return packing.not_applied if isinstance(packing, Schemes | BitsAndBytes) else ()


def _tensors(files: ModelFiles, args: ModelArgs) -> dict[str, FileTensor]:
    """The tensors of an HF folder by full name."""
    return {name: tensor for name, (_, tensor) in located_tensors(files, args).items()}


def located_tensors(files: ModelFiles, args: ModelArgs) -> dict[str, tuple[Path, FileTensor]]:
    """The tensors of an HF folder by full name, with their files."""
    family = family_of(args)
    return {
        family.hf_name(name): (path, tensor)
        for path in files.weights
        for name, tensor in read_safetensors_header(path).items()
    }


def hf_packing(files: ModelFiles) -> Packing | Schemes | BitsAndBytes | None:
    """How an HF folder packs its quantised matrices, or None if config.json names no quantisation.

    Raises: CheckpointError if the quantisation is not supported, or not in safetensors files.
    """
    values = read_json_object(files.config)
    with naming(files.config, CheckpointError):
        packing = packing_of(values)
    pickled = next((path for path in files.weights if path.suffix != ".safetensors"), None)
    if packing is not None and pickled is not None:
        raise CheckpointError(
            f"{pickled}: weights of {packing.method!r} are read from safetensors only; save them "
            "as safetensors"
        )
    return packing


def packing_of(values: Mapping[str, Any]) -> Packing | Schemes | BitsAndBytes | None:
    """How weights are packed according to config.json; None if it names no quantisation.

    quant_method 'gguf' counts as no quantisation: transformers saves weights that it read from a
    GGUF file as plain values.

    Raises: UsageError if the quantisation is not supported.
    """
    for key, program in _OTHER_PROGRAMS.items():
        if values.get(key):
            raise UsageError(
                f"has {key}, where {program} describes quantised weights; only "
                f"quantization_config is read; {_SUPPORTED}; {_INSTEAD}"
            )
    config = Fields(Fields(values).mapping("quantization_config"))
    method = config.string("quant_method", "unknown")
    if not config.values or method == "gguf":
        return None
    if method not in _METHODS:
        raise UsageError(
            f"quantization_config has quant_method={method[:80]!r}, which is not supported; "
            f"{_SUPPORTED}; {_INSTEAD}"
        )
    try:
        if method == "bitsandbytes":
            return bitsandbytes_of(config)
        if method in _ZERO_OFFSETS:
            return replace(_packing(method, config), rules=_rules(config))
        return METHODS[method](config)
    except UsageError as error:
        raise UsageError(f"quantization_config of {method!r}: {error}; {_INSTEAD}") from error


def packed_weights(
    args: ModelArgs, tensors: Collection[str], packing: Packing
) -> dict[str, Packing]:
    """The packings, by Meta's names, of an HF folder's matrices, given its tensor names `tensors`.

    The tensor names decide: programs differ in how they list unquantised layers in config.json.

    Raises: CheckpointError as `Packing.of_module`, and for a shape that is not supported.
    """
    slices, packed = stored_slices(args, "hf"), dict[str, Packing]()
    for param in parameters(args):
        stored_slice = slices[param.name]
        base = stored_slice.name.removesuffix("weight")
        if (
            param.kind == "vector"
            or len(stored_slice.shape) != 2
            or base + "qweight" not in tensors
        ):
            continue
        own = packing.of_module(base.removesuffix("."))
        (n_outputs, n_inputs), per_word = stored_slice.shape, own.per_word
        multiple = per_word if own.form is None else QUANT_GROUP_SIZE
        if n_inputs % multiple or n_outputs % per_word:
            raise CheckpointError(
                f"{base}qweight: has {n_outputs} outputs and {n_inputs} inputs; they must be "
                f"multiples of {per_word} and {multiple}; {_INSTEAD}"
            )
        packed[param.name] = own
    return packed


def _rules(config: Fields) -> tuple[tuple[str, re.Pattern[str], Fields], ...]:
    """The rules of `dynamic`, except for -: rules: the tensors show which matrices are plain."""
    dynamic = Fields(config.mapping("dynamic"))
    return tuple(
        (
            text,
            compiled_pattern(text.removeprefix("+:")),
            Fields({**config.values, **dynamic.mapping(text)}),
        )
        for text in dynamic.values
        if not text.startswith("-:")
    )


def _packing(method: str, config: Fields) -> Packing:
    if (n_bits := config.integer("bits")) not in _BITS[method]:
        supported = ", ".join(map(str, _BITS[method]))
        raise UsageError(
            f"bits={n_bits} is not supported; {supported} {'are' if ',' in supported else 'is'}"
        )
    size, any_order = config.integer("group_size", 128), config.flag("desc_act", False)
    is_stored = n_bits == 4 and size in HF_QUANTS and not any_order
    if method == "awq" and not is_stored:
        what = "desc_act=true" if any_order else f"group_size={size}"
        sizes = ", ".join(map(str, HF_QUANTS))
        raise UsageError(f"{what} is not supported; consecutive groups of {sizes} are")
    if size < 1 and size != -1:
        raise UsageError(f"group_size={size}: use at least 1, or -1 for all inputs")
    if not config.flag("zero_point", True):
        raise UsageError("zero_point=false is not supported; groups must have zero points")
    zero_offsets = _ZERO_OFFSETS[method]
    form = _form(method, config) or next(iter(zero_offsets))
    if form not in zero_offsets:
        raise UsageError(
            f"the format {form[:80]!r} is not supported; supported: {', '.join(zero_offsets)}"
        )
    run_form = HF_QUANTS[size] if is_stored else None
    return Packing(method, run_form, zero_offsets[form], n_bits, max(size, 0), any_order)


def _form(method: str, config: Fields) -> str:
    """The packing format that quantization_config names, or an empty string."""
    named = {config.string(key).lower() for key in _FORMAT_KEYS[method] if config.has(key)}
    if config.flag("is_marlin_format", False):
        named.add("marlin")
    if config.string("backend", "") == "llm-awq":  # a program with a format of its own
        named.add("llm-awq")
    if len(named) > 1:
        raise UsageError(f"names the formats {listed(map(repr, sorted(named)))}; name one")
    return next(iter(named), "")
