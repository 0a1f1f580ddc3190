"""Collectives by kernels, over the sockets between ranks that do not share memory.

`parallel.sockets` describes the messages and the protocol; in one exchange some ranks may run this
kernel and others Python. If messages do not arrive while the kernel spins, or belong to another
collective, or a socket fails, Python finishes the exchange: it waits, and reports lost ranks.
"""

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Integer, Integers, Numbers, T
from parallel_llama.ops.cpu.ir import (
    I8,
    I32,
    I64,
    Lanes,
    Thread,
    Value,
    Variable,
    copy,
    larger,
    loop,
    repeat,
    when,
    where,
)
from parallel_llama.ops.cpu.jit import CompiledKernel, CPUFeatures, this_machine
from parallel_llama.ops.cpu.replay import Exit, Recording
from parallel_llama.parallel.sockets import (
    CELLS,
    FD,
    HEADER_BYTES,
    MESSAGE,
    RECEIVED,
    SENT,
    SocketExchange,
)

# Linux; a socket that does not block, and no signal if the other end is closed.
_MSG_DONTWAIT, _MSG_NOSIGNAL = 0x40, 0x4000


@dataclass(slots=True, kw_only=True)
class _ExchangeArguments(Generic[T]):
    cells: Integers[T]
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


class SocketAllReduceKernel:
    """x = the sum of x over all ranks, in rank order as in Python; only for recordings.

    Shapes: x of any shape, contiguous.
    """

    def __init__(self, dtype: torch.dtype, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        self._program = CompiledKernel(
            _SumArguments[float], partial(_all_reduce, lanes), numbers=lanes.pointer
        )

    def __call__(self, x: Tensor, exchange: SocketExchange, recording: Recording) -> None:
        assert x.is_contiguous()
        arguments = _SumArguments(
            x=x.data_ptr(), n=x.numel(), exchange=_exchange_arguments(exchange, x, recording)
        )
        recording.run(self._program, 1, arguments)


class SocketGatherColumnsKernel:
    """The columns of all ranks side by side; only for recordings.

    Shapes: as those of `exchange.GatherColumnsKernel`.
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
        exchange: SocketExchange,
        recording: Recording,
    ) -> None:
        assert x.is_contiguous() and whole.is_contiguous()
        arguments = _ColumnArguments(
            x=x.data_ptr(), n_rows=len(x), whole=whole.data_ptr(), n_columns=whole.shape[1],
            starts=starts.buffer_info()[0],
            exchange=_exchange_arguments(exchange, whole, recording),
        )  # fmt: skip
        recording.run(self._program, 1, arguments)


@cache
def make_socket_all_reduce(dtype: torch.dtype) -> SocketAllReduceKernel:
    return SocketAllReduceKernel(dtype, this_machine())


@cache
def make_socket_gather_columns(dtype: torch.dtype) -> SocketGatherColumnsKernel:
    return SocketGatherColumnsKernel(dtype, this_machine())


def _exchange_arguments(
    exchange: SocketExchange, result: Tensor, recording: Recording
) -> _ExchangeArguments[float]:
    return _ExchangeArguments(
        cells=exchange.cells, rank=exchange.rank, size=exchange.size,
        signature=exchange.signature, n_looks=exchange.n_looks,
        exit=recording.exit(recording.deferred(result, exchange.finish)),
    )  # fmt: skip


def _all_reduce(lanes: Lanes, b: ir.IRBuilder, _thread: Thread, args: _SumArguments[Value]) -> None:
    """x = sum of the values of all ranks."""
    x, n = args.x, args.n
    n_bytes = n * lanes.stored.itemsize
    with (
        _exchanging(x, n_bytes, lambda _: n_bytes, args.exchange),
        loop(b, 0, n, lanes.width) as i,
    ):
        mask = lanes.first(n - i)
        total = Variable(lanes.load(_values(lanes, args.exchange, n.like(0)) + i, mask))
        with loop(b, 1, args.exchange.size) as other:
            total.value += lanes.load(_values(lanes, args.exchange, other) + i, mask)
        lanes.store(x + i, total.value, mask)


def _gather_columns(
    lanes: Lanes, b: ir.IRBuilder, _thread: Thread, args: _ColumnArguments[Value]
) -> None:
    """
    for rank, row:
        whole[row, columns of rank] = the row in the rank's message
    """
    starts, n_rows, n_bytes = args.starts, args.n_rows, lanes.stored.itemsize

    def sent_by(rank: Value) -> Value:
        return (starts[rank + 1] - starts[rank]) * n_rows * n_bytes

    with (
        _exchanging(args.x, sent_by(args.exchange.rank), sent_by, args.exchange),
        loop(b, 0, args.exchange.size) as other,
    ):
        width = starts[other + 1] - starts[other]
        values, target = _values(lanes, args.exchange, other), args.whole + starts[other]
        with loop(b, 0, n_rows) as row:
            source = _bytes_at(values + row * width)
            copy(_bytes_at(target + row * args.n_columns), source, width * n_bytes)


@contextmanager
def _exchanging(
    x: Value,
    n_bytes: Value,
    sent_by: Callable[[Value], Value],
    args: _ExchangeArguments[Value],
) -> Iterator[None]:
    """Emits an exchange around the code that reads the messages.

    send x to every other rank
    if the messages of all ranks arrive in time, and belong to this exchange:
        the code inside
        count the exchange as finished
    else:
        interrupt the replay, so that Python finishes the exchange

    Args:
        sent_by: the bytes of values in the message of a rank.
    """
    b, own = x.b, _message(args, args.rank)
    n_finished = args.cells + args.size * CELLS
    copy(own + HEADER_BYTES, _bytes_at(x), n_bytes)
    header = own.bits_as(I64.as_pointer())
    header[0], header[1] = args.signature, n_finished[0]
    _send_to_all(own, n_bytes + HEADER_BYTES, args)
    _receive_from_all(sent_by, args)
    n_ready = Variable(args.size.like(0))
    with loop(b, 0, args.size) as other, when(args.cells[other * CELLS + FD] > -1):
        cells, message = args.cells + other * CELLS, _message(args, other)
        found = message.bits_as(I64.as_pointer())
        is_whole = _are_equal(cells[RECEIVED], sent_by(other) + HEADER_BYTES)
        is_sent = _are_equal(cells[SENT], n_bytes + HEADER_BYTES)
        is_same = _are_equal(found[0], args.signature) & _are_equal(found[1], n_finished[0])
        n_ready.value += where(is_whole & is_sent & is_same, args.size.like(1), 0)
    with when(n_ready.value > args.size - 2):
        yield
        n_finished[0] += 1
    with when(n_ready.value < args.size - 1):
        args.exit.take()


def _send_to_all(message: Value, n_bytes: Value, args: _ExchangeArguments[Value]) -> None:
    with loop(message.b, 0, args.size) as other:
        cells = args.cells + other * CELLS
        cells[RECEIVED] = n_bytes.like(0)
        with when(cells[FD] > -1):
            flags = Value(message.b, I32(_MSG_DONTWAIT | _MSG_NOSIGNAL))
            n_sent = _system("send", cells[FD].resized(I32), message, n_bytes, flags)
            cells[SENT] = larger(n_sent, n_bytes.like(0))


def _receive_from_all(sent_by: Callable[[Value], Value], args: _ExchangeArguments[Value]) -> None:
    """Receives until all messages are there, or `n_looks` have found nothing."""
    b = args.size.b
    n_left, n_missing = Variable(args.n_looks), Variable(args.size.like(0))
    with repeat(b) as leave_if:
        n_missing.value = args.size.like(0)
        with loop(b, 0, args.size) as other:
            cells = args.cells + other * CELLS
            n_received, n_all = cells[RECEIVED], sent_by(other) + HEADER_BYTES
            with when((cells[FD] > -1) & (n_received < n_all)):
                room = _message(args, other) + n_received
                flags = Value(b, I32(_MSG_DONTWAIT))
                n_new = _system("recv", cells[FD].resized(I32), room, n_all - n_received, flags)
                cells[RECEIVED] = n_received + larger(n_new, n_new.like(0))
                n_missing.value += where(cells[RECEIVED] < n_all, args.size.like(1), 0)
        n_left.value -= 1
        leave_if((n_missing.value < 1) | (n_left.value < 0))


def _message(args: _ExchangeArguments[Value], rank: Value) -> Value:
    """The address of the message of a rank."""
    address = args.cells[rank * CELLS + MESSAGE]
    return Value(address.b, address.b.inttoptr(address.raw, I8.as_pointer()))


def _values(lanes: Lanes, args: _ExchangeArguments[Value], rank: Value) -> Value:
    """The address of the values in the message of a rank."""
    return (_message(args, rank) + HEADER_BYTES).bits_as(lanes.pointer)


def _bytes_at(address: Value) -> Value:
    return address.bits_as(I8.as_pointer())


def _are_equal(one: Value, other: Value) -> Value:
    return ((one < other) | (one > other)) ^ 1


def _system(name: str, *arguments: Value) -> Value:
    """Calls a function of the C library that returns a number of bytes."""
    b, raw = arguments[0].b, [argument.raw for argument in arguments]
    type_ = ir.FunctionType(I64, [each.type for each in raw])
    known = b.module.globals.get(name)
    return Value(b, b.call(known or ir.Function(b.module, type_, name), raw))
