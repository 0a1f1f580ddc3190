"""A list of calls as one program, which one team of threads goes through from start to end.

Where a call is for several threads, or the one before it was, they meet first: each spins until the
last has come. That takes a small part of what it takes to start a team.

A call of one thread may end the walk, so that Python can do what comes next: it writes its own
number to `AT`. Threads must agree on where they meet for the last time, and some may still be
leaving one meeting while another thread is on its way to the next. So a thread leaves only where it
meets behind the call that ended the walk.

    calls    cells of 8 bytes: the address of the part, that of its arguments, on how many threads
             it runs at most, and 1 where the threads meet before it
    state    cells of 8 bytes, in lines of their own: who has arrived, how often all have met, AT

Source: sense-reversing barriers, Mellor-Crummey and Scott 1991, section 3.1.
"""

from dataclasses import dataclass
from functools import cache
from typing import Generic

from llvmlite import ir

from parallel_llama.ops.cpu.arguments import Integer, Integers, T
from parallel_llama.ops.cpu.builder import (
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
from parallel_llama.ops.cpu.program import Program

CALL_CELLS = 4
_PART, _ARGUMENTS, _N_THREADS, _MEETS = range(CALL_CELLS)
STATE_CELLS = 24
_ARRIVED, _N_MET, AT = 0, 8, 16

# Looks before the core is offered to others: some tens of microseconds, which is what threads wait
# for each other that have a core each.
_LOOKS = 1000


@dataclass(slots=True, kw_only=True)
class WalkArguments(Generic[T]):
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
def make_walk() -> Program[WalkArguments[float]]:
    return Program("walk", WalkArguments[float], _walk)


@cache
def make_leave() -> Program[Exit[float]]:
    """A call that does nothing but end the walk."""
    return Program("leave", Exit[float], _leave)


def _walk(b: ir.IRBuilder, thread: Thread, args: WalkArguments[Value]) -> None:
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
        meets = call[_MEETS] > 0
        with when(meets):
            _meet(args.state, thread)
        at = (args.state + AT).acquired()
        leave_if(meets & (at < number))
        count = smaller(call[_N_THREADS], thread.count)
        with when((thread.number < count) & (at > number - 1)):
            _make(call, thread.number, count)
        following.value = number + 1


def _meet(state: Value, thread: Thread) -> None:
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
            _offer_core(state.b)


def _make(call: Value, number: Value, count: Value) -> None:
    """Call a program's part."""
    b, argument = call.b, I8.as_pointer()
    part = ir.FunctionType(VOID, [argument, I64, I64]).as_pointer()
    address = b.inttoptr(call[_ARGUMENTS].raw, argument)
    b.call(b.inttoptr(call[_PART].raw, part), [address, number.raw, count.raw])


def _offer_core(b: ir.IRBuilder) -> None:
    known = b.module.globals.get("sched_yield")
    b.call(known or ir.Function(b.module, ir.FunctionType(I32, []), "sched_yield"), [])


def _leave(_b: ir.IRBuilder, _thread: Thread, args: Exit[Value]) -> None:
    args.take()
