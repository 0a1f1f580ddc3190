"""The mixture of experts: a router sends each token to a few of many feed-forwards.

x is replicated, so every rank routes all tokens alike and takes the rows of its own experts, one
expert behind the other. What its channels of them make is a partial sum, as in a dense layer, and
one all_reduce makes it whole, whether ranks share an expert or hold different ones.

    token           0    1    2         rank of experts 0-1    rank of experts 2-3
    its experts    3 1  0 3  1 2        0: 1   1: 0 2          2: 2   3: 0 1

Source: Mixtral, arXiv 2401.04088; sparsely-gated mixtures, arXiv 1701.06538.
"""

import torch
from torch import Tensor, nn

from parallel_llama.config import ModelArgs
from parallel_llama.model.layers import activation_of, unfilled
from parallel_llama.ops import TorchOps
from parallel_llama.ops.formats import apply_routed, end_to_end
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.plan import Share


class Matrix(nn.Module):
    """A matrix in torch's order, [out, in], that is applied by who holds it."""

    def __init__(self, dtype: torch.dtype, *shape: int) -> None:
        super().__init__()
        self.weight = unfilled(dtype, *shape)


class Expert(nn.Module):
    """One SwiGLU's weights: w1 and w3 by columns, w2 by rows.

    `pack` lays w1 and w3 end to end once they are filled.
    """

    def __init__(self, dim: int, n_channels: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.w1, self.w3 = (Matrix(dtype, n_channels, dim) for _ in range(2))
        self.w2 = Matrix(dtype, dim, n_channels)

    def pack(self) -> None:
        self.w13 = end_to_end([self.w1.weight, self.w3.weight])


class MixtureOfExperts(nn.Module):
    """Each token's best experts, summed in their shares; this rank has some of them, or of each.

    Which experts a token goes to depends on no other token.

    Shapes: x [T, dim] replicated; the result [T, dim] replicated.
    Collective: one all_reduce.
    """

    def __init__(
        self, args: ModelArgs, share: Share, comm: Communicator, ops: TorchOps, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.comm, self.ops, self.numbers = comm, ops, share.experts
        self.activation = activation_of(args, ops)
        self.n_active, self.normed = args.n_active_experts, args.normed_experts
        self.gate = Matrix(dtype, args.n_experts, args.dim)
        self._held = [Expert(args.dim, len(share.ffn), dtype) for _ in share.experts]
        names = map(str, share.experts)
        self.experts = nn.ModuleDict(dict(zip(names, self._held, strict=True)))

    def pack(self) -> None:
        """The experts themselves are packed one by one, as they are filled."""
        self.w13 = [expert.w13 for expert in self._held]
        self.w2 = [expert.w2.weight for expert in self._held]

    def forward(self, x: Tensor) -> Tensor:
        shares, experts = self.ops.route(  # [T, n_active] replicated
            x, self.gate.weight.values, self.n_active, normed=self.normed
        )
        to_experts, back = self.ops.routes_of(experts, self.numbers)
        h = apply_routed(x, self.w13, to_experts, self.ops)
        h = self.activation(h)  # [T * n_active, channels] local, by expert
        parts = apply_routed(h, self.w2, back, self.ops)  # [T * n_active, dim] partial, by token
        return self.ops.all_reduce(self.ops.weighted_sum(parts, shares), self.comm)
