"""The operators in torch: the reference, on any device and in any dtype."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_llama.dtypes import InputFormat
from parallel_llama.ops import kv_rows
from parallel_llama.ops.attention import (
    PLAIN,
    HeadMap,
    HeadNorms,
    PagedPlan,
    PagedQueries,
    Plan,
    Queries,
    QueryChunk,
    QueryTile,
    Scores,
    SinkPlan,
    SlotPlan,
    TorchSinkPlan,
    causal_mask,
)
from parallel_llama.ops.dispatch import Dispatch
from parallel_llama.ops.filters import Filters, mass_of, merge_top_k
from parallel_llama.ops.gumbel import SamplingKeys, gumbel
from parallel_llama.ops.inputs import round_inputs
from parallel_llama.ops.part_sums import Product
from parallel_llama.ops.quant import PanelShape, quant_gemm
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.plan import MAX_QUERIES


class TorchOps:
    """The operators of a model, on one rank's shard.

    Subclasses replace some operators by faster ones.

    Args:
        scores: The score function of attention.
    """

    panel_rows = 16  # rows per panel of a quantised matrix
    is_paged = False  # whether attention takes a `PagedPlan`

    def __init__(self, scores: Scores = PLAIN) -> None:
        self._scores = scores

    def compile(
        self,
        *,
        has_experts: bool = False,
        has_shared_gate: bool = False,
        has_sigmoid_router: bool = False,
        has_unrotated: bool = False,
        has_clamped_swiglu: bool = False,
        has_expert_bias: bool = False,
    ) -> None:
        """Compile the kernels, so that the first step does not wait for them."""

    def lookup(
        self, tokens: Tensor, weight: Tensor, first: int = 0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The rows of a weight for some tokens, row 0 for token `first`; -0.0 for other tokens.

        -0.0 is the neutral element of the sum over ranks: 0.0 would change the sign of -0.0.

        Shapes: tokens [T] int64, weight [n, dim] -> [T, dim], in `dtype` if that is given.
        """
        row = tokens - first
        is_elsewhere = (row < 0) | (row >= len(weight))
        if not len(weight):  # a tiny vocabulary may leave a rank without rows
            return weight.new_full((len(tokens), weight.shape[1]), -0.0, dtype=dtype)
        rows = F.embedding(row.masked_fill(is_elsewhere, 0), weight)
        return rows.to(dtype or weight.dtype).masked_fill_(is_elsewhere[:, None], -0.0)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Y = X A + b, the weight in torch's order; it may have 16 bits where x has more.

        Shapes: [T, in], [out, in] -> [T, out].
        """
        return F.linear(x, weight.to(x.dtype), bias)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Product:
        """`linear` for an operator that takes a `PartSums`; `whole` makes it a tensor."""
        return self.linear(x, weight, bias)

    def whole(self, product: Product) -> Tensor:
        """The result of `product` as a tensor, with the bits of `linear`."""
        assert isinstance(product, Tensor)
        return product

    def round_inputs(self, x: Tensor, form: InputFormat) -> Tensor:
        """`ops.inputs.round_inputs`, each row independent of the others.

        Shapes: x and the result [T, in].
        """
        return round_inputs(x, form)

    def low_rank(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """x A B, with A and B in torch's order.

        Shapes: x [T, in], a [rank, in], b [out, rank] -> [T, out].
        Source: LoRA, arXiv 2106.09685, section 4.1.
        """
        return F.linear(F.linear(x, a), b)

    def quant_gemm(self, x: Tensor, panels: Tensor, shape: PanelShape, out: Tensor) -> None:
        """out = X A with a quantised A, as `ops.quant` defines it.

        Shapes: x [T, in]; panels [n_panels, n_bytes] uint8; out [T, n_outputs], perhaps a view of
        some columns.
        """
        out.copy_(quant_gemm(x, shape.unpack(panels, out.shape[1])))

    def quant_embedding(
        self, tokens: Tensor, panels: Tensor, shape: PanelShape, n_outputs: int, first: int = 0
    ) -> Tensor:
        """`lookup` in a quantised matrix of `n_outputs` rows.

        Shapes: tokens [T] int64; panels [n_panels, n_bytes] uint8 -> [T, in] float32.
        """
        if not n_outputs:  # a tiny vocabulary may leave a rank without rows
            size = len(tokens), shape.n_inputs
            return torch.full(size, -0.0, dtype=torch.float32, device=tokens.device)
        row = tokens - first
        is_elsewhere = (row < 0) | (row >= n_outputs)
        rows = shape.unpack_rows(panels, row.masked_fill(is_elsewhere, 0)).values()
        return rows.masked_fill_(is_elsewhere[:, None], -0.0)

    def routed_linear(self, x: Tensor, weights: Sequence[Tensor], dispatch: Dispatch) -> Tensor:
        """Y = X A, each row with one of several A; zeros for rows that no weight computes.

        Shapes: x [n, in], each weight [out, in] -> [P, out].
        """
        products = [partial(self.linear, weight=weight) for weight in weights]
        return dispatch.through(x, products, len(weights[0]))

    def routed_product(self, x: Tensor, weights: Sequence[Tensor], dispatch: Dispatch) -> Product:
        """`routed_linear` for an operator that takes a `PartSums`."""
        return self.routed_linear(x, weights, dispatch)

    def route(
        self, x: Tensor, gate: Tensor, n_active: int, bias: Tensor | None = None, *, normed: bool
    ) -> tuple[Tensor, Tensor]:
        """The routing weights and the experts of each token, the best first.

        The weights are the softmax of the scores of all experts, with their bias, in at least
        float32; with `normed`, each token's weights sum to 1. Ties go to the expert with the lower
        number.

        Shapes: x [T, dim], gate [n_experts, dim], bias [n_experts] in at least float32 ->
            routing_weights and experts [T, n_active].
        Source: Mixtral, arXiv 2401.04088; the bias, GptOssTopKRouter of transformers 5.24.
        """
        scores = F.linear(x, gate)
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        wide = wide if bias is None else wide + bias
        # Not topk, whose order of equal values is not defined.
        ordered, experts = wide.softmax(-1).sort(descending=True, stable=True)
        routing_weights = ordered[:, :n_active]
        if normed:
            routing_weights = routing_weights / routing_weights.sum(-1, keepdim=True)
        return routing_weights, experts[:, :n_active]

    def router_scores(self, x: Tensor, gate: Tensor) -> Tensor:
        """x A; in the subclasses a row's bits do not depend on the batch.

        Shapes: x [T, dim], gate [n_experts, dim] -> [T, n_experts].
        """
        return F.linear(x, gate)

    def sigmoid_route(
        self,
        x: Tensor,
        gate: Tensor,
        bias: Tensor | None,
        n_active: int,
        groups: tuple[int, int],
        scale: float,
        *,
        normed: bool,
    ) -> tuple[Tensor, Tensor]:
        """The routing weights and the experts of each token, the most preferred expert first.

        Experts are ordered by sigmoid(score) + bias, or by the score if there is no bias, in at
        least float32. The routing weight of an expert is sigmoid(score) times `scale`; with
        `normed`, the routing weights of a token sum to `scale`. Ties go to the expert with the
        lower number.

        Args:
            groups: (n, m): the experts form n groups of consecutive experts, and a token uses its m
                best groups. Each expert has the value by which experts are ordered, and groups are
                ordered by the sum of their two largest values.

        Shapes: x [T, dim], gate [n_experts, dim], bias [n_experts] -> routing_weights and experts
            [T, n_active].
        Source: DeepSeek-V3, arXiv 2412.19437; Glm4MoeTopkRouter and Llama4Router of transformers
            5.24.
        """
        scores = self.router_scores(x, gate)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        weights, (n_groups, n_active_groups) = scores.sigmoid(), groups
        # Without a bias, experts are ordered by score: sigmoids of all large scores are equal.
        choices = scores if bias is None else weights + bias
        if n_groups > 1:
            by_group = choices.view(len(x), n_groups, -1)
            group_scores = by_group.sort(-1, descending=True).values[..., :2].sum(-1)
            order = group_scores.sort(descending=True, stable=True).indices
            is_excluded = torch.ones_like(group_scores, dtype=torch.bool)
            is_excluded.scatter_(1, order[:, :n_active_groups], False)
            choices = by_group.masked_fill(is_excluded[..., None], -torch.inf).view_as(choices)
        experts = choices.sort(descending=True, stable=True).indices[:, :n_active].contiguous()
        routing_weights = weights.gather(1, experts)
        if normed:
            routing_weights = routing_weights / (routing_weights.sum(-1, keepdim=True) + 1e-20)
        return routing_weights * scale, experts

    def expert_dispatch(self, experts: Tensor, local_experts: range) -> tuple[Dispatch, Dispatch]:
        """Two dispatches: from tokens to rows sorted by expert, and from these rows to pairs.

        A pair is a token and one of its experts; the pairs of a token are contiguous. This rank has
        the experts with the numbers `local_experts`; pairs of all other experts are last.

        Shapes: experts [T, n_active]; the results' sources and targets [T * n_active].
        """
        index = experts.flatten() - local_experts.start
        index = index.where((index >= 0) & (index < len(local_experts)), len(local_experts))
        (index, pairs), device = index.sort(stable=True), index.device
        order = torch.arange(len(pairs), device=device)
        # Not bincount, which synchronises with the device.
        starts = torch.searchsorted(index, torch.arange(len(local_experts) + 1, device=device))
        to_experts = Dispatch(pairs // experts.shape[1], order, starts, len(experts))
        return to_experts, Dispatch(order, pairs, starts, len(experts))

    def add_expert_bias_(self, y: Tensor, bias: Tensor, dispatch: Dispatch) -> Tensor:
        """Adds to each row of y the bias of the row's expert, in place, and returns y.

        Rows that no expert of this rank computes are unchanged. The targets of `dispatch` must be
        0, 1, 2, ..., so that the rows are sorted by expert.

        Shapes: y [P, n], bias [number of this rank's experts, n].
        """
        starts = dispatch.starts
        rows = torch.arange(len(y), device=y.device)
        experts = torch.searchsorted(starts[1:], rows, right=True)
        is_elsewhere = experts >= len(bias)
        row_biases = F.embedding(experts.masked_fill(is_elsewhere, 0), bias)
        return y.add_(row_biases.masked_fill_(is_elsewhere[:, None], 0))

    def weighted_sum(self, parts: Product, routing_weights: Tensor) -> Tensor:
        """The weighted sum of each token's n parts, summed in the dtype of the weights.

        Shapes: parts [T * n, dim], routing_weights [T, n] -> [T, dim], dtype of the parts.
        """
        by_token = self.whole(parts).view(*routing_weights.shape, -1)
        # In order, because the bits of torch.sum may depend on the number of rows.
        total = by_token[:, 0] * routing_weights[:, :1]
        for number in range(1, routing_weights.shape[1]):
            total += by_token[:, number] * routing_weights[:, number : number + 1]
        return total.to(parts.dtype)

    def scaled_pairs(self, x: Tensor, routing_weights: Tensor) -> Tensor:
        """Each token times each of its n routing weights, computed in the dtype of the weights.

        Shapes: x [T, dim], routing_weights [T, n] -> [T * n, dim], dtype of x.
        """
        return (x[:, None] * routing_weights[..., None]).flatten(0, 1).to(x.dtype)

    def add_gated_(self, y: Tensor, x: Tensor, scores: Tensor) -> Tensor:
        """Adds sigmoid(score) x to y in place, with one score for each row, and returns y.

        Shapes: y, x [T, dim], scores [T, 1].
        """
        wide = torch.promote_types(y.dtype, torch.float32)
        return y.copy_(y.to(wide) + scores.to(wide).sigmoid() * x.to(wide))

    def largest(self, x: Tensor, first: int = 0) -> Tensor:
        """The largest value of each row and the first column that has it, counted from `first`.

        The value is NaN if the row has a NaN, and -inf if all values are -inf.

        Shapes: [n, m] -> [n, 2] float64.
        """
        if not x.shape[1]:
            empty = x.new_full((len(x), 2), first, dtype=torch.float64)
            empty[:, 0] = -torch.inf
            return empty
        values, columns = x.max(1)
        return torch.stack((values.double(), (columns + first).double()), dim=1)

    def draw(self, x: Tensor, sampling_keys: SamplingKeys, first: int = 0) -> Tensor:
        """The best score of each row and the first token that has it; column 0 is token `first`.

        A score is logit / temperature + the noise of the row's key and the token, or the logit for
        temperature 0. The best is NaN if the row has a NaN, and -inf if all logits are -inf.

        Shapes: x [n, m], n sampling keys -> [n, 2] float64.
        """
        wide, temperatures = x.double(), sampling_keys.temperatures[:, None]
        tokens = torch.arange(first, first + x.shape[1], device=x.device)
        noisy = wide / temperatures + gumbel(sampling_keys.keys, tokens)
        return TorchOps.largest(self, torch.where(temperatures > 0, noisy, wide), first)

    def candidates(self, x: Tensor, temperatures: Tensor, k: int, first: int = 0) -> Tensor:
        """Each row's mass and its k largest logits with their tokens, as in `ops.filters`.

        Shapes: x [n, m] of the tokens from `first` on, temperatures [n] -> [n, 1 + 2 k] float64.
        """
        rows = x.new_full((len(x), 1 + 2 * k), -torch.inf, dtype=torch.float64)
        rows[:, 0], rows[:, 1 + k :] = 0, -1
        if x.shape[1]:
            values, columns = x.double().sort(dim=1, descending=True, stable=True)
            largest = values[:, :1].clamp(min=-torch.finfo(torch.float64).max)
            rows[:, 0] = ((values - largest) / temperatures[:, None]).exp().sum(1)
            n_columns = min(k, x.shape[1])
            rows[:, 1 : 1 + n_columns] = values[:, :n_columns]
            rows[:, 1 + k : 1 + k + n_columns] = columns[:, :n_columns] + first
        return rows

    def draw_filtered(self, of_ranks: Tensor, filters: Filters, vocab_size: int) -> Tensor:
        """The token of each row, drawn from all ranks' candidates; -1 if these do not suffice.

        Shapes: of_ranks [tp_size, n, 1 + 2 k] -> [n] int64.
        """
        values, tokens = merge_top_k(of_ranks, 1)
        values, tokens = values[:, :vocab_size], tokens[:, :vocab_size]
        mass = mass_of(of_ranks[:, :, 0], of_ranks[:, :, 1], filters.sampling_keys.temperatures)
        is_kept, is_decided = filters.keep_mask(values, mass, vocab_size)
        drawn = tokens.gather(1, filters.draw(values, tokens, is_kept)[:, None])[:, 0]
        return drawn.where(is_decided, -1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """x / rms(x) * (weight + offset), with the mean of squares in at least float32.

        A row whose sum of squares overflows becomes NaN, not zeros.

        Shapes: x and the result [..., dim].
        Source: arXiv 1910.07467.
        """
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # Not F.rms_norm, which takes ten times as long on the CPU for many rows.
        length: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        # One call for eps + norm^2 / dim, since for one row a call costs as much as its arithmetic.
        mean = torch.full_like(length, eps).addcmul_(length, length, value=1 / x.shape[-1])
        inverse_rms = (mean * 0).add_(mean.rsqrt())  # NaN for an infinite mean
        normed = wide * inverse_rms
        if offset:  # in 16 bits, weight + offset would lose digits of a weight near 0
            return normed.mul_(weight.to(normed.dtype) + offset).to(x.dtype)
        return normed.to(x.dtype).mul_(weight)

    def rms_norm_(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        """`rms_norm` of each head, in place. Shapes: x [T, H, D], contiguous in [H, D]."""
        x.copy_(self.rms_norm(x.contiguous(), weight, eps, offset))

    def unit_norm_(self, x: Tensor, eps: float) -> None:
        """`rms_norm_` without weights. Shapes: as `rms_norm_`."""
        self.rms_norm_(x, x.new_ones(x.shape[-1]), eps)

    def scale_rows_(self, x: Tensor, scales: Tensor) -> None:
        """Multiplies each row of x by its scale in place. Shapes: x [T, H, D], scales [T]."""
        x.copy_(x * scales[:, None, None])

    def head_squares_(self, x: Tensor, squares: Tensor, columns: range, first: int) -> None:
        """Writes the sum of squares of head i of x to column first + i of `squares`.

        The other `columns` become 0, so that the sum over ranks has the squares of all heads.

        Shapes: x [T, H, D]; squares [T, n], in at least float32.
        """
        squares[:, columns.start : columns.stop] = 0
        squares[:, first : first + x.shape[1]] = x.to(squares.dtype).square().sum(-1)

    def norm_heads_(
        self, x: Tensor, squares: Tensor, columns: range, weight: Tensor, eps: float
    ) -> None:
        """`rms_norm` of all heads of all ranks together, in place for the heads of this rank.

        The `columns` of `squares` are the sums of squares of all heads.

        Shapes: x [T, H, D]; squares [T, n], in at least float32; weight [H * D].
        Source: OLMo 2, arXiv 2501.00656.
        """
        _, n_heads, head_dim = x.shape
        head_squares = squares[:, columns.start : columns.stop]
        mean = head_squares.sum(1).div_(len(columns) * head_dim).add_(eps)
        inverse_rms = (mean * 0).add_(mean.rsqrt())  # NaN for an infinite mean
        x.copy_(x * inverse_rms[:, None, None] * weight.view(n_heads, head_dim))

    def add_(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds y to x in place and returns x. Shapes: x [T, n]; y [T, n], or [n] for every row."""
        return x.add_(y)

    def add_rms_norm(
        self,
        x: Tensor,
        y: Product,
        weight: Tensor,
        eps: float,
        offset: float = 0.0,
        post_weight: Tensor | None = None,
    ) -> Tensor:
        """Adds y to x in place and returns `rms_norm` of x.

        With `post_weight`, `rms_norm` of y with this weight is added instead of y.

        Shapes: x, y and the result [T, dim].
        """
        y = self.whole(y)
        if post_weight is not None:
            y = self.rms_norm(y, post_weight, eps, offset)
        return self.rms_norm(self.add_(x, y), weight, eps, offset)

    def all_reduce(self, x: Tensor, comm: Communicator) -> Tensor:
        """`comm.all_reduce` as an operator, which a recording can contain; in place."""
        return comm.all_reduce(x)

    def gather_columns(self, x: Tensor, widths: Sequence[int], comm: Communicator) -> Tensor:
        """`comm.gather_columns` as an operator."""
        return comm.gather_columns(x, widths)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0
    ) -> Tensor:
        """(x - mean(x)) / std(x) * (weight + offset) + bias.

        Shapes: x and the result [T, dim].
        Source: arXiv 1607.06450.
        """
        return F.layer_norm(x, x.shape[-1:], weight + offset if offset else weight, bias, eps)

    def layer_norm_heads_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """`layer_norm` of each head in place, without a bias, in at least float32.

        Shapes: x [T, H, D]; weight [H * D].
        Source: CohereLayerNorm of transformers 5.24.
        """
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = F.layer_norm(wide, x.shape[-1:], eps=eps)
        x.copy_(normed.mul_(weight.view(x.shape[1:])))

    def silu_and_mul(self, x: Product) -> Tensor:
        """silu(gate) * up, the two halves of each row; may overwrite x.

        Shapes: [T, 2 * channels] -> [T, channels].
        Source: SwiGLU, arXiv 2002.05202.
        """
        gate, up = self.whole(x).chunk(2, dim=-1)
        return F.silu(gate, inplace=True).mul_(up)

    def clamped_swiglu(self, x: Product, alpha: float, limit: float) -> Tensor:
        """gate * sigmoid(alpha gate) * (up + 1), the two halves of each row, with bounds.

        The gate is at most `limit`, and up is from -limit to limit.

        Shapes: [T, 2 * channels] -> [T, channels].
        Source: GptOssExperts of transformers 5.24.
        """
        gate, up = self.whole(x).chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    def gelu_and_mul(self, x: Product, *, is_tanh: bool) -> Tensor:
        """gelu(gate) * up, the two halves of each row; `is_tanh` for the tanh approximation.

        Shapes: [T, 2 * channels] -> [T, channels].
        Source: GEGLU, arXiv 2002.05202.
        """
        gate, up = self.whole(x).chunk(2, dim=-1)
        return self.gelu(gate, is_tanh=is_tanh).mul_(up)

    def gelu(self, x: Product, *, is_tanh: bool) -> Tensor:
        """x * Phi(x), exact or with the tanh approximation of Phi, as a new tensor.

        Source: arXiv 1606.08415.
        """
        return F.gelu(self.whole(x), approximate="tanh" if is_tanh else "none")

    def relu2(self, x: Product) -> Tensor:
        """max(x, 0)^2, as a new tensor.

        Source: Primer, arXiv 2109.08668.
        """
        return F.relu(self.whole(x)).square_()

    def rotate_and_store(
        self,
        qkv: Product,
        rotations: Tensor | None,
        slots: Tensor,
        k: Tensor,
        v: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Rotates queries and keys, and stores the keys and values in their slots of the cache.

        With `norms`, queries and keys are normalised first; without `rotations`, they are not
        rotated. May overwrite qkv.

        Returns: the queries, [T, H, D].

        Shapes: qkv [T, H + 2 K, D], heads in interleaved order; rotations [T, 1, D / 2] complex;
        slots [T]; k, v [K, n_slots, W], rows as in `kv_rows`.
        """
        qkv, n_kv_heads = self.whole(qkv), len(k)
        first_k, first_v = (qkv.shape[1] - n * n_kv_heads for n in (2, 1))
        if norms is not None:
            for x, weight in ((qkv[:, :first_k], norms.q), (qkv[:, first_k:first_v], norms.k)):
                self.rms_norm_(x, weight, norms.eps, norms.offset)
        self._rotate_and_store(qkv, rotations, slots, k, v)
        return qkv[:, :first_k]

    def _rotate_and_store(
        self, qkv: Tensor, rotations: Tensor | None, slots: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """`rotate_and_store` without norms, with the queries rotated in place.

        The keys in qkv are undefined afterwards.
        """
        n_kv_heads = len(k)
        rotated = qkv[:, : qkv.shape[1] - n_kv_heads]
        if rotations is not None:
            rotate_(rotated, rotations)
        kv_rows.store(rotated[:, -n_kv_heads:], slots, k)
        kv_rows.store(qkv[:, -n_kv_heads:], slots, v)

    def plan(self, queries: Queries, device: torch.device) -> Plan:
        """The plan of these queries, made once for all layers of a KV group.

        The keys of all queries must be on this rank.
        """
        return SlotPlan(tuple(queries.query_chunks(device)), queries.decoded())

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
        """Softmax attention of the queries of a plan over their keys, into their rows of out.

        Other rows of `out` are unchanged.

        Shapes: q, out [T, H, D]; k, v [K, n_slots, W]; sinks [H] in at least float32, if the
            scores have sinks.
        """
        assert (sinks is not None) == self._scores.has_sinks
        if isinstance(plan, PagedPlan):
            for part in plan.parts:
                self._paged_attention(q, k, v, part, heads, out, sinks)
            return
        assert isinstance(plan, SlotPlan)
        for q_heads, kv_heads in heads.runs:
            q_run, out_run = q[:, q_heads], out[:, q_heads]
            k_run, v_run = k[kv_heads], v[kv_heads]
            sinks_run = None if sinks is None else sinks[q_heads]
            for row, (_, slots) in plan.decoded.items():
                # Always copied, so that torch gets the same layout for any number of slices.
                keys, values = (
                    torch.cat([x[:, s] for s in slots], 1)[None] for x in (k_run, v_run)
                )
                query = q_run[row : row + 1]
                out_run[row : row + 1] = self._attend(query, keys, values, None, sinks_run)
            for chunk in plan.chunks:
                self._chunk_attention(q_run, k_run, v_run, chunk, out_run, sinks_run)

    def plan_sinks(
        self, window: Queries, sinks: Queries, dtype: torch.dtype, device: torch.device
    ) -> Iterator[SinkPlan]:
        """Yields the plans of queries that attend to their windows and to sinks.

        `window` has the queries with the keys of their windows. `sinks` has the same queries with
        the sinks as keys; their positions are reduced by the length of the window, so that each
        query attends only to the sinks before its window.
        """
        tiles = zip(window.tiles(dtype, device), sinks.tiles(dtype, device), strict=True)
        for window_tile, sink_tile in tiles:
            yield TorchSinkPlan(window_tile.rows, window_tile.positions, window_tile, sink_tile)

    def sink_attention(
        self,
        q: Tensor,
        rotated: Tensor,
        k: Tensor,
        v: Tensor,
        plan: SinkPlan,
        heads: HeadMap,
        out: Tensor,
    ) -> None:
        """Softmax attention of a plan's queries over window and sinks, into their rows of out.

        Shapes: as in `attention`; rotated [t, H, D], the plan's queries as rotated for the sinks.
        """
        assert isinstance(plan, TorchSinkPlan)
        for q_heads, kv_heads in heads.runs:
            parts = []
            for queries, tile in ((q[plan.rows], plan.window), (rotated, plan.sinks)):
                o, lse = self.partial_attention(queries[:, q_heads], k[kv_heads], v[kv_heads], tile)
                parts.append(torch.cat((o, lse[..., None].to(o.dtype)), -1))
            out[plan.rows, q_heads] = merge_lse(torch.stack(parts))

    def partial_attention(
        self, q: Tensor, k: Tensor, v: Tensor, tile: QueryTile
    ) -> tuple[Tensor, Tensor]:
        """The attention of a tile's queries over its keys, and the log-sum-exp of the scores.

        A query that attends to none of the keys gets zeros and -inf.

        Shapes: q [t, K * G, D], the queries of the tile; k, v [K, n_slots, W]; the results
        [t, K * G, D] and [t, K * G].
        """
        slices = ([cache[:, slots] for slots in tile.slots] for cache in (k, v))
        keys, values = (rows[0] if len(rows) == 1 else torch.cat(rows, 1) for rows in slices)
        return self._partial(q, keys[None], values[None], tile.mask)

    def _chunk_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chunk: QueryChunk,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """`attention` for a chunk, with equally many query heads for each KV head."""
        stored = (kv_rows.take(cache, chunk.slots)[None] for cache in (k, v))
        keys, values = (self._unpack(rows, q.dtype) for rows in stored)
        q, out, window = q[chunk.rows], out[chunk.rows], chunk.window
        for first_query in range(0, len(q), MAX_QUERIES):
            tile = slice(first_query, first_query + MAX_QUERIES)
            queries = chunk.positions[tile]
            first = 0 if window is None else queries.start - window + 1
            seen = range(max(first, chunk.first_key), queries.stop)
            mask = causal_mask(queries, [seen], window, q.dtype, q.device)
            at = slice(seen.start - chunk.first_key, seen.stop - chunk.first_key)
            out[tile] = self._attend(q[tile], keys[:, :, at], values[:, :, at], mask, sinks)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        """Softmax attention of consecutive queries of one sequence, G heads per KV head.

        Shapes: q [T, K * G, D]; k, v [1, K, S, W]; mask [T, S], added to the scores, or None if all
        queries attend to all keys; sinks [K * G]; the result [T, K * G, D].
        """
        n_rows, n_kv_heads = len(q), k.shape[1]
        if sinks is not None:
            o, lse = self._partial(q, k, v, mask)
            # The fraction of the softmax weights that the sink leaves to the keys.
            return o * torch.sigmoid(lse - sinks)[..., None].to(o.dtype)
        if self._scores.soft_cap is not None:
            # scaled_dot_product_attention has no soft cap.
            return self._partial(q, k, v, mask)[0]
        k, v = self._unpack(k, q.dtype), self._unpack(v, q.dtype)
        scale = self._scores.scale
        if n_rows == 1:
            # The query heads of a KV head are the rows of one call, so each key is read once.
            q = q.view(1, n_kv_heads, -1, q.shape[2])
            return F.scaled_dot_product_attention(q, k, v, scale=scale).flatten(1, 2)
        q = q.view(n_rows, n_kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3)  # [K, G, T, D]
        heads_per_kv = q.shape[1]
        # Expanding copies no keys or values; torch's enable_gqa copies them on the CPU.
        o = F.scaled_dot_product_attention(
            q,
            k.transpose(0, 1).expand(-1, heads_per_kv, -1, -1),
            v.transpose(0, 1).expand(-1, heads_per_kv, -1, -1),
            attn_mask=mask,
            scale=scale,
        )
        return o.permute(2, 0, 1, 3).flatten(1, 2)

    def _unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantise keys or values. Shapes: [1, K, S, W] -> [1, K, S, D]."""
        return kv_rows.unpack(rows, dtype)

    def _partial(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`_attend` over a part of the keys, and the log-sum-exp of the scores, [T, K * G]."""
        n_rows, n_heads, head_dim = q.shape
        _, n_kv_heads, n_keys, _ = k.shape
        k, v = self._unpack(k, q.dtype), self._unpack(v, q.dtype)
        grouped = q.view(n_rows, n_kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
        scores = grouped @ k[0].mT  # [K, G * T, S]
        scale, cap = self._scores.scale_of(head_dim), self._scores.soft_cap
        if cap is None:
            scores.mul_(scale)
        else:
            scores.mul_(scale / cap).tanh_().mul_(cap)
        if mask is not None:
            scores.view(n_kv_heads, -1, n_rows, n_keys).add_(mask)
        # Weights are summed in at least float32, as in scaled_dot_product_attention.
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        lse = wide.logsumexp(-1, keepdim=True)
        weights = wide.softmax(-1).masked_fill(lse == -torch.inf, 0)
        o = weights.to(v.dtype) @ v[0]
        shape = (n_heads, n_rows, -1)
        return o.view(shape).transpose(0, 1), lse.view(shape).transpose(0, 1)[..., 0]

    def _paged_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: PagedQueries,
        heads: HeadMap,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """`attention` for ranges of queries, with block tables."""
        q_heads_of_kv = [slice(*bounds) for bounds in pairwise(heads.bounds.tolist())]
        window = queries.window
        for row, n_queries, start, first_key, first_block in queries.rows.tolist():
            if not n_queries:
                continue
            first = first_key if window is None else max(first_key, start - window + 1)
            seen = range(first, start + n_queries)
            slots = queries.slots_of(first_block, range(first - first_key, seen.stop - first_key))
            keys, values = (kv_rows.take(cache, slots)[None] for cache in (k, v))
            rows = slice(row, row + n_queries)
            mask = causal_mask(range(start, seen.stop), [seen], window, q.dtype, q.device)
            for kv_head, q_heads in enumerate(q_heads_of_kv):
                out[rows, q_heads] = self._attend(
                    q[rows, q_heads],
                    keys[:, kv_head : kv_head + 1],
                    values[:, kv_head : kv_head + 1],
                    mask,
                    None if sinks is None else sinks[q_heads],
                )


def rotate_(x: Tensor, rotations: Tensor) -> None:
    """Rotates every head of x, in interleaved order, by its token's angles, in place.

    Shapes: x [T, H, D]; `rotations` [T, 1, D / 2] complex, of at least float32.
    """
    wide = x.to(rotations.dtype.to_real())
    torch.view_as_complex(wide.view(*x.shape[:-1], -1, 2)).mul_(rotations)
    if wide is not x:
        x.copy_(wide)


def merge_lse(parts: Tensor) -> Tensor:
    """Merges partial attention results; the last column is the log-sum-exp of the scores.

    The log-sum-exp of a part without keys is -inf.

    Shapes: [n_parts, T, H, D + 1] -> [T, H, D].
    """
    weights = parts[..., -1:].softmax(0)
    total = parts[0, ..., :-1] * weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total += part[..., :-1] * weight
    return total
