"""Rows of an embedding in one call, which a decode step can record."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Integer, Integers, Numbers, T, Weights
from parallel_llama.ops.cpu.builder import Lanes, Thread, Value, loop, when
from parallel_llama.ops.cpu.program import (
    Machine,
    Program,
    Run,
    at_once,
    this_machine,
    threads_for,
)


@dataclass(slots=True, kw_only=True)
class _LookupArguments(Generic[T]):
    tokens: Integers[T]
    weight: Weights[T]
    y: Numbers[T]
    n: Integer[T]
    m: Integer[T]
    dim: Integer[T]
    first: Integer[T]


class LookupKernel:
    """y[t] = weight[tokens[t] - first], and zeros where the weight has no such row.

    Weights may be kept in 16 bits where the result has float32.

    Shapes: tokens [n] int64; weight [m, dim] in one piece; the result [n, dim].
    """

    def __init__(self, dtype: torch.dtype, stored: torch.dtype, machine: Machine) -> None:
        lanes, self._dtype, self._stored = machine.lanes(dtype), dtype, stored
        of_weight = replace(lanes, stored=stored)
        body = partial(_lookup, lanes, of_weight)
        self._program = Program(
            "lookup",
            _LookupArguments[float],
            body,
            numbers=lanes.pointer,
            weights=of_weight.pointer,
        )

    def __call__(self, tokens: Tensor, weight: Tensor, first: int, run: Run = at_once) -> Tensor:
        n, (m, dim) = len(tokens), weight.shape
        assert tokens.is_contiguous() and tokens.dtype == torch.int64
        assert weight.is_contiguous() and weight.dtype == self._stored
        y = weight.new_empty((n, dim), dtype=self._dtype)
        arguments = _LookupArguments(
            tokens=tokens.data_ptr(), weight=weight.data_ptr(), y=y.data_ptr(), n=n, m=m, dim=dim,
            first=first,
        )  # fmt: skip
        run(self._program, threads_for(n * dim), arguments)
        return y


@cache
def make_lookup(dtype: torch.dtype, stored: torch.dtype) -> LookupKernel:
    """The kernel for this machine; `computes` says for which types to compute in."""
    return LookupKernel(dtype, stored, this_machine())


def _lookup(
    lanes: Lanes,
    of_weight: Lanes,
    b: ir.IRBuilder,
    thread: Thread,
    args: _LookupArguments[Value],
) -> None:
    """The kernel.

    for t in this thread's tokens:
        y[t] = weight[tokens[t] - first] if it is there else 0
    """
    dim = args.dim
    with loop(b, *thread.part_of(args.n)) as t:
        row, y = args.tokens[t] - args.first, args.y + t * dim
        is_there = (row > -1) & (row < args.m)
        with loop(b, 0, dim, lanes.width) as i:
            mask = lanes.first(dim - i)
            lanes.store(y + i, lanes.constant(b, 0), mask)
            with when(is_there):
                lanes.store(y + i, of_weight.load(args.weight + row * dim + i, mask), mask)
