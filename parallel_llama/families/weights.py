"""The weights of a model, told from its features: names, shapes, and the axis that cuts each."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from parallel_llama.families.model_args import ModelArgs

Axis = Literal["heads", "kv_heads", "ffn", "vocab"]


@dataclass(frozen=True)
class Param:
    """One weight of the model under its Meta name: its whole shape and the axis that cuts it.

    `dim` is the dimension that is cut, `unit` the rows (or columns) of one head, channel or
    vocabulary row along it. A parameter without an axis is replicated.
    """

    name: str
    shape: tuple[int, ...]
    axis: Axis | None = None
    dim: int = 0
    unit: int = 1

    @property
    def values_per_unit(self) -> int:
        """Values in one unit of the axis that cuts it; all of them where replicated."""
        n_units = self.shape[self.dim] // self.unit if self.axis else 1
        return math.prod(self.shape) // n_units


def outer_parameters(args: ModelArgs) -> Iterator[Param]:
    """The weights before and after the layers."""
    yield Param("tok_embeddings.weight", (args.vocab_size, args.dim), "vocab")
    yield Param("norm.weight", (args.dim,))
    if not args.tied_embeddings:
        yield Param("output.weight", (args.vocab_size, args.dim), "vocab")


def layer_parameters(args: ModelArgs, layer: int) -> Iterator[Param]:
    """The weights of one layer, in the order of the forward pass."""
    dim, head_dim = args.dim, args.head_dim
    q_dim, kv_dim = args.n_heads * head_dim, args.n_kv_heads * head_dim
    attention, ffn = f"layers.{layer}.attention", f"layers.{layer}.feed_forward"
    yield Param(f"layers.{layer}.attention_norm.weight", (dim,))
    yield Param(f"{attention}.wq.weight", (q_dim, dim), "heads", 0, head_dim)
    yield Param(f"{attention}.wk.weight", (kv_dim, dim), "kv_heads", 0, head_dim)
    yield Param(f"{attention}.wv.weight", (kv_dim, dim), "kv_heads", 0, head_dim)
    yield Param(f"{attention}.wo.weight", (dim, q_dim), "heads", 1, head_dim)
    if args.attention_bias:
        yield Param(f"{attention}.wq.bias", (q_dim,), "heads", 0, head_dim)
        yield Param(f"{attention}.wk.bias", (kv_dim,), "kv_heads", 0, head_dim)
        yield Param(f"{attention}.wv.bias", (kv_dim,), "kv_heads", 0, head_dim)
    if args.has_wo_bias:
        yield Param(f"{attention}.wo.bias", (dim,))
    yield Param(f"layers.{layer}.ffn_norm.weight", (dim,))
    yield Param(f"{ffn}.w1.weight", (args.ffn_dim, dim), "ffn")
    yield Param(f"{ffn}.w3.weight", (args.ffn_dim, dim), "ffn")
    yield Param(f"{ffn}.w2.weight", (dim, args.ffn_dim), "ffn", 1)
    if args.mlp_bias:
        yield Param(f"{ffn}.w1.bias", (args.ffn_dim,), "ffn")
        yield Param(f"{ffn}.w3.bias", (args.ffn_dim,), "ffn")
        yield Param(f"{ffn}.w2.bias", (dim,))
