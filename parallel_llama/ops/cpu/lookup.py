"""Rows of an embedding in one call, which a decode step can record."""

from dataclasses import replace
from functools import cache, partial

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.builder import I64, Lanes, Thread, Value, loop, when
from parallel_llama.ops.cpu.program import (
    Machine,
    Program,
    Run,
    at_once,
    this_machine,
    threads_for,
)


class LookupKernel:
    """y[t] = weight[tokens[t] - first], and zeros where the weight has no such row.

    Weights may be kept in 16 bits where the result has float32.

    Shapes: tokens [n] int64; weight [m, dim] in one piece; the result [n, dim].
    """

    def __init__(self, dtype: torch.dtype, stored: torch.dtype, machine: Machine) -> None:
        lanes, self._dtype, self._stored = machine.lanes(dtype), dtype, stored
        of_weight = replace(lanes, stored=stored)
        types = [I64.as_pointer(), of_weight.pointer, lanes.pointer, I64, I64, I64, I64]
        self._program = Program("lookup", types, partial(_lookup, lanes, of_weight))

    def __call__(self, tokens: Tensor, weight: Tensor, first: int, run: Run = at_once) -> Tensor:
        n, (m, dim) = len(tokens), weight.shape
        assert tokens.is_contiguous() and tokens.dtype == torch.int64
        assert weight.is_contiguous() and weight.dtype == self._stored
        y = weight.new_empty((n, dim), dtype=self._dtype)
        addresses = (tokens.data_ptr(), weight.data_ptr(), y.data_ptr())
        run(self._program, threads_for(n * dim), *addresses, n, m, dim, first)
        return y


@cache
def make_lookup(dtype: torch.dtype, stored: torch.dtype) -> LookupKernel:
    """The kernel for this machine; `computes` says for which types to compute in."""
    return LookupKernel(dtype, stored, this_machine())


def _lookup(
    lanes: Lanes, of_weight: Lanes, b: ir.IRBuilder, thread: Thread, arguments: list[Value]
) -> None:
    """The kernel.

    for t in this thread's tokens:
        y[t] = weight[tokens[t] - first] if it is there else 0
    """
    tokens, weight, y, n, m, dim, first = arguments
    with loop(b, *thread.part_of(n)) as t:
        row, own_y = tokens[t] - first, y + t * dim
        is_there = (row > -1) & (row < m)
        with loop(b, 0, dim, lanes.width) as i:
            mask = lanes.first(dim - i)
            lanes.store(own_y + i, lanes.constant(b, 0), mask)
            with when(is_there):
                lanes.store(own_y + i, of_weight.load(weight + row * dim + i, mask), mask)
