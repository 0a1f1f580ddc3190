"""How a weight is stored, and how it is applied: the one place that looks into a weight."""

from collections.abc import Sequence
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_llama.dtypes import DTYPES, DTypeName, KVFormat
from parallel_llama.ops.torch_ops import TorchOps


class DenseWeight:
    """A rank's part of a weight as plain values; on the meta device until it is filled.

    Shapes: `values` as the plan cuts them, for a matrix in torch's order, [out, in].
    """

    def __init__(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.empty(tuple(shape), dtype=dtype, device=device)

    @property
    def is_filled(self) -> bool:
        return not self.values.is_meta

    def fill(self, values: Tensor) -> None:
        """Take in the values as they were read.

        Raises: ValueError for another shape or dtype, and where it is filled already.
        """
        mine = self.values
        if self.is_filled:
            raise ValueError("is filled twice")
        if mine.shape != values.shape or mine.dtype != values.dtype:
            raise ValueError(
                f"is {list(mine.shape)} {mine.dtype} on this rank, "
                f"got {list(values.shape)} {values.dtype}"
            )
        self.values = values

    def apply(self, x: Tensor, ops: TorchOps, bias: "DenseWeight | None" = None) -> Tensor:
        """Y = X A + b. Shapes: [T, in] -> [T, out]."""
        return ops.linear(x, self.values, None if bias is None else bias.values)

    @staticmethod
    def apply_grouped(
        x: Tensor, weights: Sequence["DenseWeight"], counts: Sequence[int], ops: TorchOps
    ) -> Tensor:
        """Consecutive rows of x by a weight each: the first `counts[0]` by the first, and so on."""
        return ops.grouped_linear(x, [weight.values for weight in weights], counts)

    def lookup(self, rows: Tensor) -> Tensor:
        """Some rows of the weight. Shapes: int64 [T] -> [T, in]."""
        return F.embedding(rows, self.values)

    @staticmethod
    def end_to_end(weights: Sequence["DenseWeight"]) -> "DenseWeight":
        """One weight with the outputs of several side by side, of which they become views."""
        whole = copy(weights[0])
        whole.values = torch.cat([weight.values for weight in weights])
        start = 0
        for weight in weights:
            stop = start + len(weight.values)
            weight.values, start = whole.values[start:stop], stop
        return whole


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of one of `dtypes.DTYPES`."""
    assert name in DTYPES
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def kv_dtype(form: KVFormat) -> torch.dtype:
    """The dtype of a KV cache in this format; `kv_rows` says how its rows lie."""
    scaled = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
    return scaled.get(form.dtype) or torch_dtype(form.dtype)


def dtype_name(dtype: torch.dtype) -> DTypeName:
    """The name of a dtype that weights may have; the inverse of `torch_dtype`."""
    (name,) = (each for each in DTYPES if getattr(torch, each) == dtype)
    return name
