"""A turn of all_reduce by a kernel, in the memory that the ranks of a host share.

`parallel.shared_memory` describes the memory and the order of things; a rank may take a turn with
this kernel while another takes it in Python. Where the others do not come while it looks for them,
or come with something else, the rest of the turn is Python's, which knows how to wait and what to
say of a rank that is lost.
"""

from functools import cache, partial

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.builder import (
    I64,
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
from parallel_llama.ops.cpu.program import Machine, Program, this_machine
from parallel_llama.ops.cpu.recording import Recording
from parallel_llama.parallel.shared_memory import LINE, SIGNATURE, SLOT_BYTES, TURN, Turn


class TurnKernel:
    """The sum over all ranks, in place, by one thread; in rank order, as Python has it.

    It is for recordings alone. Shapes: x as the turn's, in one piece.
    """

    def __init__(self, dtype: torch.dtype, machine: Machine) -> None:
        lanes = machine.lanes(dtype)
        integers = I64.as_pointer()
        types = [lanes.pointer, I64, integers, lanes.pointer, *[I64] * 4, integers, I64]
        self._program = Program("turn", types, partial(_turn, lanes))

    def __call__(self, x: Tensor, turn: Turn, recording: Recording) -> None:
        assert x.is_contiguous() and x.nbytes <= SLOT_BYTES
        arguments = (x.numel(), turn.header, turn.slots, turn.rank, turn.size)
        rest = recording.later(x, turn.finish)
        recording.run_or_leave(
            self._program, rest, x.data_ptr(), *arguments, turn.signature, turn.n_looks
        )


@cache
def make_turn(dtype: torch.dtype) -> TurnKernel:
    """The kernel for this machine; `computes` says for which types."""
    return TurnKernel(dtype, this_machine())


def _turn(lanes: Lanes, b: ir.IRBuilder, _thread: Thread, arguments: list[Value]) -> None:
    """The kernel.

    copy x into this rank's slot, and publish it
    if all ranks publish theirs in time, with the same signature:
        x = sum of all slots
        begin the next turn
    else:
        leave the rest to Python
    """
    x, n, header, slots, rank, size, signature, n_looks, at, number = arguments
    own, n_bytes = header + rank * LINE, lanes.stored.itemsize
    parity = own[TURN] & 1
    stride = SLOT_BYTES // n_bytes
    first = slots + parity * stride  # rank 0's, and the others' two slots further each
    copy(first + rank * (2 * stride), x, n * n_bytes)
    phase = own[0] + 1
    own[parity + SIGNATURE] = signature
    own.release(phase)
    n_agreeing = _await_others(header, size, phase, parity + SIGNATURE, signature, n_looks)
    with when(n_agreeing > size - 1):
        with loop(b, 0, n, lanes.width) as i:
            mask = lanes.first(n - i)
            total = Variable(lanes.load(first + i, mask))
            with loop(b, 1, size) as other:
                total.value += lanes.load(first + other * (2 * stride) + i, mask)
            lanes.store(x + i, total.value, mask)
        own[TURN] += 1
    with when(n_agreeing < size):
        at[0] = number


def _await_others(
    header: Value, size: Value, phase: Value, signed: Value, signature: Value, n_looks: Value
) -> Value:
    """How many ranks have published this phase with this signature, after so many looks."""
    b = header.b
    n_agreeing, n_there, n_left = (
        Variable(number) for number in (size.like(0), size.like(0), n_looks)
    )
    with repeat(b) as leave_if:
        leave_if((n_there.value > size - 1) | (n_left.value < 0))
        other = header + n_there.value * LINE
        has_come = other.acquired() > phase - 1
        with when(has_come):
            differs = (other[signed] < signature) | (other[signed] > signature)
            n_agreeing.value += where(differs, size.like(0), 1)
            n_there.value += 1
        with when(has_come ^ 1):
            pause(b)
            n_left.value -= 1
    return n_agreeing.value
