"""What each token gets from its experts, in one pass over memory."""

from dataclasses import dataclass
from functools import cache, partial
from typing import Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Integer, Numbers, T
from parallel_llama.ops.cpu.builder import Lanes, Thread, Value, Variable, fma, loop
from parallel_llama.ops.cpu.program import Machine, Program, Run, at_once, this_machine, threads_for


@dataclass(slots=True, kw_only=True)
class _WeightedSumArguments(Generic[T]):
    parts: Numbers[T]
    shares: Numbers[T]
    y: Numbers[T]
    n_tokens: Integer[T]
    n: Integer[T]
    dim: Integer[T]


class WeightedSumKernel:
    """y[t] = sum of parts[t * n + i] * shares[t, i].

    Shapes: parts [T * n, dim] and shares [T, n], each in one piece; the result [T, dim].
    """

    def __init__(self, dtype: torch.dtype, machine: Machine) -> None:
        lanes = machine.lanes(dtype)
        body = partial(_weighted_sum, lanes)
        self._program = Program(
            "weighted_sum", _WeightedSumArguments[float], body, numbers=lanes.pointer
        )

    def __call__(self, parts: Tensor, shares: Tensor, run: Run = at_once) -> Tensor:
        n_tokens, n = shares.shape
        assert parts.is_contiguous() and shares.is_contiguous() and parts.dtype == shares.dtype
        assert len(parts) == n_tokens * n
        dim = parts.shape[1]
        y = parts.new_empty(n_tokens, dim)
        arguments = _WeightedSumArguments(
            parts=parts.data_ptr(),
            shares=shares.data_ptr(),
            y=y.data_ptr(),
            n_tokens=n_tokens,
            n=n,
            dim=dim,
        )
        run(self._program, threads_for(parts.numel()), arguments)
        return y


@cache
def make_weighted_sum(dtype: torch.dtype) -> WeightedSumKernel:
    """The kernel for this machine; `computes` says for which types."""
    return WeightedSumKernel(dtype, this_machine())


def _weighted_sum(
    lanes: Lanes, b: ir.IRBuilder, thread: Thread, args: _WeightedSumArguments[Value]
) -> None:
    """The kernel.

    for token in this thread's tokens:
        y[token] = sum of parts[token * n + i] * shares[token, i]
    """
    n, dim = args.n, args.dim
    with loop(b, *thread.part_of(args.n_tokens)) as token:
        own, own_shares = args.parts + token * n * dim, args.shares + token * n
        with loop(b, 0, dim, lanes.width) as i:
            mask = lanes.first(dim - i)
            total = Variable(lanes.constant(b, 0))
            with loop(b, 0, n) as part:
                value = lanes.load(own + part * dim + i, mask)
                total.value = fma(value, lanes.splat(own_shares[part]), total.value)
            lanes.store(args.y + token * dim + i, total.value, mask)
