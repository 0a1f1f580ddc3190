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
    InputFormat,
    Kind,
    KVFormat,
    Precision,
    QuantFormat,
)
from parallel_llama.ops.dispatch import Dispatch
from parallel_llama.ops.part_sums import Product
from parallel_llama.ops.quant import PackedRows, QuantMatrix, QuantRows
from parallel_llama.ops.torch_ops import TorchOps

HALVES = torch.bfloat16, torch.float16


class DenseWeight:
    """A rank's shard of a weight that is not quantised; on the meta device until it is loaded.

    Args:
        shape: The shape of the shard; for a matrix in torch's order, [out, in].
        dtype: The dtype of products and lookups. If it is float32, a matrix may be stored in 16
            bits.
        device: The device of the empty weight.

    Attributes:
        inputs: The format to which inputs are rounded before a product, if any.
    """

    inputs: InputFormat | None = None

    def __init__(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> None:
        self._values: Tensor | None = torch.empty(tuple(shape), dtype=dtype, device=device)
        self._parts: list[Tensor] = []  # the rows, until `store` or `values` concatenates them
        # After `concat_outputs`: the weight that holds the rows, and the index of the first row.
        self._fused: tuple[DenseWeight, int] | None = None
        self.n_outputs, self.computed = shape[0], dtype

    @property
    def values(self) -> Tensor:
        if self._fused is not None:
            whole, first = self._fused
            return whole.values[first : first + self.n_outputs]
        if self._values is None:
            self._values, self._parts = torch.cat(self._parts), []
        return self._values

    @values.setter
    def values(self, values: Tensor) -> None:
        self._values, self._parts, self._fused = values, [], None

    @property
    def n_inputs(self) -> int:
        return self.values.shape[1]

    @property
    def is_loaded(self) -> bool:
        return self._values is None or not self._values.is_meta

    def load(self, values: Tensor | list[Tensor]) -> None:
        """Set the values, given whole or as a list of parts in the order of rows.

        Raises: ValueError for another shape or dtype, or if the weight is loaded already.
        """
        if self.is_loaded:
            raise ValueError("is loaded twice")
        parts, empty = values if isinstance(values, list) else [values], self.values
        first = parts[0]
        shape = [sum(map(len, parts)), *first.shape[1:]]
        is_half = first.ndim == 2 and first.dtype in HALVES and self.computed == torch.float32
        if list(empty.shape) != shape or not (empty.dtype == first.dtype or is_half):
            raise ValueError(
                f"is {list(empty.shape)} {empty.dtype} on this rank, got {shape} {first.dtype}"
            )
        self._values, self._parts = (None, parts) if isinstance(values, list) else (values, [])

    def pack(self) -> None:
        """Concatenate the rows now, instead of when they are first used."""
        _ = self.values

    @property
    def unstored_bytes(self) -> int:
        """The bytes that `store` needs; 0 if the rows are contiguous already."""
        return sum(part.nbytes for part in self._parts)

    def store(self, memory: Tensor) -> None:
        """Concatenate the rows in the given memory. Shapes: [unstored_bytes] uint8.

        The memory of each part is freed once its rows are copied.
        """
        shape = self.n_outputs, *self._parts[0].shape[1:]
        values, start = memory.view(self._parts[0].dtype).view(shape), 0
        while self._parts:
            part = self._parts.pop(0)
            values[start : start + len(part)] = part
            start += len(part)
        self.values = values

    def apply(self, x: Tensor, ops: TorchOps, bias: "DenseWeight | None" = None) -> Tensor:
        """Y = X A + b. Shapes: [T, in] -> [T, out]."""
        return ops.whole(self.product(x, ops, bias))

    def product(self, x: Tensor, ops: TorchOps, bias: "DenseWeight | None" = None) -> Product:
        """As `apply`, for an operator that takes a `PartSums`."""
        x = x if self.inputs is None else ops.round_inputs(x, self.inputs)
        return ops.product(x, self.values, None if bias is None else bias.values)

    def apply_to(self, x: Tensor, ops: TorchOps, out: Tensor) -> None:
        """out = X A. Shapes: [T, in], [T, out]; out may be a slice of columns."""
        out.copy_(self.apply(x, ops))

    def lookup(self, tokens: Tensor, first: int, ops: TorchOps) -> Tensor:
        """The rows of some tokens, row 0 for token `first`; -0.0 for other tokens.

        Shapes: int64 [T] -> [T, in].
        """
        return ops.lookup(tokens, self.values, first, self.computed)

    @staticmethod
    def concat_outputs(weights: Sequence["DenseWeight"]) -> "DenseWeight":
        """One weight with the outputs of several weights, which become views of it."""
        whole = copy(weights[0])
        whole._values, whole._parts, whole.n_outputs = None, [], 0
        for weight in weights:
            whole._parts += weight._parts or [weight.values]
            weight._values, weight._parts = None, []
            weight._fused = whole, whole.n_outputs
            whole.n_outputs += weight.n_outputs
        return whole


class QuantWeight:
    """A rank's shard of a quantised matrix, in the panel layout of the operators.

    Args:
        parts: The rows of the matrix, which are packed when they are first used.
        panel_rows: Rows per panel.
        computed: The dtype of lookups.

    Shapes: `values` [n_panels, n_bytes] uint8, as in `ops.quant`.
    """

    is_loaded = True

    def __init__(
        self,
        parts: QuantRows | Sequence[QuantRows],
        panel_rows: int,
        computed: torch.dtype = torch.float32,
    ) -> None:
        self._parts = [parts] if isinstance(parts, QuantRows) else list(parts)
        self._values: Tensor | None = None
        self.computed = computed
        self.n_outputs = sum(part.shape[0] for part in self._parts)
        self.panels = self._parts[0].panel_shape(panel_rows)
        self.n_inputs = self.panels.n_inputs

    @property
    def values(self) -> Tensor:
        if self._values is None:
            device = self._parts[0].device
            self.store(torch.empty(self.unstored_bytes, dtype=torch.uint8, device=device))
        assert self._values is not None
        return self._values

    @values.setter
    def values(self, values: Tensor) -> None:
        self._values = values

    def pack(self) -> None:
        """Pack the rows now, instead of when they are first used; unpacked they are larger."""
        _ = self.values

    @property
    def unstored_bytes(self) -> int:
        """The bytes that `store` needs; 0 if the rows are packed already."""
        return self._n_panels * self.panels.n_bytes if self._parts else 0

    @property
    def _n_panels(self) -> int:
        return -(-self.n_outputs // self.panels.n_rows)

    def store(self, memory: Tensor) -> None:
        """Pack the rows in the given memory. Shapes: [unstored_bytes] uint8."""
        panels = memory.view(self._n_panels, self.panels.n_bytes)
        self.panels.pack(*self._parts, out=panels)
        self._values, self._parts = panels, []

    @classmethod
    def replacing(
        cls, empty: "Weight", parts: QuantRows | Sequence[QuantRows], panel_rows: int
    ) -> "QuantWeight":
        """The quantised weight that replaces an empty one.

        Raises: ValueError for another shape, or if the weight is loaded already.
        """
        if empty.is_loaded:
            raise ValueError("is loaded twice")
        weight = cls(parts, panel_rows, empty.computed)
        shape = [weight.n_outputs, weight.panels.n_inputs]
        if list(empty.values.shape) != shape:
            raise ValueError(f"is {list(empty.values.shape)} on this rank, got {shape}")
        return weight

    def load(self, _: Tensor | list[Tensor]) -> None:
        """Raises: ValueError, because the weight is created with its rows."""
        raise ValueError("is loaded twice")

    def rows(self, outputs: range) -> PackedRows:
        """The rows of some outputs, as a view."""
        return PackedRows(self.panels, self.values, outputs)

    def apply(self, x: Tensor, ops: TorchOps, bias: DenseWeight | None = None) -> Tensor:
        """Y = X A + b. Shapes: [T, in] -> [T, out]."""
        y = x.new_empty(len(x), self.n_outputs)
        self.apply_to(x, ops, y)
        return y if bias is None else ops.add_(y, bias.values)

    product = apply

    def apply_to(self, x: Tensor, ops: TorchOps, out: Tensor) -> None:
        """out = X A. Shapes: [T, in], [T, out]; out may be a slice of columns."""
        ops.quant_gemm(x, self.values, self.panels, out)

    def lookup(self, tokens: Tensor, first: int, ops: TorchOps) -> Tensor:
        """As `DenseWeight.lookup`. Shapes: int64 [T] -> [T, in]."""
        rows = ops.quant_embedding(tokens, self.values, self.panels, self.n_outputs, first)
        return rows if rows.dtype == self.computed else rows.to(self.computed)

    @staticmethod
    def concat_outputs(weights: Sequence["QuantWeight"]) -> "QuantWeight":
        """One weight with the outputs of several weights, which then have no memory."""
        parts = [part for weight in weights for part in weight._move_parts()]
        return QuantWeight(parts, weights[0].panels.n_rows, weights[0].computed)

    def _move_parts(self) -> list[QuantRows]:
        """Returns the rows, and releases the weight's memory."""
        parts = self._parts or [self.rows(range(self.n_outputs))]
        self._parts, self._values = [], torch.empty(0, dtype=torch.uint8)
        return parts


Weight = DenseWeight | QuantWeight

# What a weight is loaded from: its values, whole or as a list of parts in the order of rows.
LoadedWeight = Tensor | QuantMatrix | list[Tensor] | list[QuantRows]


class MixedWeight:
    """Several weights of different formats, with their outputs side by side.

    Args:
        parts: The weights, in the order of the outputs.
    """

    def __init__(self, parts: "Sequence[Weight | MixedWeight]") -> None:
        self._parts = parts
        ends = list(accumulate((part.n_outputs for part in parts), initial=0))
        self.n_outputs: int = ends[-1]
        self._columns = [slice(*bounds) for bounds in pairwise(ends)]

    def apply(self, x: Tensor, ops: TorchOps, bias: DenseWeight | None = None) -> Tensor:
        """Y = X A + b. Shapes: [T, in] -> [T, out]."""
        y = x.new_empty(len(x), self.n_outputs)
        self.apply_to(x, ops, y)
        return y if bias is None else ops.add_(y, bias.values)

    product = apply

    def apply_to(self, x: Tensor, ops: TorchOps, out: Tensor) -> None:
        """out = X A. Shapes: [T, in], [T, out]; out may be a slice of columns."""
        for part, columns in zip(self._parts, self._columns, strict=True):
            part.apply_to(x, ops, out[:, columns])


def concat_outputs(weights: Sequence[Weight | MixedWeight]) -> Weight | MixedWeight:
    """One weight with the outputs of several weights side by side.

    If all weights have the same format, they are concatenated and keep no memory of their own.
    """
    dense = [weight for weight in weights if isinstance(weight, DenseWeight)]
    quantised = [weight for weight in weights if isinstance(weight, QuantWeight)]
    forms: set[object] = {weight.panels for weight in quantised}
    forms |= {(weight.values.dtype, weight.inputs) for weight in dense}
    if len(forms) > 1:
        return MixedWeight(weights)
    return DenseWeight.concat_outputs(dense) if dense else QuantWeight.concat_outputs(quantised)


def grouped_linear(
    x: Tensor, weights: Sequence[Weight | MixedWeight], dispatch: Dispatch, ops: TorchOps
) -> Product:
    """Multiplies rows of x by the weights that `dispatch` gives them; zeros for other rows."""
    dense = [weight for weight in weights if isinstance(weight, DenseWeight)]
    inputs = {weight.inputs for weight in dense}
    if len(dense) == len(weights) and len(inputs) < 2:
        form = next(iter(inputs), None)
        x = x if form is None else ops.round_inputs(x, form)
        return ops.routed_product(x, [weight.values for weight in dense], dispatch)
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
