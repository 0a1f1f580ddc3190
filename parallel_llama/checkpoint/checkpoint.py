"""The interface of all readers of weights, the rotary orders of wq and wk, and random weights.

Rotary embedding rotates pairs of rows of each head. Meta's files and the model store the two rows
of a pair next to each other (interleaved: 0, 1 | 2, 3 | ...). HF's files store them half a head
apart (half-split: 0, D/2 | 1, D/2+1 | ...), which is also the canonical order of hashes and of
native folders. The norms of queries and keys follow the same orders.

Source: RoFormer, arXiv 2104.09864, section 3.2.2 (the interleaved order).
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import sliced_shape
from parallel_llama.checkpoint.scaled import ScaledBlock
from parallel_llama.dtypes import QuantFormat, ScaledFormat
from parallel_llama.errors import CheckpointError, listed
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import RotaryOrder
from parallel_llama.families.weights import Param
from parallel_llama.ops.formats import torch_dtype
from parallel_llama.ops.quant import QuantMatrix


class Checkpoint(ABC):
    """The weights of a model by Meta's names; `stored_order` is the rotary order of wq and wk."""

    def __init__(self, args: ModelArgs, stored_order: RotaryOrder) -> None:
        self.args, self._stored_order = args, stored_order

    @abstractmethod
    def check(self, args: ModelArgs) -> None:
        """Compare names, shapes and dtypes with the model, without reading the weights.

        Raises: CheckpointError listing all differences.
        """

    def read(self, param: Param, rows: range, order: RotaryOrder = "half") -> Tensor:
        """Reads a slice of a weight; only after `check`.

        Args:
            rows: the slice along `param.dim`; other dimensions are whole.
            order: the rotary order of the result; whole heads are read to reorder them.

        Returns: a contiguous tensor in the stored dtype (float32 if quantised), on the CPU unless
            the weights are random.

        Raises: DamagedWeights if the files changed or disagree.
        """
        if order == self._stored_order or not is_rotary(param.name):
            return self._stored(param, rows)
        heads = self._whole_heads(rows)
        return self._reordered(self._stored(param, heads), heads, rows, order)

    def groups(
        self, param: Param, rows: range, form: QuantFormat, order: RotaryOrder = "half"
    ) -> QuantMatrix | None:
        """Reads a slice as quantised groups, or returns None if it is not stored in this format.

        Raises: as `read`.
        """
        if order == self._stored_order or not is_rotary(param.name):
            return self._stored_quant(param, rows, form)
        heads = self._whole_heads(rows)
        whole = self._stored_quant(param, heads, form)
        if whole is None:
            return None
        return whole.map_tensors(lambda part: self._reordered(part, heads, rows, order))

    def scaled(self, param: Param, rows: range, form: ScaledFormat) -> ScaledBlock | None:
        """Reads a slice in half-split order with numbers and scales as they are stored.

        Returns: None if the weight is not stored in this format.

        Raises: as `read`.
        """
        if self._stored_order == "half" or not is_rotary(param.name):
            return self._stored_scaled(param, rows, form)
        heads = self._whole_heads(rows)
        whole = self._stored_scaled(param, heads, form)
        if whole is None:
            return None
        return whole.map_rows(rows, lambda part: self._reordered(part, heads, rows, "half"))

    def _whole_heads(self, rows: range) -> range:
        size = self.args.head_dim
        return range(rows.start // size * size, -(-rows.stop // size) * size)

    def _reordered(self, stored: Tensor, heads: range, rows: range, order: RotaryOrder) -> Tensor:
        """Converts whole heads (`stored`, which has the rows `heads`) and selects `rows`."""
        value = reordered(stored, self.args.head_dim, order, self.args.rotary_dim)
        return value[rows.start - heads.start :][: len(rows)]

    def _stored_quant(self, _: Param, __: range, ___: QuantFormat) -> QuantMatrix | None:
        """As `groups`, in the stored rotary order."""
        return None

    def _stored_scaled(self, _: Param, __: range, ___: ScaledFormat) -> ScaledBlock | None:
        """As `scaled`, in the stored rotary order."""
        return None

    @abstractmethod
    def _stored(self, param: Param, rows: range) -> Tensor:
        """As `read`, in the stored rotary order."""

    def close(self) -> None:  # noqa: B027 (random weights have nothing to close)
        """Close the files; nothing can be read afterwards."""


def refuse_difference(where: object, difference: Mapping[str, Sequence[str]]) -> None:
    """Raises a CheckpointError that lists the differences, if there are any."""
    parts = [f"{kind}: {listed(names)}" for kind, names in difference.items() if names]
    if parts:
        raise CheckpointError(
            f"{where}: the tensors do not fit the model's configuration; {'; '.join(parts)}; "
            "use the configuration that belongs to these weights, or fetch the files again"
        )


def reordered(
    rows: Tensor, head_dim: int, order: RotaryOrder, rotary_dim: int | None = None
) -> Tensor:
    """Converts the rows of whole heads from the other rotary order to `order`, as a copy.

    Only the first `rotary_dim` rows of each head are rotary; None stands for all rows.

    Shapes: rows [n_heads * head_dim, ...], a weight or a bias.
    """
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    rotated, kept = heads[:, :rotary_dim], heads[:, rotary_dim or head_dim :]
    n_pairs = rotated.shape[1] // 2
    pairs = (n_pairs, 2) if order == "half" else (2, n_pairs)
    swapped = rotated.reshape(-1, *pairs, *rows.shape[1:]).transpose(1, 2).reshape(rotated.shape)
    if kept.numel():
        swapped = torch.cat([swapped, kept], dim=1)
    return swapped.reshape(rows.shape)


def is_rotary(name: str) -> bool:
    """Whether the rows of the weight with this name form rotary pairs."""
    return any(f".attention.{part}." in name for part in ("wq", "wk", "q_norm", "k_norm"))


# Rows or columns of random weights per key. Another number would change the weights of every seed.
CHUNK = 64

STD = 0.02  # of random matrices and biases; activations keep their scale over many layers
NORM_STD = 0.1  # of random norms, around 1

_CPU = torch.device("cpu")


class RandomCheckpoint(Checkpoint):
    """Weights drawn from a seed on a device, the same for every number of ranks.

    Values are drawn in fixed chunks of rows (or columns, for weights cut by columns), and each
    chunk has its own key, so a rank draws little more than its own shard. With exact sums,
    row-parallel weights are sharded by outputs and drawn whole. Values differ between kinds of
    devices.
    """

    def __init__(self, args: ModelArgs, seed: int, device: torch.device) -> None:
        super().__init__(args, "half")
        self.seed, self._device = seed, device
        self._dtype = torch_dtype(args.dtype)

    def check(self, args: ModelArgs) -> None:
        """Does nothing: random weights fit every model."""

    def _stored(self, param: Param, rows: range) -> Tensor:
        dim = param.file_dim
        if dim != param.dim:
            whole = self._stored(replace(param, axis=None, dim=dim), range(param.shape[dim]))
            return whole.narrow(param.dim, rows.start, len(rows)).clone()
        out = torch.empty(sliced_shape(param, rows), dtype=self._dtype, device=self._device)
        for number in range(rows.start // CHUNK, -(-rows.stop // CHUNK)):
            start = number * CHUNK
            chunk = range(start, min(start + CHUNK, param.shape[dim]))
            overlap = range(max(rows.start, chunk.start), min(rows.stop, chunk.stop))
            if overlap:
                drawn = self._drawn(param, number, chunk)
                target = out.narrow(dim, overlap.start - rows.start, len(overlap))
                target.copy_(drawn.narrow(dim, overlap.start - chunk.start, len(overlap)))
        return out

    def _drawn(self, param: Param, number: int, chunk: range) -> Tensor:
        key = hashlib.blake2b(f"{self.seed} {param.name} {number}".encode(), digest_size=8)
        generator = torch.Generator(self._device)
        generator.manual_seed(int.from_bytes(key.digest(), "little") >> 1)
        values = torch.empty(sliced_shape(param, chunk), dtype=torch.float32, device=self._device)
        values.normal_(generator=generator)
        if param.name.endswith("norm.weight"):
            return values.mul_(NORM_STD).add_(1 - self.args.norm_offset)
        return values.mul_(STD)


def random_checkpoint(args: ModelArgs, seed: int, device: torch.device = _CPU) -> RandomCheckpoint:
    """Random weights for the shape of a model, in `args.dtype`, drawn on a device."""
    return RandomCheckpoint(args, seed, device)
