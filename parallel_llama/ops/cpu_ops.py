"""The operators on a CPU: LLVM kernels, and torch for the rest."""

from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor

from parallel_llama.dtypes import InputFormat, QuantFormat
from parallel_llama.ops.attention import (
    PLAIN,
    HeadMap,
    Plan,
    Queries,
    Scores,
    SinkPlan,
)
from parallel_llama.ops.cpu.attention_plan import CPUPlan, CPUSinkPlan, PartTile
from parallel_llama.ops.cpu.decode_attention import (
    PARTIAL_FIELDS,
    DecodeAttentionKernel,
    make_decode_attention,
)
from parallel_llama.ops.cpu.elementwise import (
    Activation,
    make_activation,
    make_add,
    make_add_gated,
    make_clamped_swiglu,
    make_expert_bias,
    make_largest,
    make_norm,
    make_weighted_sum,
)
from parallel_llama.ops.cpu.embedding import make_lookup, make_quant_embedding
from parallel_llama.ops.cpu.exchange import make_all_reduce, make_gather_columns
from parallel_llama.ops.cpu.gemm import make_gemm
from parallel_llama.ops.cpu.gemm_amx import GemmAMXKernel, make_gemm_amx
from parallel_llama.ops.cpu.gemv import MAX_ROWS, make_gemv, make_routed_gemv
from parallel_llama.ops.cpu.inputs import make_round_inputs
from parallel_llama.ops.cpu.jit import Launcher, at_once, this_machine
from parallel_llama.ops.cpu.kv_rows import make_unpack
from parallel_llama.ops.cpu.low_rank import AdapterRoom, make_low_rank
from parallel_llama.ops.cpu.merge_parts import make_merge_parts
from parallel_llama.ops.cpu.norm_across_heads import make_head_squares, make_norm_heads
from parallel_llama.ops.cpu.prefill_attention import PrefillAttentionKernel, make_prefill_attention
from parallel_llama.ops.cpu.prefill_attention_amx import (
    PrefillAttentionAMXKernel,
    make_prefill_attention_amx,
)
from parallel_llama.ops.cpu.quant_gemm import make_quant_gemm
from parallel_llama.ops.cpu.replay import Arena, KernelsOnly, Recording, make_executor
from parallel_llama.ops.cpu.rotary import RotaryKernel, make_rotary
from parallel_llama.ops.cpu.route import make_expert_dispatch, make_route, make_sigmoid_route
from parallel_llama.ops.dispatch import Dispatch
from parallel_llama.ops.part_sums import Product
from parallel_llama.ops.quant import PanelShape
from parallel_llama.ops.torch_ops import TorchOps
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.shared_memory import SharedMemory
from parallel_llama.parallel.sockets import Sockets


class CPUOps(TorchOps):
    """Operators for a model of one dtype and head size.

    Arguments as in `choose_ops`. `exact` excludes AMX kernels: they sum in an order of their own,
    and a measurement of their speed decides whether they are used.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        head_dim: int,
        heads_per_kv: Collection[int],
        scores: Scores = PLAIN,
        cache_dtype: torch.dtype | None = None,
        matrices: Collection[torch.dtype | QuantFormat] = (),
        *,
        exact: bool = False,
    ) -> None:
        super().__init__(scores)
        self._dtype, self._head_dim, self._heads_per_kv = dtype, head_dim, heads_per_kv
        self._cache_dtype = cache_dtype or dtype
        self._uses_amx = not exact
        self._matrices = {dtype, *matrices}
        self._tables: dict[tuple[int, ...], array[int]] = {}
        self.panel_rows = this_machine().lanes(torch.float32).width
        self._run: Launcher = at_once
        self._recording: Recording | None = None
        self._arena = Arena()

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
        """Compile the kernels that most models use; the others are compiled when they first run."""
        for form in self._matrices:
            if isinstance(form, QuantFormat):
                make_quant_gemm(form)
                make_quant_embedding(form)
                continue
            make_gemv(self._dtype, form)
            make_gemm(self._dtype, form)
            make_lookup(self._dtype, form)
            if has_experts:
                make_routed_gemv(self._dtype, form)
        if torch.bfloat16 in self._matrices and self._uses_amx:
            make_gemm_amx()
        for kernel in (make_norm, make_add, make_largest):
            kernel(self._dtype)
        make_executor()
        if has_experts:
            make_route(self._dtype)
            make_expert_dispatch()
            make_weighted_sum(self._dtype)
        if has_sigmoid_router:
            make_sigmoid_route(self._dtype)
        if has_shared_gate:
            make_add_gated(self._dtype)
        if has_clamped_swiglu:
            make_clamped_swiglu(self._dtype)
        if has_expert_bias:
            make_expert_bias(self._dtype)
        self._rotary(self._cache_dtype, rotates=True)
        if has_unrotated:
            self._rotary(self._cache_dtype, rotates=False)
        if self._cache_dtype != self._dtype:
            make_unpack(self._dtype, self._cache_dtype, self._head_dim)
        self._prefill_attention(self._cache_dtype)
        for heads_per_kv in self._heads_per_kv:
            self._decode_attention(self._cache_dtype, heads_per_kv)

    def compile_low_rank(self) -> None:
        """Compile the kernels of `add_low_ranks_`; all models of this dtype share them."""
        make_low_rank(self._dtype)

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Record the operators that are called inside the context instead of running them.

        Raises: NotRecorded if torch computes an operator or anything between operators.
        """
        recording = Recording(self._arena)
        self._recording, self._run = recording, recording.run
        try:
            with KernelsOnly(self._arena):
                yield recording
        finally:
            self._recording, self._run = None, at_once
        recording.complete()

    def lookup(
        self, tokens: Tensor, weight: Tensor, first: int = 0, dtype: torch.dtype | None = None
    ) -> Tensor:
        return make_lookup(dtype or weight.dtype, weight.dtype)(tokens, weight, first, self._run)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(x) > MAX_ROWS:
            y = self._linear_many_rows(x, weight)
        else:
            y = make_gemv(self._dtype, weight.dtype)(x, weight, self._run)
        return y if bias is None else self.add_(y, bias)

    def round_inputs(self, x: Tensor, form: InputFormat) -> Tensor:
        return make_round_inputs(self._dtype, form)(x, form, self._run)

    def add_low_ranks_(self, y: Tensor, x: Tensor, adapters: AdapterRoom, layer: int) -> None:
        """Adds x A B to y in place, with the matrices A and B of each row's adapter.

        `layer` is the index of the layer in `AdapterAddresses`.

        Shapes: y [T, out], x [T, in].
        """
        make_low_rank(self._dtype)(y, x, adapters, layer, self._run)

    def _linear_many_rows(self, x: Tensor, weight: Tensor) -> Tensor:
        uses_amx = self._uses_amx and GemmAMXKernel.takes(weight)
        gemm_amx = make_gemm_amx() if uses_amx else None
        if gemm_amx is not None and x.dtype == torch.float32:
            return gemm_amx(x, weight, self._run)
        return make_gemm(self._dtype, weight.dtype)(x, weight, self._run)

    def quant_gemm(self, x: Tensor, panels: Tensor, shape: PanelShape, out: Tensor) -> None:
        make_quant_gemm(shape.form)(x, panels, shape, out, self._run)

    def quant_embedding(
        self, tokens: Tensor, panels: Tensor, shape: PanelShape, n_outputs: int, first: int = 0
    ) -> Tensor:
        return make_quant_embedding(shape.form)(tokens, panels, shape, first, n_outputs, self._run)

    def route(
        self, x: Tensor, gate: Tensor, n_active: int, bias: Tensor | None = None, *, normed: bool
    ) -> tuple[Tensor, Tensor]:
        scores = self.router_scores(x, gate)
        scores = scores if bias is None else self.add_(scores, bias)
        return make_route(self._dtype)(scores, n_active, normed=normed, run=self._run)

    def router_scores(self, x: Tensor, gate: Tensor) -> Tensor:
        # One kernel for any number of rows: a token's experts must not depend on the batch or the
        # number of threads.
        return make_gemv(self._dtype, self._dtype)(x, gate, self._run)

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
        scores = self.router_scores(x, gate)
        kernel = make_sigmoid_route(self._dtype)
        return kernel(scores, bias, n_active, groups, scale, normed=normed, run=self._run)

    def expert_dispatch(self, experts: Tensor, local_experts: range) -> tuple[Dispatch, Dispatch]:
        return make_expert_dispatch()(experts, local_experts, self._run)

    def routed_linear(self, x: Tensor, weights: Sequence[Tensor], dispatch: Dispatch) -> Tensor:
        stored = weights[0].dtype
        if not _has_few_rows(dispatch) or any(weight.dtype != stored for weight in weights):
            return super().routed_linear(x, weights, dispatch)
        table = self._table([weight.data_ptr() for weight in weights])
        kernel = make_routed_gemv(self._dtype, stored)
        return kernel(x, table, len(weights[0]), dispatch, self._run)

    def add_expert_bias_(self, y: Tensor, bias: Tensor, dispatch: Dispatch) -> Tensor:
        make_expert_bias(self._dtype)(y, bias, dispatch.starts, self._run)
        return y

    def weighted_sum(self, parts: Product, routing_weights: Tensor) -> Tensor:
        return make_weighted_sum(self._dtype)(self.whole(parts), routing_weights, self._run)

    def add_gated_(self, y: Tensor, x: Tensor, scores: Tensor) -> Tensor:
        make_add_gated(self._dtype)(y, x, scores, self._run)
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        return make_norm(self._dtype)(rows, weight, eps, offset, run=self._run).view(x.shape)

    def rms_norm_(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        make_norm(self._dtype)(x, weight, eps, offset, x, self._run)

    def head_squares_(self, x: Tensor, squares: Tensor, columns: range, first: int) -> None:
        make_head_squares(self._dtype)(x, squares, columns, first, self._run)

    def norm_heads_(
        self, x: Tensor, squares: Tensor, columns: range, weight: Tensor, eps: float
    ) -> None:
        make_norm_heads(self._dtype)(x, squares, columns, weight, eps, self._run)

    def add_(self, x: Tensor, y: Tensor) -> Tensor:
        make_add(self._dtype)(x, y, self._run)
        return x

    def all_reduce(self, x: Tensor, comm: Communicator) -> Tensor:
        if self._recording is None or comm.size == 1:
            return super().all_reduce(x, comm)
        exchange = comm.sum_exchange(x) if isinstance(comm, SharedMemory | Sockets) else None
        if exchange is None:
            self._recording.host_call(self._recording.deferred(x, comm.all_reduce))
        else:
            make_all_reduce(self._dtype, exchange.medium)(x, exchange, self._recording)
        return x

    def gather_columns(self, x: Tensor, widths: Sequence[int], comm: Communicator) -> Tensor:
        if self._recording is None or comm.size == 1:
            return super().gather_columns(x, widths, comm)
        whole = x.new_empty(len(x), sum(widths))
        exchange = (
            comm.column_exchange(whole, widths)
            if isinstance(comm, SharedMemory | Sockets)
            else None
        )
        if exchange is None:
            columns = self._recording.borrowed(x)
            self._recording.host_call(
                self._recording.deferred(
                    whole, lambda whole: whole.copy_(comm.gather_columns(columns, widths))
                )
            )
        else:
            gather = make_gather_columns(self._dtype, exchange.medium)
            starts = self._table(list(accumulate(widths, initial=0)))
            gather(x, whole, starts, exchange, self._recording)
        return whole

    def silu_and_mul(self, x: Product) -> Tensor:
        return make_activation(self._dtype, "silu")(self.whole(x), self._run)

    def clamped_swiglu(self, x: Product, alpha: float, limit: float) -> Tensor:
        return make_clamped_swiglu(self._dtype)(self.whole(x), alpha, limit, self._run)

    def gelu_and_mul(self, x: Product, *, is_tanh: bool) -> Tensor:
        kind: Activation = "gelu_tanh" if is_tanh else "gelu"
        return make_activation(self._dtype, kind)(self.whole(x), self._run)

    def gelu(self, x: Product, *, is_tanh: bool) -> Tensor:
        kind: Activation = "gelu_tanh" if is_tanh else "gelu"
        return make_activation(self._dtype, kind, gated=False)(self.whole(x), self._run)

    def relu2(self, x: Product) -> Tensor:
        return make_activation(self._dtype, "relu2", gated=False)(self.whole(x), self._run)

    def _rotate_and_store(
        self, qkv: Tensor, rotations: Tensor | None, slots: Tensor, k: Tensor, v: Tensor
    ) -> None:
        rotary = self._rotary(k.dtype, rotates=rotations is not None)
        rotary(qkv, rotations, slots, k, v, self._run)

    def plan(self, queries: Queries, device: torch.device) -> Plan:
        assert device.type == "cpu"
        return CPUPlan.of(queries)

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
        assert isinstance(plan, CPUPlan)
        for q_heads, kv_heads in heads.runs:
            q_run, out_run = q[:, q_heads], out[:, q_heads]
            k_run, v_run = k[kv_heads], v[kv_heads]
            sinks_run = None if sinks is None else sinks[q_heads]
            if plan.decode is not None:
                decode = self._decode_attention(k.dtype, q_run.shape[1] // len(k_run))
                decode(q_run, k_run, v_run, plan.decode, out_run, self._run, sinks_run)
            prefill = self._prefill_attention(k.dtype)
            for chunk in plan.chunks:
                prefill(q_run, k_run, v_run, chunk, out_run, self._run, sinks_run)

    def plan_sinks(
        self,
        window: Queries,
        sinks: Queries,
        dtype: torch.dtype,  # noqa: ARG002
        device: torch.device,
    ) -> Iterator[SinkPlan]:
        assert device.type == "cpu"
        return CPUSinkPlan.of(window, sinks)

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
        assert isinstance(plan, CPUSinkPlan)
        results = self.part_attention(torch.cat((rotated, q)), k, v, plan.tile, heads)
        out[plan.rows] = self.merge_parts(*results, plan.tile)

    def part_attention(
        self, q: Tensor, k: Tensor, v: Tensor, tile: PartTile, heads: HeadMap
    ) -> tuple[Tensor, Tensor]:
        """The attention over each part of the keys on this rank, for `merge_parts`.

        All ranks return `tile.max_parts` parts; those beyond this rank's own are undefined.

        Shapes: q [n, H, D], with the rows that `tile.batch` names; k, v as in `attention`; the
        results [max_parts, H, D], and their largest scores and sums of weights [max_parts, H, 2].
        """
        results = q.new_empty(tile.max_parts, *q.shape[1:])
        partials = q.new_empty(tile.max_parts, q.shape[1], PARTIAL_FIELDS)
        if tile.batch is not None:
            n = len(tile.batch.parts)
            for q_heads, kv_heads in heads.runs:
                q_run, k_run, v_run = q[:, q_heads], k[kv_heads], v[kv_heads]
                decode = self._decode_attention(k.dtype, q_run.shape[1] // len(k_run))
                results[:n, q_heads], partials[:n, q_heads] = decode.parts(
                    q_run, k_run, v_run, tile.batch
                )
        return results, partials

    def merge_parts(
        self, results: Tensor, partials: Tensor, tile: PartTile, sinks: Tensor | None = None
    ) -> Tensor:
        """Merges the parts of all ranks, as gathered from `part_attention`, in order of position.

        Shapes: results [n_ranks * max_parts, H, D]; partials [n_ranks * max_parts, H, 2]; sinks
        [H]; the result [t, H, D].
        """
        has_sinks = self._scores.has_sinks
        merge = make_merge_parts(results.dtype, self._head_dim, has_sinks=has_sinks)
        results, partials = (x[tile.order].contiguous() for x in (results, partials))
        return merge(results, partials, tile.bounds, sinks)

    def largest(self, x: Tensor, first: int = 0) -> Tensor:
        return make_largest(x.dtype)(x, first, self._run)

    def _table(self, numbers: Sequence[int]) -> "array[int]":
        """The numbers as an array at an address that stays valid for replayed kernels."""
        return self._tables.setdefault(tuple(numbers), array("q", numbers))

    def _unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        if rows.dtype == dtype:
            return rows
        return make_unpack(dtype, rows.dtype, self._head_dim)(rows, self._run)

    def _rotary(self, cache_dtype: torch.dtype, *, rotates: bool) -> RotaryKernel:
        return make_rotary(self._dtype, cache_dtype, self._head_dim, rotates=rotates)

    def _decode_attention(
        self, cache_dtype: torch.dtype, heads_per_kv: int
    ) -> DecodeAttentionKernel:
        return make_decode_attention(
            self._dtype, cache_dtype, self._head_dim, heads_per_kv, self._scores
        )

    def _prefill_attention(
        self, cache_dtype: torch.dtype
    ) -> PrefillAttentionKernel | PrefillAttentionAMXKernel:
        if self._uses_amx and self._dtype == torch.float32 and cache_dtype == torch.bfloat16:
            amx_kernel = make_prefill_attention_amx(self._head_dim, self._scores)
            if amx_kernel is not None:
                return amx_kernel
        return make_prefill_attention(self._dtype, cache_dtype, self._head_dim, self._scores)


def _has_few_rows(dispatch: Dispatch) -> bool:
    """Whether every weight multiplies at most MAX_ROWS rows."""
    if dispatch.max_rows <= MAX_ROWS:
        return True
    return max(stop - start for start, stop in zip(*dispatch.bounds(), strict=True)) <= MAX_ROWS
