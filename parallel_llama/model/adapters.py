"""Adds the matrices of LoRA adapters to the layers of a loaded model, and removes them."""

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
    """Adds the matrices of an adapter to the layers that compute with the adapted weights.

    On a CPU all matrices are copied to one region of memory, with huge pages if possible, where the
    matrices A of a fused layer are consecutive.
    """
    by_layer: dict[int, tuple[LowRanks, list[LowRank]]] = {}
    for pair in pairs:
        layer, first = fused_at(model, pair.weight)
        parts = by_layer.setdefault(id(layer.low_ranks), (layer.low_ranks, []))[1]
        parts.append(LowRank(pair.a, pair.b, first))
    layers = [sorted(parts, key=lambda part: part.first) for _, parts in by_layer.values()]
    if pairs and pairs[0].a.device.type == "cpu":
        layers = _in_one_region(layers)
    for (low_ranks, _), parts in zip(by_layer.values(), layers, strict=True):
        low_ranks[adapter] = parts


def remove_adapter(model: Transformer, adapter: str) -> None:
    """Removes the matrices of an adapter from all layers that have them."""
    for _, layer in _layers(model):
        layer.low_ranks.pop(adapter, None)


def adapter_addresses(model: Transformer, adapter: str) -> AdapterAddresses:
    """The addresses of an adapter's matrices on this CPU, valid until the adapter is removed."""
    layers = [layer.low_ranks for _, layer in _layers(model)]
    addresses = AdapterAddresses(len(layers))
    for low_ranks in layers:
        parts = low_ranks.get(adapter)
        if parts:
            first = parts[0].a
            n_rows = sum(len(part.a) for part in parts)
            a = first.as_strided((n_rows, first.shape[1]), first.stride())
            addresses.add(low_ranks.number, a, [(part.first, part.b) for part in parts])
    return addresses


def low_rank_matrices(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Yields the matrices of all adapters on this rank, with a unique name for each."""
    for layer_name, layer in _layers(model):
        for adapter, pairs in layer.low_ranks.items():
            for number, pair in enumerate(pairs):
                name = f"{number} for {layer_name} of adapter {adapter!r}"
                yield from ((f"A {name}", pair.a), (f"B {name}", pair.b))


def _in_one_region(layers: Sequence[Sequence[LowRank]]) -> list[list[LowRank]]:
    """Copies of the matrices in one region: for each layer all A, and then all B."""
    matrices = [x for parts in layers for x in (*(p.a for p in parts), *(p.b for p in parts))]
    region = huge_pages(sum(matrix.nbytes for matrix in matrices)).view(matrices[0].dtype)
    ends = accumulate((matrix.numel() for matrix in matrices), initial=0)
    copies = (
        region[start:stop].view(matrix.shape).copy_(matrix)
        for matrix, (start, stop) in zip(matrices, pairwise(ends), strict=True)
    )
    copied = []
    for parts in layers:
        matrices_a, matrices_b = ([next(copies) for _ in parts] for _ in range(2))
        triples = zip(matrices_a, matrices_b, parts, strict=True)
        copied.append([LowRank(a, b, part.first) for a, b, part in triples])
    return copied


def _layers(model: Transformer) -> Iterator[tuple[str, ColumnParallelLinear | RowParallelLinear]]:
    """Yields the name and layer of each layer that may have matrices of adapters."""
    for number, block in model.layers.items():
        parts: list[Any] = [block.attention, block.feed_forward]
        if isinstance(block.feed_forward, MixtureOfExperts) and block.feed_forward.shared_expert:
            parts.append(block.feed_forward.shared_expert)
        for leaf, layer in ((leaf, each) for part in parts for leaf, each in vars(part).items()):
            # Without a gate, w1 and w13 are the same layer.
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and leaf != "w1":
                yield f"layers.{number}.{leaf}", layer
