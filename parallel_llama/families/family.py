"""The record of a model family: its config keys, features, defaults and names of weights."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from parallel_llama.errors import UsageError, shown
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import (
    LLAMA_NAMES,
    Layout,
    Names,
    RotaryOrder,
    hf_full_name,
    is_rotary_table,
    layer_of,
    renamed,
)
from parallel_llama.files.fields import Fields

# The keys of config.json for these arguments in most families.
USUAL_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "max_seq_len": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
    "sliding_window": "sliding_window",
}

# Rotary orders if GGUF files keep HF's order of rows.
HALF_IN_GGUF: Mapping[Layout, RotaryOrder] = {"meta": "interleaved", "hf": "half", "gguf": "half"}

# Rotary orders if all files have Meta's order of rows.
INTERLEAVED: Mapping[Layout, RotaryOrder] = {
    "meta": "interleaved",
    "hf": "interleaved",
    "gguf": "interleaved",
}

# Keys of config.json that several families read.
BIASES = frozenset({"attention_bias", "mlp_bias"})
ROTARY_PART = "partial_rotary_factor"
QUERY_SCALE = "llama_4_scaling_beta"  # among the rope settings
ROTATED, ROTATED_INTERVAL = "no_rope_layers", "no_rope_layer_interval"

# The names of tensors in most models of text and images, such as LLaVA.
LLAVA_PARTS: Mapping[str, Any] = {
    "text_prefix": "language_model.",
    "other_parts": ("vision_tower.", "multi_modal_projector."),
}

FullLayers = Callable[[Fields, int], Iterable[int]]


def every_layer_has_the_window(_fields: Fields, _n_layers: int) -> Iterable[int]:
    return ()


def every_second(_fields: Fields, n_layers: int) -> Iterable[int]:
    return range(1, n_layers, 2)


def biases(fields: Fields) -> dict[str, Any]:
    """The arguments that BIASES of config.json state."""
    return {key: fields.flag(key, False) for key in BIASES}


def written_biases(args: ModelArgs) -> dict[str, Any]:
    """The values of BIASES in config.json."""
    return {"attention_bias": args.attention_bias, "mlp_bias": args.mlp_bias}


def rope_fields(fields: Fields) -> Fields:
    """The rope settings of config.json: rope_scaling, or else rope_parameters."""
    return Fields(fields.mapping("rope_scaling") or fields.mapping("rope_parameters"))


def rotary_dim_of(fields: Fields, default_part: float) -> int | None:
    """The number of rotated values of each head, from ROTARY_PART of config.json; None for all.

    Args:
        default_part: the value of ROTARY_PART if config.json does not have the key.

    Raises: UsageError for a factor that is not above 0 and at most 1.
    """
    part = rope_fields(fields).number(ROTARY_PART, fields.number(ROTARY_PART, default_part))
    if not 0 < part <= 1:
        raise UsageError(f"{ROTARY_PART}={part:g}: use a number above 0, at most 1")
    n_heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // max(1, n_heads))
    return None if part == 1 else int(head_dim * part)


def written_rotary_part(args: ModelArgs) -> dict[str, Any]:
    """The value of ROTARY_PART in config.json."""
    return {ROTARY_PART: (args.rotary_dim or args.head_dim) / args.head_dim}


def every_nth(n: int, key: str, n_layers: int) -> tuple[int, ...]:
    """The n-th layer and every n-th after it.

    Args:
        key: the name of n in the file, for the error.

    Raises: UsageError for n below 1.
    """
    if n < 1:
        raise UsageError(f"{key}={n}: use 1 or more, such as 4")
    return tuple(range(n - 1, n_layers, n))


def unrotated_layers(fields: Fields, n_layers: int) -> tuple[int, ...]:
    """The layers with 0 in ROTATED of config.json; without ROTATED, every ROTATED_INTERVAL-th.

    Despite the key's name, 1 means a rotated layer.

    Raises: UsageError for an interval below 1, or a list with too few entries.
    """
    rotated = fields.integers(ROTATED)
    if not rotated:
        return every_nth(fields.integer(ROTATED_INTERVAL, 4), ROTATED_INTERVAL, n_layers)
    if len(rotated) < n_layers:
        raise UsageError(
            f"{ROTATED} has {len(rotated)} entries and num_hidden_layers={n_layers}; "
            "use the config.json that belongs to the weights"
        )
    return tuple(layer for layer in range(n_layers) if not rotated[layer])


def written_rotated(args: ModelArgs) -> dict[str, Any]:
    """The value of ROTATED in config.json."""
    return {ROTATED: [int(layer not in args.unrotated_layers) for layer in range(args.n_layers)]}


def gguf_full_layers(fields: Fields, arch: str, n_layers: int) -> tuple[int, ...]:
    """The layers without a window in a GGUF file: every n-th, by default the fourth, or as listed.

    Source: llama.cpp, load_swa_pattern.
    """
    key = f"{arch}.attention.sliding_window_pattern"
    pattern = fields.values.get(key, 4)
    if isinstance(pattern, list) and len(pattern) == n_layers:
        return tuple(layer for layer, has_window in enumerate(pattern) if not has_window)
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        return tuple(range(pattern - 1, n_layers, pattern))
    raise UsageError(f"{key}={shown(pattern)}: use a number above 0, or a value for each layer")


def layer_types(args: ModelArgs, with_window: str = "sliding_attention") -> list[str]:
    """The value of layer_types in config.json.

    Args:
        with_window: the value for layers with a window.
    """
    full = range(args.n_layers) if args.sliding_window is None else args.full_layers
    return ["full_attention" if layer in full else with_window for layer in range(args.n_layers)]


@dataclass(frozen=True)
class GGUFForm:
    """A family in GGUF files.

    Args:
        architecture: llama.cpp's name for the architecture.
        features: Maps the header's fields and the tensors' names to the ModelArgs other than sizes;
            adds the constants that llama.cpp hard-codes.
        reads: The keys that only this architecture has and `features` reads, without the
            architecture's prefix.
        needs: A key, without the architecture's prefix, or a tensor. A file without it is of
            another family with the same architecture.
        also_read: Another architecture with the same keys and tensors.
        has_experts: Whether the models have experts.
        has_layer_norm: Whether the models have LayerNorm, which has a key for its epsilon.
        rotates_part: Whether rope.dimension_count may be smaller than the size of a head.
        truncates_yarn: Whether yarn rounds the correction range outwards.
        writes: The inverse of `features` for the fields of a header, without the architecture's
            prefix; None if the family is not written as GGUF.
    """

    architecture: str
    features: Callable[[Fields, Collection[str]], Mapping[str, Any]] = lambda *_: {}
    reads: frozenset[str] = frozenset()
    needs: str | None = None
    also_read: str | None = None
    has_experts: bool = False
    has_layer_norm: bool = False
    rotates_part: bool = False
    truncates_yarn: bool = True
    writes: Callable[[ModelArgs], Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Family:
    """A model family: everything that distinguishes it.

    Outside of this package only `config.meta`, `checkpoint.verify` and `tokenizer.loading` mention
    families by name.

    Args:
        name: HF's model_type.
        models: The published models of the family, as users call them.
        architecture: HF's class with an output layer.
        base_architecture: HF's class without an output layer.
        base_has_output: Whether that class has an output layer too.
        features: Maps the fields of config.json to the family's own ModelArgs.
        writes: The inverse of `features`.
        reads: The keys of config.json that not all families have.
        keys: Keys that differ from `USUAL_KEYS`, by argument; empty for an argument without a key.
        full_layers: Returns the layers without a sliding window, if the family has one.
        window_switch: A key that must be true for the sliding window to be used.
        window_type: The value of layer_types for layers with a window.
        has_extra_layers: Whether files may hold layers after the last, which are not needed.
        has_local_rope: Whether rope_parameters may have one object for full attention and one for
            sliding attention.
        defaults: Arguments for keys that config.json does not have.
        names: The names of the weights in each layout. Weights with the same name in a layout share
            a tensor.
        more_names: Names that depend on the model.
        qkv_by_kv_head: The layouts that store q, k and v by KV head (see `stored_slices`).
        interleaved_experts: The layouts that store the rows of w1 and w3 of an expert alternately,
            and matrices of experts as [in, out] (see `stored_slices`).
        transposed_experts: The layouts that store the rows of w1 before those of w3 for each
            expert, and matrices of experts as [in, out].
        multimodal: HF's model_type of models of text and images with a text part of this family.
        text_prefix: The beginning of the names of the text part's tensors in such models.
        other_parts: The beginnings of the names of the other parts' tensors, which are not loaded.
        params: The publisher of checkpoints with params.json that are read as this family; empty
            without one. `reshard` writes Meta's layout for every family.
        gguf: The family in GGUF files; None if it is not read from them. Several families may have
            the same architecture and `has_experts`. A file with the key that one family `needs` is
            read as that family, and any other file as the first family in `FAMILIES`.
        rotary_order: The order of the rows of wq and wk in each layout.
    """

    name: str
    models: str
    architecture: str
    base_architecture: str
    base_has_output: bool = False
    features: Callable[[Fields], Mapping[str, Any]] = lambda _: {}
    writes: Callable[[ModelArgs], Mapping[str, Any]] = lambda _: {}
    reads: frozenset[str] = frozenset()
    keys: Mapping[str, str] = field(default_factory=dict)
    full_layers: FullLayers | None = None
    window_switch: str | None = None
    window_type: str = "sliding_attention"
    has_extra_layers: bool = False
    has_local_rope: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[Names, ...] = LLAMA_NAMES
    more_names: Callable[[ModelArgs], tuple[Names, ...]] = lambda _: ()
    qkv_by_kv_head: frozenset[Layout] = frozenset()
    interleaved_experts: frozenset[Layout] = frozenset()
    transposed_experts: frozenset[Layout] = frozenset()
    multimodal: str = ""
    text_prefix: str = ""
    other_parts: tuple[str, ...] = ()
    params: Literal["", "meta", "mistral"] = ""
    gguf: GGUFForm | None = None
    rotary_order: Mapping[Layout, RotaryOrder] = field(
        default_factory=lambda: {"meta": "interleaved", "hf": "half", "gguf": "interleaved"}
    )

    def key(self, argument: str) -> str:
        """The key of config.json for an argument; "" if the family has no key for it.

        Raises: KeyError for an argument that is neither in `keys` nor in `USUAL_KEYS`.
        """
        return self.keys[argument] if argument in self.keys else USUAL_KEYS[argument]

    def hf_name(self, stored: str) -> str:
        """HF's full name of a stored tensor, as in the text model with an output layer."""
        for prefix in self.text_prefixes:
            stored = stored.removeprefix(prefix)
        return hf_full_name(stored, self.names)

    @property
    def text_prefixes(self) -> tuple[str, ...]:
        """Beginnings of the names of the text part in models of text and images.

        The text part is a module of the base model, or else of the whole model.
        """
        return (f"model.{self.text_prefix}", self.text_prefix) if self.text_prefix else ()

    def name_in(self, layout: Layout, name: str, args: ModelArgs) -> str:
        """The name that a layout has for a weight of the model."""
        return renamed(name, "meta", layout, (*self.names, *self.more_names(args)))

    def skips(self, name: str, layout: Layout, args: ModelArgs) -> bool:
        """Whether a file may hold this tensor, which the model does not need."""
        # Some writers store tied embeddings twice.
        output = self.name_in(layout, "output.weight", args)
        is_second = args.tied_embeddings and name == output
        is_extra = self.has_extra_layers and layer_of(name, layout) >= args.n_layers
        is_other = layout == "hf" and name.removeprefix("model.").startswith(self.other_parts)
        return is_second or is_extra or is_other or is_rotary_table(name, layout)
