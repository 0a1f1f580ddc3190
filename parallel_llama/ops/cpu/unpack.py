"""Keys and values of a narrow cache as numbers to compute with; torch needs several passes."""

from dataclasses import dataclass
from functools import cache, partial
from typing import Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Integer, Numbers, Rows, T
from parallel_llama.ops.cpu.builder import Thread, Value, loop
from parallel_llama.ops.cpu.kv_rows import KVRows
from parallel_llama.ops.cpu.program import (
    Machine,
    Program,
    Run,
    at_once,
    this_machine,
    threads_for,
)


@dataclass(slots=True, kw_only=True)
class _Arguments(Generic[T]):
    cache: Rows[T]
    head_stride: Integer[T]
    y: Numbers[T]
    n_slots: Integer[T]
    n: Integer[T]


class UnpackKernel:
    """What `kv_rows.unpack` computes, to the last bit.

    Shapes: rows [1, K, S, W], slots in one piece, heads anywhere; the result [1, K, S, D].
    """

    def __init__(
        self, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, machine: Machine
    ) -> None:
        lanes = machine.lanes(dtype, head_dim)
        self.dtype, self._rows = dtype, KVRows(cache_dtype, lanes, head_dim)
        body = partial(_unpack, self._rows)
        self._program = Program(
            "unpack", _Arguments[float], body, numbers=lanes.pointer, rows=self._rows.pointer
        )

    def __call__(self, rows: Tensor, run: Run = at_once) -> Tensor:
        _, n_heads, n_slots, width = rows.shape
        assert rows.stride()[2:] == (width, 1) and width == self._rows.width
        assert rows.dtype == self._rows.stored
        y = torch.empty(1, n_heads, n_slots, self._rows.head_dim, dtype=self.dtype)
        arguments = _Arguments(
            cache=rows.data_ptr(),
            head_stride=rows.stride(1),
            y=y.data_ptr(),
            n_slots=n_slots,
            n=n_heads * n_slots,
        )
        run(self._program, threads_for(y.numel()), arguments)
        return y


@cache
def make_unpack(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> UnpackKernel:
    """The kernel for this machine; `computes` says for which types."""
    return UnpackKernel(dtype, cache_dtype, head_dim, this_machine())


def _unpack(rows: KVRows, b: ir.IRBuilder, thread: Thread, args: _Arguments[Value]) -> None:
    """The kernel.

    for (head, slot) in this thread's pairs:
        y[head, slot] = numbers of rows[head, slot]
    """
    n_slots = args.n_slots
    with loop(b, *thread.part_of(args.n)) as pair:
        head = args.cache + pair // n_slots * args.head_stride
        rows.read(head + pair % n_slots * rows.width, args.y + pair * rows.head_dim)
