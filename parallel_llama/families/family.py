"""What a family of models is: all that its members share and others do differently."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import (
    LLAMA_NAMES,
    Layout,
    Names,
    RotaryOrder,
    is_rotary_table,
    renamed,
)
from parallel_llama.files.fields import Fields

# The keys of config.json that state these arguments in most families.
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

FullLayers = Callable[[Fields, int], Iterable[int]]


def every_layer_has_the_window(_fields: Fields, _n_layers: int) -> Iterable[int]:
    return ()


@dataclass(frozen=True)
class GGUFForm:
    """How llama.cpp's files tell of a family: their architecture, and whether there are experts.

    `features` is what the header's fields and the tensors' names say beside the shape, as
    ModelArgs, and what llama.cpp has in its code in their place; `reads` are the keys for it that
    not all architectures have, without the architecture in front.
    """

    architecture: str
    features: Callable[[Fields, Collection[str]], Mapping[str, Any]] = lambda *_: {}
    reads: frozenset[str] = frozenset()
    has_experts: bool = False


@dataclass(frozen=True)
class Family:
    """One family's record; readers, writers and the plan ask it, and nothing else names a family.

    `name` is HF's model_type, and `architecture` HF's class with a head; `gguf` is None where
    llama.cpp's files do not tell it from another one. Of config.json, `reads` are the keys that it
    has beside those of all families, and `features` what they say, as ModelArgs; `writes` is the
    way back. `keys` are those for which it has another word than Llama, by the argument that each
    of them states; an empty one is not there, and nothing else than the usual can be said.

    `names` are its weights' in each layout, `more_names` those that depend on the model, and
    `rotary_order` that of the rows of wq and wk there. Weights of one name in a layout share a
    tensor, in layouts of `qkv_by_kv_head` group by group (see `places`).

    A family with a sliding window has `full_layers`, which of so many layers see all keys
    nonetheless; where `window_switch` names a key, the window is only meant if that is true.
    """

    name: str
    architecture: str
    base_architecture: str  # without a head
    features: Callable[[Fields], Mapping[str, Any]] = lambda _: {}
    writes: Callable[[ModelArgs], Mapping[str, Any]] = lambda _: {}
    reads: frozenset[str] = frozenset()
    keys: Mapping[str, str] = field(default_factory=dict)
    full_layers: FullLayers | None = None
    window_switch: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)  # where config.json does not say
    names: tuple[Names, ...] = LLAMA_NAMES
    more_names: Callable[[ModelArgs], tuple[Names, ...]] = lambda _: ()
    qkv_by_kv_head: frozenset[Layout] = frozenset()
    gguf: GGUFForm | None = None
    rotary_order: Mapping[Layout, RotaryOrder] = field(
        default_factory=lambda: {"meta": "interleaved", "hf": "half", "gguf": "interleaved"}
    )

    def key(self, argument: str) -> str:
        """The key of config.json that states an argument.

        Raises: KeyError for one that has no key in all families.
        """
        return self.keys[argument] if argument in self.keys else USUAL_KEYS[argument]

    def name_in(self, layout: Layout, name: str, args: ModelArgs) -> str:
        """What a layout calls the weight that has this name in the model."""
        return renamed(name, "meta", layout, (*self.names, *self.more_names(args)))

    def skips(self, name: str, layout: Layout, args: ModelArgs) -> bool:
        """Whether a file may hold this tensor although the model has no use for it."""
        # Some writers store the embeddings a second time where they are tied.
        output = self.name_in(layout, "output.weight", args)
        is_second = args.tied_embeddings and name == output
        return is_second or is_rotary_table(name, layout)
