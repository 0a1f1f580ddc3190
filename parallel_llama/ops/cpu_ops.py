"""The operators on a CPU: kernels of our own where rows are few, torch where they are many."""

from collections.abc import Collection

import torch
from torch import Tensor

from parallel_llama.dtypes import GroupFormat
from parallel_llama.ops.cpu import (
    MAX_ROWS,
    AttentionKernel,
    RotaryKernel,
    computes,
    make_attention,
    make_group_linear,
    make_linear,
    make_norm,
    make_rotary,
    make_silu_and_mul,
    make_unpack,
    this_machine,
)
from parallel_llama.ops.decode_batch import DecodeBatch
from parallel_llama.ops.groups import PanelShape
from parallel_llama.ops.scores import PLAIN, Scores
from parallel_llama.ops.torch_ops import TorchOps, best_experts


class CPUOps(TorchOps):
    """For a model of one dtype and head size, with such groups of query heads on each KV head."""

    def __init__(
        self,
        dtype: torch.dtype,
        head_dim: int,
        groups: Collection[int],
        scores: Scores = PLAIN,
        cache_dtype: torch.dtype | None = None,
        matrices: Collection[torch.dtype | GroupFormat] = (),
    ) -> None:
        super().__init__(scores)
        self._dtype, self._head_dim, self._groups = dtype, head_dim, groups
        self._cache_dtype = cache_dtype or dtype
        self._matrices = {dtype, *matrices}
        self.panel_rows = this_machine().lanes(torch.float32).width

    def compile(self) -> None:
        """Make the kernels, which are kept for all models; a second time it costs nothing."""
        for form in self._matrices:
            if isinstance(form, GroupFormat):
                make_group_linear(form)
            else:
                make_linear(self._dtype, form)
        for kernel in (make_norm, make_silu_and_mul):
            kernel(self._dtype)
        self._rotary(self._cache_dtype)
        if self._cache_dtype != self._dtype:
            make_unpack(self._dtype, self._cache_dtype, self._head_dim)
        for n_group in self._groups:
            self._attention(self._cache_dtype, n_group)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(x) > MAX_ROWS:
            return super().linear(x, weight, bias)
        y = make_linear(self._dtype, weight.dtype)(x, weight)
        return y if bias is None else y.add_(bias)

    def group_linear(self, x: Tensor, panels: Tensor, shape: PanelShape, n_outputs: int) -> Tensor:
        return make_group_linear(shape.form)(x, panels, shape, n_outputs)

    def route(
        self, x: Tensor, gate: Tensor, n_active: int, *, normed: bool
    ) -> tuple[Tensor, Tensor]:
        # For any number of rows: a token's experts must not hang on how many others there are, nor
        # on the threads of the rank.
        return best_experts(make_linear(self._dtype, self._dtype)(x, gate), n_active, normed=normed)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        return make_norm(self._dtype)(rows, weight, eps, offset).view(x.shape)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return make_silu_and_mul(self._dtype)(x)

    def rotate_and_store(
        self, qkv: Tensor, rotations: Tensor, slots: Tensor, k: Tensor, v: Tensor
    ) -> None:
        self._rotary(k.dtype)(qkv, rotations, slots, k, v)

    def decode_attention(
        self, q: Tensor, k: Tensor, v: Tensor, batch: DecodeBatch, out: Tensor
    ) -> None:
        self._attention(k.dtype, q.shape[1] // len(k))(q, k, v, batch, out)

    def _unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        if rows.dtype == dtype:
            return rows
        return make_unpack(dtype, rows.dtype, self._head_dim)(rows)

    def _rotary(self, cache_dtype: torch.dtype) -> RotaryKernel:
        return make_rotary(self._dtype, cache_dtype, self._head_dim)

    def _attention(self, cache_dtype: torch.dtype, n_group: int) -> AttentionKernel:
        return make_attention(self._dtype, cache_dtype, self._head_dim, n_group, self._scores)


def choose_ops(
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int,
    groups: Collection[int],
    scores: Scores = PLAIN,
    cache_dtype: torch.dtype | None = None,
    matrices: Collection[torch.dtype | GroupFormat] = (),
) -> TorchOps:
    """The fastest operators for a model of this kind, whose KV cache has that dtype or its own.

    `matrices` are the forms in which it keeps matrices, beside its dtype.
    """
    if computes(dtype, device):
        return CPUOps(dtype, head_dim, groups, scores, cache_dtype, matrices)
    return TorchOps(scores)
