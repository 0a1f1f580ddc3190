"""Kernels for the collectives all_reduce and gather_columns, as a part of recorded steps.

Ranks of one host exchange messages in shared memory, and ranks of several hosts also over sockets;
`parallel.shared_memory` and `parallel.sockets` describe the messages and the protocols. The other
ranks of an exchange may run it in Python. A kernel leaves an exchange to Python if messages do not
arrive while it waits, or belong to another collective, or if a socket fails; Python then waits for
the messages, finishes the exchange and reports lost ranks.
"""

from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Bytes, Integer, Integers, Numbers, T
from parallel_llama.ops.cpu.ir import (
    I32,
    I64,
    Lanes,
    Thread,
    Value,
    Variable,
    call_function,
    copy,
    larger,
    loop,
    pause,
    repeat,
    when,
    where,
)
from parallel_llama.ops.cpu.jit import CompiledKernel, CPUFeatures, this_machine
from parallel_llama.ops.cpu.replay import Exit, Recording
from parallel_llama.parallel import sockets
from parallel_llama.parallel.collectives import Exchange, Medium
from parallel_llama.parallel.shared_memory import EXCHANGE, LINE, SIGNATURE, SLOT_BYTES
from parallel_llama.parallel.wait_policy import WaitPolicy

# Linux's flags for `send` and `recv`: do not block, and send no SIGPIPE if the peer has closed.
_MSG_DONTWAIT, _MSG_NOSIGNAL = 0x40, 0x4000

# The sleep between two polls; the system adds about 60 microseconds.
_SLEEP_US = 5


@dataclass(slots=True, kw_only=True)
class _ExchangeArguments(Generic[T]):
    cells: Integers[T]
    messages: Bytes[T]
    rank: Integer[T]
    size: Integer[T]
    signature: Integer[T]
    n_looks: Integer[T]
    policy: Integer[T]
    exit: Exit[T]


# A context manager that emits an exchange of the values at an address. The code that is emitted in
# the `with` block runs when the values of all ranks have arrived. The third argument is a function
# from a rank to the number of values that it sends. The context manager yields a function from a
# rank to the address of its values.
_Exchanging = Callable[
    [Lanes, Value, Callable[[Value], Value], _ExchangeArguments[Value]],
    AbstractContextManager[Callable[[Value], Value]],
]


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

    def __init__(self, dtype: torch.dtype, medium: Medium, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        build = partial(_all_reduce, lanes, medium)
        self._program = CompiledKernel(_SumArguments[float], build, numbers=lanes.pointer)

    def __call__(self, x: Tensor, exchange: Exchange, recording: Recording) -> None:
        assert x.is_contiguous()
        arguments = _SumArguments(
            x=x.data_ptr(), n=x.numel(), exchange=_exchange_arguments(exchange, x, recording)
        )
        recording.run(self._program, 1, arguments)


class GatherColumnsKernel:
    """The columns of all ranks side by side; only for recordings.

    Shapes: x [n, the rank's columns], `whole` [n, all columns], both contiguous; starts [size + 1],
    the first column of each rank and the number of columns.
    """

    def __init__(self, dtype: torch.dtype, medium: Medium, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        build = partial(_gather_columns, lanes, medium)
        self._program = CompiledKernel(_ColumnArguments[float], build, numbers=lanes.pointer)

    def __call__(
        self,
        x: Tensor,
        whole: Tensor,
        starts: "array[int]",
        exchange: Exchange,
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
def make_all_reduce(dtype: torch.dtype, medium: Medium) -> AllReduceKernel:
    return AllReduceKernel(dtype, medium, this_machine())


@cache
def make_gather_columns(dtype: torch.dtype, medium: Medium) -> GatherColumnsKernel:
    return GatherColumnsKernel(dtype, medium, this_machine())


def _exchange_arguments(
    exchange: Exchange, result: Tensor, recording: Recording
) -> _ExchangeArguments[float]:
    return _ExchangeArguments(
        cells=exchange.cells, messages=exchange.messages, rank=exchange.rank, size=exchange.size,
        signature=exchange.signature, n_looks=exchange.n_looks, policy=exchange.policy,
        exit=recording.exit(recording.deferred(result, exchange.finish)),
    )  # fmt: skip


def _all_reduce(
    lanes: Lanes,
    medium: Medium,
    b: ir.IRBuilder,
    _thread: Thread,
    args: _SumArguments[Value],
) -> None:
    """x = the sum of the values of all ranks."""
    x, n = args.x, args.n
    with (
        _EXCHANGING[medium](lanes, x, lambda _: n, args.exchange) as values_of,
        loop(b, 0, n, lanes.width) as i,
    ):
        mask = lanes.first(n - i)
        total = Variable(lanes.load(values_of(n.like(0)) + i, mask))
        with loop(b, 1, args.exchange.size) as other:
            total.value += lanes.load(values_of(other) + i, mask)
        lanes.store(x + i, total.value, mask)


def _gather_columns(
    lanes: Lanes,
    medium: Medium,
    b: ir.IRBuilder,
    _thread: Thread,
    args: _ColumnArguments[Value],
) -> None:
    """
    for rank, row:
        whole[row, columns of rank] = the row in the rank's message
    """
    starts, n_rows, n_bytes = args.starts, args.n_rows, lanes.stored.itemsize

    def n_sent_by(rank: Value) -> Value:
        return (starts[rank + 1] - starts[rank]) * n_rows

    with (
        _EXCHANGING[medium](lanes, args.x, n_sent_by, args.exchange) as values_of,
        loop(b, 0, args.exchange.size) as other,
    ):
        width = starts[other + 1] - starts[other]
        values, target = values_of(other), args.whole + starts[other]
        with loop(b, 0, n_rows) as row:
            copy(target + row * args.n_columns, values + row * width, width * n_bytes)


# In shared memory


@contextmanager
def _in_shared_memory(
    lanes: Lanes,
    x: Value,
    n_sent_by: Callable[[Value], Value],
    args: _ExchangeArguments[Value],
) -> Iterator[Callable[[Value], Value]]:
    """
    copy x into this rank's slot, and publish it
    if all ranks publish their slots in time, with the same signature:
        the body of the `with` block
        count the exchange as finished
    else:
        interrupt the replay, so that Python finishes the exchange
    """
    own_cells, n_bytes = args.cells + args.rank * LINE, lanes.stored.itemsize
    parity = own_cells[EXCHANGE] & 1
    stride = 2 * (SLOT_BYTES // n_bytes)  # each rank has two slots
    first = args.messages.bits_as(lanes.pointer) + parity * (SLOT_BYTES // n_bytes)
    copy(first + args.rank * stride, x, n_sent_by(args.rank) * n_bytes)
    phase = own_cells[0] + 1
    own_cells[parity + SIGNATURE] = args.signature
    own_cells.release(phase)
    n_agreeing = _wait_for_ranks(phase, parity + SIGNATURE, args)
    with when(n_agreeing > args.size - 1):
        yield lambda rank: first + rank * stride
        own_cells[EXCHANGE] += 1
    with when(n_agreeing < args.size):
        args.exit.take()


def _wait_for_ranks(phase: Value, signed: Value, args: _ExchangeArguments[Value]) -> Value:
    """Waits for other ranks. Returns: how many published this phase with this signature in time."""
    b, size, signature = phase.b, args.size, args.signature
    n_agreeing, n_arrived, n_left = (
        Variable(number) for number in (size.like(0), size.like(0), args.n_looks)
    )
    with repeat(b) as leave_if:
        leave_if((n_arrived.value > size - 1) | (n_left.value < 0))
        other = args.cells + n_arrived.value * LINE
        has_arrived = other.acquired() > phase - 1
        with when(has_arrived):
            differs = (other[signed] < signature) | (other[signed] > signature)
            n_agreeing.value += where(differs, size.like(0), 1)
            n_arrived.value += 1
        with when(has_arrived ^ 1):
            _pause_by(args.policy)
            n_left.value -= 1
    return n_agreeing.value


# Over sockets


@contextmanager
def _over_sockets(
    lanes: Lanes,
    x: Value,
    n_sent_by: Callable[[Value], Value],
    args: _ExchangeArguments[Value],
) -> Iterator[Callable[[Value], Value]]:
    """
    write x into this rank's row, and send it to its receivers
    if all messages for this rank arrive in time:
        publish that they have arrived
    if all ranks of this host publish in time, and all messages belong to this exchange:
        the body of the `with` block
        count the exchange as finished
    else:
        interrupt the replay, so that Python finishes the exchange
    """
    counts = args.cells + args.size * sockets.CELLS
    n_before = counts[sockets.SHARED]
    rows = args.messages + (n_before & 1) * args.size * sockets.ROW_BYTES

    def values_of(rank: Value) -> Value:
        row = rows + rank * sockets.ROW_BYTES
        return (row + sockets.VALUES_AT).bits_as(lanes.pointer)

    def n_bytes_of(rank: Value) -> Value:
        return n_sent_by(rank) * lanes.stored.itemsize + sockets.HEADER_BYTES

    n_bytes = n_bytes_of(args.rank)
    copy(values_of(args.rank), x, n_bytes - sockets.HEADER_BYTES)
    header, current = _header_of(rows, args.rank), counts[sockets.FINISHED] + 1
    header[0] = args.signature
    (header + 1).release(current)
    _send(header.bits_as(rows.raw.type), n_bytes, args)
    _receive(rows, n_bytes_of, args)
    n_same = Variable(args.size.like(0))
    with when(_n_incomplete(n_bytes, n_bytes_of, args) < 1):
        rows_ready = rows.bits_as(I64.as_pointer())
        (rows_ready + args.rank * (sockets.ROW_BYTES // 8)).release(n_before + 1)
        with (
            when(_n_behind(rows_ready, n_before, args) < 1),
            loop(x.b, 0, args.size) as other,
        ):
            received = _header_of(rows, other)
            is_same = _are_equal(received[0], args.signature) & _are_equal(received[1], current)
            n_same.value += where(is_same, args.size.like(1), 0)
    with when(n_same.value > args.size - 1):
        yield values_of
        counts[sockets.FINISHED] += 1
        counts[sockets.SHARED] += 1
    with when(n_same.value < args.size):
        args.exit.take()


def _send(message: Value, n_bytes: Value, args: _ExchangeArguments[Value]) -> None:
    """Sends a message to its receivers, as far as that is possible without blocking."""
    with loop(message.b, 0, args.size) as other:
        cells = _cells_of(args, other)
        cells[sockets.SENT] = cells[sockets.RECEIVED] = n_bytes.like(0)
        with when(cells[sockets.SEND_FD] > -1):
            flags = Value(message.b, I32(_MSG_DONTWAIT | _MSG_NOSIGNAL))
            fd = cells[sockets.SEND_FD].resized(I32)
            n_sent = call_function(fd.b, "send", I64, fd, message, n_bytes, flags)
            cells[sockets.SENT] = larger(n_sent, n_bytes.like(0))


def _receive(
    rows: Value, n_bytes_of: Callable[[Value], Value], args: _ExchangeArguments[Value]
) -> None:
    """Receives until all messages are complete, with at most about `n_looks` attempts per rank.

    Between attempts the thread yields its core, which a program that delivers the messages, such as
    a virtual switch, may need.
    """
    b = args.size.b
    n_left, n_missing = Variable(args.n_looks), Variable(args.size.like(0))
    with repeat(b) as leave_if:
        n_missing.value = args.size.like(0)
        with loop(b, 0, args.size) as other:
            cells, n_all = _cells_of(args, other), n_bytes_of(other)
            n_received = cells[sockets.RECEIVED]
            with when((cells[sockets.RECEIVE_FD] > -1) & (n_received < n_all)):
                buffer = _header_of(rows, other).bits_as(rows.raw.type) + n_received
                fd, flags = cells[sockets.RECEIVE_FD].resized(I32), Value(b, I32(_MSG_DONTWAIT))
                n_new = call_function(fd.b, "recv", I64, fd, buffer, n_all - n_received, flags)
                cells[sockets.RECEIVED] = n_received + larger(n_new, n_new.like(0))
                n_missing.value += where(cells[sockets.RECEIVED] < n_all, args.size.like(1), 0)
        n_left.value -= 1
        leave_if((n_missing.value < 1) | (n_left.value < 0))
        _pause_by(larger(args.policy, args.policy.like(WaitPolicy.YIELD)))


def _n_incomplete(
    n_bytes: Value, n_bytes_of: Callable[[Value], Value], args: _ExchangeArguments[Value]
) -> Value:
    """The number of messages that this rank has not sent or received completely."""
    one, n = args.size.like(1), Variable(args.size.like(0))
    with loop(n_bytes.b, 0, args.size) as other:
        cells = _cells_of(args, other)
        is_unsent = (cells[sockets.SEND_FD] > -1) & (cells[sockets.SENT] < n_bytes)
        is_due = cells[sockets.RECEIVE_FD] > -1
        is_partial = is_due & (cells[sockets.RECEIVED] < n_bytes_of(other))
        n.value += where(is_unsent, one, 0) + where(is_partial, one, 0)
    return n.value


def _n_behind(rows_ready: Value, n_before: Value, args: _ExchangeArguments[Value]) -> Value:
    """Waits for the other ranks of this host. Returns: how many did not publish in time."""
    b, one = n_before.b, args.size.like(1)
    n, n_left = Variable(args.size.like(0)), Variable(args.n_looks)
    with loop(b, 0, args.size) as other, when(_cells_of(args, other)[sockets.IS_LOCAL] > 0):
        ready = rows_ready + other * (sockets.ROW_BYTES // 8)
        with repeat(b) as leave_if:
            leave_if((ready.acquired() > n_before) | (n_left.value < 0))
            _pause_by(args.policy)
            n_left.value -= 1
        n.value += where(ready.acquired() > n_before, args.size.like(0), one)
    return n.value


def _cells_of(args: _ExchangeArguments[Value], rank: Value) -> Value:
    return args.cells + rank * sockets.CELLS


def _header_of(rows: Value, rank: Value) -> Value:
    """The address of the message of a rank, which begins with its header."""
    return (rows + rank * sockets.ROW_BYTES + sockets.HEADER_AT).bits_as(I64.as_pointer())


def _pause_by(policy: Value) -> None:
    """Emits what a waiting rank does between two polls: spin, yield its core, or sleep."""
    b = policy.b
    with when(policy < WaitPolicy.YIELD):
        pause(b)
    with when(_are_equal(policy, policy.like(WaitPolicy.YIELD))):
        call_function(b, "sched_yield", I64)
    with when(policy > WaitPolicy.YIELD):
        call_function(b, "usleep", I64, policy.like(_SLEEP_US).resized(I32))


def _are_equal(one: Value, other: Value) -> Value:
    return ((one < other) | (one > other)) ^ 1


_EXCHANGING: dict[Medium, _Exchanging] = {
    "shared memory": _in_shared_memory,
    "sockets": _over_sockets,
}
