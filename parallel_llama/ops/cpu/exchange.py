"""Collectives by kernels, in the memory that the ranks of a host share.

`parallel.shared_memory` describes the memory and the protocol; in one exchange some ranks may run
this kernel and others Python. If other ranks do not arrive while the kernel spins, or arrive with
another collective, Python finishes the exchange: it waits, and reports lost ranks.
"""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
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
class _ExchangeArguments(Generic[T]):
    header: Integers[T]
    slots: Numbers[T]
    rank: Integer[T]
    size: Integer[T]
    signature: Integer[T]
    n_looks: Integer[T]
    exit: Exit[T]


@dataclass(slots=True, kw_only=True)
class _SumArguments(Generic[T]):
    x: Numbers[T]
    n: Integer[T]
    exchange: _ExchangeArguments[T]


@dataclass(slots=True, kw_only=True)
class _ColumnArguments(Generic[T]):
    x: Numbers[T]
    n_rows: Integer[T]
    whole: Numbers[T]
    n_columns: Integer[T]
    starts: Integers[T]
    exchange: _ExchangeArguments[T]


class AllReduceKernel:
    """x = the sum of x over all ranks, in rank order as in Python; only for recordings.

    Shapes: x of any shape, contiguous.
    """

    def __init__(self, dtype: torch.dtype, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        self._program = CompiledKernel(
            _SumArguments[float], partial(_all_reduce, lanes), numbers=lanes.pointer
        )

    def __call__(self, x: Tensor, exchange: Exchange, recording: Recording) -> None:
        assert x.is_contiguous() and x.nbytes <= SLOT_BYTES
        arguments = _SumArguments(
            x=x.data_ptr(), n=x.numel(), exchange=_exchange_arguments(exchange, x, recording)
        )
        recording.run(self._program, 1, arguments)


class GatherColumnsKernel:
    """The columns of all ranks side by side; only for recordings.

    Shapes: x [n, the rank's columns], `whole` [n, all columns], both contiguous; starts [size + 1],
    the first column of each rank and the number of columns.
    """

    def __init__(self, dtype: torch.dtype, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        self._program = CompiledKernel(
            _ColumnArguments[float], partial(_gather_columns, lanes), numbers=lanes.pointer
        )

    def __call__(
        self,
        x: Tensor,
        whole: Tensor,
        starts: "array[int]",
        exchange: Exchange,
        recording: Recording,
    ) -> None:
        assert x.is_contiguous() and whole.is_contiguous() and x.nbytes <= SLOT_BYTES
        arguments = _ColumnArguments(
            x=x.data_ptr(), n_rows=len(x), whole=whole.data_ptr(), n_columns=whole.shape[1],
            starts=starts.buffer_info()[0],
            exchange=_exchange_arguments(exchange, whole, recording),
        )  # fmt: skip
        recording.run(self._program, 1, arguments)


@cache
def make_all_reduce(dtype: torch.dtype) -> AllReduceKernel:
    return AllReduceKernel(dtype, this_machine())


@cache
def make_gather_columns(dtype: torch.dtype) -> GatherColumnsKernel:
    return GatherColumnsKernel(dtype, this_machine())


def _exchange_arguments(
    exchange: Exchange, result: Tensor, recording: Recording
) -> _ExchangeArguments[float]:
    return _ExchangeArguments(
        header=exchange.header, slots=exchange.slots, rank=exchange.rank, size=exchange.size,
        signature=exchange.signature, n_looks=exchange.n_looks,
        exit=recording.exit(recording.deferred(result, exchange.finish)),
    )  # fmt: skip


def _all_reduce(lanes: Lanes, b: ir.IRBuilder, _thread: Thread, args: _SumArguments[Value]) -> None:
    """x = sum of all slots."""
    x, n = args.x, args.n
    with (
        _exchanging(lanes, x, n, args.exchange) as (first, stride),
        loop(b, 0, n, lanes.width) as i,
    ):
        mask = lanes.first(n - i)
        total = Variable(lanes.load(first + i, mask))
        with loop(b, 1, args.exchange.size) as other:
            total.value += lanes.load(first + other * stride + i, mask)
        lanes.store(x + i, total.value, mask)


def _gather_columns(
    lanes: Lanes, b: ir.IRBuilder, _thread: Thread, args: _ColumnArguments[Value]
) -> None:
    """
    for rank, row:
        whole[row, columns of rank] = the row in the rank's slot
    """
    starts, n_rows, n_bytes = args.starts, args.n_rows, lanes.stored.itemsize
    rank = args.exchange.rank
    n_own = (starts[rank + 1] - starts[rank]) * n_rows
    with (
        _exchanging(lanes, args.x, n_own, args.exchange) as (first, stride),
        loop(b, 0, args.exchange.size) as other,
    ):
        width = starts[other + 1] - starts[other]
        slot, target = first + other * stride, args.whole + starts[other]
        with loop(b, 0, n_rows) as row:
            copy(target + row * args.n_columns, slot + row * width, width * n_bytes)


@contextmanager
def _exchanging(
    lanes: Lanes, x: Value, n: Value, exchange: _ExchangeArguments[Value]
) -> Iterator[tuple[Value, int]]:
    """Emits an exchange around the code that reads the slots. Yields: the first slot, the stride.

    copy x into this rank's slot, and publish it
    if all ranks publish their slots in time, with the same signature:
        the code inside
        count the exchange as finished
    else:
        interrupt the replay, so that Python finishes the exchange
    """
    own, n_bytes = exchange.header + exchange.rank * LINE, lanes.stored.itemsize
    parity = own[EXCHANGE] & 1
    stride = 2 * (SLOT_BYTES // n_bytes)  # each rank has two slots
    first = exchange.slots + parity * (SLOT_BYTES // n_bytes)
    copy(first + exchange.rank * stride, x, n * n_bytes)
    phase = own[0] + 1
    own[parity + SIGNATURE] = exchange.signature
    own.release(phase)
    n_agreeing = _wait_for_ranks(phase, parity + SIGNATURE, exchange)
    with when(n_agreeing > exchange.size - 1):
        yield first, stride
        own[EXCHANGE] += 1
    with when(n_agreeing < exchange.size):
        exchange.exit.take()


def _wait_for_ranks(phase: Value, signed: Value, args: _ExchangeArguments[Value]) -> Value:
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
