"""What a family of models is: all that its members share and others do differently."""

from collections.abc import Callable, Mapping
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


@dataclass(frozen=True)
class Family:
    """One family's record; readers, writers and the plan ask it, and nothing else names a family.

    `name` is what HF's model_type and GGUF's general.architecture call it, and `architecture` HF's
    class with a head. Of config.json, `reads` are the keys that it has beside those of all
    families, and `features` what they say, as ModelArgs; `writes` is the way back. Where
    `window_switch` names a key, a sliding window is only meant if that is true. `names` are its
    weights' in each layout, `rotary_order` that of the rows of wq and wk there.
    """

    name: str
    architecture: str
    base_architecture: str  # without a head
    features: Callable[[Fields], Mapping[str, Any]]
    writes: Callable[[ModelArgs], Mapping[str, Any]]
    reads: frozenset[str] = frozenset()
    window_switch: str | None = None
    max_seq_len: int = 2048  # where config.json does not say
    names: tuple[Names, ...] = LLAMA_NAMES
    rotary_order: Mapping[Layout, RotaryOrder] = field(
        default_factory=lambda: {"meta": "interleaved", "hf": "half", "gguf": "interleaved"}
    )

    def name_in(self, layout: Layout, name: str) -> str:
        """What a layout calls the weight that has this name in the model."""
        return renamed(name, "meta", layout, self.names)

    def skips(self, name: str, layout: Layout, args: ModelArgs) -> bool:
        """Whether a file may hold this tensor although the model has no use for it."""
        # Some writers store the embeddings a second time where they are tied.
        is_second = args.tied_embeddings and name == self.name_in(layout, "output.weight")
        return is_second or is_rotary_table(name, layout)
