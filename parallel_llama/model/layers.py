"""The parallel layers: Megatron's column-, row- and vocabulary-parallel weights, and the norms.

Names and meaning are fairscale's. What they add: uneven shards (any range from the plan, an empty
one included), construction on the meta device, and nothing allocated beyond the rank's own part.
They do not know how ranges are chosen, nor how a weight is stored.

With Y = X A, a column-parallel layer holds columns of A and gives columns of Y; a row-parallel
layer holds rows of A and gives a partial sum of Y. torch stores A transposed, [out, in].

Source: Megatron-LM, arXiv 1909.08053, section 3.
"""

from collections.abc import Callable
from copy import copy
from functools import partial

import torch
from torch import Tensor, nn

from parallel_llama.config import ModelArgs
from parallel_llama.ops import TorchOps, formats
from parallel_llama.ops.formats import DenseWeight, MixedWeight, Weight
from parallel_llama.parallel.collectives import Communicator


def unfilled(dtype: torch.dtype, *shape: int) -> DenseWeight:
    """A weight that takes no memory until it is filled: layers are built on the meta device."""
    return DenseWeight(shape, dtype=dtype, device=torch.device("meta"))


class ColumnParallelLinear(nn.Module):
    """Y = X A + b with the rank's own columns of A: input replicated, output local.

    Shapes: x [T, in_features] replicated; the result [T, len(rows)] local.
    """

    def __init__(
        self, in_features: int, rows: range, ops: TorchOps, dtype: torch.dtype, *, bias: bool
    ) -> None:
        super().__init__()
        self.ops = ops
        self.weight: Weight | MixedWeight = unfilled(dtype, len(rows), in_features)
        self.bias = unfilled(dtype, len(rows)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.apply(x, self.ops, self.bias)


def end_to_end(*layers: ColumnParallelLinear) -> ColumnParallelLinear:
    """One layer that gives the outputs of several, side by side, in one product.

    The layers' weights become views of its weight, or stay its parts, so nothing is held twice.
    """
    whole = copy(layers[0])
    whole.weight = formats.end_to_end([layer.weight for layer in layers])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    whole.bias = DenseWeight.end_to_end(biases) if biases else None
    return whole


class RowParallelLinear(nn.Module):
    """Y = X A + b with the rank's own rows of A: input local, output summed over the ranks.

    Shapes: x [T, len(columns)] local; the result [T, out_features] replicated.
    Collective: one all_reduce.
    """

    def __init__(
        self,
        columns: range,
        out_features: int,
        comm: Communicator,
        ops: TorchOps,
        dtype: torch.dtype,
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        self.comm, self.ops = comm, ops
        self.weight = unfilled(dtype, out_features, len(columns))
        self.bias = unfilled(dtype, out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return summed((self, x))


def summed(*terms: tuple[RowParallelLinear, Tensor]) -> Tensor:
    """The sum of several row-parallel layers' outputs, over the ranks as well.

    Shapes: each term's x [T, len(columns)] local; the result [T, out_features] replicated.
    Collective: one all_reduce.
    """
    first = terms[0][0]
    y = first.weight.apply(terms[0][1], first.ops)  # [T, out_features] partial
    for layer, x in terms[1:]:
        y = first.ops.add_(y, layer.weight.apply(x, layer.ops))
    y = first.ops.all_reduce(y, first.comm)  # [T, out_features] replicated
    for layer, _ in terms:
        if layer.bias is not None:  # after the sum: it counts once
            y = first.ops.add_(y, layer.bias.values)
    return y


class VocabParallelEmbedding(nn.Module):
    """The embedding of each token, looked up by the one rank that holds its row.

    Shapes: tokens [T] int64 replicated; the result [T, dim] replicated.
    Collective: one all_reduce.
    """

    def __init__(
        self, rows: range, dim: int, comm: Communicator, ops: TorchOps, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.comm, self.ops, self.rows, self.dim = comm, ops, rows, dim
        self.weight = unfilled(dtype, len(rows), dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.weight.lookup(tokens, self.rows.start, self.ops)  # [T, dim] partial
        return self.ops.all_reduce(x, self.comm)  # [T, dim] replicated


class RMSNorm(nn.Module):
    """x / rms(x) * (weight + offset), which every rank holds whole.

    Shapes: x [T, dim] replicated, and so is the result.
    """

    def __init__(
        self, dim: int, eps: float, ops: TorchOps, dtype: torch.dtype, offset: float = 0.0
    ) -> None:
        super().__init__()
        self.eps, self.ops, self.offset = eps, ops, offset
        self.weight = unfilled(dtype, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight.values, self.eps, self.offset)

    def of_sum(self, x: Tensor, y: Tensor) -> Tensor:
        """x += y. Returns: the norm of x then."""
        return self.ops.add_rms_norm(x, y, self.weight.values, self.eps, self.offset)

    def in_place(self, x: Tensor) -> None:
        """The same of heads where they lie. Shapes: x [T, H, dim]."""
        self.ops.rms_norm_(x, self.weight.values, self.eps, self.offset)


class LayerNorm(nn.Module):
    """(x - mean(x)) / std(x) * weight + bias, which every rank holds whole.

    Shapes: x [T, dim] replicated, and so is the result.
    """

    def __init__(
        self, dim: int, eps: float, ops: TorchOps, dtype: torch.dtype, *, bias: bool
    ) -> None:
        super().__init__()
        self.eps, self.ops = eps, ops
        self.weight = unfilled(dtype, dim)
        self.bias = unfilled(dtype, dim) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.values
        return self.ops.layer_norm(x, self.weight.values, bias, self.eps)

    def of_sum(self, x: Tensor, y: Tensor) -> Tensor:
        """x += y. Returns: the norm of x then."""
        return self.forward(self.ops.add_(x, y))


def norm_of(args: ModelArgs, ops: TorchOps, dtype: torch.dtype) -> RMSNorm | LayerNorm:
    """A norm of the residual stream, of the model's kind."""
    if args.norm == "layer":
        return LayerNorm(args.dim, args.norm_eps, ops, dtype, bias=args.norm_bias)
    return RMSNorm(args.dim, args.norm_eps, ops, dtype, args.norm_offset)


def activation_of(args: ModelArgs, ops: TorchOps) -> Callable[[Tensor], Tensor]:
    """From the outputs of w1, and of w3 where there is a gate, to the inputs of w2.

    Shapes: [T, 2 * channels] local, or [T, channels] without a gate -> [T, channels] local.
    """
    if args.activation == "silu":
        return ops.silu_and_mul
    gelu = ops.gelu_and_mul if args.gated else ops.gelu
    return partial(gelu, is_tanh=args.activation == "gelu_tanh")
