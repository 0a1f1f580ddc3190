"""Records the kernel calls of a step and replays them as one program, like a CUDA graph.

Recording computes nothing: it stores each kernel call with its addresses. A replay makes the same
calls in the same order, so its results have the same bits. Inputs that change from step to step are
written to the same tensors before each replay.

One team of threads executes all calls. If a call or the previous one uses several threads, there is
a barrier before the call, which is much cheaper than starting a team. A call that uses one thread
may interrupt the replay to let Python continue, by writing its index to `AT`. A thread that is late
in leaving the barrier before that call may already see the interruption. It must not exit yet,
because the threads that left earlier would wait for it at the next barrier. So all threads exit at
the first barrier after that call.

    calls    cells of 8 bytes: the address of the kernel's `part`, the address of its arguments, the
             largest number of threads, and 1 if there is a barrier before the call
    state    cells of 8 bytes on separate cache lines: the number of threads at the barrier, the
             number of barriers passed, and `AT`, the call that interrupted

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
    call_function,
    pause,
    repeat,
    smaller,
    when,
)
from parallel_llama.ops.cpu.jit import CompiledKernel

CALL_CELLS = 4
_PART, _ARGUMENTS, _N_THREADS, _HAS_BARRIER = range(CALL_CELLS)
STATE_CELLS = 24
_ARRIVED, _N_PASSED, AT = 0, 8, 16

# Spins before a thread yields its core: tens of microseconds, the usual wait of threads that have a
# core each.
_SPINS = 1000

# Torch functions that compute nothing; a result of _VIEWS must share memory with the argument.
_VIEWS = {"__getitem__", "view", "flatten", "contiguous", "chunk", "unbind"}
_QUERIES = {"__get__", "__len__", "size", "stride", "dim", "numel", "data_ptr", "is_contiguous"}
_EMPTY = {"empty", "empty_like", "new_empty"}


@dataclass(slots=True, kw_only=True)
class ExecutorArguments(Generic[T]):
    """The calls from `start` to `stop` - 1."""

    calls: Integers[T]
    start: Integer[T]
    stop: Integer[T]
    state: Integers[T]


@dataclass(slots=True, kw_only=True)
class Exit(Generic[T]):
    """The address to which a call writes its number to interrupt the replay."""

    at: Integers[T]
    number: Integer[T]

    def take(self: "Exit[Value]") -> None:
        """Emits the interruption of the replay."""
        self.at[0] = self.number


@cache
def make_executor() -> CompiledKernel[ExecutorArguments[float]]:
    return CompiledKernel(ExecutorArguments[float], _execute)


@cache
def make_host_call() -> CompiledKernel[Exit[float]]:
    """A kernel that does nothing but interrupt the replay."""
    return CompiledKernel(Exit[float], _host_call)


def _execute(b: ir.IRBuilder, thread: Thread, args: ExecutorArguments[Value]) -> None:
    """Executes calls.

    for number in start to stop:
        if the call has a barrier:
            wait for all threads
            exit if an earlier call has interrupted the replay
        if this thread takes part in the call, and no earlier call has interrupted the replay:
            make the call
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
    """Waits until all threads have arrived."""
    n_passed = (state + _N_PASSED).acquired()
    with when((state + _ARRIVED).add_atomically(1) > thread.count - 2):
        state[_ARRIVED] = thread.count.like(0)
        (state + _N_PASSED).release(n_passed + 1)
    n_spins = Variable(thread.count.like(0))
    with repeat(state.b) as leave_if:
        leave_if((state + _N_PASSED).acquired() > n_passed)
        n_spins.value += 1
        pause(state.b)
        with when(n_spins.value > _SPINS):
            call_function(state.b, "sched_yield", I32)


def _make(call: Value, number: Value, count: Value) -> None:
    """Calls a kernel's `part` as thread `number` of `count`."""
    b, argument = call.b, I8.as_pointer()
    part = ir.FunctionType(VOID, [argument, I64, I64]).as_pointer()
    address = b.inttoptr(call[_ARGUMENTS].raw, argument)
    b.call(b.inttoptr(call[_PART].raw, part), [address, number.raw, count.raw])


def _host_call(_b: ir.IRBuilder, _thread: Thread, args: Exit[Value]) -> None:
    args.take()


class NotRecorded(Exception):
    """A step contains a computation that is not a kernel."""


class Arena:
    """Memory for the intermediate tensors of recordings.

    A block of memory is reused once its tensor has been freed during recording. Recordings may
    share an arena if they are not replayed at the same time.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # by size

    def tensor(self, like: Tensor) -> Tensor:
        """A contiguous tensor of the same shape and dtype."""
        # Powers of two, so that recordings of similar numbers of rows share blocks.
        size = 1 << max(6, (like.nbytes - 1).bit_length())
        free = self._free[size]
        block = free.pop() if free else torch.empty(size, dtype=torch.uint8)
        memory = block.numpy().data
        # Only the tensor's storage refers to `memory`, and views share the storage.
        weakref.finalize(memory, free.append, block).atexit = False
        numbers = torch.frombuffer(memory, dtype=like.dtype, count=size // like.itemsize)
        return numbers[: like.numel()].view(like.shape)


class Recording:
    """Recorded kernel calls, which can be replayed any number of times, one replay at a time.

    Tensors that the calls use must live as long as the recording, except those that were allocated
    during recording.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena  # kept alive, since the calls use its memory
        self._calls: list[tuple[CompiledKernel[Any], int, bytes]] = []  # kernel, threads, arguments
        self._arguments = ctypes.create_string_buffer(0)
        self._fallbacks: dict[int, Callable[[], None]] = {}
        self._state = (ctypes.c_int64 * STATE_CELLS)()
        self._table = (ctypes.c_int64 * 0)()
        self._n_threads = 1

    def run(
        self, program: CompiledKernel[ArgumentsT], n_threads: int, arguments: ArgumentsT, /
    ) -> None:
        """Records a call; this is a `Launcher`."""
        self._calls.append((program, n_threads, program.pack(arguments)))

    def exit(self, fallback: Callable[[], None]) -> Exit[int]:
        """An exit for the next recorded call; if the call takes it, the replay runs `fallback`."""
        number = len(self._calls)
        self._fallbacks[number] = fallback
        return Exit(at=ctypes.addressof(self._state) + 8 * AT, number=number)

    def host_call(self, fallback: Callable[[], None]) -> None:
        """Records a call of a Python function."""
        self.run(make_host_call(), 1, self.exit(fallback))

    def deferred(self, x: Tensor, function: Callable[[Tensor], object]) -> Callable[[], None]:
        """A function without arguments that calls `function` with a tensor at x's address.

        It does not keep x alive, so other recorded tensors may reuse the memory after the call.
        """
        return partial(_call_at, function, _View(x.data_ptr(), x.shape, x.dtype))

    def borrowed(self, x: Tensor) -> Tensor:
        """A tensor at x's address that does not keep x alive: later calls may reuse the memory."""
        return _View(x.data_ptr(), x.shape, x.dtype).tensor()

    def replay(self) -> None:
        """Makes all calls."""
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
        """Ends the recording."""
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
    """A mode in which new tensors are allocated in the arena.

    Raises: NotRecorded if torch is called to compute something.
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
        if name not in _QUERIES | _VIEWS | _EMPTY:
            raise NotRecorded(name)
        result = func(*args, **(kwargs or {}))
        if name in _EMPTY:
            return self._arena.tensor(result)
        if name in _VIEWS and not _shares_memory(result, args[0]):
            raise NotRecorded(f"{name} with a copy")
        return result


def _shares_memory(result: Tensor | Sequence[Tensor], x: Tensor) -> bool:
    views = (result,) if isinstance(result, Tensor) else result
    storage = x.untyped_storage().data_ptr()
    return all(view.untyped_storage().data_ptr() == storage for view in views)


@dataclass(frozen=True)
class _View:
    """The address, shape and dtype of a tensor."""

    address: int
    shape: torch.Size
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        if not self.shape.numel():
            return torch.empty(self.shape, dtype=self.dtype)
        memory = ctypes.c_char * (self.shape.numel() * self.dtype.itemsize)
        return torch.frombuffer(memory.from_address(self.address), dtype=self.dtype).view(
            self.shape
        )


def _call_at(function: Callable[[Tensor], object], view: _View) -> None:
    function(view.tensor())
