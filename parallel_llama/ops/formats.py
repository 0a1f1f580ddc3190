"""Formats of weights: how a weight is stored, and how a model multiplies with it."""

from collections.abc import Sequence
from copy import copy
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from parallel_llama.dtypes import (
    DTYPES,
    DenseFormat,
    DTypeName,
    Kind,
    KVFormat,
    Precision,
    QuantFormat,
)
from parallel_llama.ops.dispatch import Dispatch
from parallel_llama.ops.quant import PanelShape, QuantMatrix, joined
from parallel_llama.ops.torch_ops import TorchOps

HALVES = torch.bfloat16, torch.float16


class DenseWeight:
    """A rank's shard of a weight that is not quantised; on the meta device until it is loaded.

    Args:
        shape: The shape of the shard; for a matrix in torch's order, [out, in].
        dtype: The dtype of products and lookups. A matrix may be stored in 16 bits for float32.
        device: The device of the empty weight.
    """

    def __init__(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.empty(tuple(shape), dtype=dtype, device=device)
        self.computed = dtype

    @property
    def is_loaded(self) -> bool:
        return not self.values.is_meta

    @property
    def n_outputs(self) -> int:
        return len(self.values)

    def load(self, values: Tensor) -> None:
        """Set the values.

        Raises: ValueError for another shape or dtype, or if the weight is loaded already.
        """
        mine = self.values
        if self.is_loaded:
            raise ValueError("is loaded twice")
        is_half = values.ndim == 2 and values.dtype in HALVES and self.computed == torch.float32
        if mine.shape != values.shape or not (mine.dtype == values.dtype or is_half):
            raise ValueError(
                f"is {list(mine.shape)} {mine.dtype} on this rank, "
                f"got {list(values.shape)} {values.dtype}"
            )
        self.values = values

    def apply(self, x: Tensor, ops: TorchOps, bias: "DenseWeight | None" = None) -> Tensor:
        """Y = X A + b. Shapes: [T, in] -> [T, out]."""
        return ops.linear(x, self.values, None if bias is None else bias.values)

    def apply_to(self, x: Tensor, ops: TorchOps, out: Tensor) -> None:
        """out = X A. Shapes: [T, in], [T, out]; out may be a slice of columns."""
        out.copy_(self.apply(x, ops))

    def lookup(self, tokens: Tensor, first: int, ops: TorchOps) -> Tensor:
        """The rows of some tokens, row 0 for token `first`; zeros for other tokens.

        Shapes: int64 [T] -> [T, in].
        """
        return ops.lookup(tokens, self.values, first, self.computed)

    @staticmethod
    def concat_outputs(weights: Sequence["DenseWeight"]) -> "DenseWeight":
        """One weight with the outputs of several weights, which become views of it."""
        whole = copy(weights[0])
        whole.values = torch.cat([weight.values for weight in weights])
        start = 0
        for weight in weights:
            stop = start + len(weight.values)
            weight.values, start = whole.values[start:stop], stop
        return whole


class QuantWeight:
    """A rank's shard of a quantised matrix, in the panel layout of the operators.

    Args:
        groups: The matrix.
        panel_rows: Rows per panel.
        computed: The dtype of lookups.

    Shapes: `values` [n_panels, n_bytes] uint8, as in `ops.quant`.
    """

    is_loaded = True

    def __init__(
        self, groups: QuantMatrix, panel_rows: int, computed: torch.dtype = torch.float32
    ) -> None:
        self.computed = computed
        self.n_outputs, n_inputs = groups.shape
        self.panels = PanelShape(groups.form, n_inputs, panel_rows, groups.n_before)
        self.values = self.panels.pack(groups)

    @classmethod
    def in_place_of(cls, empty: "Weight", groups: QuantMatrix, panel_rows: int) -> "QuantWeight":
        """The quantised weight that replaces an empty one.

        Raises: ValueError for another shape, or if the weight is loaded already.
        """
        if empty.is_loaded:
            raise ValueError("is loaded twice")
        if empty.values.shape != groups.shape:
            raise ValueError(
                f"is {list(empty.values.shape)} on this rank, got {list(groups.shape)}"
            )
        return cls(groups, panel_rows, empty.computed)

    def load(self, _: Tensor) -> None:
        """Raises: ValueError, since the weight is loaded from the start."""
        raise ValueError("is loaded twice")

    def groups(self) -> QuantMatrix:
        """The matrix, unpacked from its panels."""
        return self.panels.unpack(self.values, self.n_outputs)

    def rows(self, outputs: range) -> QuantMatrix:
        """The rows of some outputs, unpacked from the panels that hold them."""
        n = self.panels.n_rows
        first, stop = outputs.start // n, -(-outputs.stop // n)
        part = self.panels.unpack(self.values[first:stop], (stop - first) * n)
        return part.some(slice(outputs.start - first * n, outputs.stop - first * n))

    def apply(self, x: Tensor, ops: TorchOps, bias: DenseWeight | None = None) -> Tensor:
        """Y = X A + b. Shapes: [T, in] -> [T, out]."""
        y = x.new_empty(len(x), self.n_outputs)
        self.apply_to(x, ops, y)
        return y if bias is None else ops.add_(y, bias.values)

    def apply_to(self, x: Tensor, ops: TorchOps, out: Tensor) -> None:
        """out = X A. Shapes: [T, in], [T, out]; out may be a slice of columns."""
        ops.quant_gemm(x, self.values, self.panels, out)

    def lookup(self, tokens: Tensor, first: int, ops: TorchOps) -> Tensor:
        """As `DenseWeight.lookup`. Shapes: int64 [T] -> [T, in]."""
        rows = ops.quant_embedding(tokens, self.values, self.panels, self.n_outputs, first)
        return rows if rows.dtype == self.computed else rows.to(self.computed)

    @staticmethod
    def concat_outputs(weights: Sequence["QuantWeight"]) -> "QuantWeight":
        """One weight with the outputs of several weights, whose own memory is freed."""
        whole = joined([weight.groups() for weight in weights], dim=0)
        for weight in weights:
            weight.values = weight.values.new_empty(0)
        return QuantWeight(whole, weights[0].panels.n_rows, weights[0].computed)


Weight = DenseWeight | QuantWeight


class MixedWeight:
    """Several weights of different formats, with their outputs side by side.

    Args:
        parts: The weights, in the order of the outputs.
    """

    def __init__(self, parts: "Sequence[Weight | MixedWeight]") -> None:
        self._parts = parts
        ends = list(accumulate((part.n_outputs for part in parts), initial=0))
        self.n_outputs: int = ends[-1]
        self._places = [slice(*bounds) for bounds in pairwise(ends)]

    def apply(self, x: Tensor, ops: TorchOps, bias: DenseWeight | None = None) -> Tensor:
        """Y = X A + b. Shapes: [T, in] -> [T, out]."""
        y = x.new_empty(len(x), self.n_outputs)
        self.apply_to(x, ops, y)
        return y if bias is None else ops.add_(y, bias.values)

    def apply_to(self, x: Tensor, ops: TorchOps, out: Tensor) -> None:
        """out = X A. Shapes: [T, in], [T, out]; out may be a slice of columns."""
        for part, place in zip(self._parts, self._places, strict=True):
            part.apply_to(x, ops, out[:, place])


def concat_outputs(weights: Sequence[Weight | MixedWeight]) -> Weight | MixedWeight:
    """One weight with the outputs of several weights side by side.

    Weights of one format are concatenated and hold no memory of their own afterwards.
    """
    dense = [weight for weight in weights if isinstance(weight, DenseWeight)]
    groups = [weight for weight in weights if isinstance(weight, QuantWeight)]
    forms = {weight.panels for weight in groups} | {weight.values.dtype for weight in dense}
    if len(forms) > 1:
        return MixedWeight(weights)
    return DenseWeight.concat_outputs(dense) if dense else QuantWeight.concat_outputs(groups)


def grouped_linear(
    x: Tensor, weights: Sequence[Weight | MixedWeight], dispatch: Dispatch, ops: TorchOps
) -> Tensor:
    """Multiplies each row of x by the weight of its dispatch; zeros for rows without one."""
    dense = [weight.values for weight in weights if isinstance(weight, DenseWeight)]
    if len(dense) == len(weights):
        return ops.routed_linear(x, dense, dispatch)
    products = [partial(weight.apply, ops=ops) for weight in weights]
    return dispatch.through(x, products, weights[0].n_outputs)


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of one of `dtypes.DTYPES`."""
    assert name in DTYPES
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def matrix_forms(precision: Precision) -> set[torch.dtype | QuantFormat]:
    """The dtypes and formats of the matrices of a model of this precision."""
    kinds: tuple[Kind, ...] = ("matrix", "outer")
    forms = {precision.form_of(kind, "") for kind in kinds} | {*(precision.stored or {}).values()}
    return {torch_dtype(form.dtype) if isinstance(form, DenseFormat) else form for form in forms}


def kv_dtype(form: KVFormat) -> torch.dtype:
    """The dtype of a KV cache in this format; see `kv_rows` for the layout of its rows."""
    scaled = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
    return scaled.get(form.dtype) or torch_dtype(form.dtype)


def dtype_name(dtype: torch.dtype) -> DTypeName:
    """The name of a dtype that weights may have; the inverse of `torch_dtype`."""
    (name,) = (each for each in DTYPES if getattr(torch, each) == dtype)
    return name
