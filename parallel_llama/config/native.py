"""Reads and writes native.json, which states the fields of `ModelArgs` directly."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any

import msgspec

from parallel_llama.dtypes import QuantFormat
from parallel_llama.errors import UsageError, listed
from parallel_llama.families import FAMILIES
from parallel_llama.families.model_args import ModelArgs, RopeScaling, features_of
from parallel_llama.files.fields import Fields

# The versions of native folders, by the names that native.json gives them.
VERSIONS = {"parallel_llama native 1": 1, "parallel_llama native 2": 2}

# The formats that all versions store alike. Version 2 packs 5-bit integers, and has all others.
_IN_EVERY_VERSION = {"int8", "int8 with minima", "int4", "int4 with minima", "fp8"}

_KEYS = {"format", "args", "units", "quantised"}
_ARGS = {field.name: field.default for field in fields(ModelArgs)}
_SCALING = {field.name for field in fields(RopeScaling)}


def native_config(
    args: ModelArgs, units: Mapping[str, int], formats: Mapping[str, QuantFormat] | None = None
) -> dict[str, Any]:
    """The content of native.json, with rows or columns per unit of each axis.

    `formats` are those of the quantised weights, each one of `quantised.NATIVE_QUANTS`. The content
    states the first version with these formats.
    """
    features = features_of(args)
    common = list(_ARGS)[: list(_ARGS).index("family")]  # in every file
    stated = asdict(args)
    own = {name: stated[name] for name in stated if name in common or name in features}
    names = {weight: form.name for weight, form in (formats or {}).items()}
    quantised = {"quantised": names} if names else {}
    first, latest = VERSIONS
    version = first if _IN_EVERY_VERSION.issuperset(names.values()) else latest
    return {"format": version, "args": own, "units": dict(units), **quantised}


def args_from_native(values: Mapping[str, Any]) -> ModelArgs:
    """The arguments of native.json.

    Raises: UsageError for another format, or a key that is unknown, missing or of a wrong type.
    """
    native_version(values)
    top = Fields(values)
    top.require_known(_KEYS)
    stated = top.mapping("args")
    Fields(stated).require_known(_ARGS)
    Fields(Fields(stated).mapping("rope_scaling")).require_known(_SCALING)
    try:
        args: ModelArgs = msgspec.convert(stated, ModelArgs)
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


def native_units(values: Mapping[str, Any], axes: Collection[str]) -> dict[str, int]:
    """The unit sizes of a native folder along these axes.

    Raises: UsageError for a missing size, or one below 1.
    """
    units = Fields(Fields(values).mapping("units"))
    sizes = {axis: units.integer(axis) for axis in axes}
    for axis, size in sizes.items():
        if size < 1:
            raise UsageError(f"units of {axis} have size {size}; at least 1")
    return sizes
