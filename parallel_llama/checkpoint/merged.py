"""Merges a LoRA adapter into the weights of a checkpoint: W + scaling * B @ A.

Some rows of a weight need those rows of B and all of A; some columns need those columns of A and
all of B. So weights are merged piece by piece, in any layout of the base. The sum is computed in
float32, or in float64 if a summand or the result is in float64. It is not rounded here: the caller
rounds it once.

Source: LoRA, arXiv 2106.09685, section 4.1; Linear.merge of peft 0.21.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from parallel_llama.checkpoint.adapter_tensors import (
    stored_inputs,
    stored_outputs,
    stored_values,
)
from parallel_llama.checkpoint.byte_ranges import ByteRanges
from parallel_llama.checkpoint.checkpoint import Checkpoint
from parallel_llama.checkpoint.reading import finite
from parallel_llama.config.adapter import Adapter, LoraPair
from parallel_llama.dtypes import QuantFormat
from parallel_llama.families import family_of, stored_slices
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import RotaryOrder
from parallel_llama.families.stored_slices import StoredSlice
from parallel_llama.families.weights import Param
from parallel_llama.ops.quant import QuantMatrix


class MergedCheckpoint(Checkpoint):
    """The weights of `base` with an adapter merged into them.

    Weights that the adapter does not change are read from `base`, which is closed with this one.

    Args:
        dtypes: the dtype to which the caller rounds each weight, by name.
    """

    def __init__(
        self, base: Checkpoint, adapter: Adapter, dtypes: Mapping[str, torch.dtype]
    ) -> None:
        args = adapter.args
        super().__init__(args, family_of(args).rotary_order["hf"])
        self.base, self._adapter, self._dtypes = base, adapter, dtypes
        self._slices = stored_slices(args, "hf")
        self._file = ByteRanges(adapter.weights)

    def changes(self, name: str) -> bool:
        """Whether the adapter changes the weight with this name."""
        stored = self._slices[name].name
        return stored in self._adapter.pairs or stored in self._adapter.whole

    def check(self, args: ModelArgs) -> None:
        """Compare the base with its own model; `load_adapter` has checked the adapter."""
        self.base.check(replace(args, tied_embeddings=self.base.args.tied_embeddings))

    def read(self, param: Param, rows: range, order: RotaryOrder = "half") -> Tensor:
        if self.changes(param.name):
            return super().read(param, rows, order)
        return self.base.read(self._in_base(param), rows, order)

    def groups(
        self, param: Param, rows: range, form: QuantFormat, order: RotaryOrder = "half"
    ) -> QuantMatrix | None:
        if self.changes(param.name):
            return None
        return self.base.groups(self._in_base(param), rows, form, order)

    def close(self) -> None:
        self._file.close()
        self.base.close()

    def _stored(self, param: Param, rows: range) -> Tensor:
        stored_slice = self._slices[param.name]
        trained = self._adapter.whole.get(stored_slice.name)
        if trained is None:
            value = self.base.read(self._in_base(param), rows, self._stored_order)
        else:
            value = stored_values(self._file, trained, param, stored_slice, rows)
        pair = self._adapter.pairs.get(stored_slice.name)
        return value if pair is None else self._sum(value, param, pair, stored_slice, rows)

    def _sum(
        self, value: Tensor, param: Param, pair: LoraPair, stored_slice: StoredSlice, rows: range
    ) -> Tensor:
        """W + scaling * B @ A for a slice W of a weight.

        Raises: DamagedWeights if a sum is NaN or Inf.
        """
        n_outputs, n_inputs = param.shape
        outputs, columns = (rows, range(n_inputs)) if param.dim == 0 else (range(n_outputs), rows)
        b = stored_outputs(self._file, pair, param, stored_slice, outputs)
        a = stored_inputs(self._file, pair, columns)
        dtype = torch.float32
        for other in (value.dtype, a.dtype, b.dtype, self._dtypes[param.name]):
            dtype = torch.promote_types(dtype, other)
        merged = b.to(dtype) @ a.to(dtype)
        merged *= pair.scaling
        merged += value
        return finite(param, merged, dtype)

    def _in_base(self, param: Param) -> Param:
        """The weight to read from the base: the embeddings if the base has no output layer."""
        if param.name == "output.weight" and self.base.args.tied_embeddings:
            return replace(param, name="tok_embeddings.weight")
        return param
