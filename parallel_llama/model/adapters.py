"""The matrices of LoRA adapters in the layers of a loaded model."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from parallel_llama.model.layers import ColumnParallelLinear, RowParallelLinear
from parallel_llama.model.low_rank import LowRank
from parallel_llama.model.moe import MixtureOfExperts
from parallel_llama.model.transformer import Transformer
from parallel_llama.model.weights import part_at

# Fused layers, and the layers that they compute, in the order of their outputs.
_FUSED = {"wqkv": ("wq", "wk", "wv"), "w13": ("w1", "w3")}


def add_pair(model: Transformer, adapter: str, weight: str, a: Tensor, b: Tensor) -> None:
    """Adds the matrices of an adapter to the layer that holds a weight; the model is loaded.

    Shapes: a [rank, in], b [out, rank], for this rank's shard [out, in] of the weight.
    """
    path, leaf, _ = weight.rsplit(".", 2)
    part: Any = part_at(model, path)
    name = next((fused for fused, leaves in _FUSED.items() if leaf in leaves), leaf)
    leaves = _FUSED.get(name, (leaf,))
    before = leaves[: leaves.index(leaf)]
    first = sum(getattr(part, each).weight.n_outputs for each in before)
    getattr(part, name).low_ranks.setdefault(adapter, []).append(LowRank(a, b, first))


def remove_adapter(model: Transformer, adapter: str) -> None:
    """Removes the matrices of an adapter from all layers; does nothing if it has none."""
    for _, layer in _layers(model):
        layer.low_ranks.pop(adapter, None)


def low_rank_matrices(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """The matrices of all adapters on this rank, each with a name of its own."""
    for layer_name, layer in _layers(model):
        for adapter, pairs in layer.low_ranks.items():
            for at, pair in enumerate(pairs):
                name = f"{at} for {layer_name} of adapter {adapter!r}"
                yield from ((f"A {name}", pair.a), (f"B {name}", pair.b))


def _layers(model: Transformer) -> Iterator[tuple[str, ColumnParallelLinear | RowParallelLinear]]:
    """The layers that may have matrices of adapters, with their names."""
    for number, block in enumerate(model.layers):
        parts: list[Any] = [block.attention, block.feed_forward]
        if isinstance(block.feed_forward, MixtureOfExperts) and block.feed_forward.shared_expert:
            parts.append(block.feed_forward.shared_expert)
        for leaf, layer in ((leaf, each) for part in parts for leaf, each in vars(part).items()):
            # Without a gate, w1 and w13 are the same layer.
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and leaf != "w1":
                yield f"layers.{number}.{leaf}", layer
