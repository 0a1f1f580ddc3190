"""The parallel layers: Megatron's column-, row- and vocabulary-parallel weights, and RMSNorm.

Names and meaning are fairscale's. What they add: uneven shards (any range from the plan, an empty
one included), construction on the meta device, and nothing allocated beyond the rank's own part.
They do not know how ranges are chosen.

With Y = X A, a column-parallel layer holds columns of A and gives columns of Y; a row-parallel
layer holds rows of A and gives a partial sum of Y. torch stores A transposed, [out, in].

Source: Megatron-LM, arXiv 1909.08053, section 3.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_llama.kernels import MAX_ROWS, make_norm, make_product
from parallel_llama.parallel import Communicator


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Y = X A + b for a weight in torch's order. Shapes: [T, in], [out, in] -> [T, out]."""
    if len(x) <= MAX_ROWS:
        kernel = make_product(weight.dtype, weight.device)
        if kernel is not None:
            y = kernel(x, weight)
            return y if bias is None else y.add_(bias)
    return F.linear(x, weight, bias)


class ColumnParallelLinear(nn.Module):
    """Y = X A + b with the rank's own columns of A: input replicated, output local.

    Shapes: x [T, in_features] replicated; the result [T, len(rows)] local.
    """

    def __init__(
        self,
        in_features: int,
        rows: range,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = _parameter((len(rows), in_features), dtype, device)
        self.bias = _parameter((len(rows),), dtype, device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


def end_to_end(*layers: ColumnParallelLinear) -> ColumnParallelLinear:
    """One layer that gives the outputs of several, side by side, in one product.

    The layers become views of its weight, so nothing is held twice afterwards.
    """
    first = layers[0].weight
    whole = ColumnParallelLinear(
        first.shape[1],
        range(sum(len(layer.weight) for layer in layers)),
        bias=layers[0].bias is not None,
        dtype=first.dtype,
        device=first.device,
    )
    for name, packed in whole.named_parameters():
        start = 0
        for layer in layers:
            part = packed[start : start + len(layer.weight)]
            part.copy_(getattr(layer, name))
            setattr(layer, name, nn.Parameter(part, requires_grad=False))
            start += len(part)
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
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.comm = comm
        self.weight = _parameter((out_features, len(columns)), dtype, device)
        self.bias = _parameter((out_features,), dtype, device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = product(x, self.weight)  # [T, out_features] partial
        y = self.comm.all_reduce(y)  # [T, out_features] replicated
        return y if self.bias is None else y + self.bias  # after the sum, so it counts once


class VocabParallelEmbedding(nn.Module):
    """The embedding of each token, looked up by the one rank that holds its row.

    Shapes: tokens [T] int64 replicated; the result [T, dim] replicated.
    Collective: one all_reduce.
    """

    def __init__(
        self,
        rows: range,
        dim: int,
        comm: Communicator,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.comm, self.rows = comm, rows
        self.weight = _parameter((len(rows), dim), dtype, device)

    def forward(self, tokens: Tensor) -> Tensor:
        if len(self.rows) == 0:  # a tiny vocabulary may leave a rank without rows
            x = self.weight.new_zeros(len(tokens), self.weight.shape[1])
        else:
            elsewhere = (tokens < self.rows.start) | (tokens >= self.rows.stop)
            own = (tokens - self.rows.start).masked_fill(elsewhere, 0)
            x = F.embedding(own, self.weight).masked_fill(elsewhere[:, None], 0)
        return self.comm.all_reduce(x)  # [T, dim] partial -> replicated


class RMSNorm(nn.Module):
    """x / rms(x) * weight, with the mean of squares in at least float32.

    A row whose squares are too large for that becomes nan, not zeros.

    Shapes: x [T, dim] replicated, and so is the result.
    Source: arXiv 1910.07467.
    """

    def __init__(self, dim: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter((dim,), dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        kernel = make_norm(x.dtype, x.device)
        if kernel is not None:
            return kernel(x, self.weight, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # Not F.rms_norm: on the CPU it takes ten times as long for many rows.
        length: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        # One call for eps + norm^2 / dim: at one row each call takes as long as what it computes.
        mean = torch.full_like(length, self.eps).addcmul_(length, length, value=1 / x.shape[-1])
        inverse_rms = (mean * 0).add_(mean.rsqrt())  # nan for an infinite mean
        y = (wide * inverse_rms).to(x.dtype)
        return y.mul_(self.weight)


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
