"""Tensor-parallel layers: column-, row- and vocabulary-parallel weights, and the norms.

Names and semantics are fairscale's. Shards may be uneven or empty. A layer allocates no memory
before its weights are loaded, and does not know how shards are chosen or weights are stored.

With Y = X A, a column-parallel layer holds columns of A and computes columns of Y; a row-parallel
layer holds rows of A and computes a partial sum of Y. torch stores A transposed, [out, in].

Source: Megatron-LM, arXiv 1909.08053, section 3.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.weights import Axis
from parallel_llama.model.low_rank import Adapters, LowRanks, add_low_rank_
from parallel_llama.ops import TorchOps, formats
from parallel_llama.ops.formats import DenseWeight, MixedWeight, Weight
from parallel_llama.ops.part_sums import PartSums, Product
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.plan import Shard


@dataclass(frozen=True)
class Backend:
    """What the layers of a rank have in common: communicator, operators and dtype.

    Args:
        dtype: The dtype of activations, and of products with weights that are not quantised.
        stage_comm: The communicator of the ranks of this rank's stage; None without a pipeline.
    """

    comm: Communicator
    ops: TorchOps
    dtype: torch.dtype
    stage_comm: Communicator | None = None

    @property
    def in_stage(self) -> "Backend":
        """The backend of layers that are sharded over the ranks of a stage."""
        return self if self.stage_comm is None else replace(self, comm=self.stage_comm)

    @property
    def wide_dtype(self) -> torch.dtype:
        """The dtype of activations, but at least float32."""
        return torch.promote_types(self.dtype, torch.float32)

    def empty_weight(self, *shape: int, dtype: torch.dtype | None = None) -> DenseWeight:
        """A weight on the meta device, which takes no memory until it is loaded."""
        return DenseWeight(shape, dtype=dtype or self.dtype, device=torch.device("meta"))


class ColumnParallelLinear:
    """Y = X A + b with this rank's columns of A: input replicated, output local.

    `low_ranks` are the matrices of adapters, each for the tokens that run with its adapter.

    Shapes: x [T, in_features] replicated; the result [T, len(rows)] local.
    """

    def __init__(self, in_features: int, rows: range, backend: Backend, *, bias: bool) -> None:
        self.ops = backend.ops
        self.weight: Weight | MixedWeight = backend.empty_weight(len(rows), in_features)
        self.bias = backend.empty_weight(len(rows)) if bias else None
        self.low_ranks = LowRanks()

    def __call__(self, x: Tensor, adapters: Adapters = ()) -> Tensor:
        y = self.weight.apply(x, self.ops, self.bias)
        add_low_rank_(y, x, self.low_ranks, adapters, self.ops)
        return y

    def product(self, x: Tensor, adapters: Adapters = ()) -> Product:
        """As `__call__`, for an operator that takes a `PartSums`."""
        return self(x, adapters) if adapters else self.weight.product(x, self.ops, self.bias)


def concat_outputs(*layers: ColumnParallelLinear) -> ColumnParallelLinear:
    """One layer that computes the outputs of several layers side by side, in one product.

    No weight is stored twice: the weights of `layers` become views or parts of the new weight.
    """
    whole = copy(layers[0])
    whole.weight = formats.concat_outputs([layer.weight for layer in layers])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    whole.bias = DenseWeight.concat_outputs(biases) if biases else None
    whole.low_ranks = LowRanks()
    return whole


@dataclass(frozen=True)
class RowCut:
    """How a row-parallel layer is sharded: by inputs, or with exact sums by outputs.

    Args:
        inputs: This rank's number of inputs.
        all_inputs: The number of inputs of each rank, if sharded by outputs.
        all_outputs: The number of outputs of each rank, if sharded by outputs.
        rank: The number of this rank among the ranks that share the layer.
    """

    inputs: int
    all_inputs: tuple[int, ...] = ()
    all_outputs: tuple[int, ...] = ()
    rank: int = 0

    @classmethod
    def of_heads(cls, shard: Shard, head_dim: int) -> "RowCut":
        """How wo is sharded."""
        all_heads = () if shard.exact is None else shard.exact.heads
        return cls._of(
            shard, len(shard.heads) * head_dim, [len(heads) * head_dim for heads in all_heads]
        )

    @classmethod
    def of_channels(cls, shard: Shard, axis: Axis) -> "RowCut":
        """How w2, and each expert's w2, is sharded; `axis` is the axis of the channels."""
        all_channels = () if shard.exact is None else shard.exact.channels(axis)
        return cls._of(shard, len(shard.extent(axis)), [len(channels) for channels in all_channels])

    @classmethod
    def _of(cls, shard: Shard, inputs: int, all_inputs: Sequence[int]) -> "RowCut":
        outputs = () if shard.exact is None else shard.exact.outputs
        return cls(inputs, tuple(all_inputs), tuple(map(len, outputs)), shard.stage_rank)

    def shape(self, out_features: int) -> tuple[int, int]:
        """The shape of this rank's shard of the weight, [out, in]."""
        if not self.all_outputs:
            return out_features, self.inputs
        return self.all_outputs[self.rank], sum(self.all_inputs)

    def whole_inputs(self, x: Tensor, ops: TorchOps, comm: Communicator) -> Tensor:
        """The inputs that this rank's shard of the weight multiplies.

        Shapes: [T, inputs] local -> [T, inputs] local, or with exact sums [T, all inputs]
        replicated.
        Collective: with exact sums, one gather_columns.
        """
        return ops.gather_columns(x, self.all_inputs, comm) if self.all_outputs else x

    def complete(self, y: Tensor, ops: TorchOps, comm: Communicator) -> Tensor:
        """All outputs on every rank.

        Shapes: [T, out_features] partial, or with exact sums [T, outputs] local -> [T,
        out_features] replicated.
        Collective: one all_reduce, or with exact sums one gather_columns.
        """
        if self.all_outputs:
            return ops.gather_columns(y, self.all_outputs, comm)
        return ops.all_reduce(y, comm)


class RowParallelLinear:
    """Y = X A + b with this rank's rows of A: input local, output summed over the ranks.

    With exact sums the rank has columns of A instead, and ranks exchange inputs and outputs.
    `low_ranks` are the matrices of adapters, each for the tokens that run with its adapter.

    Shapes: x [T, cut.inputs] local; the result [T, out_features] replicated.
    Collective: one all_reduce; with exact sums two gather_columns.
    """

    def __init__(self, cut: RowCut, out_features: int, backend: Backend, *, bias: bool) -> None:
        self.cut, self.comm, self.ops = cut, backend.comm, backend.ops
        self.weight: Weight = backend.empty_weight(*cut.shape(out_features))
        self.bias = backend.empty_weight(out_features) if bias else None
        self.low_ranks = LowRanks()

    def __call__(self, x: Tensor, adapters: Adapters = ()) -> Tensor:
        return row_parallel_sum((self, x), adapters=adapters)

    def product(self, x: Tensor, adapters: Adapters = ()) -> Product:
        """As `__call__`. On one rank, which exchanges nothing, it may return a `PartSums`."""
        if self.comm.exchanges or self.bias is not None or adapters:
            return self(x, adapters)
        y = self.weight.product(self.cut.whole_inputs(x, self.ops, self.comm), self.ops)
        return y if isinstance(y, PartSums) else self.cut.complete(y, self.ops, self.comm)

    def apply(self, x: Tensor, adapters: Adapters = ()) -> Tensor:
        """The product before `RowCut.complete`.

        Shapes: x [T, cut.inputs] local -> [T, out_features] partial, or with exact sums [T,
        outputs] local.
        Collective: with exact sums, one gather_columns.
        """
        x = self.cut.whole_inputs(x, self.ops, self.comm)
        y = self.weight.apply(x, self.ops)
        add_low_rank_(y, x, self.low_ranks, adapters, self.ops)
        return y


def row_parallel_sum(*terms: tuple[RowParallelLinear, Tensor], adapters: Adapters = ()) -> Tensor:
    """The sum of the outputs of several row-parallel layers, with one all_reduce.

    Shapes: each term's x [T, cut.inputs] local; the result [T, out_features] replicated.
    Collective: one all_reduce; with exact sums one gather_columns, and one for each term.
    """
    first, x = terms[0]
    y = first.apply(x, adapters)  # [T, out_features] partial, or [T, outputs] local
    for layer, x in terms[1:]:
        y = first.ops.add_(y, layer.apply(x, adapters))
    y = first.cut.complete(y, first.ops, first.comm)  # [T, out_features] replicated
    for layer, _ in terms:
        if layer.bias is not None:  # after the all_reduce, so that the bias counts once
            y = first.ops.add_(y, layer.bias.values)
    return y


class VocabParallelEmbedding:
    """The embedding of each token, looked up by the one rank that holds its row.

    Shapes: tokens [T] int64 replicated; the result [T, dim] replicated.
    Collective: one all_reduce.
    """

    def __init__(self, rows: range, dim: int, backend: Backend) -> None:
        self.comm, self.ops, self.rows, self.dim = backend.comm, backend.ops, rows, dim
        self.weight: Weight = backend.empty_weight(len(rows), dim)

    def __call__(self, tokens: Tensor) -> Tensor:
        x = self.weight.lookup(tokens, self.rows.start, self.ops)  # [T, dim] partial
        return self.ops.all_reduce(x, self.comm)  # [T, dim] replicated


class RMSNorm:
    """x / rms(x) * (weight + offset).

    Every rank holds the whole weight, except in a norm across heads (`qk_norm_across_heads`), where
    it holds the weights of its own heads.

    Shapes: x and the result [T, dim] replicated.
    """

    def __init__(self, dim: int, eps: float, backend: Backend, offset: float = 0.0) -> None:
        self.eps, self.ops, self.offset = eps, backend.ops, offset
        self.weight = backend.empty_weight(dim)

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight.values, self.eps, self.offset)

    def add_and_norm(self, x: Tensor, y: "Addend") -> Tensor:
        """Adds y to x in place and returns norm(x)."""
        post_weight = None
        if y.norm is not None:
            assert isinstance(y.norm, RMSNorm)
            assert (y.norm.eps, y.norm.offset) == (self.eps, self.offset)
            post_weight = y.norm.weight.values
        return self.ops.add_rms_norm(
            x, y.product, self.weight.values, self.eps, self.offset, post_weight
        )


class LayerNorm:
    """(x - mean(x)) / std(x) * (weight + offset) + bias; every rank holds all of weight and bias.

    Shapes: x and the result [T, dim] replicated.
    """

    def __init__(
        self, dim: int, eps: float, backend: Backend, offset: float = 0.0, *, bias: bool
    ) -> None:
        self.eps, self.ops, self.offset = eps, backend.ops, offset
        self.weight = backend.empty_weight(dim)
        self.bias = backend.empty_weight(dim) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.values
        return self.ops.layer_norm(x, self.weight.values, bias, self.eps, self.offset)

    def add_and_norm(self, x: Tensor, y: "Addend") -> Tensor:
        """Adds y to x in place and returns norm(x)."""
        return self(y.add_to(x, self.ops))


class HeadLayerNorm:
    """LayerNorm without a bias, head by head; each head of this rank has its own weights.

    Shapes: weight [H * D] local.
    """

    def __init__(self, size: int, eps: float, backend: Backend) -> None:
        self.eps, self.ops = eps, backend.ops
        self.weight = backend.empty_weight(size)

    def in_place(self, x: Tensor) -> None:
        """Normalises each head of x in place. Shapes: x [T, H, D] local."""
        self.ops.layer_norm_heads_(x, self.weight.values, self.eps)


Norm = RMSNorm | LayerNorm


@dataclass(frozen=True)
class Addend:
    """An output that is added to the residual stream.

    Args:
        product: The output, [T, dim] replicated.
        norm: The norm that is applied to the output first; None without one.
    """

    product: Product
    norm: Norm | None = None

    def add_to(self, x: Tensor, ops: TorchOps) -> Tensor:
        """Adds the output to x in place and returns x."""
        y = ops.whole(self.product)
        return ops.add_(x, y if self.norm is None else self.norm(y))


def norm_of(args: ModelArgs, backend: Backend) -> Norm:
    """A new norm of the residual stream, of the model's kind.

    The stream is stored divided by `residual_scale` (see `transformer.Transformer`). Its norm
    equals that of the undivided stream, because eps is divided by the square of `residual_scale`.
    """
    eps = args.norm_eps / args.residual_scale**2
    if args.norm == "layer":
        return LayerNorm(args.dim, eps, backend, args.norm_offset, bias=args.norm_bias)
    return RMSNorm(args.dim, eps, backend, args.norm_offset)


def activation_of(args: ModelArgs, ops: TorchOps) -> Callable[[Product], Tensor]:
    """The function from the outputs of w1 (and of w3, with a gate) to the inputs of w2.

    Shapes: [T, 2 * channels] local, or [T, channels] without a gate -> [T, channels] local.
    """
    if args.activation == "silu":
        return ops.silu_and_mul
    if args.activation == "relu2":
        return ops.relu2
    if args.activation == "clamped_swiglu":
        return partial(ops.clamped_swiglu, alpha=args.swiglu_alpha, limit=args.swiglu_limit)
    gelu = ops.gelu_and_mul if args.gated else ops.gelu
    return partial(gelu, is_tanh=args.activation == "gelu_tanh")
