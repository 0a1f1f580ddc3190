"""The feed-forward of a layer without experts, and the shared expert of a mixture of experts."""

from torch import Tensor

from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.weights import Axis
from parallel_llama.model.layers import (
    Backend,
    ColumnParallelLinear,
    RowCut,
    RowParallelLinear,
    activation_of,
    concat_outputs,
)
from parallel_llama.model.low_rank import Adapters
from parallel_llama.ops.part_sums import Product
from parallel_llama.plan import Shard


class FeedForward:
    """w2(f(w1 x) * w3 x), or w2(f(w1 x)) without a gate; w1 and w3 by columns, w2 by rows.

    `axis` is the axis of its channels. `fuse` concatenates the loaded w1 and w3; it must run before
    a call.

    Shapes: x [T, dim] replicated; the result [T, dim] replicated.
    Collective: as w2.
    Source: arXiv 2002.05202.
    """

    def __init__(self, args: ModelArgs, shard: Shard, axis: Axis, backend: Backend) -> None:
        self.activation, bias = activation_of(args, backend.ops), args.mlp_bias
        channels = shard.extent(axis)
        self.w1 = ColumnParallelLinear(args.dim, channels, backend, bias=bias)
        self.w3 = (
            ColumnParallelLinear(args.dim, channels, backend, bias=bias) if args.gated else None
        )
        self.w2 = RowParallelLinear(RowCut.of_channels(shard, axis), args.dim, backend, bias=bias)

    def fuse(self) -> None:
        self.w13 = self.w1 if self.w3 is None else concat_outputs(self.w1, self.w3)

    def __call__(self, x: Tensor, adapters: Adapters = ()) -> Product:
        return self.w2.product(self.channels(x, adapters), adapters)

    def channels(self, x: Tensor, adapters: Adapters = ()) -> Tensor:
        """The input of w2. Shapes: [T, dim] replicated -> [T, channels] local."""
        return self.activation(self.w13.product(x, adapters))
