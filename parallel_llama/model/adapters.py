"""The matrices of LoRA adapters in the layers of a loaded model."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from parallel_llama.checkpoint.adapter_tensors import LoadedPair
from parallel_llama.model.huge_pages import huge_pages
from parallel_llama.model.layers import ColumnParallelLinear, RowParallelLinear
from parallel_llama.model.low_rank import LowRank, LowRanks
from parallel_llama.model.moe import MixtureOfExperts
from parallel_llama.model.transformer import Transformer
from parallel_llama.model.weights import fused_at
from parallel_llama.ops import AdapterAddresses


def number_layers(model: Transformer) -> None:
    """Numbers the layers that may have matrices of adapters; the model must be loaded."""
    for number, (_, layer) in enumerate(_layers(model)):
        layer.low_ranks.number = number


def add_adapter(model: Transformer, adapter: str, pairs: Sequence[LoadedPair]) -> None:
    """Adds the matrices of an adapter to the layers that hold their weights.

    On a CPU all matrices are copied to one region of memory, with huge pages if possible, where the
    matrices A of a fused layer follow each other.
    """
    of_layers: dict[int, tuple[LowRanks, list[LowRank]]] = {}
    for pair in pairs:
        layer, first = fused_at(model, pair.weight)
        found = of_layers.setdefault(id(layer.low_ranks), (layer.low_ranks, []))[1]
        found.append(LowRank(pair.a, pair.b, first))
    parts = [sorted(found, key=lambda each: each.first) for _, found in of_layers.values()]
    if pairs and pairs[0].a.device.type == "cpu":
        parts = _in_one_region(parts)
    for (low_ranks, _), found in zip(of_layers.values(), parts, strict=True):
        low_ranks[adapter] = found


def remove_adapter(model: Transformer, adapter: str) -> None:
    """Removes the matrices of an adapter from all layers; does nothing if it has none."""
    for _, layer in _layers(model):
        layer.low_ranks.pop(adapter, None)


def adapter_addresses(model: Transformer, adapter: str) -> AdapterAddresses:
    """The addresses of an adapter's matrices on this CPU, valid until the adapter is removed."""
    layers = [layer.low_ranks for _, layer in _layers(model)]
    found = AdapterAddresses(len(layers))
    for low_ranks in layers:
        parts = low_ranks.get(adapter)
        if parts:
            first = parts[0].a
            n_rows = sum(len(part.a) for part in parts)
            a = first.as_strided((n_rows, first.shape[1]), first.stride())
            found.add(low_ranks.number, a, [(part.first, part.b) for part in parts])
    return found


def low_rank_matrices(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """The matrices of all adapters on this rank, each with a name of its own."""
    for layer_name, layer in _layers(model):
        for adapter, pairs in layer.low_ranks.items():
            for at, pair in enumerate(pairs):
                name = f"{at} for {layer_name} of adapter {adapter!r}"
                yield from ((f"A {name}", pair.a), (f"B {name}", pair.b))


def _in_one_region(layers: Sequence[Sequence[LowRank]]) -> list[list[LowRank]]:
    """Copies of the matrices, in one region: for each layer all A, and then all B."""
    tensors = [each for parts in layers for each in (*(p.a for p in parts), *(p.b for p in parts))]
    region = huge_pages(sum(each.nbytes for each in tensors)).view(tensors[0].dtype)
    ends = accumulate((each.numel() for each in tensors), initial=0)
    copies = (
        region[start:stop].view(each.shape).copy_(each)
        for each, (start, stop) in zip(tensors, pairwise(ends), strict=True)
    )
    found = []
    for parts in layers:
        own = [next(copies) for _ in range(2 * len(parts))]
        both = zip(own[: len(parts)], own[len(parts) :], parts, strict=True)
        found.append([LowRank(a, b, part.first) for a, b, part in both])
    return found


def _layers(model: Transformer) -> Iterator[tuple[str, ColumnParallelLinear | RowParallelLinear]]:
    """The layers that may have matrices of adapters, with their names."""
    for number, block in model.layers.items():
        parts: list[Any] = [block.attention, block.feed_forward]
        if isinstance(block.feed_forward, MixtureOfExperts) and block.feed_forward.shared_expert:
            parts.append(block.feed_forward.shared_expert)
        for leaf, layer in ((leaf, each) for part in parts for leaf, each in vars(part).items()):
            # Without a gate, w1 and w13 are the same layer.
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and leaf != "w1":
                yield f"layers.{number}.{leaf}", layer
