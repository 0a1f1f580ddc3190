"""native.json: the arguments of a native folder, as they are and with nothing to interpret."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from parallel_llama.config.model_args import ModelArgs, RopeScaling
from parallel_llama.errors import UsageError
from parallel_llama.fields import Fields

NATIVE_FORMAT = "parallel_llama native 1"

_KEYS = {"format", "args", "units"}
_ARGS = {field.name for field in fields(ModelArgs)}
_SCALING = {field.name for field in fields(RopeScaling)}
_SCALINGS = ("linear", "dynamic", "llama3", "yarn", "factors")


def native_config(args: ModelArgs, units: Mapping[str, int]) -> dict[str, Any]:
    """The content of native.json; `units` are the sizes along the axes that it was written in."""
    return {"format": NATIVE_FORMAT, "args": asdict(args), "units": dict(units)}


def args_from_native(values: Mapping[str, Any]) -> ModelArgs:
    """The arguments that native.json states.

    Raises: UsageError for another format, or a key that is unknown, missing or of a wrong type.
    """
    top = Fields(values)
    if (version := top.text("format")) != NATIVE_FORMAT:
        raise UsageError(f"has the format {version[:80]!r}; {NATIVE_FORMAT!r} is read")
    top.require_known(_KEYS)
    own = Fields(top.mapping("args"))
    own.require_known(_ARGS)
    return ModelArgs(
        dim=own.integer("dim"),
        n_layers=own.integer("n_layers"),
        n_heads=own.integer("n_heads"),
        n_kv_heads=own.integer("n_kv_heads"),
        head_dim=own.integer("head_dim"),
        ffn_dim=own.integer("ffn_dim"),
        vocab_size=own.integer("vocab_size"),
        norm_eps=own.number("norm_eps"),
        rope_theta=own.number("rope_theta"),
        rope_scaling=_scaling(own.mapping("rope_scaling")),
        max_seq_len=own.integer("max_seq_len"),
        tied_embeddings=own.flag("tied_embeddings", False),
        attention_bias=own.flag("attention_bias", False),
        mlp_bias=own.flag("mlp_bias", False),
        dtype=own.text("dtype"),
    )


def native_units(values: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of the units that a native folder is stored in, by axis.

    Raises: UsageError unless each is a number above zero.
    """
    units = Fields(Fields(values).mapping("units"))
    sizes = {axis: units.integer(axis) for axis in ("heads", "kv_heads", "ffn", "vocab")}
    for axis, size in sizes.items():
        if size < 1:
            raise UsageError(f"units of {axis} are of size {size}; at least 1")
    return sizes


def _scaling(values: Mapping[str, Any]) -> RopeScaling | None:
    if not values:
        return None
    own = Fields(values)
    own.require_known(_SCALING)
    kind = own.text("kind")
    if kind not in _SCALINGS:
        raise UsageError(f"rope scaling {kind[:80]!r} is not one of {', '.join(_SCALINGS)}")
    factors = values.get("factors") or []
    if not isinstance(factors, list):
        raise UsageError("the factors of the rope scaling are no list")
    return RopeScaling(
        kind,  # type: ignore[arg-type]
        factor=own.number("factor"),
        original_max_seq_len=own.optional_integer("original_max_seq_len"),
        low_freq_factor=own.number("low_freq_factor"),
        high_freq_factor=own.number("high_freq_factor"),
        beta_fast=own.number("beta_fast"),
        beta_slow=own.number("beta_slow"),
        attention_factor=own.optional_number("attention_factor"),
        mscale=own.optional_number("mscale"),
        mscale_all_dim=own.optional_number("mscale_all_dim"),
        truncate=own.flag("truncate", True),
        factors=tuple(Fields({"factor": factor}).number("factor") for factor in factors),
    )
