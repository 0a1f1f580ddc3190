"""Keys and values of a narrow cache as numbers to compute with; torch needs several passes."""

from functools import cache, partial

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.builder import I64, Thread, Value, loop
from parallel_llama.ops.cpu.kv_rows import KVRows
from parallel_llama.ops.cpu.program import (
    Machine,
    Program,
    Run,
    at_once,
    this_machine,
    threads_for,
)


class UnpackKernel:
    """What `kv_rows.unpack` computes, to the last bit.

    Shapes: rows [1, K, S, W], slots in one piece, heads anywhere; the result [1, K, S, D].
    """

    def __init__(
        self, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, machine: Machine
    ) -> None:
        lanes = machine.lanes(dtype, head_dim)
        self.dtype, self._rows = dtype, KVRows(cache_dtype, lanes, head_dim)
        types = [self._rows.pointer, I64, lanes.pointer, I64, I64]
        self._program = Program("unpack", types, partial(_unpack, self._rows))

    def __call__(self, rows: Tensor, run: Run = at_once) -> Tensor:
        _, n_heads, n_slots, width = rows.shape
        assert rows.stride()[2:] == (width, 1) and width == self._rows.width
        assert rows.dtype == self._rows.stored
        y = torch.empty(1, n_heads, n_slots, self._rows.head_dim, dtype=self.dtype)
        addresses = (rows.data_ptr(), rows.stride(1), y.data_ptr())
        run(self._program, threads_for(y.numel()), *addresses, n_slots, n_heads * n_slots)
        return y


@cache
def make_unpack(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> UnpackKernel:
    """The kernel for this machine; `computes` says for which types."""
    return UnpackKernel(dtype, cache_dtype, head_dim, this_machine())


def _unpack(rows: KVRows, b: ir.IRBuilder, thread: Thread, arguments: list[Value]) -> None:
    """The kernel.

    for (head, slot) in this thread's pairs:
        y[head, slot] = numbers of rows[head, slot]
    """
    cache, head_stride, y, n_slots, n = arguments
    with loop(b, *thread.part_of(n)) as pair:
        row = cache + pair // n_slots * head_stride + pair % n_slots * rows.width
        rows.read(row, y + pair * rows.head_dim)
