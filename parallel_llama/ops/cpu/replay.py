"""Records the kernel calls of a step and replays them as one program.

While a step is recorded, nothing is computed: each kernel call is kept with its addresses. A replay
makes the same calls in the same order, so results are the same to the last bit. Inputs that change
from step to step are written to the same tensors before each replay.

One team of threads goes through all calls. Where a call runs on several threads, or the previous
one did, the threads meet at a barrier first, which takes a small part of the time that it takes to
start a team. A call of one thread may end the walk, so that Python can do what comes next: it
writes its number to `AT`. All threads must exit at the same barrier, though some may still be
leaving the previous one; so a thread exits only at the barrier behind the call that ended the walk.

    calls    cells of 8 bytes: the address of the program's part, the address of its arguments, the
             largest number of threads, and 1 if the threads meet before the call
    state    cells of 8 bytes on separate cache lines: threads that have arrived, barriers passed,
             and AT

Sources: stream capture, as in CUDA graphs; sense-reversing barriers, Mellor-Crummey and Scott 1991,
section 3.1.
"""

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic

import torch
from llvmlite import ir
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parallel_llama.ops.cpu.arguments import ArgumentsT, Integer, Integers, T
from parallel_llama.ops.cpu.ir import (
    I8,
    I32,
    I64,
    VOID,
    Thread,
    Value,
    Variable,
    pause,
    repeat,
    smaller,
    when,
)
from parallel_llama.ops.cpu.jit import Program

CALL_CELLS = 4
_PART, _ARGUMENTS, _N_THREADS, _HAS_BARRIER = range(CALL_CELLS)
STATE_CELLS = 24
_ARRIVED, _N_MET, AT = 0, 8, 16

# Looks before the core is offered to others: some tens of microseconds, which is what threads wait
# for each other that have a core each.
_LOOKS = 1000


@dataclass(slots=True, kw_only=True)
class ExecutorArguments(Generic[T]):
    """The calls from `start` to before `stop`."""

    calls: Integers[T]
    start: Integer[T]
    stop: Integer[T]
    state: Integers[T]


@dataclass(slots=True, kw_only=True)
class Exit(Generic[T]):
    """Where a call writes its number to end the walk."""

    at: Integers[T]
    number: Integer[T]

    def take(self: "Exit[Value]") -> None:
        """Emit that the call ends the walk."""
        self.at[0] = self.number


@cache
def make_executor() -> Program[ExecutorArguments[float]]:
    return Program("executor", ExecutorArguments[float], _execute)


@cache
def make_host_call() -> Program[Exit[float]]:
    """A call that does nothing but end the walk."""
    return Program("host_call", Exit[float], _host_call)


def _execute(b: ir.IRBuilder, thread: Thread, args: ExecutorArguments[Value]) -> None:
    """The kernel.

    for number in start to stop:
        if the threads meet before this call:
            wait for all of them
            leave if a call before this one has ended the walk
        if the call is for this thread, and none has ended the walk:
            make it
    """
    following = Variable(args.start)
    with repeat(b) as leave_if:
        number = following.value
        leave_if(number > args.stop - 1)
        call = args.calls + number * CALL_CELLS
        has_barrier = call[_HAS_BARRIER] > 0
        with when(has_barrier):
            _barrier(args.state, thread)
        at = (args.state + AT).acquired()
        leave_if(has_barrier & (at < number))
        count = smaller(call[_N_THREADS], thread.count)
        with when((thread.number < count) & (at > number - 1)):
            _make(call, thread.number, count)
        following.value = number + 1


def _barrier(state: Value, thread: Thread) -> None:
    """Wait until all threads are here."""
    n_met = (state + _N_MET).acquired()
    with when((state + _ARRIVED).add_atomically(1) > thread.count - 2):
        state[_ARRIVED] = thread.count.like(0)
        (state + _N_MET).release(n_met + 1)
    n_looks = Variable(thread.count.like(0))
    with repeat(state.b) as leave_if:
        leave_if((state + _N_MET).acquired() > n_met)
        n_looks.value += 1
        pause(state.b)
        with when(n_looks.value > _LOOKS):
            _yield_core(state.b)


def _make(call: Value, number: Value, count: Value) -> None:
    """Call a program's part."""
    b, argument = call.b, I8.as_pointer()
    part = ir.FunctionType(VOID, [argument, I64, I64]).as_pointer()
    address = b.inttoptr(call[_ARGUMENTS].raw, argument)
    b.call(b.inttoptr(call[_PART].raw, part), [address, number.raw, count.raw])


def _yield_core(b: ir.IRBuilder) -> None:
    known = b.module.globals.get("sched_yield")
    b.call(known or ir.Function(b.module, ir.FunctionType(I32, []), "sched_yield"), [])


def _host_call(_b: ir.IRBuilder, _thread: Thread, args: Exit[Value]) -> None:
    args.take()


# What torch does without reading or writing a number, if its result lies where its argument does.
_VIEWS = {"__getitem__", "view", "flatten", "contiguous", "chunk", "unbind"}
_QUESTIONS = {"__get__", "__len__", "size", "stride", "dim", "numel", "data_ptr", "is_contiguous"}
_EMPTY = {"empty", "empty_like", "new_empty"}


class NotRecorded(Exception):
    """Something in a step computes that is no kernel."""


class Arena:
    """Memory for what kernels of a recording hand on to each other.

    A piece is taken again once nobody has the tensor in it, while it is recorded. Recordings may
    share an arena if they are not replayed at the same time.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # by size

    def tensor(self, like: Tensor) -> Tensor:
        """A tensor of the same shape and dtype, in one piece."""
        # Powers of two: recordings of almost as many rows find each other's.
        size = 1 << max(6, (like.nbytes - 1).bit_length())
        free = self._free[size]
        piece = free.pop() if free else torch.empty(size, dtype=torch.uint8)
        memory = piece.numpy().data
        # The tensor's storage has the only reference to it, and views share the storage.
        weakref.finalize(memory, free.append, piece).atexit = False
        numbers = torch.frombuffer(memory, dtype=like.dtype, count=size // like.itemsize)
        return numbers[: like.numel()].view(like.shape)


class Recording:
    """Calls of kernels, to be made by `replay` as often as wanted, one replay at a time.

    Every tensor that they were given must live as long as the recording; those that were made
    while it was recorded do.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena  # kept: the calls know addresses in them
        self._calls: list[tuple[Program[Any], int, bytes]] = []  # with threads and arguments
        self._arguments = ctypes.create_string_buffer(0)
        self._fallbacks: dict[int, Callable[[], None]] = {}
        self._state = (ctypes.c_int64 * STATE_CELLS)()
        self._table = (ctypes.c_int64 * 0)()
        self._n_threads = 1

    def run(self, program: Program[ArgumentsT], n_threads: int, arguments: ArgumentsT, /) -> None:
        """Record a call, as `Run` says."""
        self._calls.append((program, n_threads, program.packed(arguments)))

    def exit(self, fallback: Callable[[], None]) -> Exit[int]:
        """An exit for the next recorded call, which runs `fallback` if the call takes it."""
        number = len(self._calls)
        self._fallbacks[number] = fallback
        return Exit(at=ctypes.addressof(self._state) + 8 * AT, number=number)

    def host_call(self, fallback: Callable[[], None]) -> None:
        """Record something that Python does."""
        self.run(make_host_call(), 1, self.exit(fallback))

    def deferred(self, x: Tensor, function: Callable[[Tensor], object]) -> Callable[[], None]:
        """A call of a function with the tensor that lies where x lies now.

        It does not keep x, whose memory may be another tensor's when the call is over.
        """
        return partial(_call_at, function, _Place(x.data_ptr(), x.shape, x.dtype))

    def borrowed(self, x: Tensor) -> Tensor:
        """A tensor that lies where x lies now, which may be another's when a replay is over."""
        return _Place(x.data_ptr(), x.shape, x.dtype).tensor()

    def replay(self) -> None:
        """Make all calls."""
        start, stop = 0, len(self._calls)
        while start < stop:
            self._state[AT] = stop
            span = ExecutorArguments(
                calls=ctypes.addressof(self._table),
                start=start,
                stop=stop,
                state=ctypes.addressof(self._state),
            )
            make_executor()(self._n_threads, span)
            start = self._state[AT]
            if start < stop:
                self._fallbacks[start]()
                start += 1

    def complete(self) -> None:
        """Nothing more is recorded."""
        cells: list[int] = []
        n_before = 0
        self._arguments = ctypes.create_string_buffer(b"".join(each for *_, each in self._calls))
        address = ctypes.addressof(self._arguments)
        for program, n_threads, arguments in self._calls:
            has_barrier = max(n_before, n_threads) > 1
            cells += (program.part, address, n_threads, has_barrier)
            n_before = n_threads
            address += len(arguments)
        self._table = (ctypes.c_int64 * len(cells))(*cells)
        self._n_threads = max((n_threads for _, n_threads, _ in self._calls), default=1)


class KernelsOnly(TorchFunctionMode):
    """Inside, new tensors take their memory from the arena, and torch computes nothing.

    Raises: NotRecorded where it is asked to.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.__name__
        if name not in _QUESTIONS | _VIEWS | _EMPTY:
            raise NotRecorded(name)
        result = func(*args, **(kwargs or {}))
        if name in _EMPTY:
            return self._arena.tensor(result)
        if name in _VIEWS and not _lies_in(result, args[0]):
            raise NotRecorded(f"{name} with a copy")
        return result


def _lies_in(result: Tensor | Sequence[Tensor], x: Tensor) -> bool:
    """Whether tensors share their memory with x."""
    views = (result,) if isinstance(result, Tensor) else result
    own = x.untyped_storage().data_ptr()
    return all(view.untyped_storage().data_ptr() == own for view in views)


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies, and how it looks."""

    address: int
    shape: torch.Size
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        memory = ctypes.c_char * (self.shape.numel() * self.dtype.itemsize)
        return torch.frombuffer(memory.from_address(self.address), dtype=self.dtype).view(
            self.shape
        )


def _call_at(function: Callable[[Tensor], object], place: _Place) -> None:
    function(place.tensor())
