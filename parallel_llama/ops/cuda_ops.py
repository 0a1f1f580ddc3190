"""The operators on a CUDA device: Triton kernels where torch takes several launches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel_llama.ops.attention import PLAIN, HeadMap, HeadNorms, PagedPlan, Plan, Scores
from parallel_llama.ops.cuda.chunk_attention import chunk_attention
from parallel_llama.ops.cuda.decode_attention import decode_attention
from parallel_llama.ops.cuda.elementwise import (
    add_expert_bias,
    add_gated,
    add_rms_norm,
    clamped_swiglu,
    gelu_and_mul,
    lookup,
    rms_norm,
    silu_and_mul,
    weighted_sum,
)
from parallel_llama.ops.cuda.linear import (
    Addresses,
    linear,
    product,
    routed_product,
    takes,
    takes_routed,
    whole,
)
from parallel_llama.ops.cuda.quant_linear import PANEL_ROWS, quant_gemm
from parallel_llama.ops.cuda.rotary import can_store, rotate_and_store
from parallel_llama.ops.cuda.route import MAX_PAIRS, expert_dispatch, route
from parallel_llama.ops.cuda.sampling import candidates, draw, draw_filtered, takes_candidates
from parallel_llama.ops.dispatch import Dispatch
from parallel_llama.ops.filters import Filters
from parallel_llama.ops.gumbel import SamplingKeys
from parallel_llama.ops.part_sums import Product
from parallel_llama.ops.quant import PanelShape
from parallel_llama.ops.torch_ops import TorchOps


class CUDAOps(TorchOps):
    """Operators for a model in float32, bfloat16 or float16, with sums in float32.

    Args:
        scores: The score function of attention.
    """

    panel_rows = PANEL_ROWS
    is_paged = True

    def __init__(self, scores: Scores = PLAIN) -> None:
        super().__init__(scores)
        self._addresses: dict[tuple[int, ...], Addresses] = {}

    def lookup(
        self, tokens: Tensor, weight: Tensor, first: int = 0, dtype: torch.dtype | None = None
    ) -> Tensor:
        return lookup(tokens, weight, first, dtype or weight.dtype)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As in `TorchOps`. For up to 16 rows, a row's bits do not depend on the batch.

        More rows go to cuBLAS, whose order of sums depends on the number of rows.
        """
        return linear(x, weight, bias) if takes(x, weight) else super().linear(x, weight, bias)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Product:
        return product(x, weight, bias) if takes(x, weight) else super().linear(x, weight, bias)

    def whole(self, product: Product) -> Tensor:
        return whole(product)

    def quant_gemm(self, x: Tensor, panels: Tensor, shape: PanelShape, out: Tensor) -> None:
        """As in `TorchOps`. For up to 16 rows, a row's bits do not depend on the batch.

        More rows go to cuBLAS, and their inputs are not rounded to integers.
        """
        quant_gemm(x, panels, shape, out)

    def route(
        self, x: Tensor, gate: Tensor, n_active: int, bias: Tensor | None = None, *, normed: bool
    ) -> tuple[Tensor, Tensor]:
        # One kernel for any number of rows: a token's experts must not depend on the batch.
        return route(product(x, gate, None), n_active, bias, normed=normed)

    def router_scores(self, x: Tensor, gate: Tensor) -> Tensor:
        return linear(x, gate, None)  # one kernel for any number of rows, as in `route`

    def expert_dispatch(self, experts: Tensor, local_experts: range) -> tuple[Dispatch, Dispatch]:
        if experts.numel() > MAX_PAIRS:
            return super().expert_dispatch(experts, local_experts)
        return expert_dispatch(experts, local_experts)

    def routed_linear(self, x: Tensor, weights: Sequence[Tensor], dispatch: Dispatch) -> Tensor:
        """As in `TorchOps`. For few rows it needs no host sync and equals `linear` bit for bit."""
        return whole(self.routed_product(x, weights, dispatch))

    def routed_product(self, x: Tensor, weights: Sequence[Tensor], dispatch: Dispatch) -> Product:
        if not takes_routed(x, weights, dispatch):
            return super().routed_linear(x, weights, dispatch)
        addresses = tuple(weight.data_ptr() for weight in weights)
        # No addresses are new while a CUDA graph is captured, since the step has run before.
        if addresses not in self._addresses:
            self._addresses[addresses] = Addresses.of(addresses, weights[0].device)
        return routed_product(x, weights, self._addresses[addresses], dispatch)

    def add_expert_bias_(self, y: Tensor, bias: Tensor, dispatch: Dispatch) -> Tensor:
        add_expert_bias(y, bias, dispatch.starts)
        return y

    def weighted_sum(self, parts: Product, routing_weights: Tensor) -> Tensor:
        return weighted_sum(parts, routing_weights)

    def add_gated_(self, y: Tensor, x: Tensor, scores: Tensor) -> Tensor:
        add_gated(y, x, scores)
        return y

    def draw(self, x: Tensor, sampling_keys: SamplingKeys, first: int = 0) -> Tensor:
        return (
            draw(x, sampling_keys, first) if x.shape[1] else super().draw(x, sampling_keys, first)
        )

    def candidates(self, x: Tensor, temperatures: Tensor, k: int, first: int = 0) -> Tensor:
        if not x.shape[1] or not takes_candidates(k):
            return super().candidates(x, temperatures, k, first)
        return candidates(x, temperatures, k, first)

    def draw_filtered(self, of_ranks: Tensor, filters: Filters, vocab_size: int) -> Tensor:
        if not takes_candidates(of_ranks.shape[2] // 2):
            return super().draw_filtered(of_ranks, filters, vocab_size)
        return draw_filtered(of_ranks, filters, vocab_size)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = torch.empty_like(rows)
        rms_norm(rows, weight, eps, offset, y)
        return y.view(x.shape)

    def rms_norm_(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        rms_norm(x, weight, eps, offset, x)

    def add_rms_norm(
        self,
        x: Tensor,
        y: Product,
        weight: Tensor,
        eps: float,
        offset: float = 0.0,
        post_weight: Tensor | None = None,
    ) -> Tensor:
        return add_rms_norm(x, y, weight, eps, offset, post_weight)

    def silu_and_mul(self, x: Product) -> Tensor:
        return silu_and_mul(x)

    def clamped_swiglu(self, x: Product, alpha: float, limit: float) -> Tensor:
        return clamped_swiglu(x, alpha, limit)

    def gelu_and_mul(self, x: Product, *, is_tanh: bool) -> Tensor:
        return gelu_and_mul(x, is_tanh=is_tanh)

    def rotate_and_store(
        self,
        qkv: Product,
        rotations: Tensor | None,
        slots: Tensor,
        k: Tensor,
        v: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        if can_store(qkv.shape[2], k.dtype):
            return rotate_and_store(qkv, rotations, slots, k, v, norms)
        return super().rotate_and_store(qkv, rotations, slots, k, v, norms)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Plan,
        heads: HeadMap,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """As in `TorchOps`. The result of a query computed alone has the same bits in any batch."""
        if not isinstance(plan, PagedPlan) or not can_store(q.shape[2], k.dtype):
            super().attention(q, k, v, plan, heads, out, sinks)
            return
        for part in plan.parts:
            if part.max_queries == 1:
                decode_attention(q, k, v, part, heads, out, self._scores, sinks=sinks)
            else:
                chunk_attention(q, k, v, part, heads, out, self._scores, sinks)
