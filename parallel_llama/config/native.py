"""Reads and writes native.json, which states the fields of `ModelArgs` directly."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

import msgspec

from parallel_llama.dtypes import InputFormat, QuantFormat, ScaledFormat, StoredFormat
from parallel_llama.errors import UsageError, listed
from parallel_llama.families import FAMILIES
from parallel_llama.families.model_args import ModelArgs, RopeScaling, features_of
from parallel_llama.files.fields import Fields

# The versions of native folders, by the names that native.json gives them.
VERSIONS = {
    "parallel_llama native 1": 1,
    "parallel_llama native 2": 2,
    "parallel_llama native 3": 3,
}

# Formats that all versions store in the same way. Version 2 packs 5-bit integers and adds the other
# formats of QuantFormat; version 3 adds those of ScaledFormat and InputFormat.
_IN_EVERY_VERSION = {"int8", "int8 with minima", "int4", "int4 with minima", "fp8"}

_KEYS = {"format", "args", "units", "quantised", "scaled", "inputs"}
_INPUTS = {field.name: field.default for field in fields(InputFormat)}

# The largest number of rows or columns that share a scale; far above the size of any matrix.
_MAX_SIDE = 1 << 30

# The dtypes of scales by type of number.
_SCALES = {
    "e4m3": ("F32", "BF16", "F16"),
    "int8": ("F32", "BF16", "F16"),
    "e2m1": ("U8", "F8_E4M3"),
}
_ARGS = {field.name: field.default for field in fields(ModelArgs)}
_SCALING = {field.name for field in fields(RopeScaling)}

_FormatT = TypeVar("_FormatT", ScaledFormat, InputFormat)


def native_config(
    args: ModelArgs,
    units: Mapping[str, int],
    formats: Mapping[str, StoredFormat] | None = None,
    inputs: Mapping[str, InputFormat] | None = None,
) -> dict[str, Any]:
    """The content of native.json, with rows or columns per unit of each axis.

    The content states the first version that has these formats.

    Args:
        formats: the formats of the quantised weights, each a `ScaledFormat` or one of
            `quantised.NATIVE_QUANTS`.
        inputs: the formats to which the inputs of matrices are rounded.
    """
    features = features_of(args)
    common = list(_ARGS)[: list(_ARGS).index("family")]  # in every file
    values = asdict(args)
    arguments = {name: values[name] for name in values if name in common or name in features}
    names, scaled = {}, {}
    for weight, form in (formats or {}).items():
        if isinstance(form, QuantFormat):
            names[weight] = form.name
        else:
            scaled[weight] = asdict(form)
    first, second, third = VERSIONS
    version = first if _IN_EVERY_VERSION.issuperset(names.values()) else second
    rounded = {
        weight: {key: value for key, value in asdict(form).items() if value != _INPUTS[key]}
        for weight, form in (inputs or {}).items()
    }
    stated_formats = {"quantised": names, "scaled": scaled, "inputs": rounded}
    return {
        "format": third if scaled or rounded else version,
        "args": arguments,
        "units": dict(units),
        **{key: by_weight for key, by_weight in stated_formats.items() if by_weight},
    }


def args_from_native(values: Mapping[str, Any]) -> ModelArgs:
    """The arguments of native.json.

    Raises: UsageError for another format, or a key that is unknown, missing or of a wrong type.
    """
    native_version(values)
    top = Fields(values)
    top.require_known(_KEYS)
    arguments = top.mapping("args")
    Fields(arguments).require_known(_ARGS)
    Fields(Fields(arguments).mapping("rope_scaling")).require_known(_SCALING)
    try:
        args: ModelArgs = msgspec.convert(arguments, ModelArgs)
    except msgspec.ValidationError as error:
        raise UsageError(f"args: {error}") from error
    if args.family not in FAMILIES:
        raise UsageError(f"family={args.family[:80]!r} is not supported; {', '.join(FAMILIES)} are")
    return args


def native_version(values: Mapping[str, Any]) -> int:
    """The version of a native folder.

    Raises: UsageError for a format that is not in `VERSIONS`.
    """
    if (name := Fields(values).string("format")) not in VERSIONS:
        raise UsageError(
            f"the format {name[:80]!r} is not supported; {listed(map(repr, VERSIONS))} are"
        )
    return VERSIONS[name]


def native_scaled(values: Mapping[str, Any], matrices: Collection[str]) -> dict[str, ScaledFormat]:
    """The formats of the scaled weights that native.json states, by Meta's names.

    `matrices` are the names of the model's matrices.

    Raises: UsageError for a name that is not a matrix, or a format that does not exist.
    """
    formats = {}
    for name, form, where in _stated(values, "scaled", matrices, ScaledFormat):
        if not all(0 <= side <= _MAX_SIDE for side in form.block):
            raise UsageError(f"{where}block={[*form.block]}: use 1 to {_MAX_SIDE}, or 0 for all")
        is_known = form.numbers != "e2m1" or (form.block[0] == 1 and not form.has_zeros)
        if form.scales not in _SCALES[form.numbers] or not is_known:
            raise UsageError(f"{where}{form.name} is not supported; write the folder again")
        formats[name] = form
    return formats


def native_inputs(values: Mapping[str, Any], matrices: Collection[str]) -> dict[str, InputFormat]:
    """The formats of inputs that native.json states, by Meta's names of the matrices.

    Raises: UsageError for a name that is not in `matrices`, or a format that does not exist.
    """
    formats = {}
    for name, form, where in _stated(values, "inputs", matrices, InputFormat):
        is_known = form.numbers == "int8" or not (form.has_zeros or form.zero)
        if not is_known or form.scale == 0 or not 0 <= form.group <= _MAX_SIDE:
            raise UsageError(f"{where}{form} is not supported; write the folder again")
        if form.most is not None and form.most <= 0:
            raise UsageError(f"{where}most={form.most:g} must be positive")
        formats[name] = form
    return formats


def _stated(
    values: Mapping[str, Any], key: str, matrices: Collection[str], kind: type[_FormatT]
) -> Iterator[tuple[str, _FormatT, str]]:
    """Yields each matrix under a key of native.json: its name, its format, a prefix for errors.

    Raises: UsageError for a name that is not in `matrices`, or fields that `kind` does not have.
    """
    for name, stated in Fields(values).mapping(key).items():
        where = f"{key}: {name[:80]!r}: "
        if name not in matrices:
            raise UsageError(f"{where}not a matrix of the model")
        try:
            form = msgspec.convert(stated, kind)
            Fields(stated).require_known([field.name for field in fields(kind)])
        except (msgspec.ValidationError, UsageError) as error:
            raise UsageError(f"{where}{error}") from error
        yield name, form, where


def native_units(values: Mapping[str, Any], axes: Collection[str]) -> dict[str, int]:
    """The unit sizes of a native folder along these axes.

    Raises: UsageError for a missing size, or one below 1.
    """
    units = Fields(Fields(values).mapping("units"))
    sizes = {axis: units.integer(axis) for axis in axes}
    for axis, size in sizes.items():
        if size < 1:
            raise UsageError(f"units of {axis} have size {size}; use at least 1")
    return sizes
