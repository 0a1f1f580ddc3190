"""All-reduce by a kernel, in the memory that the ranks of a host share.

`parallel.shared_memory` describes the memory and the protocol; in one exchange some ranks may run
this kernel and others Python. If other ranks do not arrive while the kernel spins, or arrive with
another collective, Python finishes the exchange: it waits, and reports lost ranks.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Integer, Integers, Numbers, T
from parallel_llama.ops.cpu.ir import (
    Lanes,
    Thread,
    Value,
    Variable,
    copy,
    loop,
    pause,
    repeat,
    when,
    where,
)
from parallel_llama.ops.cpu.jit import CompiledKernel, CPUFeatures, this_machine
from parallel_llama.ops.cpu.replay import Exit, Recording
from parallel_llama.parallel.shared_memory import EXCHANGE, LINE, SIGNATURE, SLOT_BYTES, Exchange


@dataclass(slots=True, kw_only=True)
class _Arguments(Generic[T]):
    x: Numbers[T]
    n: Integer[T]
    header: Integers[T]
    slots: Numbers[T]
    rank: Integer[T]
    size: Integer[T]
    signature: Integer[T]
    n_looks: Integer[T]
    exit: Exit[T]


class AllReduceKernel:
    """x = the sum of x over all ranks, in rank order as in Python; only for recordings.

    Shapes: x of any shape, contiguous.
    """

    def __init__(self, dtype: torch.dtype, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        self._program = CompiledKernel(
            _Arguments[float], partial(_all_reduce, lanes), numbers=lanes.pointer
        )

    def __call__(self, x: Tensor, turn: Exchange, recording: Recording) -> None:
        assert x.is_contiguous() and x.nbytes <= SLOT_BYTES
        arguments = _Arguments(
            x=x.data_ptr(), n=x.numel(), header=turn.header, slots=turn.slots, rank=turn.rank,
            size=turn.size, signature=turn.signature, n_looks=turn.n_looks,
            exit=recording.exit(recording.deferred(x, turn.finish)),
        )  # fmt: skip
        recording.run(self._program, 1, arguments)


@cache
def make_all_reduce(dtype: torch.dtype) -> AllReduceKernel:
    return AllReduceKernel(dtype, this_machine())


def _all_reduce(lanes: Lanes, b: ir.IRBuilder, _thread: Thread, args: _Arguments[Value]) -> None:
    """
    copy x into this rank's slot, and publish it
    if all ranks publish their slots in time, with the same signature:
        x = sum of all slots
        count the exchange as finished
    else:
        interrupt the replay, so that Python finishes the exchange
    """
    x, n, header, rank, size = args.x, args.n, args.header, args.rank, args.size
    own, n_bytes = header + rank * LINE, lanes.stored.itemsize
    parity = own[EXCHANGE] & 1
    stride = SLOT_BYTES // n_bytes
    first = args.slots + parity * stride  # of rank 0; each rank has two slots
    copy(first + rank * (2 * stride), x, n * n_bytes)
    phase = own[0] + 1
    own[parity + SIGNATURE] = args.signature
    own.release(phase)
    n_agreeing = _wait_for_ranks(phase, parity + SIGNATURE, args)
    with when(n_agreeing > size - 1):
        with loop(b, 0, n, lanes.width) as i:
            mask = lanes.first(n - i)
            total = Variable(lanes.load(first + i, mask))
            with loop(b, 1, size) as other:
                total.value += lanes.load(first + other * (2 * stride) + i, mask)
            lanes.store(x + i, total.value, mask)
        own[EXCHANGE] += 1
    with when(n_agreeing < size):
        args.exit.take()


def _wait_for_ranks(phase: Value, signed: Value, args: _Arguments[Value]) -> Value:
    """Waits for other ranks. Returns: how many published this phase with this signature in time."""
    b, size, signature = phase.b, args.size, args.signature
    n_agreeing, n_arrived, n_left = (
        Variable(number) for number in (size.like(0), size.like(0), args.n_looks)
    )
    with repeat(b) as leave_if:
        leave_if((n_arrived.value > size - 1) | (n_left.value < 0))
        other = args.header + n_arrived.value * LINE
        has_arrived = other.acquired() > phase - 1
        with when(has_arrived):
            differs = (other[signed] < signature) | (other[signed] > signature)
            n_agreeing.value += where(differs, size.like(0), 1)
            n_arrived.value += 1
        with when(has_arrived ^ 1):
            pause(b)
            n_left.value -= 1
    return n_agreeing.value
