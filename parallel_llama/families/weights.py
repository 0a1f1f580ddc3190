"""The weights of a model: names, shapes, and the axis along which each is sharded."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from parallel_llama.dtypes import Kind
from parallel_llama.families.model_args import ModelArgs

Axis = Literal["heads", "kv_heads", "ffn", "shared_ffn", "dense_ffn", "vocab", "outputs"]

# Gates compute a few scores per token; they are not quantised.
_GATES = ".gate.weight", ".shared_gate.weight"
# The biases of the experts' outputs: a row for each expert.
_BIASES = ".w2_bias"
# The norms of queries and keys.
HEAD_NORMS = ".attention.q_norm.weight", ".attention.k_norm.weight"


@dataclass(frozen=True)
class Param:
    """One weight of the model.

    Args:
        name: Meta's name of the weight.
        shape: The shape of the whole weight.
        axis: The axis that is sharded; None for a replicated weight.
        dim: The dimension of `shape` that is sharded.
        unit: Rows or columns per head, channel or vocabulary entry along the dimension.
        expert: The number of the expert with this weight, or None. Only ranks with the expert hold
            the weight.
    """

    name: str
    shape: tuple[int, ...]
    axis: Axis | None = None
    dim: int = 0
    unit: int = 1
    expert: int | None = None

    @property
    def layer(self) -> int | None:
        """The number of the weight's layer; None for a weight outside of the layers."""
        first, _, rest = self.name.partition(".")
        return int(rest.partition(".")[0]) if first == "layers" else None

    @property
    def file_dim(self) -> int:
        """The dimension along which files shard the weight, also after `cut_by_outputs`."""
        return 1 if self.axis == "outputs" else self.dim

    @property
    def values_per_unit(self) -> int:
        """Values per unit of the sharded axis; all values of a replicated weight."""
        n_units = self.shape[self.dim] // self.unit if self.axis else 1
        return math.prod(self.shape) // n_units

    @property
    def kind(self) -> Kind:
        """The kind of weight, which decides the allowed formats."""
        if len(self.shape) == 1 or self.name.endswith((*_GATES, _BIASES)):
            return "vector"
        return "matrix" if self.name.startswith("layers.") else "outer"


def cut_by_outputs(param: Param) -> Param:
    """The weight sharded by outputs if it is row-parallel, for exact sums; else unchanged.

    >>> param = Param("layers.0.attention.wo.weight", (576, 512), "heads", 1, 64)
    >>> cut = cut_by_outputs(param)
    >>> cut.axis, cut.dim, cut.unit
    ('outputs', 0, 1)
    """
    return replace(param, axis="outputs", dim=0, unit=1) if param.dim else param


def outer_parameters(args: ModelArgs) -> Iterator[Param]:
    """The weights before and after the layers."""
    yield Param("tok_embeddings.weight", (args.vocab_size, args.dim), "vocab")
    yield from _norm("norm", args)
    if not args.tied_embeddings:
        yield Param("output.weight", (args.vocab_size, args.dim), "vocab")


def layer_parameters(args: ModelArgs, layer: int) -> Iterator[Param]:
    """The weights of one layer, in the order of the forward pass."""
    if args.pre_norms:
        yield from _norm(f"layers.{layer}.attention_norm", args)
    yield from _attention(f"layers.{layer}.attention", args)
    if args.post_norms:
        yield from _norm(f"layers.{layer}.post_attention_norm", args)
    if args.pre_norms and not args.shared_norm:
        yield from _norm(f"layers.{layer}.ffn_norm", args)
    name = f"layers.{layer}.feed_forward"
    if not args.n_experts:
        yield from _feed_forward(name, args, "ffn", args.ffn_dim)
    elif layer in args.dense_layers:
        yield from _feed_forward(name, args, "dense_ffn", args.dense_ffn_dim)
    else:
        yield from _experts(name, args)
    if args.post_norms:
        yield from _norm(f"layers.{layer}.post_ffn_norm", args)


def _norm(name: str, args: ModelArgs) -> Iterator[Param]:
    yield Param(f"{name}.weight", (args.dim,))
    if args.norm_bias:
        yield Param(f"{name}.bias", (args.dim,))


def _attention(name: str, args: ModelArgs) -> Iterator[Param]:
    dim, head_dim = args.dim, args.head_dim
    q_dim, kv_dim = args.n_heads * head_dim, args.n_kv_heads * head_dim
    yield Param(f"{name}.wq.weight", (q_dim, dim), "heads", 0, head_dim)
    yield Param(f"{name}.wk.weight", (kv_dim, dim), "kv_heads", 0, head_dim)
    yield Param(f"{name}.wv.weight", (kv_dim, dim), "kv_heads", 0, head_dim)
    yield Param(f"{name}.wo.weight", (dim, q_dim), "heads", 1, head_dim)
    if args.attention_bias:
        yield Param(f"{name}.wq.bias", (q_dim,), "heads", 0, head_dim)
        yield Param(f"{name}.wk.bias", (kv_dim,), "kv_heads", 0, head_dim)
        yield Param(f"{name}.wv.bias", (kv_dim,), "kv_heads", 0, head_dim)
    if args.has_wo_bias:
        yield Param(f"{name}.wo.bias", (dim,))
    if args.qk_norm_across_heads or args.qk_layer_norm:
        yield Param(f"{name}.q_norm.weight", (q_dim,), "heads", 0, head_dim)
        yield Param(f"{name}.k_norm.weight", (kv_dim,), "kv_heads", 0, head_dim)
    elif args.qk_norm:
        yield Param(f"{name}.q_norm.weight", (head_dim,))
        yield Param(f"{name}.k_norm.weight", (head_dim,))
    if args.sink_logits:
        yield Param(f"{name}.sinks", (args.n_heads,), "heads")


def _feed_forward(name: str, args: ModelArgs, axis: Axis, channels: int) -> Iterator[Param]:
    columns = ("w1", "w3") if args.gated else ("w1",)
    for column in columns:
        yield Param(f"{name}.{column}.weight", (channels, args.dim), axis)
    yield Param(f"{name}.w2.weight", (args.dim, channels), axis, 1)
    if args.mlp_bias:
        for column in columns:
            yield Param(f"{name}.{column}.bias", (channels,), axis)
        yield Param(f"{name}.w2.bias", (args.dim,))


def _experts(name: str, args: ModelArgs) -> Iterator[Param]:
    """The router of a layer, with mistral-inference's name for it, and every expert.

    Every rank holds the biases of all experts' outputs, `w2_bias`, which it adds to the sum over
    the ranks. The shared expert and its gate are last.
    """
    dim, channels = args.dim, args.ffn_dim
    yield Param(f"{name}.gate.weight", (args.n_experts, dim))
    if args.has_gate_bias:
        yield Param(f"{name}.gate.bias", (args.n_experts,))
    for expert in range(args.n_experts):
        prefix = f"{name}.experts.{expert}"
        yield Param(f"{prefix}.w1.weight", (channels, dim), "ffn", expert=expert)
        yield Param(f"{prefix}.w3.weight", (channels, dim), "ffn", expert=expert)
        yield Param(f"{prefix}.w2.weight", (dim, channels), "ffn", 1, expert=expert)
        if args.expert_bias:
            yield Param(f"{prefix}.w1.bias", (channels,), "ffn", expert=expert)
            yield Param(f"{prefix}.w3.bias", (channels,), "ffn", expert=expert)
    if args.expert_bias:
        yield Param(f"{name}.w2_bias", (args.n_experts, dim))
    if args.shared_ffn_dim:
        yield from _feed_forward(f"{name}.shared_expert", args, "shared_ffn", args.shared_ffn_dim)
    if args.shared_gate:
        yield Param(f"{name}.shared_gate.weight", (1, dim))
