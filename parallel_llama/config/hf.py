"""Reads and writes HF's config.json, in the form of transformers 4 and 5."""

import logging
import math
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from itertools import product
from typing import Any

from parallel_llama.config.generation import GenerationDefaults
from parallel_llama.config.hf_keys import check_keys
from parallel_llama.config.quantised import packing_of
from parallel_llama.errors import UsageError, shown
from parallel_llama.families import FAMILIES, MISSING, Family, family_of
from parallel_llama.families.family import (
    QUERY_SCALE,
    ROTARY_PART,
    every_layer_has_the_window,
    rope_fields,
)
from parallel_llama.families.model_args import (
    ModelArgs,
    RopeScaling,
    head_size,
    longest_sequence,
    require_size,
)
from parallel_llama.files.fields import Fields, did_you_mean

logger = logging.getLogger(__name__)

# Sizes of the model, in the order of writing.
_SIZES = "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size"

_FULL, _SLIDING = "full_attention", "sliding_attention"
_OLD_LAYER_TYPES = {"attention": _FULL}

# In a model of text and images: keys beside text_config that apply to the text part too. As in
# transformers, they override keys within text_config.
_OF_TEXT_TOO = "dtype", "torch_dtype", "quantization_config", "tie_word_embeddings"

# Activations by transformers' names; the first name of each is written.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}

_TRAINED = "original_max_position_embeddings"
_SHORT, _LONG = "short_factor", "long_factor"
# The keys of each type of rope scaling other than _ROPE_COMMON, in the order of writing.
_ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", _TRAINED, "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor", _TRAINED, "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale",
        "mscale_all_dim",
    ),
    "longrope": ("factor", _TRAINED, _SHORT, _LONG, "attention_factor"),
}  # fmt: skip
# Older names of types of rope scaling.
_OLD_ROPE_TYPES = {"su": "longrope"}
# The first YaRN models have the key `finetuned`, which does not change the model.
_ROPE_COMMON = {"rope_type", "type", "rope_theta", ROTARY_PART, "finetuned"}
# The second key repeats the context, and is not read.
_OF_SCALED_QUERIES = {QUERY_SCALE, "max_position_embeddings"}
# Keys of vLLM's YaRN, which transformers ignores; attn_factor is not attention_factor.
_ROPE_UNREAD = {"attn_factor", "extrapolation_factor"}

# The high_freq_factor of Llama 3.1 to 3.3, and of Llama 4 Scout.
_HIGH_FACTORS = (4.0, 1.0)
# Trained contexts that `llama3_from_factors` tries; Llama 3.1 to 3.3 have 8192.
_TRAINED_CONTEXTS = [1 << power for power in (*range(13, 4, -1), *range(14, 21))]

# Tolerance for factors that were computed in float32; other trained contexts differ far more.
_SAME_FACTOR = 1e-4


def args_from_hf(values: Mapping[str, Any]) -> ModelArgs:
    """The arguments of HF's config.json, with transformers' defaults for missing keys.

    In most families the sizes of the model have no defaults.

    Raises: UsageError as in `load_model_args`.
    Source: transformers 5.23, its configurations of the families.
    """
    fields = Fields(values := _text_part(values))
    family = _family(fields)
    packing_of(values)  # refuses unsupported quantisation before weights are searched for
    check_keys(fields, family.reads.union(family.keys.values()))
    if fields.has("auto_map"):
        logger.warning("config.json names Python code (auto_map), which is never run")
    arguments = _sizes(fields, family)
    arguments |= _hf_rope(fields, family, arguments["max_seq_len"])
    arguments |= family.features(fields)
    if "activation" not in arguments:
        arguments["activation"] = _activation(fields, family.key("activation"))
    longest = longest_sequence(arguments["max_seq_len"], arguments["rope_scaling"])
    arguments |= _windows(fields, family, arguments["n_layers"], longest)
    if "sliding_window" not in arguments:
        # Only layers with a window use these arguments.
        arguments.pop("local_rope_theta", None)
        arguments.pop("window_chunks", None)
    return ModelArgs(
        dtype=fields.string(
            "dtype", fields.string("torch_dtype", family.defaults.get("dtype", "float32"))
        ),
        family=family.name,
        **arguments,
    )


def _text_part(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the text part of a model of text and images; else `values`."""
    model_type = values.get("model_type")
    families = [family for family in FAMILIES.values() if family.multimodal == model_type]
    if not (model_type and families):
        return values
    if not (text := Fields(values).mapping("text_config")):
        raise UsageError(f"model_type={model_type!r} needs text_config, the model of text")
    kinds = {family.name: family for family in families}
    kind = Fields(text).string("model_type", families[0].name)
    if (family := kinds.get(kind)) is None:
        raise UsageError(
            f"text_config has model_type={kind[:80]!r}, which is not supported in {model_type!r}; "
            f"supported: {', '.join(map(repr, kinds))}"
        )
    logger.warning("only the text part of %r is loaded; images cannot be read", model_type)
    shared = {key: values[key] for key in _OF_TEXT_TOO if key in values}
    return {**text, **shared, "model_type": family.name, "architectures": [family.architecture]}


def _sizes(fields: Fields, family: Family) -> dict[str, Any]:
    """The sizes of the model; the family's features may override them."""
    dim_key, heads_key, head_key = (family.key(name) for name in ("dim", "n_heads", "head_dim"))
    dim = require_size("dim", fields.integer(dim_key))
    n_heads = fields.integer(heads_key, family.defaults.get("n_heads"))
    # If head_dim or n_kv_heads is null, it follows from the other sizes, not from the family.
    head_dim = None if head_key in fields.values else family.defaults.get("head_dim")
    if fields.has(head_key):
        head_dim = fields.integer(head_key)
    if head_dim is None:
        head_dim = head_size(dim_key, dim, heads_key, n_heads)
    if not head_key and fields.integer("head_dim", head_dim) != head_dim:
        raise UsageError(
            f"head_dim={fields.integer('head_dim')} must equal {dim_key} / {heads_key} = "
            f"{head_dim} in {family.name!r}; use the config.json that belongs to the weights"
        )
    kv_key, n_kv_heads = family.key("n_kv_heads"), n_heads
    if kv_key not in fields.values:
        n_kv_heads = family.defaults.get("n_kv_heads", n_heads)
    max_seq_len = family.defaults.get("max_seq_len", 2048)
    return {
        "dim": dim,
        "n_layers": require_size("n_layers", fields.integer(family.key("n_layers"))),
        "n_heads": n_heads,
        "n_kv_heads": fields.integer(kv_key, n_kv_heads),
        "head_dim": head_dim,
        "ffn_dim": fields.integer(family.key("ffn_dim"), family.defaults.get("ffn_dim")),
        "vocab_size": fields.integer(family.key("vocab_size"), family.defaults.get("vocab_size")),
        "norm_eps": fields.number(family.key("norm_eps"), family.defaults.get("norm_eps", 1e-6)),
        "max_seq_len": fields.integer(family.key("max_seq_len"), max_seq_len),
        "tied_embeddings": _is_tied(fields, family),
    }


def _is_tied(fields: Fields, family: Family) -> bool:
    return fields.flag("tie_word_embeddings", family.defaults.get("tied_embeddings", False))


def _activation(fields: Fields, key: str) -> str:
    name = fields.string(key, "silu")
    if name not in _ACTIVATIONS:
        raise UsageError(
            f"{key}={name[:80]!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _family(fields: Fields) -> Family:
    """The family that model_type and architectures name; both must agree."""
    architectures, model_type = fields.strings("architectures"), fields.string("model_type", "")
    supported = ", ".join(family.architecture for family in FAMILIES.values())
    if not model_type and not architectures:
        raise UsageError(f"has neither model_type nor architectures; supported: {supported}")
    names = {
        name: family
        for family in FAMILIES.values()
        for name in (family.architecture, family.base_architecture)
    }
    if (reason := MISSING.get(model_type)) is not None:
        raise UsageError(f"model_type={model_type!r} is not supported: {reason}")
    for architecture in architectures:
        if architecture not in names:
            raise UsageError(
                f"the architecture {architecture[:80]!r} is not supported; supported: {supported}"
            )
    if not model_type:
        model_type = names[architectures[0]].name
    if model_type not in FAMILIES:
        raise UsageError(
            f"model_type={model_type[:80]!r} is not supported; supported: "
            f"{', '.join(map(repr, FAMILIES))}"
        )
    family = FAMILIES[model_type]
    for architecture in architectures:
        if names[architecture] is not family:
            raise UsageError(
                f"the architecture {architecture!r} and model_type={model_type!r} differ; "
                "use the config.json that belongs to the weights"
            )
    is_base = architectures == [family.base_architecture] and not family.base_has_output
    if is_base and not _is_tied(fields, family):
        raise UsageError(
            f"the architecture {family.base_architecture!r} is a base model without a head and "
            "without tied embeddings; fetch or save it as "
            f"{family.architecture}"
        )
    return family


def _windows(fields: Fields, family: Family, n_layers: int, longest: int) -> dict[str, Any]:
    """The sliding window, and the full-attention layers.

    `longest` is the length of the longest sequence.
    """
    layer_types = _layer_types(fields, n_layers, family.window_type)
    if family.full_layers is None:
        _require_no_window(fields, family, layer_types, longest)
        return {}
    is_on = family.window_switch is None or fields.flag(family.window_switch, False)
    # A null means no window; a missing key means the default of the family.
    key, kind = family.key("sliding_window"), family.window_type
    window = fields.optional_integer(key)
    if key not in fields.values:
        window = family.defaults["sliding_window"]
    if window is None or not is_on:
        if kind in layer_types:
            lacks = f"without a value of {key}; add it"
            if window is not None:
                lacks = f"and {family.window_switch} is false; set it to true"
            raise UsageError(f"layer_types has {kind!r} {lacks}, or remove layer_types")
        return {}
    if layer_types:
        full = tuple(layer for layer, type_ in enumerate(layer_types) if type_ == _FULL)
    else:
        full = tuple(family.full_layers(fields, n_layers))
    is_uniform = family.full_layers is every_layer_has_the_window
    if is_uniform and _FULL in layer_types and window < longest:
        raise UsageError(
            f"layer_types has {_FULL!r} and sliding_window={window}, which every layer of "
            f"{family.name!r} has; remove the one that the weights were not trained with"
        )
    # A window in every layer that covers the longest sequence has no effect, unless layers with a
    # window have their own rotary base.
    hides_nothing = not full and window >= longest and not family.has_local_rope
    if len(full) == n_layers or hides_nothing:
        return {}
    return {"sliding_window": window, "full_layers": full}


def _layer_types(fields: Fields, n_layers: int, window_type: str) -> list[str]:
    layer_types = [_OLD_LAYER_TYPES.get(name, name) for name in fields.strings("layer_types")]
    for layer_type in layer_types:
        if layer_type not in (_FULL, window_type):
            raise UsageError(
                f"layer_types has {layer_type[:80]!r}; {_FULL!r} and {window_type!r} are supported"
            )
    if layer_types and len(layer_types) != n_layers:
        raise UsageError(
            f"layer_types has {len(layer_types)} layers and num_hidden_layers={n_layers}; "
            "use the config.json that belongs to the weights"
        )
    return layer_types


def _require_no_window(
    fields: Fields, family: Family, layer_types: list[str], longest: int
) -> None:
    """Refuse a sliding window that is shorter than the longest sequence.

    transformers' Llama ignores the window in attention but limits the cache to it, so its output
    depends on how the prompt was split into calls.
    """
    if _SLIDING in layer_types:
        raise UsageError(
            f"layer_types has {_SLIDING!r}; {family.name!r} has only {_FULL!r}; if the weights "
            "were trained without a sliding window, remove layer_types"
        )
    window = fields.integer("sliding_window", longest)
    if window < longest and not layer_types:
        raise UsageError(
            f"sliding_window={window}: {family.name!r} does not support a window below the context "
            f"length={longest}; if the weights were trained without a window, remove the key"
        )


def _hf_rope(fields: Fields, family: Family, max_seq_len: int) -> dict[str, Any]:
    """Rotary base and scaling from rope_parameters (transformers 5) or rope_scaling (4).

    A value that is stated twice resolves as in transformers. A key that no type of scaling has is
    refused. A key of another type has no effect, and a warning names it.

    Source: transformers 5.23, modeling_rope_utils.py.
    """
    rope = _rope_by_layer(fields, family) if family.has_local_rope else rope_fields(fields)
    kind = rope.string("rope_type", rope.string("type", "default"))
    kind = _OLD_ROPE_TYPES.get(kind, kind)
    if kind not in _ROPE_TYPES:
        raise UsageError(
            f"rope_type={kind[:80]!r} is not supported; supported: {', '.join(_ROPE_TYPES)}"
            f"{did_you_mean(kind, _ROPE_TYPES)}"
        )
    common = _ROPE_COMMON | (_OF_SCALED_QUERIES if QUERY_SCALE in family.reads else set())
    try:
        rope.require_known(common.union(_ROPE_UNREAD, *_ROPE_TYPES.values()))
    except UsageError as error:
        raise UsageError(f"among the rope settings: {error}") from error
    read = common.union(_ROPE_TYPES[kind])
    if unread := [key for key in rope.values if key not in read]:
        logger.warning("rope scaling %r ignores %s", kind, ", ".join(unread))
    for settings in (rope, fields):
        if (rotary := settings.number(ROTARY_PART, 1.0)) != 1 and ROTARY_PART not in family.reads:
            raise UsageError(f"{ROTARY_PART}={rotary} is not supported in {family.name!r}, only 1")
    default = family.defaults.get("rope_theta", 10000.0)
    theta = rope.number("rope_theta", fields.number("rope_theta", default))
    trained = family.defaults.get("original_max_seq_len")
    if trained is None:
        trained = rope.integer(_TRAINED, max_seq_len)
    if not family.has_local_rope:  # else transformers ignores this key
        trained = fields.integer(_TRAINED, trained)
    scaling = _scaling(kind, rope, max_seq_len, trained)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _rope_by_layer(fields: Fields, family: Family) -> Fields:
    """The rope settings of layers without a window; layers with a window have their own.

    Raises: UsageError for settings that transformers ignores, although another program might not,
        and for rope scaling of layers with a window, which no `ModelArgs` can express.
    """
    rope = Fields(fields.mapping("rope_parameters"))
    # transformers also writes keys for all layers beside these objects; they have no effect.
    is_by_layer = rope.has(_FULL) or rope.has(_SLIDING)
    if not is_by_layer and (common := [key for key in rope.values if rope.has(key)]):
        raise UsageError(
            f"rope_parameters of {family.name!r} has {shown(common[0])} for all layers, which has "
            f"no effect; use an object under {_FULL!r}, and one under {_SLIDING!r}"
        )
    local = Fields(rope.mapping(_SLIDING))
    kind = local.string("rope_type", local.string("type", "default"))
    if kind != "default":
        raise UsageError(
            f"rope_type={kind[:80]!r} for {_SLIDING!r} is not supported; only layers without a "
            "sliding window may have rope scaling"
        )
    scaling = Fields(fields.mapping("rope_scaling"))
    if scaling.string("type", "default") != "default" and not scaling.has("rope_type"):
        raise UsageError(
            f"rope_scaling of {family.name!r} has the key 'type', which transformers ignores in "
            "this family; call it 'rope_type'"
        )
    merged = Fields({**rope.mapping(_FULL), **scaling.values})
    if not merged.values.get("truncate", True):
        raise UsageError(
            f"truncate={shown(merged.values['truncate'])} is not supported in {family.name!r}, "
            "where transformers ignores it; remove it"
        )
    return merged


def _scaling(kind: str, rope: Fields, max_seq_len: int, trained: int) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", rope.number("factor"))
    if kind == "dynamic":
        return RopeScaling("dynamic", rope.number("factor"), max_seq_len)
    if kind == "llama3":
        keys = "factor", "low_freq_factor", "high_freq_factor"
        factor, low, high = (rope.number(key) for key in keys)
        return RopeScaling("llama3", factor, trained, low, high)
    if trained < 1:
        raise UsageError(f"{_TRAINED}={trained}: use 1 or more")
    if kind == "longrope":
        return RopeScaling(
            "longrope",
            rope.number("factor", max_seq_len / trained),
            trained,
            attention_factor=rope.optional_number("attention_factor"),
            factors=rope.numbers(_SHORT),
            long_factors=rope.numbers(_LONG),
        )
    return RopeScaling(
        "yarn",
        rope.number("factor", max_seq_len / trained),
        trained,
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,  # 0 means the default
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=bool(rope.values.get("truncate", True)),  # transformers reads a null as false
    )


def hf_config(args: ModelArgs, defaults: GenerationDefaults | None = None) -> dict[str, Any]:
    """The content of config.json, in the form that transformers 4 and 5 read.

    Raises: UsageError for a feature or rope scaling that config.json cannot express.
    """
    defaults, family = defaults or GenerationDefaults(), family_of(args)
    window_key = family.key("sliding_window")
    eos = list(defaults.eos_ids)
    # Families with another activation have no key for it, or write it themselves.
    names = (name for name, activation in _ACTIVATIONS.items() if activation == args.activation)
    activation = next(names, None)
    config = {
        "architectures": [family.architecture],
        "model_type": family.name,
        **{family.key(name): getattr(args, name) for name in _SIZES},
        family.key("activation"): activation,
        family.key("norm_eps"): args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_scaling": _rope_scaling(args),
        family.key("max_seq_len"): args.max_seq_len,
        "tie_word_embeddings": args.tied_embeddings,
        **({} if family.full_layers is None else {window_key: args.sliding_window}),
        **family.writes(args),
        "bos_token_id": defaults.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": args.dtype,
    }
    config.pop("", None)  # arguments that the family has no key for
    _require_same(args, args_from_hf(config))
    return config


def _require_same(args: ModelArgs, read_back: ModelArgs) -> None:
    """Refuse a model whose config.json reads back as another model.

    Rope scaling is not compared, because it may be written in another form.

    Raises: UsageError.
    """
    for name in (field.name for field in dataclass_fields(ModelArgs)):
        value, other = getattr(args, name), getattr(read_back, name)
        if name == "rope_scaling" or value == other:
            continue
        if isinstance(value, float) and isinstance(other, float) and math.isclose(value, other):
            continue
        raise UsageError(
            f"{name}={value}: config.json of {args.family!r} cannot express it, only {other}; use "
            "--format native"
        )


def llama3_from_factors(args: ModelArgs, factors: tuple[float, ...]) -> RopeScaling:
    """The llama3 scaling with these frequency factors, which GGUF files store instead.

    Raises: UsageError if no llama3 scaling has them.
    """
    for high, trained in product(_HIGH_FACTORS, _TRAINED_CONTEXTS):
        scaling = RopeScaling("llama3", factors[-1], trained, 1.0, high)
        expected = scaling.llama3_factors(args.rope_theta, args.head_dim)
        if all(
            math.isclose(factor, other, rel_tol=_SAME_FACTOR)
            for factor, other in zip(factors, expected, strict=True)
        ):
            return scaling
    raise UsageError(
        f"its {len(factors)} rotary factors (rope_freqs.weight) are not those of llama3 scaling, "
        "and config.json cannot express others; use --format native"
    )


def _rope_scaling(args: ModelArgs) -> dict[str, Any] | None:
    scaling = args.rope_scaling
    if scaling is not None and scaling.kind == "factors":
        scaling = llama3_from_factors(args, scaling.factors)
    if scaling is None:
        return None
    if scaling.kind == "dynamic" and scaling.original_max_seq_len != args.max_seq_len:
        raise UsageError(
            f"dynamic rope scaling from a context of {scaling.original_max_seq_len} in a model of "
            f"{args.max_seq_len}: config.json cannot express it; use --format native"
        )
    stated = {
        **vars(scaling),
        _TRAINED: scaling.original_max_seq_len,
        _SHORT: list(scaling.factors),
        _LONG: list(scaling.long_factors),
    }
    keys = [key for key in _ROPE_TYPES[scaling.kind] if stated[key] is not None]
    own = {QUERY_SCALE: args.query_scale} if QUERY_SCALE in family_of(args).reads else {}
    return {"rope_type": scaling.kind, **{key: stated[key] for key in keys}, **own}
