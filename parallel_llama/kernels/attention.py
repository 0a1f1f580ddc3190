"""Attention of one query per sequence, over keys and values where they lie in the KV cache.

What one KV head keeps of one sequence is read once, for the whole group of queries that share it.
Scores are taken for a vector of keys at a time and go to a scratch row per query; their softmax is
taken in place; the values are then summed by it, for a few queries at a time.

A result depends on the query, its keys and its values alone: not on the other sequences, not on the
thread, and not on how the slots are cut into slices.

Source: grouped queries, arXiv 2305.13245.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.kernels.builder import (
    I32,
    I64,
    VOID,
    Lanes,
    at,
    declared,
    function,
    loop,
    prefetch,
    smaller,
)
from parallel_llama.kernels.exponential import exp
from parallel_llama.kernels.program import Machine, Program, this_machine

_MAX_CHUNK = 4  # of a group whose sums of values stay in registers together
_BLOCK_BYTES = 1 << 13  # of values that a whole group takes while the next ones are on their way
_LINE_BYTES = 64  # of a cache

Combine = Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]


@dataclass(frozen=True)
class SingleQueries:
    """Which rows of a batch are queries that each see keys of their own, the same in all layers.

    Shapes: int64 `places` [n, 3], the rows with the most keys first: a row's number, and where its
    slices begin and end in `bounds` [m, 2], the first slot of a slice and the one after its last.
    """

    places: Tensor
    bounds: Tensor
    max_len: int

    @classmethod
    def of(cls, slices: Mapping[int, Sequence[slice]]) -> "SingleQueries":
        """From the slots that each row sees, in order; each sees some, and no slice is empty."""
        places: list[tuple[int, int, int]] = []
        bounds: list[tuple[int, int]] = []
        lengths: dict[int, int] = {}
        for row, own in slices.items():
            places.append((row, len(bounds), len(bounds) + len(own)))
            bounds += [(one.start, one.stop) for one in own]
            lengths[row] = sum(one.stop - one.start for one in own)
        # The longest come first, so that no thread is left with one while the others have finished.
        places.sort(key=lambda place: lengths[place[0]], reverse=True)
        return cls(
            torch.tensor(places, dtype=torch.int64),
            torch.tensor(bounds, dtype=torch.int64),
            max(lengths.values()),
        )


@dataclass(frozen=True)
class _Shape:
    """What a kernel is made for."""

    lanes: Lanes
    head_dim: int
    n_group: int
    n_registers: int

    @property
    def block(self) -> int:
        """Keys whose values go through a whole group before the next ones."""
        return max(1, _BLOCK_BYTES * 8 // (self.head_dim * self.lanes.bits))

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """Rows start to stop of a group, so many at a time; sizes differ by one at most."""
        n_chunks = -(-self.n_group // _MAX_CHUNK)
        size, n_larger = divmod(self.n_group, n_chunks)
        middle = n_larger * (size + 1)
        if n_larger:
            yield 0, middle, size + 1
        yield middle, self.n_group, size

    def vectors_at_once(self, n_rows: int) -> int:
        """Of a value: as many as leave room for a sum of each row and for the rows' weights."""
        n_vectors = self.head_dim // self.lanes.width
        fitting = (self.n_registers - 1 - n_rows) // n_rows
        return max(
            n for n in range(1, n_vectors + 1) if n_vectors % n == 0 and n <= max(1, fitting)
        )


class DecodeAttention:
    """Softmax attention of single queries over their own keys, for one run of equal groups.

    Other rows of `out` are left as they are.

    Shapes: q, out [T, K * G, D], heads contiguous, rows anywhere; k, v [K, n_slots, D], slots
    contiguous, heads anywhere.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        head_dim: int,
        n_group: int,
        machine: Machine,
    ) -> None:
        self.dtype, self.head_dim, self.n_group = dtype, head_dim, n_group
        largest_divisor = head_dim & -head_dim  # among powers of two
        self._width = min(machine.vector_bytes // dtype.itemsize, largest_divisor)
        lanes = Lanes(dtype, self._width)
        shape = _Shape(lanes, head_dim, n_group, machine.n_vectors)
        self._program = Program("decode_attention", 15, partial(_attention, shape))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, queries: SingleQueries, out: Tensor
    ) -> None:
        n_kv_heads, packed = len(k), (self.head_dim, 1)
        assert q.shape == out.shape == (len(q), n_kv_heads * self.n_group, self.head_dim)
        assert q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == out.stride()[1:] == packed
        assert q.dtype == k.dtype == v.dtype == out.dtype == self.dtype
        # A vector of scores may begin at a row's last key, and one of -inf comes after that.
        row = -(-queries.max_len // self._width) * self._width + self._width
        n_items = len(queries.places) * n_kv_heads
        n_threads = min(torch.get_num_threads(), n_items)
        scores = torch.empty(n_threads * self.n_group * row, dtype=self.dtype)
        taken = ctypes.c_int64(0)
        self._program(
            n_threads,
            ctypes.addressof(taken),
            n_items,
            n_kv_heads,
            queries.places.data_ptr(),
            queries.bounds.data_ptr(),
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            out.data_ptr(),
            out.stride(0),
            scores.data_ptr(),
            row,
        )


@cache
def make_attention(dtype: torch.dtype, head_dim: int, n_group: int) -> DecodeAttention:
    """The kernel for this machine, compiled when first asked for; `computes` says for what."""
    return DecodeAttention(dtype, head_dim, n_group, this_machine())


def _attention(
    shape: _Shape, b: ir.IRBuilder, arguments: list[ir.Value], thread: ir.Value, _: ir.Value
) -> None:
    """What a thread does: items, each one query row and one KV head, while there are any."""
    integers, numbers = I64.as_pointer(), shape.lanes.pointer
    types = [integers, I64, I64, *[integers] * 2, *[numbers, I64] * 5]
    (
        taken, n_items, n_kv_heads, places, bounds,
        q, q_row, k, k_head, v, v_head, out, out_row, scores, row,
    ) = (
        b.inttoptr(value, type_) if type_ is not I64 else value
        for value, type_ in zip(arguments, types, strict=True)
    )  # fmt: skip
    scored, softmax, summed = (make(b.module, shape) for make in (_scores, _softmax, _sums))
    group = I64(shape.n_group)
    own = at(b, scores, b.mul(thread, b.mul(group, row)))
    with _items(b, taken, n_items) as item:
        place = at(b, places, b.mul(b.udiv(item, n_kv_heads), I64(3)))
        q_number, first, last = (b.load(at(b, place, n)) for n in range(3))
        head = b.urem(item, n_kv_heads)
        first_head = b.mul(head, I64(shape.n_group * shape.head_dim))
        slices = [bounds, first, last]
        q_own = at(b, q, b.mul(q_number, q_row), first_head)
        n_keys = b.call(scored, [q_own, at(b, k, b.mul(head, k_head)), own, row, *slices])
        with loop(b, I64(0), group) as query:
            b.call(softmax, [at(b, own, b.mul(query.index, row)), n_keys])
        out_own = at(b, out, b.mul(q_number, out_row), first_head)
        b.call(summed, [out_own, at(b, v, b.mul(head, v_head)), own, row, *slices])


@contextmanager
def _items(b: ir.IRBuilder, taken: ir.Value, n_items: ir.Value) -> Iterator[ir.Value]:
    """Emit what is built inside for every item that no other thread has taken."""
    head, inside, end = (b.append_basic_block(name) for name in ("take", "item", "done"))
    b.branch(head)
    b.position_at_end(head)
    item = b.atomic_rmw("add", taken, I64(1), "monotonic")
    b.cbranch(b.icmp_signed("<", item, n_items), inside, end)
    b.position_at_end(inside)
    yield item
    b.branch(head)
    b.position_at_end(end)


def _slice_of(b: ir.IRBuilder, bounds: ir.Value, number: ir.Value) -> tuple[ir.Value, ir.Value]:
    start = at(b, bounds, b.mul(number, I64(2)))
    return b.load(start), b.load(at(b, start, 1))


def _scores(module: ir.Module, shape: _Shape) -> ir.Function:
    """scores[g, t] = q[g] k[t] / sqrt(D) for all keys t; returns how many they are.

    Shapes: q [G, D]; k [n_slots, D]; scores [G, row]. What comes after the last key is undefined.
    """
    lanes, head_dim = shape.lanes, shape.head_dim
    numbers, width = lanes.pointer, lanes.width
    types = [numbers, numbers, numbers, I64, I64.as_pointer(), I64, I64]
    b, (q, k, scores, row, bounds, first, end) = function(module, "scores", I64, types)
    few = b.alloca(lanes.scalar, width * head_dim)
    with loop(b, I64(0), I64(width * head_dim), width) as part:
        # Numbers that nobody wrote may be so small that products with them are slow.
        lanes.store(b, lanes.every(0.0), at(b, few, part.index))
    with loop(b, first, end, carried=[I64(0)]) as slices:
        start, stop = _slice_of(b, bounds, slices.index)
        n_before = slices.values[0]
        with loop(b, start, stop, width) as block:
            keys = at(b, k, b.mul(block.index, I64(head_dim)))
            following = _following(b, bounds, slices.index, end, block.index, width)
            _prefetch(b, shape, at(b, k, b.mul(following, I64(head_dim))), width * head_dim)
            keys = _readable(b, shape, keys, b.sub(stop, block.index), few)
            t = b.add(n_before, b.sub(block.index, start))
            with loop(b, I64(0), I64(shape.n_group)) as query:
                dots = _dots(b, shape, at(b, q, b.mul(query.index, I64(head_dim))), keys)
                scaled = b.fmul(dots, lanes.every(head_dim**-0.5))
                lanes.store(b, scaled, at(b, scores, b.mul(query.index, row), t))
        slices.next.append(b.add(n_before, b.sub(stop, start)))
    b.ret(slices.results[0])
    return b.function


def _following(
    b: ir.IRBuilder, bounds: ir.Value, number: ir.Value, end: ir.Value, slot: ir.Value, n: int
) -> ir.Value:
    """The slot that is taken n after this one, or the first of the next slice if that is nearer."""
    _, stop = _slice_of(b, bounds, number)
    next_slice = smaller(b, b.add(number, I64(1)), b.sub(end, I64(1)))
    next_start, _ = _slice_of(b, bounds, next_slice)
    after = b.add(slot, I64(n))
    return b.select(b.icmp_signed("<", after, stop), after, next_start)


def _prefetch(b: ir.IRBuilder, shape: _Shape, address: ir.Value, n_numbers: int) -> None:
    """Ask memory for numbers that are used later; any address may be asked for."""
    n_bytes = shape.lanes.bits // 8
    for start in range(0, n_numbers * n_bytes, _LINE_BYTES):
        prefetch(b, at(b, address, start // n_bytes))


def _readable(
    b: ir.IRBuilder, shape: _Shape, keys: ir.Value, n_keys: ir.Value, few: ir.Value
) -> ir.Value:
    """A vector's worth of keys; where fewer are left, their copy, for memory may end after them."""
    n_bytes = b.mul(n_keys, I64(shape.head_dim * shape.lanes.bits // 8))
    are_few = b.icmp_signed("<", n_keys, I64(shape.lanes.width))
    with b.if_then(are_few, likely=False):
        types = [few.type, keys.type, I64, ir.IntType(1)]
        copy = declared(b.module, "llvm.memcpy.p0.p0.i64", VOID, types)
        b.call(copy, [few, keys, n_bytes, ir.IntType(1)(0)])
    return b.select(are_few, few, keys)


def _dots(b: ir.IRBuilder, shape: _Shape, q: ir.Value, keys: ir.Value) -> ir.Value:
    """One query by a vector's worth of keys. Shapes: q [D]; keys [W, D]; the result [W]."""
    lanes, head_dim = shape.lanes, shape.head_dim
    sums = [lanes.every(0.0)] * lanes.width
    with loop(b, I64(0), I64(head_dim), lanes.width, sums) as part:
        x = lanes.load(b, at(b, q, part.index))
        for key, so_far in enumerate(part.values):
            y = lanes.load(b, at(b, keys, key * head_dim, part.index))
            part.next.append(lanes.fma(b, x, y, so_far))
    return _folded(b, lanes, part.results, _add)


def _folded(
    b: ir.IRBuilder, lanes: Lanes, vectors: Sequence[ir.Value], combine: Combine
) -> ir.Value:
    """A vector whose lane i combines all lanes of the i-th vector, in an order all share.

    Each step folds vectors by halves of ever shorter stretches, two of them into one: W - 1 folds
    for W vectors, where one at a time would take log2(W) each.
    """
    while len(vectors) > 1:
        half = len(vectors) // 2
        vectors = [
            _two_folded(b, lanes, one, other, half, combine)
            for one, other in zip(vectors[:half], vectors[half:], strict=True)
        ]
    return vectors[0]


def _two_folded(
    b: ir.IRBuilder, lanes: Lanes, one: ir.Value, other: ir.Value, half: int, combine: Combine
) -> ir.Value:
    """Of each stretch of 2 * `half` lanes: `one`'s halves combined, then `other`'s.

    With half = 2 and sums, abcd and ABCD become a+c b+d A+C B+D.
    """

    def halves(which: int) -> ir.Value:
        taken = []
        for lane in range(lanes.width):
            source, place = divmod(lane % (2 * half), half)
            start = lane - lane % (2 * half)
            taken.append(source * lanes.width + start + which * half + place)
        mask = ir.Constant(ir.VectorType(I32, lanes.width), [I32(lane) for lane in taken])
        return b.shuffle_vector(one, other, mask)

    return combine(b, halves(0), halves(1))


def _add(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.fadd(x, y)


def _larger(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """`y` where one is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _softmax(module: ir.Module, shape: _Shape) -> ir.Function:
    """Softmax of n numbers in place; after them is room for a vector more."""
    lanes = shape.lanes
    b, (row, n) = function(module, "softmax", VOID, [lanes.pointer, I64])
    lanes.store(b, lanes.every(-math.inf), at(b, row, n))  # exp makes it 0
    with loop(b, I64(0), n, lanes.width, [lanes.every(-math.inf)]) as scores:
        score = lanes.load(b, at(b, row, scores.index))
        scores.next.append(_larger(b, score, scores.values[0]))
    largest = _folded(b, lanes, scores.results * lanes.width, _larger)
    with loop(b, I64(0), n, lanes.width, [lanes.every(0.0)]) as terms:
        here = at(b, row, terms.index)
        term = exp(b, lanes, b.fsub(lanes.load(b, here), largest))
        lanes.store(b, term, here)
        terms.next.append(b.fadd(terms.values[0], term))
    total = _folded(b, lanes, terms.results * lanes.width, _add)
    share = b.fdiv(lanes.every(1.0), total)
    with loop(b, I64(0), n, lanes.width) as weights:
        here = at(b, row, weights.index)
        lanes.store(b, b.fmul(lanes.load(b, here), share), here)
    b.ret_void()
    return b.function


def _sums(module: ir.Module, shape: _Shape) -> ir.Function:
    """out[g] = the sum of weights[g, t] v[t] over all keys t, in their order.

    Shapes: out [G, D]; v [n_slots, D]; weights [G, row].
    """
    lanes, head_dim = shape.lanes, shape.head_dim
    numbers = lanes.pointer
    chunks = [(*chunk, _adding(module, shape, chunk[2])) for chunk in shape.chunks()]
    types = [numbers, numbers, numbers, I64, I64.as_pointer(), I64, I64]
    b, (out, v, weights, row, bounds, first, end) = function(module, "sums", VOID, types)
    with loop(b, I64(0), I64(shape.n_group * head_dim), lanes.width) as part:
        lanes.store(b, lanes.every(0.0), at(b, out, part.index))
    with loop(b, first, end, carried=[I64(0)]) as slices:
        start, stop = _slice_of(b, bounds, slices.index)
        n_before = slices.values[0]
        with loop(b, start, stop, shape.block) as block:
            values = at(b, v, b.mul(block.index, I64(head_dim)))
            following = _following(b, bounds, slices.index, end, block.index, shape.block)
            next_values = at(b, v, b.mul(following, I64(head_dim)))
            n = smaller(b, b.sub(stop, block.index), I64(shape.block))
            t = b.add(n_before, b.sub(block.index, start))
            for chunk_start, chunk_stop, n_rows, adding in chunks:
                with loop(b, I64(chunk_start), I64(chunk_stop), n_rows) as g:
                    out_rows = at(b, out, b.mul(g.index, I64(head_dim)))
                    own = at(b, weights, b.mul(g.index, row), t)
                    b.call(adding, [out_rows, values, next_values, own, row, n])
        slices.next.append(b.add(n_before, b.sub(stop, start)))
    b.ret_void()
    return b.function


def _adding(module: ir.Module, shape: _Shape, n_rows: int) -> ir.Function:
    """Add weights[g, t] v[t] to out[g] for a few rows g and n keys t.

    As many parts of the rows as registers have room for take all keys before the next.

    Shapes: out [n_rows, D]; v and what comes `following` [n, D]; weights [n_rows, row].
    """
    lanes, head_dim = shape.lanes, shape.head_dim
    n_at_once = shape.vectors_at_once(n_rows)
    types = [*[lanes.pointer] * 4, I64, I64]
    b, (out, v, following, weights, row, n) = function(module, f"add_{n_rows}", VOID, types)
    vectors = [lanes.width * vector for vector in range(n_at_once)]
    with loop(b, I64(0), I64(head_dim), n_at_once * lanes.width) as part:
        places = [
            at(b, out, part.index, g * head_dim + vector)
            for g in range(n_rows)
            for vector in vectors
        ]
        with loop(b, I64(0), n, carried=[lanes.load(b, place) for place in places]) as key:
            offset = b.add(part.index, b.mul(key.index, I64(head_dim)))
            value = at(b, v, offset)
            _prefetch(b, shape, at(b, following, offset), n_at_once * lanes.width)
            parts = [lanes.load(b, at(b, value, vector)) for vector in vectors]
            shares = [
                lanes.broadcast(b, b.load(at(b, weights, b.mul(row, I64(g)), key.index)))
                for g in range(n_rows)
            ]
            terms = [(share, one) for share in shares for one in parts]
            for (share, one), so_far in zip(terms, key.values, strict=True):
                key.next.append(lanes.fma(b, share, one, so_far))
        for place, total in zip(places, key.results, strict=True):
            lanes.store(b, total, place)
    b.ret_void()
    return b.function
