"""Softmax attention of single queries, such as a decoded token's, over the KV cache in place.

The keys and values of a KV head are read once for all query heads that share it. The kernel
computes scores for a vector of keys at a time, into a scratch row per query head. After an in-place
softmax it sums the values, for a few query heads at a time. The keys of a long sequence are split
into parts for several threads; the thread that finishes last merges the results of the parts.

A result depends only on the query, its keys and its values: not on other sequences, the threads, or
how the slots are split into ranges.

Source: grouped queries, arXiv 2305.13245; keys in parts, Flash-Decoding,
https://pytorch.org/blog/flash-decoding.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from operator import add
from typing import Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.attention import Scores
from parallel_llama.ops.cpu.arguments import Integer, Integers, Numbers, Rows, T
from parallel_llama.ops.cpu.attention_plan import PART_FIELDS, DecodeBatch
from parallel_llama.ops.cpu.ir import (
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
    reduced,
    smaller,
    when,
    where,
)
from parallel_llama.ops.cpu.jit import CompiledKernel, CPUFeatures, Launcher, at_once, this_machine
from parallel_llama.ops.cpu.kv_rows import KVRows
from parallel_llama.ops.cpu.vector_math import exp, tanh
from parallel_llama.plan import PART_KEYS

_MAX_AT_ONCE = 4  # queries of a KV head with outputs in registers at the same time
_BLOCK_BYTES = 1 << 13  # of values per block; each query of a KV head reads the whole block
# How far ahead rows are prefetched, in blocks of keys or values.
_AHEAD = 2
# Per result: the largest score, and the sum of exp(score - largest).
PARTIAL_FIELDS = 2


@dataclass(frozen=True)
class _Shape:
    """The sizes and formats that a kernel is compiled for."""

    lanes: Lanes
    head_dim: int
    heads_per_kv: int
    scores: Scores
    rows: KVRows
    n_registers: int

    @property
    def block(self) -> int:
        """Keys per block; all queries of a KV head read a block's values before the next block."""
        return max(1, _BLOCK_BYTES // (self.head_dim * self.lanes.stored.itemsize))

    @property
    def n_buffered(self) -> int:
        """The capacity of the buffer for copied or converted keys or values, in rows."""
        return self.lanes.width if self.rows.is_plain else max(self.lanes.width, self.block)

    def query_loops(self) -> Iterator[tuple[int, int, int]]:
        """Yields start, stop and step of loops over queries; the steps differ by at most one."""
        n_steps = -(-self.heads_per_kv // _MAX_AT_ONCE)
        size, n_larger = divmod(self.heads_per_kv, n_steps)
        middle = n_larger * (size + 1)
        if n_larger:
            yield 0, middle, size + 1
        yield middle, self.heads_per_kv, size

    def vectors_at_once(self, n_rows: int) -> int:
        """How many vectors of a value to sum at once for `n_rows` queries.

        The sums and the queries' weights fit the registers.
        """
        n_vectors = self.head_dim // self.lanes.width
        fitting = (self.n_registers - 1 - n_rows) // n_rows
        return max(n for n in range(1, fitting + 1) if n_vectors % n == 0)


@dataclass(slots=True, kw_only=True)
class _Arguments(Generic[T]):
    taken: Integers[T]
    done: Integers[T]
    n_parts: Integers[T]
    n_kv_heads: Integer[T]
    parts: Integers[T]
    slot_ranges: Integers[T]
    q: Numbers[T]
    q_stride: Integer[T]
    k: Rows[T]
    k_stride: Integer[T]
    v: Rows[T]
    v_stride: Integer[T]
    out: Numbers[T]
    out_stride: Integer[T]
    scores: Numbers[T]
    scores_stride: Integer[T]
    results: Numbers[T]
    partials: Numbers[T]
    sinks: Numbers[T]


class DecodeAttentionKernel:
    """Attention of decode rows over their own keys, for KV heads with equal numbers of queries.

    Other rows of `out` are unchanged.

    Shapes: q, out [T, K * G, D], each row contiguous; k, v [K, n_slots, W] in the cache's dtype,
    contiguous for each head; sinks [K * G], contiguous.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        head_dim: int,
        heads_per_kv: int,
        scores: Scores,
        machine: CPUFeatures,
    ) -> None:
        self.dtype, self.head_dim, self.heads_per_kv = dtype, head_dim, heads_per_kv
        lanes = machine.lanes(dtype, head_dim)
        self._width, self._rows = lanes.width, KVRows(cache_dtype, lanes, head_dim)
        self._has_sinks = scores.has_sinks
        shape = _Shape(lanes, head_dim, heads_per_kv, scores, self._rows, machine.n_vectors)
        self._program = CompiledKernel(
            _Arguments[float],
            partial(_attention, shape),
            numbers=lanes.pointer,
            rows=self._rows.pointer,
        )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: DecodeBatch,
        out: Tensor,
        run: Launcher = at_once,
        sinks: Tensor | None = None,
    ) -> None:
        assert (sinks is not None) == self._has_sinks
        self._run(q, k, v, batch, out, run, sinks)

    def parts(self, q: Tensor, k: Tensor, v: Tensor, batch: DecodeBatch) -> tuple[Tensor, Tensor]:
        """The result of each part of a `PartTile`, for `MergePartsKernel`, which adds the sinks.

        A result is not yet divided by the sum of its weights.

        Shapes: the results [n_parts, K * G, D]; their largest scores and sums [n_parts, K * G, 2].
        """
        results, partials = self._run(q, k, v, batch, q, at_once)
        n_heads = len(k) * self.heads_per_kv
        return results.view(-1, n_heads, self.head_dim), partials.view(-1, n_heads, PARTIAL_FIELDS)

    def _run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: DecodeBatch,
        out: Tensor,
        run: Launcher,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        n_kv_heads = len(k)
        assert q.shape == out.shape == (len(q), n_kv_heads * self.heads_per_kv, self.head_dim)
        assert q.stride()[1:] == out.stride()[1:] == (self.head_dim, 1)
        assert k.stride()[1:] == v.stride()[1:] == (self._rows.width, 1)
        assert q.dtype == out.dtype == self.dtype and k.dtype == v.dtype == self._rows.stored
        # A row of scores has room for up to width - 1 numbers before the first key, for a last
        # vector that begins at the last key, and for a vector of -inf after the last key.
        n_keys = min(batch.max_len, PART_KEYS)
        stride = -(-n_keys // self._width) * self._width + 2 * self._width
        n_items = len(batch.parts) * n_kv_heads
        n_threads = min(torch.get_num_threads(), n_items)
        scores = torch.empty(n_threads * self.heads_per_kv * stride, dtype=self.dtype)
        n_results = n_items * self.heads_per_kv
        results = torch.empty(n_results, self.head_dim, dtype=self.dtype)
        partials = torch.empty(n_results, PARTIAL_FIELDS, dtype=self.dtype)
        arguments = _Arguments(
            taken=batch.taken.data_ptr(), done=batch.done.data_ptr(),
            n_parts=batch.n_parts.data_ptr(), n_kv_heads=n_kv_heads, parts=batch.parts.data_ptr(),
            slot_ranges=batch.slot_ranges.data_ptr(), q=q.data_ptr(), q_stride=q.stride(0),
            k=k.data_ptr(), k_stride=k.stride(0), v=v.data_ptr(), v_stride=v.stride(0),
            out=out.data_ptr(), out_stride=out.stride(0), scores=scores.data_ptr(),
            scores_stride=stride, results=results.data_ptr(), partials=partials.data_ptr(),
            sinks=sinks_at(sinks, q.shape[1], self.dtype),
        )  # fmt: skip
        run(self._program, n_threads, arguments)
        return results, partials


def sinks_at(sinks: Tensor | None, n_heads: int, dtype: torch.dtype) -> int:
    """The address of the sinks of this many heads, or 0 without sinks."""
    if sinks is None:
        return 0
    assert sinks.shape == (n_heads,) and sinks.is_contiguous() and sinks.dtype == dtype
    return sinks.data_ptr()


@cache
def make_decode_attention(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, heads_per_kv: int, scores: Scores
) -> DecodeAttentionKernel:
    return DecodeAttentionKernel(dtype, cache_dtype, head_dim, heads_per_kv, scores, this_machine())


def _attention(shape: _Shape, b: ir.IRBuilder, thread: Thread, args: _Arguments[Value]) -> None:
    """
    for (part of a row, head) that no other thread has taken:
        scores = (q[row, group of head] * scale) @ k[head, slots of part].T, with a soft cap
        weights = exp(scores - largest)
        result = weights @ v[head, slots of part]
        if the row has no other part:
            out[row, group of head] = result / sum of weights, which includes the sink's
        elif this is the last result of the row to be computed:
            out[row] = the row's results, merged as in `prefill_attention`
    """
    n_kv_heads, stride = args.n_kv_heads, args.scores_stride
    results, partials = args.results, args.partials
    lanes, heads_per_kv, group_size = (
        shape.lanes,
        shape.heads_per_kv,
        shape.heads_per_kv * shape.head_dim,
    )
    scores = args.scores + thread.number * stride * heads_per_kv
    buffer = Value(b, b.alloca(lanes.vector.element, shape.n_buffered * shape.head_dim))
    scaled_q = Value(b, b.alloca(lanes.vector.element, group_size))
    with loop(b, 0, shape.n_buffered * shape.head_dim, lanes.width) as i:
        # Uninitialised memory may contain subnormal numbers, which are slow.
        lanes.store(buffer + i, lanes.constant(b, 0))
    with thread.untaken(args.taken, args.n_parts[0] * n_kv_heads) as item:
        part, head = item // n_kv_heads, item % n_kv_heads
        row, n_keys, first, end, number, count, n_before = (
            args.parts[part * PART_FIELDS + i] for i in range(PART_FIELDS)
        )
        # A key's lane depends on its position alone, not on the start of its part.
        start = n_before % lanes.width
        ranges, group = (args.slot_ranges, first, end), head * group_size
        with loop(b, 0, group_size, lanes.width) as i:
            query = lanes.load(args.q + row * args.q_stride + group + i)
            lanes.store(scaled_q + i, query * shape.scores.factor_of(shape.head_dim))
        with loop(b, 0, heads_per_kv) as query:
            lanes.store(scores + query * stride, lanes.constant(b, -math.inf))
        with _blocks(*ranges, lanes.width, start) as block:
            _score(shape, scaled_q, args.k + head * args.k_stride, scores, stride, block, buffer)
        with loop(b, 0, heads_per_kv) as query:
            row_partial = partials + (item * heads_per_kv + query) * PARTIAL_FIELDS
            _weigh(lanes, scores + query * stride, start + n_keys, row_partial)
        out_row = args.out + row * args.out_stride
        result = where(count > 1, results + item * group_size, out_row + group)
        with loop(b, 0, group_size, lanes.width) as i:
            lanes.store(result + i, lanes.constant(b, 0))
        with _blocks(*ranges, shape.block, start) as block:
            values = args.v + head * args.v_stride
            _add_values(shape, result, values, scores, stride, block, buffer)
        with when(count < 2), loop(b, 0, heads_per_kv) as query:
            row_partial = partials + (item * heads_per_kv + query) * PARTIAL_FIELDS
            largest, total = (lanes.splat(row_partial[i]) for i in range(PARTIAL_FIELDS))
            sink = args.sinks + head * heads_per_kv + query if shape.scores.has_sinks else None
            scale = final_scale(
                lanes, largest, total, None if sink is None else lanes.splat(sink[0])
            )
            _multiply(shape, result + query * shape.head_dim, scale)
        with when(count > 1):
            first_part, n_heads = part - number, n_kv_heads * heads_per_kv
            n_done = (args.done + first_part).add_atomically(1)
            with when(n_done > count * n_kv_heads - 2):
                args.done[first_part] = count.like(0)
                with loop(b, 0, n_heads) as query:
                    index = first_part * n_heads + query
                    first_results = results + index * shape.head_dim
                    first_partials = partials + index * PARTIAL_FIELDS
                    out = out_row + query * shape.head_dim
                    sink = args.sinks + query if shape.scores.has_sinks else None
                    n, step = count, n_heads
                    merge(lanes, shape.head_dim, out, first_results, first_partials, n, step, sink)


@dataclass(frozen=True)
class _Block:
    """Consecutive keys of a range of slots, up to a maximum number.

    Args:
        t: the first key's index in the row of scores, where a part may begin after index 0.
        slot: its slot.
        n_left: the number of keys from there to the end of the range.
        following: the first slot of a later block, for prefetching.
    """

    t: Value
    slot: Value
    n_left: Value
    following: Value


@contextmanager
def _blocks(slot_ranges: Value, first: Value, end: Value, size: int, at: Value) -> Iterator[_Block]:
    """Emits the body for each block of a part's keys, which are numbered from `at` on."""
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
    shape: _Shape, q: Value, k: Value, scores: Value, stride: Value, block: _Block, buffer: Value
) -> None:
    """scores[g, t] = cap(q[g] @ k[slot of t]) for queries g and a block's keys t.

    Shapes: q [G, D]; k [n_slots, W]; scores [G, stride], undefined after the last key.
    """
    lanes, head_dim, rows = shape.lanes, shape.head_dim, shape.rows
    key_rows, following = k + block.slot * rows.width, k + block.following * rows.width
    if rows.is_plain:
        keys = _readable(shape, key_rows, block.n_left, buffer)
    else:
        keys = _wide(shape, key_rows, smaller(block.n_left, lanes.width), following, buffer)
    with loop(q.b, 0, shape.heads_per_kv) as query:
        dots = _dots(shape, q + query * head_dim, keys)
        lanes.store(scores + query * stride + block.t, _capped(shape, dots))


def _capped(shape: _Shape, dots: Value) -> Value:
    """The scores from products of queries and keys: applies the soft cap, if there is one."""
    cap = shape.scores.soft_cap
    return dots if cap is None else tanh(shape.lanes, dots) * cap


def _wide(shape: _Shape, rows: Value, n: Value, following: Value, buffer: Value) -> Value:
    """Converts n rows of the cache to the dtype to compute in, and prefetches later rows.

    Rows that need no conversion are not prefetched: they are read continuously, a pattern that
    hardware prefetchers recognise.
    """
    width, line_width = shape.rows.width, LINE_BYTES // shape.rows.stored.itemsize
    with loop(rows.b, 0, n) as t:
        for start in range(0, width, line_width):
            (following + (t * width + start)).prefetch(cache=2)
        shape.rows.read(rows + t * width, buffer + t * shape.head_dim)
    return buffer


def _readable(shape: _Shape, keys: Value, n_keys: Value, buffer: Value) -> Value:
    """The address of memory with one key per lane, all readable.

    With fewer keys than lanes, the keys are copied to `buffer`, since memory may end after them.
    """
    are_few = n_keys < shape.lanes.width
    with when(are_few, likely=False):
        copy(buffer, keys, n_keys * (shape.head_dim * shape.lanes.stored.itemsize))
    return where(are_few, buffer, keys)


def _dots(shape: _Shape, q: Value, keys: Value) -> Value:
    """The products of a query with one key per lane: y[i] = q @ keys[i].

    Shapes: q [D]; keys [lanes, D]; the result [lanes].
    """
    lanes, head_dim = shape.lanes, shape.head_dim
    q_vectors = {i: lanes.load(q + i) for i in range(0, head_dim, lanes.width)}
    sums = []
    for number in range(lanes.width):
        key, total = keys + number * head_dim, lanes.constant(q.b, 0)
        for i, x in q_vectors.items():
            total = fma(x, lanes.load(key + i), total)
        sums.append(total)
        in_this_order(q.b)
    return reduced(sums)


def _weigh(lanes: Lanes, row: Value, n: Value, partial_row: Value) -> None:
    """row = exp(row - max(row)) for n numbers; overwrites one vector of memory after these numbers.

    Stores the maximum and the sum of the results at `partial_row`.
    """
    b = row.b
    lanes.store(row + n, lanes.constant(b, -math.inf))  # weights of 0
    largest = Variable(lanes.constant(b, torch.finfo(lanes.computed).min))
    with loop(b, 0, n, lanes.width) as t:
        largest.value = larger(lanes.load(row + t), largest.value)
    maximum = lanes.reduce(larger, largest.value)
    total = Variable(lanes.constant(b, 0))
    with loop(b, 0, n, lanes.width) as t:
        term = exp(lanes, lanes.load(row + t) - lanes.splat(maximum))
        lanes.store(row + t, term)
        total.value += term
    partial_row[0], partial_row[1] = maximum, lanes.reduce(add, total.value)


def final_scale(lanes: Lanes, largest: Value, total: Value, sink: Value | None) -> Value:
    """The factor that completes a softmax: 1 / total, or with a sink

        exp(largest - top) / (total * exp(largest - top) + exp(sink - top))

    where top is the larger of the largest score and the sink.
    """
    if sink is None:
        return 1 / total
    top = larger(largest, sink)
    shrunk = exp(lanes, largest - top)
    return shrunk / fma(total, shrunk, exp(lanes, sink - top))


def _multiply(shape: _Shape, result: Value, scale: Value) -> None:
    """result *= scale. Shapes: [D]."""
    with loop(result.b, 0, shape.head_dim, shape.lanes.width) as i:
        shape.lanes.store(result + i, shape.lanes.load(result + i) * scale)


def merge(
    lanes: Lanes,
    head_dim: int,
    out: Value,
    results: Value,
    partials: Value,
    n: Value,
    step: Value,
    sink: Value | None,
) -> None:
    """out = the merged results of a query's n parts; `sink` is the address of its head's sink.

    Every `step`-th result in memory belongs to the query. Overwrites each part's partial with two
    factors: one for the merged results of the earlier parts, and one for the part's own result.
    """
    b = out.b

    def partial_at(part: Value) -> Value:
        return partials + part * step * PARTIAL_FIELDS

    largest, total = (Variable(lanes.splat(partials[i])) for i in range(PARTIAL_FIELDS))
    with loop(b, 1, n) as part:
        own_partial, before = partial_at(part), largest.value
        own = lanes.splat(own_partial[0])
        largest.value = larger(own, before)
        factors = exp(lanes, before - largest.value), exp(lanes, own - largest.value)
        total.value = fma(lanes.splat(own_partial[1]), factors[1], total.value * factors[0])
        for number, factor in enumerate(factors):
            own_partial[number] = lanes.reduce(larger, factor)  # all lanes have the same
    scale = final_scale(
        lanes, largest.value, total.value, None if sink is None else lanes.splat(sink[0])
    )
    with loop(b, 0, head_dim, lanes.width) as i:
        value = Variable(lanes.load(results + i))
        with loop(b, 1, n) as part:
            before, factor = (lanes.splat(partial_at(part)[i]) for i in range(PARTIAL_FIELDS))
            own = lanes.load(results + part * step * head_dim + i)
            value.value = fma(own, factor, value.value * before)
        lanes.store(out + i, value.value * scale)


def _add_values(
    shape: _Shape,
    out: Value,
    v: Value,
    weights: Value,
    stride: Value,
    block: _Block,
    spare: Value,
) -> None:
    """out[g] += weights[g, t] * v[slot of t] for queries g and a block's keys t, in order.

    As many queries and vectors of a value are summed together as fit the registers.

    Shapes: out [G, D]; v [n_slots, W]; weights [G, stride].
    """
    lanes, head_dim, rows, b = shape.lanes, shape.head_dim, shape.rows, out.b
    values, following = v + block.slot * rows.width, v + block.following * rows.width
    n_keys = smaller(block.n_left, shape.block)
    if not rows.is_plain:
        values = _wide(shape, values, n_keys, following, spare)
    for first, stop, n_rows in shape.query_loops():
        part = shape.vectors_at_once(n_rows) * lanes.width
        offsets = [(g, i) for g in range(n_rows) for i in range(0, part, lanes.width)]
        with loop(b, first, stop, n_rows) as row, loop(b, 0, head_dim, part) as start:
            addresses = [out + row * head_dim + start + (g * head_dim + i) for g, i in offsets]
            own = weights + row * stride + block.t
            sums = [Variable(lanes.load(address)) for address in addresses]
            with loop(b, 0, n_keys) as t:
                offset = start + t * head_dim
                parts = [lanes.load(values + offset + i) for i in range(0, part, lanes.width)]
                probabilities = [lanes.splat(own[stride * g + t]) for g in range(n_rows)]
                for total, (probability, value) in zip(
                    sums, product(probabilities, parts), strict=True
                ):
                    total.value = fma(probability, value, total.value)
            for total, address in zip(sums, addresses, strict=True):
                lanes.store(address, total.value)
