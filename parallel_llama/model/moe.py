"""The mixture of experts: a router sends each token to a few of many feed-forward layers.

x is replicated, so every rank routes all tokens in the same way. A rank takes the rows of x that
are routed to its experts, and sorts these rows by expert. Its channels of these experts yield a
partial sum, as in a dense layer. One all_reduce adds the partial sums, whether the ranks shard each
expert or hold different experts. With exact sums every rank gathers all channels of every expert
and computes some outputs of w2.

Some models scale the inputs of the experts, instead of the outputs, by the routing weights.

A shared expert processes every token. Its channels are always sharded over all ranks, and its
partial sum is added to that of the other experts before the all_reduce.

    token           0    1    2         tokens of experts 0-1    tokens of experts 2-3
    its experts    3 1  0 3  1 2        0: [1]   1: [0, 2]       2: [2]   3: [0, 1]
                                        (on one rank)            (on another rank)

Source: Mixtral, arXiv 2401.04088; sparsely-gated mixtures, arXiv 1701.06538; shared experts,
DeepSeekMoE, arXiv 2401.06066, with a gate as in Qwen2MoeSparseMoeBlock of transformers 5.24;
sigmoids with a bias, DeepSeek-V3, arXiv 2412.19437, section 2.1.2; biases of experts, GptOssMLP of
transformers 5.24; scaled inputs, Llama4TextMoe of transformers 5.24.
"""

import torch
from torch import Tensor

from parallel_llama.families.model_args import ModelArgs
from parallel_llama.model.feed_forward import FeedForward
from parallel_llama.model.layers import Backend, RowCut, activation_of
from parallel_llama.model.low_rank import Adapters
from parallel_llama.ops.formats import DenseWeight, Weight, concat_outputs, grouped_linear
from parallel_llama.plan import Shard


class Matrix:
    """A weight [out, in], in torch's order, and perhaps a bias [out]."""

    def __init__(self, backend: Backend, *shape: int, bias: bool = False) -> None:
        self.weight: Weight = backend.empty_weight(*shape)
        self.bias = backend.empty_weight(shape[0]) if bias else None


class Router:
    """The weight and the bias of the scores of experts: x W + b.

    With a `sigmoid_router`, the bias changes only which experts are chosen, not their weights.

    Shapes: weight [n_experts, dim]; bias [n_experts], in at least float32.
    """

    def __init__(self, args: ModelArgs, backend: Backend) -> None:
        self.weight = backend.empty_weight(args.n_experts, args.dim)
        self.bias = (
            backend.empty_weight(args.n_experts, dtype=backend.wide_dtype)
            if args.has_gate_bias
            else None
        )


class Expert:
    """The weights of a gated feed-forward: w1 and w3 by columns, perhaps with biases; w2 by rows.

    `fuse` concatenates w1 and w3 once they are loaded.
    """

    def __init__(self, dim: int, cut: RowCut, backend: Backend, *, bias: bool) -> None:
        self.w1, self.w3 = (Matrix(backend, cut.inputs, dim, bias=bias) for _ in range(2))
        self.w2 = Matrix(backend, *cut.shape(dim))

    def fuse(self) -> None:
        self.w13 = concat_outputs([self.w1.weight, self.w3.weight])

    @property
    def biases(self) -> list[DenseWeight]:
        """The biases of w1 and w3; an empty list without biases."""
        return [bias for bias in (self.w1.bias, self.w3.bias) if bias is not None]


class MixtureOfExperts:
    """The sum of each token's best experts, weighted by the router, and of the shared expert.

    This rank holds some of the experts, or some channels of each. The experts of a token depend on
    no other token.

    Shapes: x [T, dim] replicated; the result [T, dim] replicated.
    Collective: one all_reduce; with exact sums two gather_columns, and one for the shared expert.
    """

    def __init__(self, args: ModelArgs, shard: Shard, backend: Backend) -> None:
        self.comm, self.ops, self.local_experts = backend.comm, backend.ops, shard.experts
        self.activation, bias = activation_of(args, backend.ops), args.expert_bias
        self.is_sigmoid, self.scales_inputs = args.sigmoid_router, args.scaled_inputs
        self.n_active, self.normed = args.n_active_experts, args.normed_experts
        self.groups = args.n_expert_groups, args.n_active_groups
        self.scale, self.gate = args.routed_scale, Router(args, backend)
        self.cut = RowCut.of_channels(shard, "ffn")
        self.experts = {
            number: Expert(args.dim, self.cut, backend, bias=bias) for number in shard.experts
        }
        self.w2_bias = backend.empty_weight(args.n_experts, args.dim) if bias else None
        self.shared_expert = (
            FeedForward(args, shard, "shared_ffn", backend) if args.shared_ffn_dim else None
        )
        self.shared_gate = Matrix(backend, 1, args.dim) if args.shared_gate else None

    def fuse(self) -> None:
        """Collects the weights of the experts; each expert was fused when it was loaded.

        The biases of the experts become views of one tensor, [n experts, 2 * channels].
        """
        self.w13 = [expert.w13 for expert in self.experts.values()]
        self.w2 = [expert.w2.weight for expert in self.experts.values()]
        biases = [bias for expert in self.experts.values() for bias in expert.biases]
        self.w13_bias = (
            DenseWeight.concat_outputs(biases).values.view(len(self.experts), 2 * self.cut.inputs)
            if biases
            else None
        )
        if self.shared_expert is not None:
            self.shared_expert.fuse()

    def __call__(self, x: Tensor, adapters: Adapters = ()) -> Tensor:
        routing_weights, experts = self._route(x)  # [T, n_active] replicated
        inputs = x
        if self.scales_inputs:  # then each pair of a token and an expert is treated as a token
            inputs = self.ops.scaled_pairs(x, routing_weights)  # [T * n_active, dim] replicated
            experts, routing_weights = experts.view(-1, 1), torch.ones_like(routing_weights)
        to_experts, back = self.ops.expert_dispatch(experts, self.local_experts)
        h = grouped_linear(inputs, self.w13, to_experts, self.ops)  # by expert, local
        if self.w13_bias is not None:
            h = self.ops.add_expert_bias_(self.ops.whole(h), self.w13_bias, to_experts)
        h = self.activation(h)  # [T * n_active, channels] local, by expert
        # [T * n_active, channels] local; with exact sums [T * n_active, all channels] replicated.
        h = self.cut.whole_inputs(h, self.ops, self.comm)
        parts = grouped_linear(h, self.w2, back, self.ops)  # [T * n_active, ..], by token
        y = self.ops.weighted_sum(parts, routing_weights)  # [T, dim] partial, or [T, outputs] local
        if self.shared_expert is not None:
            y = self._add_shared(y, x, self.shared_expert, adapters)
        y = self.cut.complete(y, self.ops, self.comm)  # [T, dim] replicated
        if self.w2_bias is not None:  # after the all_reduce, so that it counts once
            biases = self.ops.lookup(experts.flatten(), self.w2_bias.values)  # by pair, replicated
            y = self.ops.add_(y, self.ops.weighted_sum(biases, routing_weights))
        return y

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The routing weights and the experts of each token, [T, n_active] replicated."""
        gate = self.gate.weight.values
        bias = None if self.gate.bias is None else self.gate.bias.values
        if not self.is_sigmoid:
            return self.ops.route(x, gate, self.n_active, bias, normed=self.normed)
        return self.ops.sigmoid_route(
            x, gate, bias, self.n_active, self.groups, self.scale, normed=self.normed
        )

    def _add_shared(
        self, y: Tensor, x: Tensor, shared_expert: FeedForward, adapters: Adapters
    ) -> Tensor:
        """Adds the shared expert's output for x to y in place, and returns y."""
        channels = shared_expert.channels(x, adapters)  # [T, channels] local
        shared = shared_expert.w2.apply(channels, adapters)  # partial or local, as y
        if self.shared_gate is None:
            return self.ops.add_(y, shared)
        scores = self.ops.linear(x, self.shared_gate.weight.values)  # [T, 1] replicated
        return self.ops.add_gated_(y, shared, scores)
