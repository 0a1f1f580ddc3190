"""What kernels are written with: vectors of one machine's width, and loops that carry values.

Source: the LLVM language reference.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from llvmlite import ir

VOID, BYTE = ir.VoidType(), ir.IntType(8)
I32, I64, F64 = ir.IntType(32), ir.IntType(64), ir.DoubleType()


@dataclass(frozen=True)
class Lanes:
    """A vector of `width` floating-point numbers.

    Raises: KeyError for a dtype that kernels do not compute in.
    """

    dtype: torch.dtype
    width: int

    @property
    def bits(self) -> int:
        return {torch.float32: 32, torch.float64: 64}[self.dtype]

    @property
    def scalar(self) -> ir.Type:
        return ir.FloatType() if self.bits == 32 else ir.DoubleType()

    @property
    def vector(self) -> ir.VectorType:
        return ir.VectorType(self.scalar, self.width)

    @property
    def pointer(self) -> ir.PointerType:
        """To one number."""
        return self.scalar.as_pointer()

    @property
    def mangled(self) -> str:
        """How the names of LLVM's overloaded functions spell the vector."""
        return f"v{self.width}f{self.bits}"

    def every(self, value: float) -> ir.Constant:
        """The same number in each lane."""
        return ir.Constant(self.vector, [self.scalar(value)] * self.width)

    def load(self, b: ir.IRBuilder, address: ir.Value) -> ir.Value:
        """`width` numbers from any address that suits one of them."""
        return b.load(b.bitcast(address, self.vector.as_pointer()), align=self.bits // 8)

    def load_some(self, b: ir.IRBuilder, address: ir.Value, mask: ir.Value) -> ir.Value:
        """Like `load` where the mask is true, and 0 elsewhere, where memory is not touched."""
        kinds = [self.vector.as_pointer(), I32, mask.type, self.vector]
        function = declared(b.module, f"llvm.masked.load.{self.mangled}.p0", self.vector, kinds)
        address = b.bitcast(address, self.vector.as_pointer())
        return b.call(function, [address, I32(self.bits // 8), mask, self.every(0)])

    def store_some(
        self, b: ir.IRBuilder, value: ir.Value, address: ir.Value, mask: ir.Value
    ) -> None:
        """Like `store` where the mask is true; elsewhere memory is not touched."""
        kinds = [self.vector, self.vector.as_pointer(), I32, mask.type]
        function = declared(b.module, f"llvm.masked.store.{self.mangled}.p0", VOID, kinds)
        address = b.bitcast(address, self.vector.as_pointer())
        b.call(function, [value, address, I32(self.bits // 8), mask])

    def first(self, b: ir.IRBuilder, n: ir.Value) -> ir.Value:
        """A mask that is true in the first n lanes."""
        kind = ir.VectorType(I64, self.width)
        numbers = ir.Constant(kind, [I64(number) for number in range(self.width)])
        return b.icmp_signed("<", numbers, self.broadcast(b, n))

    def sum(self, b: ir.IRBuilder, value: ir.Value) -> ir.Value:
        """The sum of the lanes, half of them added to the other half until one is left."""
        half = self.width // 2
        while half:
            kind = ir.VectorType(I32, self.width)
            turned = ir.Constant(kind, [I32((i + half) % self.width) for i in range(self.width)])
            undefined = ir.Constant(self.vector, ir.Undefined)
            value = b.fadd(value, b.shuffle_vector(value, undefined, turned))
            half //= 2
        return b.extract_element(value, I32(0))

    def store(self, b: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
        b.store(value, b.bitcast(address, self.vector.as_pointer()), align=self.bits // 8)

    def broadcast(self, b: ir.IRBuilder, value: ir.Value) -> ir.Value:
        """One value, of any type, in each of as many lanes."""
        undefined = ir.Constant(ir.VectorType(value.type, self.width), ir.Undefined)
        first = ir.Constant(ir.VectorType(I32, self.width), [I32(0)] * self.width)
        return b.shuffle_vector(b.insert_element(undefined, value, I32(0)), undefined, first)

    def fma(self, b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """x * y + z, rounded once."""
        function = declared(b.module, f"llvm.fma.{self.mangled}", self.vector, [self.vector] * 3)
        return b.call(function, [x, y, z])


def declared(
    module: ir.Module, name: str, result: ir.Type, arguments: Sequence[ir.Type]
) -> ir.Function:
    """A function that is defined elsewhere: LLVM's own, or the process's."""
    known = module.globals.get(name)
    return known or ir.Function(module, ir.FunctionType(result, arguments), name)


def function(
    module: ir.Module, name: str, result: ir.Type, arguments: Sequence[ir.Type]
) -> tuple[ir.IRBuilder, list[ir.Value]]:
    """A function that only this module calls, to be built, and its arguments."""
    new = ir.Function(module, ir.FunctionType(result, arguments), name)
    new.linkage = "internal"
    return ir.IRBuilder(new.append_basic_block()), list(new.args)


def at(b: ir.IRBuilder, base: ir.Value, *offsets: ir.Value | int) -> ir.Value:
    """The address as many elements after `base` as the offsets come to."""
    for offset in offsets:
        base = b.gep(base, [I64(offset) if isinstance(offset, int) else offset])
    return base


def prefetch(b: ir.IRBuilder, address: ir.Value) -> None:
    """Ask memory for what is there, which need not exist."""
    kinds = [address.type, I32, I32, I32]
    read, soonest, data = I32(0), I32(3), I32(1)
    function = declared(b.module, "llvm.prefetch.p0", VOID, kinds)
    b.call(function, [address, read, soonest, data])


def part_of(
    b: ir.IRBuilder, n: ir.Value, thread: ir.Value, n_threads: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Which of n things, from one to before another, are this thread's."""
    start, stop = (
        b.sdiv(b.mul(n, number), n_threads) for number in (thread, b.add(thread, I64(1)))
    )
    return start, stop


def smaller(b: ir.IRBuilder, one: ir.Value, other: ir.Value) -> ir.Value:
    return b.select(b.icmp_signed("<", one, other), one, other)


@dataclass
class Loop:
    """Inside: `index`, and `values` as they are; `next` is what they become. After: `results`."""

    index: ir.Value
    values: list[ir.Value]
    next: list[ir.Value] = field(default_factory=list)
    results: list[ir.Value] = field(default_factory=list)


@contextmanager
def loop(
    b: ir.IRBuilder,
    start: ir.Value,
    stop: ir.Value,
    step: int = 1,
    carried: Sequence[ir.Value] = (),
) -> Iterator[Loop]:
    """Emit what is built inside for start, start + step, ... below stop, perhaps for none."""
    before = b.block
    head, end = b.append_basic_block("loop"), b.append_basic_block("after")
    b.cbranch(b.icmp_signed("<", start, stop), head, end)
    b.position_at_end(head)
    index, values = b.phi(I64), [b.phi(value.type) for value in carried]
    inside = Loop(index, values)
    yield inside
    following, last = b.add(index, I64(step)), b.block
    b.cbranch(b.icmp_signed("<", following, stop), head, end)
    for phi, first, after in zip(
        [index, *values], [start, *carried], [following, *inside.next], strict=True
    ):
        phi.add_incoming(first, before)
        phi.add_incoming(after, last)
    b.position_at_end(end)
    for first, after in zip(carried, inside.next, strict=True):
        result = b.phi(first.type)
        result.add_incoming(first, before)
        result.add_incoming(after, last)
        inside.results.append(result)
