"""Adding the matrices of a LoRA adapter to the layers of a loaded model."""

from typing import Any

from torch import Tensor

from parallel_llama.model.low_rank import LowRank
from parallel_llama.model.transformer import Transformer
from parallel_llama.model.weights import part_at

# Fused layers, and the layers whose outputs they have, in order.
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
