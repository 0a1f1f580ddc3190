"""Attention of one query per sequence, over keys and values where they lie in the KV cache.

What one KV head keeps of one sequence is read once, for the whole group of queries that share it.
Scores are taken for a vector of keys at a time and go to a scratch row per query; their softmax is
taken in place; the values are then summed by it, for a few queries at a time. Threads share the
keys of a long sequence, a part each: whoever is done last puts the parts' results together.

A result depends on the query, its keys and its values alone: not on the other sequences, not on the
threads, and not on how the slots are cut into ranges.

Source: grouped queries, arXiv 2305.13245; keys in parts, FlashDecoding, arXiv 2311.01282.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from operator import add

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.attention import PART_FIELDS, PART_KEYS, DecodeBatch, Scores
from parallel_llama.ops.cpu.builder import (
    I64,
    LINE_BYTES,
    Lanes,
    Thread,
    Value,
    Variable,
    copy,
    fma,
    in_this_order,
    larger,
    loop,
    shuffle,
    smaller,
    when,
    where,
)
from parallel_llama.ops.cpu.exponential import exp, tanh
from parallel_llama.ops.cpu.kv_rows import KVRows
from parallel_llama.ops.cpu.program import Machine, Program, Run, at_once, this_machine

_MAX_CHUNK = 4  # of a group whose sums of values stay in registers together
_BLOCK_BYTES = 1 << 13  # of values that a whole group takes while the next ones are on their way
# Blocks of keys, or of values, from the one that is read to the one that memory is asked for.
_AHEAD = 2
# Of a result: the largest score, and the sum of what exp makes of all in relation to it.
_SHARE_FIELDS = 2


@dataclass(frozen=True)
class _Shape:
    """What a kernel is made for."""

    lanes: Lanes
    head_dim: int
    n_group: int
    scores: Scores
    rows: KVRows
    n_registers: int

    @property
    def block(self) -> int:
        """Keys whose values go through a whole group before the next ones."""
        return max(1, _BLOCK_BYTES // (self.head_dim * self.lanes.stored.itemsize))

    @property
    def n_spare(self) -> int:
        """Keys or values that there must be room for in a row of numbers to compute with."""
        return self.lanes.width if self.rows.is_plain else max(self.lanes.width, self.block)

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
        return max(n for n in range(1, fitting + 1) if n_vectors % n == 0)


class AttentionKernel:
    """Softmax attention of decode rows over their own keys, for one run of equal groups.

    Other rows of `out` are left as they are.

    Shapes: q, out [T, K * G, D], heads contiguous, rows anywhere; k, v [K, n_slots, W] in the
    cache's dtype, slots contiguous, heads anywhere.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        head_dim: int,
        n_group: int,
        scores: Scores,
        machine: Machine,
    ) -> None:
        self.dtype, self.head_dim, self.n_group = dtype, head_dim, n_group
        lanes = machine.lanes(dtype, head_dim)
        self._width, self._rows = lanes.width, KVRows(cache_dtype, lanes, head_dim)
        shape = _Shape(lanes, head_dim, n_group, scores, self._rows, machine.n_vectors)
        integers = I64.as_pointer()
        numbers, rows = [lanes.pointer, I64], [self._rows.pointer, I64]
        arrays = [*numbers, *rows, *rows, *numbers, *numbers]
        counts, results = [integers, integers, integers, I64], [lanes.pointer, lanes.pointer]
        types = [*counts, integers, integers, *arrays, *results]
        self._program = Program("attention", types, partial(_attention, shape))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: DecodeBatch,
        out: Tensor,
        run: Run = at_once,
    ) -> None:
        n_kv_heads = len(k)
        assert q.shape == out.shape == (len(q), n_kv_heads * self.n_group, self.head_dim)
        assert q.stride()[1:] == out.stride()[1:] == (self.head_dim, 1)
        assert k.stride()[1:] == v.stride()[1:] == (self._rows.width, 1)
        assert q.dtype == out.dtype == self.dtype and k.dtype == v.dtype == self._rows.stored
        # A vector of scores may begin at a part's last key, and one of -inf after that. Before
        # its first key there may be most of a vector.
        n_keys = min(batch.max_len, PART_KEYS)
        stride = -(-n_keys // self._width) * self._width + 2 * self._width
        n_items = len(batch.parts) * n_kv_heads
        n_threads = min(torch.get_num_threads(), n_items)
        scores = torch.empty(n_threads * self.n_group * stride, dtype=self.dtype)
        n_results = n_items * self.n_group
        results = torch.empty(n_results, self.head_dim, dtype=self.dtype)
        shares = torch.empty(n_results, _SHARE_FIELDS, dtype=self.dtype)
        run(
            self._program, n_threads,
            batch.taken.data_ptr(), batch.done.data_ptr(), batch.n_parts.data_ptr(), n_kv_heads,
            batch.parts.data_ptr(), batch.slot_ranges.data_ptr(),
            q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0),
            out.data_ptr(), out.stride(0), scores.data_ptr(), stride,
            results.data_ptr(), shares.data_ptr(),
        )  # fmt: skip


@cache
def make_attention(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, n_group: int, scores: Scores
) -> AttentionKernel:
    """The kernel for this machine, compiled when first asked for; `computes` says for what."""
    return AttentionKernel(dtype, cache_dtype, head_dim, n_group, scores, this_machine())


def _attention(shape: _Shape, b: ir.IRBuilder, thread: Thread, arguments: list[Value]) -> None:
    """The kernel.

    for (part of a row, head) that no other thread has taken:
        scores = (q[row, group of head] * scale) @ k[head, slots of part].T, with a soft cap
        weights = exp(scores - largest)
        result = weights @ v[head, slots of part]
        if the row has no other part:
            out[row, group of head] = result / sum of weights
        elif no other result of the row is left to be done:
            out[row] = their sum, as `query_columns` adds one to those before it
    """
    (
        taken, done, n_parts, n_kv_heads, parts, slot_ranges,
        q, q_stride, k, k_stride, v, v_stride, out, out_stride, scores, stride, results, shares,
    ) = arguments  # fmt: skip
    lanes, n_group, group_size = shape.lanes, shape.n_group, shape.n_group * shape.head_dim
    own = scores + thread.number * stride * n_group
    spare = Value(b, b.alloca(lanes.vector.element, shape.n_spare * shape.head_dim))
    scaled = Value(b, b.alloca(lanes.vector.element, group_size))
    with loop(b, 0, shape.n_spare * shape.head_dim, lanes.width) as i:
        # Numbers that nobody wrote may be so small that products with them are slow.
        lanes.store(spare + i, lanes.constant(b, 0))
    with thread.untaken(taken, n_parts[0] * n_kv_heads) as item:
        part, head = item // n_kv_heads, item % n_kv_heads
        row, n_keys, first, end, number, count, n_before = (
            parts[part * PART_FIELDS + i] for i in range(PART_FIELDS)
        )
        # Each key has the lane that its position has, in this part or in a longer one.
        start = n_before % lanes.width
        seen, group = (slot_ranges, first, end), head * group_size
        with loop(b, 0, group_size, lanes.width) as i:
            query = lanes.load(q + row * q_stride + group + i)
            lanes.store(scaled + i, query * shape.scores.factor_of(shape.head_dim))
        with loop(b, 0, n_group) as query:
            lanes.store(own + query * stride, lanes.constant(b, -math.inf))
        with _blocks(*seen, lanes.width, start) as block:
            _score(shape, scaled, k + head * k_stride, own, stride, block, spare)
        with loop(b, 0, n_group) as query:
            share = shares + (item * n_group + query) * _SHARE_FIELDS
            _weigh(lanes, own + query * stride, start + n_keys, share)
        own_out = out + row * out_stride
        result = where(count > 1, results + item * group_size, own_out + group)
        with loop(b, 0, group_size, lanes.width) as i:
            lanes.store(result + i, lanes.constant(b, 0))
        with _blocks(*seen, shape.block, start) as block:
            values = v + head * v_stride
            _add_values(shape, result, values, own, stride, block, spare)
        with when(count < 2), loop(b, 0, n_group) as query:
            total = shares[(item * n_group + query) * _SHARE_FIELDS + 1]
            _divide(shape, result + query * shape.head_dim, total)
        with when(count > 1):
            first_part, n_queries = part - number, n_kv_heads * n_group
            n_done = (done + first_part).add_atomically(1)
            with when(n_done > count * n_kv_heads - 2):
                done[first_part] = count.like(0)
                with loop(b, 0, n_queries) as query:
                    at = first_part * n_queries + query
                    own_results = results + at * shape.head_dim, shares + at * _SHARE_FIELDS
                    own_query = own_out + query * shape.head_dim
                    _put_together(shape, own_query, *own_results, count, n_queries)


@dataclass(frozen=True)
class _Block:
    """Some keys of one range, at most as many as are taken at a time.

    They are the `t`-th and following ones of their part, and begin at `slot`; `n_left` are from
    there to the end of the range. Some blocks later, one begins at the slot `following`.
    """

    t: Value
    slot: Value
    n_left: Value
    following: Value


@contextmanager
def _blocks(slot_ranges: Value, first: Value, end: Value, size: int, at: Value) -> Iterator[_Block]:
    """Emit what is built inside for every block of a part's keys, in their order, counted from
    this number on.
    """
    b = slot_ranges.b
    n_before = Variable(at)
    with loop(b, first, end) as number:
        start, stop = slot_ranges[number * 2], slot_ranges[number * 2 + 1]
        with loop(b, start, stop, size) as slot:
            next_start = slot_ranges[smaller(number + 1, end - 1) * 2]
            ahead = slot + _AHEAD * size
            following = where(ahead < stop, ahead, next_start + (ahead - stop))
            yield _Block(n_before.value + (slot - start), slot, stop - slot, following)
        n_before.value += stop - start


def _score(
    shape: _Shape, q: Value, k: Value, scores: Value, stride: Value, block: _Block, spare: Value
) -> None:
    """scores[g, t] = q[g] @ k[slot of t], capped, for queries g and a block's keys t.

    Shapes: q [G, D]; k [n_slots, W]; scores [G, stride], undefined after the last key.
    """
    lanes, head_dim, rows = shape.lanes, shape.head_dim, shape.rows
    own, following = k + block.slot * rows.width, k + block.following * rows.width
    if rows.is_plain:
        keys = _readable(shape, own, block.n_left, spare)
    else:
        keys = _wide(shape, own, smaller(block.n_left, lanes.width), following, spare)
    with loop(q.b, 0, shape.n_group) as query:
        dots = _dots(shape, q + query * head_dim, keys)
        lanes.store(scores + query * stride + block.t, _capped(shape, dots))


def _capped(shape: _Shape, dots: Value) -> Value:
    """The scores of products of queries and keys."""
    cap = shape.scores.soft_cap
    return dots if cap is None else tanh(shape.lanes, dots) * cap


def _wide(shape: _Shape, rows: Value, n: Value, following: Value, spare: Value) -> Value:
    """Some rows of the cache as numbers to compute with; meanwhile memory is asked for others.

    That they are read row by row would be enough if it went on all the time, as it does where they
    are computed with as they are.
    """
    width, line = shape.rows.width, LINE_BYTES // shape.rows.stored.itemsize
    with loop(rows.b, 0, n) as t:
        for start in range(0, width, line):
            (following + (t * width + start)).prefetch(cache=2)
        shape.rows.read(rows + t * width, spare + t * shape.head_dim)
    return spare


def _readable(shape: _Shape, keys: Value, n_keys: Value, spare: Value) -> Value:
    """A vector's worth of keys; where fewer are left, their copy, for memory may end after them."""
    are_few = n_keys < shape.lanes.width
    with when(are_few, likely=False):
        copy(spare, keys, n_keys * (shape.head_dim * shape.lanes.stored.itemsize))
    return where(are_few, spare, keys)


def _dots(shape: _Shape, q: Value, keys: Value) -> Value:
    """One query by a vector's worth of keys: y[w] = q @ keys[w].

    Shapes: q [D]; keys [W, D]; the result [W].
    """
    lanes, head_dim = shape.lanes, shape.head_dim
    parts = {i: lanes.load(q + i) for i in range(0, head_dim, lanes.width)}
    sums = []
    for number in range(lanes.width):
        key, total = keys + number * head_dim, lanes.constant(q.b, 0)
        for i, x in parts.items():
            total = fma(x, lanes.load(key + i), total)
        sums.append(total)
        in_this_order(q.b)
    return _summed(lanes, sums)


def _summed(lanes: Lanes, vectors: Sequence[Value]) -> Value:
    """A vector whose lane i is the sum of all lanes of the i-th vector, in an order all share.

    Each step adds halves of ever shorter stretches, of two vectors at a time: W - 1 additions for
    W vectors, where one at a time would take log2(W) each. With stretches of four lanes, abcd and
    ABCD become a+c b+d A+C B+D.
    """
    while len(vectors) > 1:
        half = len(vectors) // 2
        # The first halves of all stretches, those of the first vector before the second's.
        first = [n + n // half % 2 * (lanes.width - half) for n in range(lanes.width)]
        second = [n + half for n in first]
        vectors = [
            shuffle(x, first, y) + shuffle(x, second, y)
            for x, y in zip(vectors[:half], vectors[half:], strict=True)
        ]
    return vectors[0]


def _weigh(lanes: Lanes, row: Value, n: Value, share: Value) -> None:
    """row = exp(row - max(row)) for n numbers and room for a vector.

    That maximum, and the sum of the results, are left at `share`.
    """
    b = row.b
    lanes.store(row + n, lanes.constant(b, -math.inf))  # exp makes it 0
    largest = Variable(lanes.constant(b, torch.finfo(lanes.computed).min))
    with loop(b, 0, n, lanes.width) as t:
        largest.value = larger(lanes.load(row + t), largest.value)
    maximum = lanes.reduce(larger, largest.value)
    total = Variable(lanes.constant(b, 0))
    with loop(b, 0, n, lanes.width) as t:
        term = exp(lanes, lanes.load(row + t) - lanes.splat(maximum))
        lanes.store(row + t, term)
        total.value += term
    share[0], share[1] = maximum, lanes.reduce(add, total.value)


def _divide(shape: _Shape, result: Value, total: Value) -> None:
    """result /= total. Shapes: [D]."""
    inverse = 1 / shape.lanes.splat(total)
    with loop(result.b, 0, shape.head_dim, shape.lanes.width) as i:
        shape.lanes.store(result + i, shape.lanes.load(result + i) * inverse)


def _put_together(
    shape: _Shape, out: Value, results: Value, shares: Value, n: Value, step: Value
) -> None:
    """out = the sum of a query's n results, divided by that of their weights.

    There are the results of so many queries, a step, from one of its own to the next. Where shares
    were, there are factors then: of all results before, and of the result.
    """
    lanes, b = shape.lanes, out.b

    def share_at(part: Value) -> Value:
        return shares + part * step * _SHARE_FIELDS

    largest, total = (Variable(lanes.splat(shares[i])) for i in range(_SHARE_FIELDS))
    with loop(b, 1, n) as part:
        share, before = share_at(part), largest.value
        own = lanes.splat(share[0])
        largest.value = larger(own, before)
        factors = exp(lanes, before - largest.value), exp(lanes, own - largest.value)
        total.value = fma(lanes.splat(share[1]), factors[1], total.value * factors[0])
        for number, factor in enumerate(factors):
            share[number] = lanes.reduce(larger, factor)  # all lanes have the same
    inverse = 1 / total.value
    with loop(b, 0, shape.head_dim, lanes.width) as i:
        value = Variable(lanes.load(results + i))
        with loop(b, 1, n) as part:
            before, factor = (lanes.splat(share_at(part)[i]) for i in range(_SHARE_FIELDS))
            own = lanes.load(results + part * step * shape.head_dim + i)
            value.value = fma(own, factor, value.value * before)
        lanes.store(out + i, value.value * inverse)


def _add_values(
    shape: _Shape,
    out: Value,
    v: Value,
    weights: Value,
    stride: Value,
    block: _Block,
    spare: Value,
) -> None:
    """out[g] += weights[g, t] * v[slot of t] for the queries g and a block's keys t, in order.

    A few queries and as many parts of them as registers have room for take all keys before others.

    Shapes: out [G, D]; v [n_slots, W]; weights [G, stride].
    """
    lanes, head_dim, rows, b = shape.lanes, shape.head_dim, shape.rows, out.b
    values, following = v + block.slot * rows.width, v + block.following * rows.width
    n_keys = smaller(block.n_left, shape.block)
    if not rows.is_plain:
        values = _wide(shape, values, n_keys, following, spare)
    for first, stop, n_rows in shape.chunks():
        part = shape.vectors_at_once(n_rows) * lanes.width
        offsets = [(g, i) for g in range(n_rows) for i in range(0, part, lanes.width)]
        with loop(b, first, stop, n_rows) as row, loop(b, 0, head_dim, part) as start:
            addresses = [out + row * head_dim + start + (g * head_dim + i) for g, i in offsets]
            own = weights + row * stride + block.t
            sums = [Variable(lanes.load(address)) for address in addresses]
            with loop(b, 0, n_keys) as t:
                offset = start + t * head_dim
                parts = [lanes.load(values + offset + i) for i in range(0, part, lanes.width)]
                shares = [lanes.splat(own[stride * g + t]) for g in range(n_rows)]
                for total, (share, value) in zip(sums, product(shares, parts), strict=True):
                    total.value = fma(share, value, total.value)
            for total, address in zip(sums, addresses, strict=True):
                lanes.store(address, total.value)
