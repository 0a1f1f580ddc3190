"""Merges the attention results of the parts of a query's keys, in order of position.

The merged result has the bits of `decode_attention` over all keys, whichever ranks computed the
parts.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Integer, Integers, Numbers, T
from parallel_llama.ops.cpu.decode_attention import PARTIAL_FIELDS, merge, sinks_at
from parallel_llama.ops.cpu.ir import Lanes, Thread, Value, loop
from parallel_llama.ops.cpu.jit import (
    CompiledKernel,
    CPUFeatures,
    at_once,
    this_machine,
    threads_for,
)


@dataclass(slots=True, kw_only=True)
class _Arguments(Generic[T]):
    bounds: Integers[T]
    n: Integer[T]
    n_heads: Integer[T]
    results: Numbers[T]
    partials: Numbers[T]
    out: Numbers[T]
    sinks: Numbers[T]


class MergePartsKernel:
    """out[t] = results[bounds[t] : bounds[t + 1]], merged in order. Overwrites the partials.

    Shapes: results [n_parts, H, D]; partials [n_parts, H, 2]; bounds [T + 1] int64; sinks [H]; the
    result [T, H, D].
    """

    def __init__(
        self, dtype: torch.dtype, head_dim: int, machine: CPUFeatures, *, has_sinks: bool
    ) -> None:
        lanes, self._dtype, self._head_dim = machine.lanes(dtype, head_dim), dtype, head_dim
        self._has_sinks = has_sinks
        self._program = CompiledKernel(
            _Arguments[float],
            partial(_merge_parts, lanes, head_dim, has_sinks),
            numbers=lanes.pointer,
        )

    def __call__(
        self, results: Tensor, partials: Tensor, bounds: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        assert (sinks is not None) == self._has_sinks
        n, (n_parts, n_heads, head_dim) = len(bounds) - 1, results.shape
        assert partials.shape == (n_parts, n_heads, PARTIAL_FIELDS) and head_dim == self._head_dim
        assert results.dtype == partials.dtype == self._dtype and bounds.dtype == torch.int64
        assert results.is_contiguous() and partials.is_contiguous()
        out = results.new_empty(n, n_heads, head_dim)
        arguments = _Arguments(
            bounds=bounds.data_ptr(), n=n, n_heads=n_heads, results=results.data_ptr(),
            partials=partials.data_ptr(), out=out.data_ptr(),
            sinks=sinks_at(sinks, n_heads, self._dtype),
        )  # fmt: skip
        at_once(self._program, threads_for(results.numel()), arguments)
        return out


@cache
def make_merge_parts(
    dtype: torch.dtype, head_dim: int, *, has_sinks: bool = False
) -> MergePartsKernel:
    return MergePartsKernel(dtype, head_dim, this_machine(), has_sinks=has_sinks)


def _merge_parts(
    lanes: Lanes,
    head_dim: int,
    has_sinks: bool,
    b: ir.IRBuilder,
    thread: Thread,
    args: _Arguments[Value],
) -> None:
    n_heads = args.n_heads
    with loop(b, *thread.part_of(args.n * n_heads)) as item:
        row = item // n_heads
        first, stop = args.bounds[row], args.bounds[row + 1]
        index = first * n_heads + item % n_heads
        results, partials = args.results + index * head_dim, args.partials + index * PARTIAL_FIELDS
        sink = args.sinks + item % n_heads if has_sinks else None
        out, n_parts = args.out + item * head_dim, stop - first
        merge(lanes, head_dim, out, results, partials, n_parts, n_heads, sink)
