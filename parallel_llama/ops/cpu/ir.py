"""A small language for kernels on top of llvmlite: values, variables, vectors, loops, conditions.

Functions that say "emits" add instructions to the kernel that is being built.

Source: the LLVM language reference.
"""

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Union

import torch
from llvmlite import ir

VOID = ir.VoidType()
I8, I16, I32, I64 = (ir.IntType(n_bits) for n_bits in (8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_TYPES = {torch.float32: F32, torch.float64: F64}
_STORED = {**_TYPES, torch.float16: F16, torch.bfloat16: I16}  # llvmlite has no bfloat16

LINE_BYTES = 64  # of a cache line
_SIZES = {F16: 2, F32: 4, F64: 8}

# A Python number stands for a constant of the other operand's type, in all lanes of a vector.
Operand = Union["Value", float]
Emit = Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]


def _operator(integers: Emit, numbers: Emit) -> Callable[["Value", Operand], "Value"]:
    """A method that emits one instruction for integers and another for floating-point numbers."""

    def method(self: "Value", other: Operand) -> "Value":
        emit = integers if _is_integer(self.raw.type) else numbers
        return Value(self.b, emit(self.b, self.raw, self.like(other).raw))

    return method


@dataclass(frozen=True, eq=False)
class Value:
    """An integer, a floating-point number, an address or a vector in a kernel.

    `address + n` is the address n elements further, and `address[n]` is the value stored there.
    `//` and `%` require integers that are not negative; `<` is false if an operand is NaN.
    """

    b: ir.IRBuilder
    raw: ir.Value

    _plus = _operator(ir.IRBuilder.add, ir.IRBuilder.fadd)
    __sub__ = _operator(ir.IRBuilder.sub, ir.IRBuilder.fsub)
    __mul__ = _operator(ir.IRBuilder.mul, ir.IRBuilder.fmul)
    __truediv__ = _operator(ir.IRBuilder.fdiv, ir.IRBuilder.fdiv)
    __floordiv__ = _operator(ir.IRBuilder.sdiv, ir.IRBuilder.sdiv)
    __mod__ = _operator(ir.IRBuilder.srem, ir.IRBuilder.srem)
    __and__ = _operator(ir.IRBuilder.and_, ir.IRBuilder.and_)
    __or__ = _operator(ir.IRBuilder.or_, ir.IRBuilder.or_)
    __xor__ = _operator(ir.IRBuilder.xor, ir.IRBuilder.xor)
    __lshift__ = _operator(ir.IRBuilder.shl, ir.IRBuilder.shl)
    __rshift__ = _operator(ir.IRBuilder.lshr, ir.IRBuilder.lshr)
    __lt__ = _operator(
        lambda b, x, y: b.icmp_signed("<", x, y), lambda b, x, y: b.fcmp_ordered("<", x, y)
    )

    def __add__(self, other: Operand) -> "Value":
        if not self.raw.type.is_pointer:
            return self._plus(other)
        n = other.raw if isinstance(other, Value) else I64(other)
        return Value(self.b, self.b.gep(self.raw, [n]))

    def __rsub__(self, other: float) -> "Value":
        return self.like(other) - self

    def __rtruediv__(self, other: float) -> "Value":
        return self.like(other) / self

    def __gt__(self, other: Operand) -> "Value":
        return self.like(other) < self

    def __neg__(self) -> "Value":
        return Value(self.b, self.b.fneg(self.raw))

    def __abs__(self) -> "Value":
        return _elementwise("fabs", self)

    def sqrt(self) -> "Value":
        return _elementwise("sqrt", self)

    def __getitem__(self, n: Operand) -> "Value":
        return Value(self.b, self.b.load((self + n).raw))

    def __setitem__(self, n: Operand, value: "Value") -> None:
        self.b.store(value.raw, (self + n).raw)

    def acquired(self) -> "Value":
        """Loads an integer from this address with acquire ordering."""
        return Value(self.b, self.b.load_atomic(self.raw, "acquire", 8))

    def release(self, value: Operand) -> None:
        """Stores an integer at this address with release ordering."""
        self.b.store_atomic(self[0].like(value).raw, self.raw, "release", 8)

    def add_atomically(self, n: int) -> "Value":
        """Atomically adds to the integer at this address. Returns: the previous value."""
        return Value(self.b, self.b.atomic_rmw("add", self.raw, I64(n), "acq_rel"))

    def prefetch(self, cache: int = 1) -> None:
        """Prefetches this address, which need not be valid, into the L1 or only the L2 cache."""
        read, soon, data = (Value(self.b, I32(number)) for number in (0, 4 - cache, 1))
        intrinsic("prefetch.p0", VOID, self, read, soon, data)

    def like(self, other: Operand) -> "Value":
        """The operand itself, or a Python number as a constant of this value's type."""
        return other if isinstance(other, Value) else _constant(self.b, self.raw.type, other)

    def to(self, type_: ir.Type) -> "Value":
        """Converts to a floating-point type, with rounding if it is narrower."""
        if self.raw.type == type_:
            return self
        if _is_integer(self.raw.type):
            return Value(self.b, self.b.sitofp(self.raw, type_))
        is_wider = _SIZES[_element(type_)] > _SIZES[_element(self.raw.type)]
        convert = self.b.fpext if is_wider else self.b.fptrunc
        return Value(self.b, convert(self.raw, type_))

    def resized(self, type_: ir.Type) -> "Value":
        """Sign-extends or truncates an integer."""
        is_wider = _element(type_).width > _element(self.raw.type).width
        resize = self.b.sext if is_wider else self.b.trunc
        return Value(self.b, resize(self.raw, type_))

    def signed_shift(self, n: int) -> "Value":
        """Shifts an integer right by n bits and keeps its sign."""
        return Value(self.b, self.b.ashr(self.raw, self.like(n).raw))

    def lane(self, number: "int | Value") -> "Value":
        """One number of a vector."""
        index = number.raw if isinstance(number, Value) else I32(number)
        return Value(self.b, self.b.extract_element(self.raw, index))

    def lanes(self) -> "list[Value]":
        """All numbers of a vector; for a number, the number itself."""
        if not isinstance(self.raw.type, ir.VectorType):
            return [self]
        return [self.lane(number) for number in range(self.raw.type.count)]

    def bits_as(self, type_: ir.Type) -> "Value":
        return Value(self.b, self.b.bitcast(self.raw, type_))


class Variable:
    """A value that can be assigned to.

    It is allocated on the stack, since LLVM's values are immutable; LLVM moves it to a register.
    """

    def __init__(self, start: Value) -> None:
        with start.b.goto_entry_block():
            self._address = Value(start.b, start.b.alloca(start.raw.type))
        self.value = start

    @property
    def value(self) -> Value:
        return self._address[0]

    @value.setter
    def value(self, value: Value) -> None:
        self._address[0] = value


@dataclass(frozen=True)
class Lanes:
    """A vector of `width` numbers, with one dtype in memory and one to compute in.

    bfloat16 numbers can only be loaded, and only to compute in float32.

    Raises: KeyError for a dtype that kernels do not compute in.
    """

    stored: torch.dtype
    computed: torch.dtype
    width: int

    @property
    def vector(self) -> ir.VectorType:
        return ir.VectorType(_TYPES[self.computed], self.width)

    @property
    def pointer(self) -> ir.PointerType:
        """The type of the address of one stored number."""
        return _STORED[self.stored].as_pointer()

    def load(self, address: Value, mask: Value | None = None) -> Value:
        """Loads from any address; lanes where a mask is false are 0 and are not read."""
        stored, access = self._access(address, mask)
        name, zeros = f"masked.load.{_mangled(stored)}.p0", _constant(address.b, stored, 0)
        numbers = intrinsic(name, stored, *access, zeros)
        if self.stored == torch.bfloat16:  # the upper half of a float32
            return (numbers.resized(ir.VectorType(I32, self.width)) << 16).bits_as(self.vector)
        return numbers.to(self.vector)

    def store(self, address: Value, value: Value, mask: Value | None = None) -> None:
        """Stores all lanes, or only those where a mask is true."""
        stored, access = self._access(address, mask)
        intrinsic(f"masked.store.{_mangled(stored)}.p0", VOID, value.to(stored), *access)

    def _access(self, address: Value, mask: Value | None) -> tuple[ir.Type, list[Value]]:
        """The vector type in memory, and the address, alignment and mask of an access."""
        stored = ir.VectorType(_STORED[self.stored], self.width)
        vector_address, align = address.bits_as(stored.as_pointer()), I32(self.stored.itemsize)
        all_lanes = _constant(address.b, ir.VectorType(ir.IntType(1), self.width), 1)
        return stored, [vector_address, Value(address.b, align), mask or all_lanes]

    def first(self, n: Value) -> Value:
        """The mask of the first n lanes."""
        numbers = ir.VectorType(I64, self.width)([I64(lane) for lane in range(self.width)])
        return Value(n.b, numbers) < self.splat(n)

    def constant(self, b: ir.IRBuilder, number: float) -> Value:
        """The same number in all lanes."""
        return _constant(b, self.vector, number)

    def splat(self, value: Value) -> Value:
        """The same value, of any type, in all lanes."""
        empty = ir.VectorType(value.raw.type, self.width)(ir.Undefined)
        first = value.b.insert_element(empty, value.raw, I32(0))
        return shuffle(Value(value.b, first), [0] * self.width)

    def reduce(self, combine: Callable[[Value, Value], Value], x: Value) -> Value:
        """Reduces the lanes to one number by combining one half with the other, repeatedly."""
        half = self.width // 2
        while half:
            x = combine(x, shuffle(x, [(lane + half) % self.width for lane in range(self.width)]))
            half //= 2
        return x.lane(0)


@dataclass(frozen=True)
class Thread:
    """The number of the current thread among those that run a kernel, and their count."""

    number: Value
    count: Value

    def part_of(self, n: Value) -> tuple[Value, Value]:
        """The start and stop of this thread's part of n items."""
        return n * self.number // self.count, n * (self.number + 1) // self.count

    @contextmanager
    def untaken(self, taken: Value, n: Value) -> Iterator[Value]:
        """Emits the `with` body for each of n items that no other thread has taken.

        The threads count items at `taken`; the last thread that finds none left resets it to 0.
        """
        with repeat(taken.b) as leave_if:
            item = taken.add_atomically(1)
            leave_if(item > n - 1)
            yield item
        with when(item > n + self.count - 2):
            taken[0] = n.like(0)


def fma(x: Value, y: Operand, z: Operand) -> Value:
    """x * y + z with one rounding."""
    return _elementwise("fma", x, y, z)


def where(condition: Value, one: Value, other: Operand) -> Value:
    """Selects `one` where the condition is true and `other` elsewhere, lane by lane."""
    b = condition.b
    return Value(b, b.select(condition.raw, one.raw, one.like(other).raw))


def smaller(one: Value, other: Operand) -> Value:
    return where(one < other, one, other)


def larger(x: Value, y: Value) -> Value:
    """The larger of two numbers; `y` if x or y is NaN."""
    return where(y < x, x, y)


def shuffle(x: Value, lanes: Sequence[int], y: Value | None = None) -> Value:
    """A vector of these lanes of x and y, where the lanes of y are numbered after those of x."""
    other = x.raw.type(ir.Undefined) if y is None else y.raw
    numbers = ir.VectorType(I32, len(lanes))([I32(lane) for lane in lanes])
    return Value(x.b, x.b.shuffle_vector(x.raw, other, numbers))


def transposed(rows: Sequence[Value]) -> list[Value]:
    """The columns of W vectors of W lanes: swaps halves, then halves of halves.

    Source: Eklundh, A fast computer method for matrix transposing, 1972.
    """
    columns, n = list(rows), len(rows)
    half = n // 2
    while half:
        for i in (i for i in range(n) if not i & half):
            one, other = columns[i], columns[i + half]
            firsts = [n + lane - half if lane & half else lane for lane in range(n)]
            seconds = [n + lane if lane & half else lane + half for lane in range(n)]
            columns[i], columns[i + half] = (
                shuffle(one, lanes, other) for lanes in (firsts, seconds)
            )
        half //= 2
    return columns


def reduced(vectors: Sequence[Value]) -> Value:
    """A vector of the sums of W vectors of W lanes; lane i has the bits of `Lanes.reduce(add, ..)`.

    Each step adds the two halves of every run of lanes, for two vectors at a time, and halves the
    runs: of four lanes, abcd and ABCD become a+c b+d A+C B+D.
    """
    sums, width = list(vectors), len(vectors)
    half = width // 2
    while half:
        firsts = [width + lane - half if lane & half else lane for lane in range(width)]
        seconds = [width + lane if lane & half else lane + half for lane in range(width)]
        sums = [
            shuffle(one, firsts, other) + shuffle(one, seconds, other)
            for one, other in zip(sums[:half], sums[half:], strict=True)
        ]
        half //= 2
    return sums[0]


def copy(target: Value, source: Value, n_bytes: Value) -> None:
    is_volatile = Value(target.b, ir.IntType(1)(0))
    intrinsic("memcpy.p0.p0.i64", VOID, target, source, n_bytes, is_volatile)


def in_this_order(b: ir.IRBuilder) -> None:
    """Compiler barrier: keeps LLVM from reordering independent loads across this point.

    It emits no machine instruction. Memory is read fastest in the order of its addresses.
    """
    b.fence("acq_rel", "singlethread")


def pause(b: ir.IRBuilder) -> None:
    """Emits the CPU's hint for spin loops, on x86-64."""
    if platform.machine() == "x86_64":
        call_function(b, "llvm.x86.sse2.pause", VOID)


def when(condition: Value, likely: bool | None = None) -> AbstractContextManager[None]:
    """Emits the `with` body under a condition."""
    inside: AbstractContextManager[None] = condition.b.if_then(condition.raw, likely)
    return inside


@contextmanager
def loop(b: ir.IRBuilder, start: Operand, stop: Operand, step: int = 1) -> Iterator[Value]:
    """Emits the `with` body for start, start + step, ... below stop."""
    first, last = (Value(b, I64(0)).like(n) for n in (start, stop))
    before, inside, after = b.block, b.append_basic_block("loop"), b.append_basic_block("after")
    b.cbranch((first < last).raw, inside, after)
    b.position_at_end(inside)
    index = Value(b, b.phi(I64))
    yield index
    following = index + step
    index.raw.add_incoming(first.raw, before)
    index.raw.add_incoming(following.raw, b.block)
    b.cbranch((following < last).raw, inside, after)
    b.position_at_end(after)


@contextmanager
def repeat(b: ir.IRBuilder) -> Iterator[Callable[[Value], None]]:
    """Emits the `with` body as an endless loop. Yields: a function that emits an exit."""
    inside, after = b.append_basic_block("repeat"), b.append_basic_block("left")

    def leave_if(condition: Value) -> None:
        going_on = b.append_basic_block("going_on")
        b.cbranch(condition.raw, after, going_on)
        b.position_at_end(going_on)

    b.branch(inside)
    b.position_at_end(inside)
    yield leave_if
    b.branch(inside)
    b.position_at_end(after)


def in_groups(start: Operand, stop: Value, size: int, build: Callable[[Value, int], None]) -> None:
    """Emits `build(first, n)` for the numbers from start up to but excluding stop, n at a time.

    n is `size`; the remainder, at most 7, is split into 4, 2 and 1.
    """
    left = (stop - start) % size
    done = stop - left
    with loop(stop.b, start, done, size) as first:
        build(first, size)
    for n in (n for n in (4, 2, 1) if n < size):
        with when((left & n) > 0):
            build(done, n)
        done = done + (left & n)


def _constant(b: ir.IRBuilder, type_: ir.Type, number: float) -> Value:
    is_vector = isinstance(type_, ir.VectorType)
    return Value(b, type_([type_.element(number)] * type_.count if is_vector else number))


def call_function(b: ir.IRBuilder, name: str, result: ir.Type, *arguments: Value) -> Value:
    """Calls a function of LLVM or of the C library, which its first call in a module declares."""
    raw = [argument.raw for argument in arguments]
    type_ = ir.FunctionType(result, [each.type for each in raw])
    known = b.module.globals.get(name)
    return Value(b, b.call(known or ir.Function(b.module, type_, name), raw))


def intrinsic(name: str, result: ir.Type, *arguments: Value) -> Value:
    """Calls one of LLVM's intrinsic functions."""
    return call_function(arguments[0].b, f"llvm.{name}", result, *arguments)


def _elementwise(name: str, x: Value, *others: Operand) -> Value:
    """Calls an intrinsic function that works lane by lane."""
    type_ = x.raw.type
    return intrinsic(f"{name}.{_mangled(type_)}", type_, x, *map(x.like, others))


def _is_integer(type_: ir.Type) -> bool:
    return isinstance(_element(type_), ir.IntType)


def _element(type_: ir.Type) -> ir.Type:
    return type_.element if isinstance(type_, ir.VectorType) else type_


def _mangled(type_: ir.Type) -> str:
    """A type's spelling in the names of LLVM's overloaded intrinsics."""
    lanes = f"v{type_.count}" if isinstance(type_, ir.VectorType) else ""
    return f"{lanes}{_element(type_).intrinsic_name}"
