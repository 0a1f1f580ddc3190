"""Loads the weights of a model; fuses each complete part, and moves it to huge pages.

When a rank changes to another shard, the new model copies the rows that both shards contain. The
old model, the source of these rows, releases its weights part by part.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from parallel_llama.dtypes import InputFormat
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.weights import Param
from parallel_llama.model.attention import Attention
from parallel_llama.model.feed_forward import FeedForward
from parallel_llama.model.huge_pages import HugePages
from parallel_llama.model.layers import (
    ColumnParallelLinear,
    HeadLayerNorm,
    LayerNorm,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from parallel_llama.model.moe import Expert, Matrix, MixtureOfExperts, Router
from parallel_llama.model.transformer import Transformer, TransformerBlock
from parallel_llama.ops.formats import DenseWeight, LoadedWeight, QuantWeight, Weight
from parallel_llama.ops.quant import PackedRows
from parallel_llama.plan import Shard

_Layer = (
    Attention
    | FeedForward
    | MixtureOfExperts
    | Matrix
    | Router
    | ColumnParallelLinear
    | RowParallelLinear
    | RMSNorm
    | LayerNorm
    | HeadLayerNorm
)


# Fused layers, and the layers that each replaces, in the order of outputs.
_FUSED = {"wqkv": ("wq", "wk", "wv"), "w13": ("w1", "w3")}


class WeightLoader:
    """Loads weights into a model by name, and provides their values to the model's successor.

    On a CPU, memory for all weights is reserved, in huge pages, when the first weight is loaded.

    Args:
        model: The model, without weights.
        before: The loader of the model that this model replaces. When a part has been loaded here,
            `before` releases the memory of that part.
        inputs: The formats to which the inputs of matrices that are not quantised are rounded, by
            the names of the matrices.
    """

    def __init__(
        self,
        model: Transformer,
        args: ModelArgs,
        shard: Shard,
        before: "WeightLoader | None" = None,
        inputs: Mapping[str, InputFormat] | None = None,
    ) -> None:
        self._model, self._shard, self._before = model, shard, before
        self._huge_pages: HugePages | None = None
        self._may_reserve = True
        self._bytes_of: dict[str, range] = {}  # in the huge pages, by part
        names = [param.name for param in filter(shard.holds, parameters(args))]
        self._weights: dict[str, Weight] = {name: getattr(*self._holder(name)) for name in names}
        for name, weight in self._weights.items():
            if inputs is not None and isinstance(weight, DenseWeight):
                weight.inputs = inputs.get(name)
        self._n_missing = Counter(part for name in names for part in _parts_of(name))

    def assign(self, name: str, values: LoadedWeight) -> None:
        """Set the values of this rank's shard of a weight; a list of parts is emptied.

        Raises: KeyError for a name the model does not have, ValueError for another shape or for a
        weight that is loaded already.
        """
        if name not in self._weights:
            raise KeyError(f"the model has no weight {name}")
        device = values[0].device if isinstance(values, list) else values.device
        if self._may_reserve and device.type == "cpu":
            self._may_reserve = False
            # `ulimit -v` may be too low: empty weights have their sizes before quantisation.
            with suppress(OSError):
                self._huge_pages = HugePages([weight.values for weight in self._weights.values()])
        try:
            self._load(name, values)
        except ValueError as error:
            raise ValueError(f"weight {name} {error}") from error
        for part in _parts_of(name):
            self._n_missing[part] -= 1
            if not self._n_missing[part]:
                self._finalise(part)

    def complete(self) -> None:
        """Check that every weight is loaded, after which the model can be called.

        Raises: ValueError if a weight was never loaded.
        """
        missing = [name for name, weight in self._weights.items() if not weight.is_loaded]
        if missing:
            raise ValueError(f"{len(missing)} weights were never loaded: {missing[:10]}")
        self._before = None  # its model must be freed

    def rows_of(self, param: Param) -> range:
        """As `HeldWeights.rows_of`."""
        return self._shard.rows_of(param) if self._shard.holds(param) else range(0)

    def take(self, param: Param, rows: range) -> Tensor | PackedRows:
        """As `HeldWeights.take`."""
        weight, first = self._weights[param.name], 0
        start = rows.start - self.rows_of(param).start
        if isinstance(weight, DenseWeight):
            return weight.values.narrow(param.dim, start, len(rows))
        if not weight.values.numel():
            fused, first = fused_at(self._model, param.name)
            weight = fused if isinstance(fused, QuantWeight) else fused.weight
        assert isinstance(weight, QuantWeight)
        return weight.rows(range(first + start, first + start + len(rows)))

    def _holder(self, name: str) -> tuple[Any, str]:
        """The layer that holds a weight, and the name of the weight's attribute."""
        part, _, leaf = name.rpartition(".")
        return part_at(self._model, part), leaf

    def _load(self, name: str, values: LoadedWeight) -> None:
        empty = self._weights[name]
        parts = values if isinstance(values, list) else [values]
        dense = [part for part in parts if isinstance(part, Tensor)]
        if dense:
            empty.load(dense if isinstance(values, list) else dense[0])
            if isinstance(values, list):
                values.clear()  # the weight frees each part once its rows are stored
            return
        rows = [part for part in parts if not isinstance(part, Tensor)]
        self._weights[name] = QuantWeight.replacing(empty, rows, self._model.ops.panel_rows)
        setattr(*self._holder(name), self._weights[name])

    def _finalise(self, name: str) -> None:
        """Fuse and pack the weights of a completely loaded part; on the CPU, in huge pages."""
        part = part_at(self._model, name)
        if isinstance(part, TransformerBlock | Expert):
            part.fuse()
        # Without a gate, w1 and w13 are the same weight; the dict has it once.
        weights = dict.fromkeys(_weights_of(part))
        if self._huge_pages is not None:
            self._bytes_of[name] = self._huge_pages.move(weights)
        else:
            for weight in weights:
                weight.pack()
        if self._before is not None:
            self._before._release(name)

    def _release(self, name: str) -> None:
        """Return the memory of a part's weights to the system; their values are lost."""
        if self._huge_pages is not None:
            self._huge_pages.release(self._bytes_of.pop(name, range(0)))


def stored_weights(model: Transformer) -> dict[str, Weight]:
    """The weights of a loaded model by name, without those that are views of a fused weight."""
    weights = {name: weight for name, weight in _named(model, "") if weight.values.numel()}
    stored: dict[str, Weight] = {}
    stop = 0
    for name in sorted(weights, key=lambda name: _span(weights[name])):
        address, negated_bytes = _span(weights[name])
        if address - negated_bytes > stop:
            stored[name], stop = weights[name], address - negated_bytes
    return stored


def _span(weight: Weight) -> tuple[int, int]:
    """A key that sorts weights by address, and a fused weight before its views."""
    return weight.values.data_ptr(), -weight.values.nbytes


def _named(part: object, path: str) -> Iterator[tuple[str, Weight]]:
    """Yields each weight of a part of the model, after its path."""
    items = part if isinstance(part, dict) else vars(part)
    for name, value in items.items():
        if isinstance(value, Weight):
            yield f"{path}{name}", value
        elif isinstance(value, list):
            yield from _named(dict(enumerate(value)), f"{path}{name}.")
        elif isinstance(value, dict | TransformerBlock | VocabParallelEmbedding | Expert | _Layer):
            yield from _named(value, f"{path}{name}.")


def part_at(model: Transformer, path: str) -> Any:
    """The part of the model at a path such as layers.3.feed_forward.experts.5."""
    part: Any = model
    for name in path.split("."):
        part = part[int(name)] if name.isdecimal() else getattr(part, name)
    return part


def fused_at(model: Transformer, weight: str) -> tuple[Any, int]:
    """The layer or fused weight that contains a weight, and the index of its first output there."""
    path, leaf, _ = weight.rsplit(".", 2)
    part = part_at(model, path)
    name = next((fused for fused, leaves in _FUSED.items() if leaf in leaves), leaf)
    leaves = _FUSED.get(name, (leaf,))
    preceding = leaves[: leaves.index(leaf)]
    return getattr(part, name), sum(
        getattr(part, sibling).weight.n_outputs for sibling in preceding
    )


def _parts_of(name: str) -> list[str]:
    """The parts that contain a weight, inner first; a part is finalised when it is complete.

    >>> _parts_of("layers.3.feed_forward.experts.5.w1.weight"), _parts_of("norm.weight")
    (['layers.3.feed_forward.experts.5', 'layers.3'], ['norm'])
    """
    path = name.split(".")
    lengths = (5, 2) if "experts" in path else (2,) if path[0] == "layers" else (1,)
    return [".".join(path[:length]) for length in lengths]


def _weights_of(part: object) -> Iterator[Weight]:
    """The weights of a part, fused ones included, without those of experts, which are parts too."""
    for value in vars(part).values():
        if isinstance(value, Weight):
            yield value
        elif isinstance(value, _Layer):
            yield from _weights_of(value)
