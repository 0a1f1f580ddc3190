"""Reads slices of the tensors of a LoRA adapter: columns of A, rows of B, and whole weights.

Source: LoRA, arXiv 2106.09685, section 4.1.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import ByteRanges
from parallel_llama.checkpoint.checkpoint import Checkpoint
from parallel_llama.checkpoint.reading import finite
from parallel_llama.checkpoint.stacked_experts import read_stacked
from parallel_llama.config.adapter import Adapter, LoraPair, served_pairs
from parallel_llama.dtypes import STORED
from parallel_llama.families import family_of, stored_slices
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.stored_slices import StoredSlice, whole
from parallel_llama.families.weights import Param
from parallel_llama.files.safetensors_header import FileTensor
from parallel_llama.ops.formats import torch_dtype
from parallel_llama.plan import Shard


@dataclass(frozen=True)
class LoadedPair:
    """A rank's part of A and B for its shard of a weight; B contains the scaling.

    Shapes: a [rank, in], b [out, rank], for a shard [out, in].
    """

    weight: str
    a: Tensor
    b: Tensor


def load_pairs(
    adapter: Adapter, shard: Shard, dtype: torch.dtype, device: torch.device
) -> Iterator[LoadedPair]:
    """Reads the pairs of a rank, one for each weight that the adapter changes.

    A rank with some outputs of a weight needs those rows of B and all of A; a rank with some inputs
    needs those columns of A and all of B.

    Raises: DamagedWeights for a value that is NaN or Inf, or too large for the dtype.
    """
    with closing(_OutputMatrices(adapter)) as file:
        for param, name in served_pairs(adapter):
            if not shard.holds(param):
                continue
            pair, cut = adapter.pairs[name], shard.cut(param)
            n_outputs, n_inputs = param.shape
            rows = shard.rows_of(cut)
            outputs, columns = (rows, range(n_inputs)) if cut.dim == 0 else (range(n_outputs), rows)
            b = file.read(param, outputs, "interleaved").to(torch.float64) * pair.scaling
            yield LoadedPair(
                param.name,
                finite(param, stored_inputs(file.bytes, pair, columns), dtype).to(device),
                finite(param, b, dtype).to(device),
            )


class _OutputMatrices(Checkpoint):
    """The matrices B of an adapter, by the names of their weights."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter.args, family_of(adapter.args).rotary_order["hf"])
        self._pairs, self._slices = adapter.pairs, stored_slices(adapter.args, "hf")
        self.bytes = ByteRanges(adapter.weights)

    def check(self, args: ModelArgs) -> None:
        """Does nothing: `load_adapter` has checked the adapter."""

    def _stored(self, param: Param, rows: range) -> Tensor:
        stored_slice = self._slices[param.name]
        return stored_outputs(self.bytes, self._pairs[stored_slice.name], param, stored_slice, rows)

    def close(self) -> None:
        self.bytes.close()


def stored_outputs(
    file: ByteRanges, pair: LoraPair, param: Param, stored_slice: StoredSlice, outputs: range
) -> Tensor:
    """The rows of B for some outputs of a weight, in the stored order. Shapes: [outputs, rank].

    Raises: DamagedWeights if a value is NaN or Inf.
    """
    b = Param(pair.b.name, (param.shape[0], pair.rank))
    return stored_values(file, pair.b, b, replace(stored_slice, shape=pair.b.shape), outputs)


def stored_inputs(file: ByteRanges, pair: LoraPair, inputs: range) -> Tensor:
    """The columns of A for some inputs of a weight. Shapes: [rank, inputs].

    Raises: DamagedWeights if a value is NaN or Inf.
    """
    a = Param(pair.a.name, pair.a.shape, dim=1)
    return stored_values(file, pair.a, a, whole(pair.a.name, pair.a.shape), inputs)


def stored_values(
    file: ByteRanges, tensor: FileTensor, param: Param, stored_slice: StoredSlice, rows: range
) -> Tensor:
    """Reads a slice of a weight from a tensor of the adapter; errors name the tensor.

    Raises: DamagedWeights if a value is NaN or Inf.
    """
    named, dtype = replace(param, name=tensor.name), torch_dtype(STORED[tensor.dtype])
    if stored_slice.count is None:
        values = file.values(tensor.offset, dtype, named, stored_slice, rows)
    else:
        read = partial(file.block, tensor.offset, dtype, stored_slice.shape[-1])
        values = read_stacked(named, stored_slice, rows, read)
    return finite(named, values, dtype)
