"""Softmax attention of consecutive queries of one sequence, over keys and values in the KV cache.

A column is a pair of a query and one of the query heads of a KV head. Columns are ordered by query,
and a few vectors of columns form a block. The lanes of every vector are columns, so neither the
softmax nor dot products have to add up lanes:

    scores[keys, columns]  = k[keys] @ q[:, columns]
    weights[keys, columns] = exp(scores[keys, columns] - the column's largest score in the tile)
    tile_sums[:, columns]  = v[keys].T @ weights[keys, columns]
    sums[:, columns]       = sums[:, columns] * before + tile_sums[:, columns] * factors

Keys are processed tile by tile. `before` and `factors` rescale the sums of the earlier tiles and of
this tile to the largest score so far. Tiles are counted from the start of the sequence, and a tile
that a query does not see leaves its column unchanged. So a result depends only on the query, its
keys and its values: not on the chunk's other queries, where the chunk begins, or the thread.

`PrefillAttentionKernel` reads keys and values in place, and converts a cache of another dtype a
tile at a time. A query's result has the same bits as in `decode_attention`, where lane i sums the
numbers i, i + W, i + 2 W, ... of a head, and a tree then adds up the lanes. Here each of these W
sums is computed on its own, and the same tree adds them up. A tile has the keys of one part in
`decode_attention`.

Source: FlashAttention-2, arXiv 2307.08691; online softmax, arXiv 1805.02867.
"""

import math
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Generic, Protocol

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.attention import NO_WINDOW, QueryChunk, Scores
from parallel_llama.ops.cpu.arguments import Integer, Integers, Numbers, Rows, T
from parallel_llama.ops.cpu.decode_attention import final_scale, sinks_at
from parallel_llama.ops.cpu.ir import (
    I64,
    LINE_BYTES,
    Lanes,
    Operand,
    Thread,
    Value,
    Variable,
    fma,
    in_this_order,
    larger,
    loop,
    shuffle,
    smaller,
    transposed,
    when,
    where,
)
from parallel_llama.ops.cpu.jit import CompiledKernel, CPUFeatures, Launcher, at_once, this_machine
from parallel_llama.ops.cpu.kv_rows import KVRows
from parallel_llama.ops.cpu.vector_math import exp, tanh
from parallel_llama.plan import PART_KEYS

_VECTORS = 3  # of columns in a block
_KEYS = 2  # scored together, so that their partial sums fit the registers


@dataclass(frozen=True)
class BlockShape:
    """The sizes that a kernel is compiled for.

    Args:
        n_vectors: vectors of columns in a block.
        tile: keys of a tile.
        n_at_once: a divisor of `tile`; `Products.score` gets a multiple of this many keys.
            `_VectorProducts` also sums at most this many numbers of a value together.
        n_strided: the number of partial sums of a tile's weights; each is over every `n_strided`-th
            key.
    """

    lanes: Lanes
    head_dim: int
    scores: Scores
    n_vectors: int
    tile: int
    n_at_once: int
    n_strided: int

    @property
    def n_columns(self) -> int:
        return self.n_vectors * self.lanes.width

    @property
    def n_padded(self) -> int:
        """The numbers of a head, rounded up to whole vectors."""
        return -(-self.head_dim // self.lanes.width) * self.lanes.width

    def mask(self, i: Value) -> Value | None:
        """The mask of a vector that begins at number i of a head; None if all lanes are used."""
        n = self.head_dim
        return None if n % self.lanes.width == 0 else self.lanes.first(n - i)

    def vectors(self, address: Value) -> list[Value]:
        """Loads a number for each column."""
        return [self.lanes.load(address + i * self.lanes.width) for i in range(self.n_vectors)]


def stack_array(b: ir.IRBuilder, type_: ir.Type, n: int) -> Value:
    """Allocates stack memory at a cache line; to be called at the beginning of a kernel."""
    array = b.alloca(type_, n)
    array.align = LINE_BYTES
    return Value(b, array)


@dataclass(frozen=True)
class QueryBlock:
    """Memory for a block of C columns.

    Shapes: q, sums [n_padded, C]; scores [tile, C]; positions [C]; totals [n_strided, C].
    """

    q: Value
    sums: Value
    scores: Value
    positions: Value
    totals: Value

    @classmethod
    def of(cls, shape: BlockShape, b: ir.IRBuilder) -> "QueryBlock":
        rows = (shape.n_padded, shape.n_padded, shape.tile, 1, shape.n_strided)
        element = shape.lanes.vector.element
        return cls(*(stack_array(b, element, n * shape.n_columns) for n in rows))


@dataclass(frozen=True)
class Keys:
    """The slots of a sequence's keys at the positions from `first` to `stop` - 1."""

    slots: Value
    first: Value
    stop: Value

    def slot(self, position: Value) -> Value:
        """The slot of the key at a position; outside of the range, that of the nearest key."""
        return self.slots[larger(smaller(position, self.stop - 1), self.first) - self.first]


@dataclass(slots=True, kw_only=True)
class ChunkArguments(Generic[T]):
    """The arguments for a chunk of n queries, except the addresses of keys and values."""

    taken: Integers[T]
    n_blocks: Integer[T]
    n_kv_heads: Integer[T]
    heads_per_kv: Integer[T]
    n: Integer[T]
    start: Integer[T]
    slots: Integers[T]
    n_keys: Integer[T]
    window: Integer[T]
    q: Numbers[T]
    q_stride: Integer[T]
    out: Numbers[T]
    out_stride: Integer[T]
    sinks: Numbers[T]


def chunk_arguments(
    shape: BlockShape,
    q: Tensor,
    n_kv_heads: int,
    chunk: QueryChunk,
    out: Tensor,
    sinks: Tensor | None,
) -> ChunkArguments[int]:
    """Shapes: q, out [T, K * G, D], each row contiguous; sinks [K * G], contiguous."""
    assert (sinks is not None) == shape.scores.has_sinks
    q, out = q[chunk.rows], out[chunk.rows]
    n, n_heads, head_dim = q.shape
    assert q.shape == out.shape and head_dim == shape.head_dim and n_heads % n_kv_heads == 0
    assert q.stride()[1:] == out.stride()[1:] == (head_dim, 1)
    assert q.dtype == out.dtype == shape.lanes.computed
    heads_per_kv = n_heads // n_kv_heads
    return ChunkArguments(
        taken=chunk.taken.data_ptr(), n_blocks=-(-n * heads_per_kv // shape.n_columns),
        n_kv_heads=n_kv_heads, heads_per_kv=heads_per_kv, n=n, start=chunk.positions.start,
        slots=chunk.slots.data_ptr(), n_keys=len(chunk.slots),
        window=NO_WINDOW if chunk.window is None else chunk.window, q=q.data_ptr(),
        q_stride=q.stride(0), out=out.data_ptr(), out_stride=out.stride(0),
        sinks=sinks_at(sinks, n_heads, shape.lanes.computed),
    )  # fmt: skip


def keys_of(chunk: ChunkArguments[Value]) -> Keys:
    stop = chunk.start + chunk.n
    return Keys(chunk.slots, stop - chunk.n_keys, stop)


class Products(Protocol):
    """The two products of attention, for a KV head and a block."""

    def prepare(self) -> None:
        """Called when the block's queries have been loaded."""

    def score(self, head: Value, tile: Value, n: Value) -> None:
        """scores = k @ q for n keys from position `tile` on, with n a multiple of `n_at_once`."""

    def add_values(self, n: Value, before: list[Value], factors: list[Value]) -> None:
        """sums = sums * before + (v.T @ scores) * factors, for the first n of the scored keys.

        The other keys that were scored have weight 0.
        """


def attend(
    shape: BlockShape,
    block: QueryBlock,
    products: Products,
    thread: Thread,
    chunk: ChunkArguments[Value],
) -> None:
    """Emits attention of a chunk's queries.

    for (head, columns) in the pairs of KV head and block that no other thread has taken:
        for keys in the tiles that one of the columns sees:
            scores = k[head, keys] @ q[columns], -inf where a column does not see a key
            weights = exp(scores - largest of the tile)
            before = exp(largest before this tile - largest so far)
            factors = exp(largest of the tile - largest so far)
            sums = sums * before + (v[head, keys].T @ weights) * factors
            totals = totals * before + (sum of weights) * factors
        out[columns] = sums / totals, with the weights of sinks in the totals
    """
    b, window, first_key = thread.number.b, chunk.window, keys_of(chunk).first
    with thread.untaken(chunk.taken, chunk.n_blocks * chunk.n_kv_heads) as item:
        # The last blocks come first, since they see the most keys: this balances the threads.
        number = chunk.n_blocks - 1 - item // chunk.n_kv_heads
        columns = _Columns(number * shape.n_columns, chunk)
        head = item % chunk.n_kv_heads
        first, last = columns.position(0), columns.position(shape.n_columns - 1)
        head_offset = head * chunk.heads_per_kv * shape.head_dim
        _load(shape, chunk.q + head_offset, columns, block)
        products.prepare()
        softmax = _Softmax(shape, b)
        start = larger(first - window + 1, first_key) & -shape.tile
        with loop(b, start, last + 1, shape.tile) as tile:
            n_seen = smaller(last + 1 - tile, shape.tile)
            n_scored = (n_seen + (shape.n_at_once - 1)) & -shape.n_at_once
            products.score(head, tile, n_scored)
            if shape.scores.soft_cap is not None:
                _cap(shape, shape.scores.soft_cap, n_scored, block)
            last_hidden = larger(last - window, first_key - 1)
            is_all_seen = (tile + n_scored < first + 2) & (last_hidden < tile)
            with when(is_all_seen ^ 1):
                _mask_scores(shape, tile, n_scored, window, first_key, block)
            before, factors = softmax.weigh(n_scored, block)
            products.add_values(n_seen, before, factors)
        scales = _final_scales(shape, chunk.sinks + head * chunk.heads_per_kv, columns, softmax)
        _store(shape, chunk.out + head_offset, columns, scales, block)


@dataclass(frozen=True)
class _Columns:
    """The columns of a block, from number `first` on.

    Columns beyond the last one are copies of it, and store the same result at the same address.
    """

    first: Value
    chunk: ChunkArguments[Value]

    def _column(self, number: Operand) -> Value:
        return smaller(self.first + number, self.chunk.n * self.chunk.heads_per_kv - 1)

    def position(self, number: Operand) -> Value:
        """The position of the column's query in its sequence."""
        return self._column(number) // self.chunk.heads_per_kv + self.chunk.start

    def head(self, number: Operand) -> Value:
        """The column's query head, counted from the first of its KV head."""
        return self._column(number) % self.chunk.heads_per_kv

    def row(self, array: Value, stride: Value, number: Operand, head_dim: int) -> Value:
        """The address of a column's numbers in the array of a KV head's queries or results."""
        token = self._column(number) // self.chunk.heads_per_kv
        return array + token * stride + self.head(number) * head_dim


def _load(shape: BlockShape, q: Value, columns: _Columns, block: QueryBlock) -> None:
    """Loads a block's queries, multiplied by the scale, and their positions; sets sums to 0."""
    lanes, b, stride = shape.lanes, q.b, columns.chunk.q_stride
    scale = shape.scores.factor_of(shape.head_dim)
    with loop(b, 0, shape.n_columns, lanes.width) as first:
        rows = []
        for lane in range(lanes.width):
            rows.append(columns.row(q, stride, first + lane, shape.head_dim))
            position = columns.position(first + lane)
            block.positions[first + lane] = position.to(lanes.vector.element)
        with loop(b, 0, shape.head_dim, lanes.width) as i:
            numbers = [lanes.load(row + i, shape.mask(i)) * scale for row in rows]
            for number, number_columns in enumerate(transposed(numbers)):
                offset = first + (i + number) * shape.n_columns
                lanes.store(block.q + offset, number_columns)
                lanes.store(block.sums + offset, lanes.constant(b, 0))


def _cap(shape: BlockShape, cap: float, n: Value, block: QueryBlock) -> None:
    """scores = tanh(scores) * cap for n keys of a tile."""
    lanes = shape.lanes
    with loop(n.b, 0, n * shape.n_columns, lanes.width) as i:
        lanes.store(block.scores + i, tanh(lanes, lanes.load(block.scores + i)) * cap)


def _mask_scores(
    shape: BlockShape, tile: Value, n: Value, window: Value, first_key: Value, block: QueryBlock
) -> None:
    """scores[t] = -inf in columns that do not see key t of a tile.

    A column sees the keys from `first_key` on that are in its window.
    """
    lanes, b = shape.lanes, tile.b
    element = lanes.vector.element
    width, before_all = (lanes.splat(each.to(element)) for each in (window, first_key - 1))
    with loop(b, 0, n) as t:
        key = lanes.splat((tile + t).to(element))
        for i in range(0, shape.n_columns, lanes.width):
            address = block.scores + t * shape.n_columns + i
            position = lanes.load(block.positions + i)
            is_near = larger(position - width, before_all) < key
            score = where(is_near, lanes.load(address), -math.inf)
            lanes.store(address, where(position < key, score.like(-math.inf), score))


class _Softmax:
    """The largest score of each column so far, and the sum of its weights."""

    def __init__(self, shape: BlockShape, b: ir.IRBuilder) -> None:
        self._shape, lanes = shape, shape.lanes
        # Not -inf, since -inf - -inf is NaN and a column may see no key of its first tile.
        self._least = lanes.constant(b, torch.finfo(lanes.computed).min)
        self.largest = [Variable(self._least) for _ in range(shape.n_vectors)]
        self.totals = [Variable(lanes.constant(b, 0)) for _ in range(shape.n_vectors)]

    def weigh(self, n: Value, block: QueryBlock) -> tuple[list[Value], list[Value]]:
        """Converts the scores of n keys to weights.

        Returns: the factors for the sums of earlier tiles, and the factors for those of this tile.
        """
        shape, scores, b = self._shape, block.scores, n.b
        tile_largest = [Variable(self._least) for _ in self.largest]
        with loop(b, 0, n) as t:
            for largest, score in zip(
                tile_largest, shape.vectors(scores + t * shape.n_columns), strict=True
            ):
                largest.value = larger(score, largest.value)
        self._exponentiate(n, block, [largest.value for largest in tile_largest])
        before, factors = [], []
        for in_tile, so_far, total, tile_total in zip(
            tile_largest, self.largest, self.totals, self._total(block), strict=True
        ):
            earlier = so_far.value
            so_far.value = larger(in_tile.value, earlier)
            before.append(exp(shape.lanes, earlier - so_far.value))
            factors.append(exp(shape.lanes, in_tile.value - so_far.value))
            total.value = fma(tile_total, factors[-1], total.value * before[-1])
        return before, factors

    def _exponentiate(self, n: Value, block: QueryBlock, largest: list[Value]) -> None:
        """Converts scores to weights, and sums the weights of keys that are `n_strided` apart."""
        shape, lanes, b = self._shape, self._shape.lanes, n.b
        with loop(b, 0, shape.n_strided * shape.n_columns, lanes.width) as i:
            lanes.store(block.totals + i, lanes.constant(b, 0))
        with loop(b, 0, n) as t:
            scores = block.scores + t * shape.n_columns
            totals = block.totals + (t & (shape.n_strided - 1)) * shape.n_columns
            for number, score in enumerate(shape.vectors(scores)):
                weight, at = exp(lanes, score - largest[number]), number * lanes.width
                lanes.store(scores + at, weight)
                lanes.store(totals + at, lanes.load(totals + at) + weight)

    def _total(self, block: QueryBlock) -> list[Value]:
        """The sums of a tile's weights, in the order in which `Lanes.reduce` adds lanes."""
        shape = self._shape
        rows = [shape.vectors(block.totals + i * shape.n_columns) for i in range(shape.n_strided)]
        while len(rows) > 1:
            half = len(rows) // 2
            pairs = zip(rows[:half], rows[half:], strict=True)
            rows = [[one + other for one, other in zip(*pair, strict=True)] for pair in pairs]
        return rows[0]


def _final_scales(
    shape: BlockShape, sinks: Value, columns: _Columns, softmax: _Softmax
) -> list[Value]:
    """The factors that complete the softmax of each column, with the sinks of one KV head."""
    lanes, scales = shape.lanes, []
    for number, (largest, total) in enumerate(zip(softmax.largest, softmax.totals, strict=True)):
        sink = None
        if shape.scores.has_sinks:
            first = number * lanes.width
            splats = [lanes.splat(sinks[columns.head(first + i)]) for i in range(lanes.width)]
            sink = splats[0]
            for lane, other in enumerate(splats):
                chosen = [lanes.width + i if i == lane else i for i in range(lanes.width)]
                sink = shuffle(sink, chosen, other)
        scales.append(final_scale(lanes, largest.value, total.value, sink))
    return scales


def _store(
    shape: BlockShape, out: Value, columns: _Columns, scales: list[Value], block: QueryBlock
) -> None:
    """out = sums * scales."""
    lanes, b, stride = shape.lanes, out.b, columns.chunk.out_stride
    for number, scale in enumerate(scales):
        lanes.store(block.scores + number * lanes.width, scale)
    with loop(b, 0, shape.n_columns, lanes.width) as first:
        scale = lanes.load(block.scores + first)
        width = range(lanes.width)
        rows = [columns.row(out, stride, first + lane, shape.head_dim) for lane in width]
        with loop(b, 0, shape.head_dim, lanes.width) as i:
            sums = block.sums + i * shape.n_columns + first
            numbers = [lanes.load(sums + n * shape.n_columns) * scale for n in width]
            for row, row_numbers in zip(rows, transposed(numbers), strict=True):
                lanes.store(row + i, row_numbers, shape.mask(i))


@dataclass(slots=True, kw_only=True)
class _Arguments(Generic[T]):
    chunk: ChunkArguments[T]
    k: Rows[T]
    k_stride: Integer[T]
    v: Rows[T]
    v_stride: Integer[T]


class PrefillAttentionKernel:
    """Attention of a chunk's queries over their keys, for KV heads with equal numbers of queries.

    Other rows of `out` are unchanged.

    Shapes: q, out [T, K * G, D], each row contiguous; k, v [K, n_slots, W] in the cache's dtype,
    contiguous for each head; sinks [K * G], contiguous.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        head_dim: int,
        scores: Scores,
        machine: CPUFeatures,
    ) -> None:
        head_lanes, lanes = machine.lanes(dtype, head_dim), machine.lanes(dtype)
        self._rows = KVRows(cache_dtype, head_lanes, head_dim)
        n_at_once = 8 if machine.n_vectors > 16 else 4  # the sums of values fit the registers
        sizes = _VECTORS, PART_KEYS, n_at_once, head_lanes.width
        self._shape = BlockShape(lanes, head_dim, scores, *sizes)
        self._program = CompiledKernel(
            _Arguments[float],
            partial(_attention, self._shape, self._rows),
            numbers=lanes.pointer,
            rows=self._rows.pointer,
        )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chunk: QueryChunk,
        out: Tensor,
        run: Launcher = at_once,
        sinks: Tensor | None = None,
    ) -> None:
        assert k.stride()[1:] == v.stride()[1:] == (self._rows.width, 1)
        assert k.dtype == v.dtype == self._rows.stored
        arguments = _Arguments(
            chunk=chunk_arguments(self._shape, q, len(k), chunk, out, sinks), k=k.data_ptr(),
            k_stride=k.stride(0), v=v.data_ptr(), v_stride=v.stride(0),
        )  # fmt: skip
        run(self._program, torch.get_num_threads(), arguments)


@cache
def make_prefill_attention(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, scores: Scores
) -> PrefillAttentionKernel:
    return PrefillAttentionKernel(dtype, cache_dtype, head_dim, scores, this_machine())


def _attention(
    shape: BlockShape, rows: KVRows, b: ir.IRBuilder, thread: Thread, args: _Arguments[Value]
) -> None:
    block = QueryBlock.of(shape, b)
    products = _VectorProducts(shape, rows, block, args)
    attend(shape, block, products, thread, args.chunk)


class _VectorProducts:
    """Products on vector registers."""

    def __init__(
        self,
        shape: BlockShape,
        rows: KVRows,
        block: QueryBlock,
        args: _Arguments[Value],
    ) -> None:
        self._shape, self._rows, self._block = shape, rows, block
        self._keys, b = keys_of(args.chunk), args.k.b
        self._k, self._v = (args.k, args.k_stride), (args.v, args.v_stride)
        self._offsets = stack_array(b, I64, shape.tile)  # of the tile's rows in the cache
        n_wide = 0 if rows.is_plain else shape.tile * shape.head_dim
        element = shape.lanes.vector.element
        self._wide = stack_array(b, element, n_wide)

    def prepare(self) -> None:
        pass

    def score(self, head: Value, tile: Value, n: Value) -> None:
        shape, block, b, lanes = self._shape, self._block, n.b, self._shape.lanes
        self._head = head
        with loop(b, 0, n) as t:
            self._offsets[t] = self._keys.slot(tile + t) * self._rows.width
        k = self._numbers(self._k, n)
        with loop(b, 0, n, _KEYS) as t:
            keys = [k + self._offset(t + i) for i in range(_KEYS)]
            for at, total in enumerate(self._dots(keys, 0, 1)):
                lanes.store(block.scores + t * shape.n_columns + at * lanes.width, total)

    def _dots(self, keys: list[Value], lane: int, apart: int) -> list[Value]:
        """Dot products of keys with all columns, over dimensions `lane`, `lane + apart`, ... only.

        The order of summation is the same as in `decode_attention`, which adds lanes up by halves.
        """
        shape, lanes, b = self._shape, self._shape.lanes, keys[0].b
        if apart < shape.n_strided:
            one, other = (self._dots(keys, lane + i * apart, 2 * apart) for i in (0, 1))
            return [x + y for x, y in zip(one, other, strict=True)]
        sums = [lanes.constant(b, 0)] * (len(keys) * shape.n_vectors)
        for i in range(lane, shape.head_dim, apart):
            queries = shape.vectors(self._block.q + i * shape.n_columns)
            pairs = product([lanes.splat(key[i]) for key in keys], queries)
            sums = [fma(*pair, total) for pair, total in zip(pairs, sums, strict=True)]
        in_this_order(b)
        return sums

    def add_values(self, n: Value, before: list[Value], factors: list[Value]) -> None:
        shape, block, b = self._shape, self._block, n.b
        lanes = shape.lanes
        v = self._numbers(self._v, n)
        size = math.gcd(shape.head_dim, shape.n_at_once)
        with loop(b, 0, shape.head_dim, size) as first:
            out = block.sums + first * shape.n_columns
            sums = [Variable(lanes.constant(b, 0)) for _ in range(size * shape.n_vectors)]
            with loop(b, 0, n) as t:
                value = v + self._offset(t) + first
                weights = shape.vectors(block.scores + t * shape.n_columns)
                numbers = [lanes.splat(value[i]) for i in range(size)]
                for total, (number, weight) in zip(sums, product(numbers, weights), strict=True):
                    total.value = fma(number, weight, total.value)
            for at, total in enumerate(sums):
                target, column = out + at * lanes.width, at % shape.n_vectors
                earlier = lanes.load(target) * before[column]
                lanes.store(target, fma(total.value, factors[column], earlier))

    def _numbers(self, cache: tuple[Value, Value], n: Value) -> Value:
        """The address of n rows of a tile in the dtype to compute in; row t is at `_offset(t)`."""
        rows, head_stride = cache
        head_rows = rows + self._head * head_stride
        if self._rows.is_plain:
            return head_rows
        with loop(n.b, 0, n) as t:
            self._rows.read(head_rows + self._offsets[t], self._wide + t * self._shape.head_dim)
        return self._wide

    def _offset(self, t: Value) -> Value:
        return self._offsets[t] if self._rows.is_plain else t * self._shape.head_dim
