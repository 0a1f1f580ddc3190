"""Softmax attention of consecutive queries of one sequence, but for the products in it.

The queries that share a KV head, those of one token side by side, are columns; some vectors of
columns are a block. All that is computed of a block has columns in its lanes. So no dot product and
no softmax adds lanes up:

    scores[keys, columns]  = k[keys] @ q[:, columns]
    weights[keys, columns] = exp(scores[keys, columns] - the largest of a column)
    own[:, columns]        = v[keys].T @ weights[keys, columns]
    sums[:, columns]       = sums[:, columns] * before + own[:, columns] * factor

Keys are taken tile by tile, each with its own largest score; what the tiles before have summed, and
what a tile has, are brought to the largest so far. Tiles are counted from the sequence's start, and
one that a query does not see leaves its column as it was. So a result depends on the query, its
keys and its values alone: not on the chunk's other queries, nor on where the chunk begins, nor on
the thread.

Source: FlashAttention-2, arXiv 2307.08691; online softmax, arXiv 1805.02867.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.attention import NO_WINDOW, QueryChunk, Scores
from parallel_llama.ops.cpu.builder import (
    I64,
    LINE_BYTES,
    Lanes,
    Operand,
    Thread,
    Value,
    Variable,
    fma,
    larger,
    loop,
    smaller,
    transposed,
    when,
    where,
)
from parallel_llama.ops.cpu.exponential import exp, tanh


@dataclass(frozen=True)
class BlockShape:
    """What a kernel is made for: heads, vectors of columns, keys of a tile.

    Keys are scored `n_at_once`, of which a tile is a multiple. `n_strided` sums are made of the
    weights of a tile, each of so many keys apart, before these are added up.
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
        """Of a block."""
        return self.n_vectors * self.lanes.width

    @property
    def n_padded(self) -> int:
        """The numbers of a head, made up to whole vectors."""
        return -(-self.head_dim // self.lanes.width) * self.lanes.width

    def mask(self, i: Value) -> Value | None:
        """Which lanes have numbers of a head, where it goes on with number i; None for all."""
        n = self.head_dim
        return None if n % self.lanes.width == 0 else self.lanes.first(n - i)

    def vectors(self, address: Value) -> list[Value]:
        """A number for each column."""
        return [self.lanes.load(address + i * self.lanes.width) for i in range(self.n_vectors)]


def room(b: ir.IRBuilder, type_: ir.Type, n: int) -> Value:
    """Memory of a thread, where a line of the cache begins; for the beginning of a kernel."""
    place = b.alloca(type_, n)
    place.align = LINE_BYTES
    return Value(b, place)


@dataclass(frozen=True)
class Block:
    """Room for a block of C columns.

    Shapes: q, sums [n_padded, C]; scores [tile, C]; positions [C]; totals [n_strided, C].
    """

    q: Value
    sums: Value
    scores: Value
    positions: Value
    totals: Value

    @classmethod
    def of(cls, shape: BlockShape, b: ir.IRBuilder) -> "Block":
        rows = (shape.n_padded, shape.n_padded, shape.tile, 1, shape.n_strided)
        element = shape.lanes.vector.element
        return cls(*(room(b, element, n * shape.n_columns) for n in rows))


@dataclass(frozen=True)
class Keys:
    """Where the keys of a sequence lie: those from `first` to the one before `stop` have slots."""

    slots: Value
    first: Value
    stop: Value

    def slot(self, position: Value) -> Value:
        """The slot of a key; for one that nobody sees, that of the nearest that somebody does."""
        return self.slots[larger(smaller(position, self.stop - 1), self.first) - self.first]


@dataclass(frozen=True)
class Call:
    """What a kernel is told of a chunk of n queries, beside where their keys and values are."""

    taken: Value
    n_blocks: Value
    n_kv_heads: Value
    n_group: Value
    n: Value
    start: Value
    slots: Value
    n_keys: Value
    window: Value
    q: Value
    q_stride: Value
    out: Value
    out_stride: Value

    @staticmethod
    def types(lanes: Lanes) -> list[ir.Type]:
        integers, numbers = I64.as_pointer(), lanes.pointer
        return [integers, *[I64] * 5, integers, *[I64] * 2, *[numbers, I64] * 2]

    @staticmethod
    def arguments(
        shape: BlockShape, q: Tensor, n_kv_heads: int, chunk: QueryChunk, out: Tensor
    ) -> tuple[int, ...]:
        """Shapes: q, out [T, K * G, D], heads contiguous, rows anywhere."""
        q, out = q[chunk.rows], out[chunk.rows]
        n, n_heads, head_dim = q.shape
        assert q.shape == out.shape and head_dim == shape.head_dim and n_heads % n_kv_heads == 0
        assert q.stride()[1:] == out.stride()[1:] == (head_dim, 1)
        assert q.dtype == out.dtype == shape.lanes.computed
        n_group = n_heads // n_kv_heads
        return (
            chunk.taken.data_ptr(), -(-n * n_group // shape.n_columns), n_kv_heads, n_group, n,
            chunk.positions.start, chunk.slots.data_ptr(), len(chunk.slots),
            NO_WINDOW if chunk.window is None else chunk.window,
            q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0),
        )  # fmt: skip

    @property
    def keys(self) -> Keys:
        stop = self.start + self.n
        return Keys(self.slots, stop - self.n_keys, stop)


class Products(Protocol):
    """The two products of attention, of a KV head and a block."""

    def prepare(self) -> None:
        """Take up the block's queries."""

    def score(self, head: Value, tile: Value, n: Value) -> None:
        """scores = k @ q for n keys from position `tile` on, a multiple of those at once."""

    def add_values(self, n: Value, before: list[Value], factors: list[Value]) -> None:
        """sums = sums * before + (v.T @ scores) * factors, for the first n keys scored last.

        Others that were scored with them have scores 0.
        """


def attend(shape: BlockShape, block: Block, products: Products, thread: Thread, call: Call) -> None:
    """Emit attention of a chunk's queries.

    for (head, columns) in the pairs of KV head and block that no other thread has taken:
        for keys in the tiles that one of the columns sees:
            scores = k[head, keys] @ q[columns], -inf where a column does not see a key
            weights = exp(scores - largest of the tile)
            before, factors = exp(largest before - largest so far), exp(largest of the tile - it)
            sums = sums * before + (v[head, keys].T @ weights) * factors
        out[columns] = sums / sum of weights, which is summed likewise
    """
    b, window, nothing = thread.number.b, call.window, call.window.like(0)
    with thread.untaken(call.taken, call.n_blocks * call.n_kv_heads) as item:
        # The last ones come first, which see most: no thread is left with one while others wait.
        number = call.n_blocks - 1 - item // call.n_kv_heads
        columns = _Columns(number * shape.n_columns, call)
        head = item % call.n_kv_heads
        first, last = columns.position(0), columns.position(shape.n_columns - 1)
        own = head * call.n_group * shape.head_dim
        _load(shape, call.q + own, columns, block)
        products.prepare()
        softmax = _Softmax(shape, b)
        start = larger(first - window + 1, nothing) & -shape.tile
        with loop(b, start, last + 1, shape.tile) as tile:
            n_seen = smaller(last + 1 - tile, shape.tile)
            n_scored = (n_seen + (shape.n_at_once - 1)) & -shape.n_at_once
            products.score(head, tile, n_scored)
            if shape.scores.soft_cap is not None:
                _cap(shape, shape.scores.soft_cap, n_scored, block)
            is_seen = (tile + n_scored < first + 2) & (last - window < tile)
            with when(is_seen ^ 1):
                _hide(shape, tile, n_scored, window, block)
            before, factors = softmax.weigh(n_scored, block)
            products.add_values(n_seen, before, factors)
        _store(shape, call.out + own, columns, softmax, block)


@dataclass(frozen=True)
class _Columns:
    """The columns of a block, from the `first` on.

    What would come after the last that there is is a copy of it, with the same result for the same
    place.
    """

    first: Value
    call: Call

    def _column(self, number: Operand) -> Value:
        return smaller(self.first + number, self.call.n * self.call.n_group - 1)

    def position(self, number: Operand) -> Value:
        """Of the column's query in its sequence."""
        return self._column(number) // self.call.n_group + self.call.start

    def row(self, array: Value, stride: Value, number: Operand, head_dim: int) -> Value:
        """Where the numbers of a column lie, in the array of a KV head's queries or results."""
        column, n_group = self._column(number), self.call.n_group
        return array + column // n_group * stride + column % n_group * head_dim


def _load(shape: BlockShape, q: Value, columns: _Columns, block: Block) -> None:
    """A block's queries, times the scale, and their positions; their sums begin at 0."""
    lanes, b, stride = shape.lanes, q.b, columns.call.q_stride
    scale = shape.scores.factor_of(shape.head_dim)
    with loop(b, 0, shape.n_columns, lanes.width) as first:
        rows = []
        for lane in range(lanes.width):
            rows.append(columns.row(q, stride, first + lane, shape.head_dim))
            position = columns.position(first + lane)
            block.positions[first + lane] = position.to(lanes.vector.element)
        with loop(b, 0, shape.head_dim, lanes.width) as i:
            numbers = [lanes.load(row + i, shape.mask(i)) * scale for row in rows]
            for number, of_columns in enumerate(transposed(numbers)):
                place = first + (i + number) * shape.n_columns
                lanes.store(block.q + place, of_columns)
                lanes.store(block.sums + place, lanes.constant(b, 0))


def _cap(shape: BlockShape, cap: float, n: Value, block: Block) -> None:
    """scores = tanh(scores) * cap, for n keys of a tile."""
    lanes = shape.lanes
    with loop(n.b, 0, n * shape.n_columns, lanes.width) as i:
        lanes.store(block.scores + i, tanh(lanes, lanes.load(block.scores + i)) * cap)


def _hide(shape: BlockShape, tile: Value, n: Value, window: Value, block: Block) -> None:
    """scores[t] = -inf where a column does not see key t of a tile."""
    lanes, b = shape.lanes, tile.b
    element = lanes.vector.element
    width = lanes.splat(window.to(element))
    with loop(b, 0, n) as t:
        key = lanes.splat((tile + t).to(element))
        for i in range(0, shape.n_columns, lanes.width):
            address = block.scores + t * shape.n_columns + i
            own = lanes.load(block.positions + i)
            is_near = own - width < key
            score = where(is_near, lanes.load(address), -math.inf)
            lanes.store(address, where(own < key, score.like(-math.inf), score))


class _Softmax:
    """The largest score that each column has seen, and the sum of its weights."""

    def __init__(self, shape: BlockShape, b: ir.IRBuilder) -> None:
        self._shape, lanes = shape, shape.lanes
        # Not -inf, from which -inf cannot be taken: a column may see nothing of its first tile.
        self._least = lanes.constant(b, torch.finfo(lanes.computed).min)
        self._largest = [Variable(self._least) for _ in range(shape.n_vectors)]
        self.totals = [Variable(lanes.constant(b, 0)) for _ in range(shape.n_vectors)]

    def weigh(self, n: Value, block: Block) -> tuple[list[Value], list[Value]]:
        """Turn n keys' scores into weights.

        Returns: what the sums of earlier tiles are to be multiplied by, and those of this one.
        """
        shape, scores, b = self._shape, block.scores, n.b
        own = [Variable(self._least) for _ in self._largest]
        with loop(b, 0, n) as t:
            for largest, score in zip(
                own, shape.vectors(scores + t * shape.n_columns), strict=True
            ):
                largest.value = larger(score, largest.value)
        self._exponentiate(n, block, [each.value for each in own])
        before, factors = [], []
        for mine, so_far, total, added in zip(
            own, self._largest, self.totals, self._total(block), strict=True
        ):
            earlier = so_far.value
            so_far.value = larger(mine.value, earlier)
            before.append(exp(shape.lanes, earlier - so_far.value))
            factors.append(exp(shape.lanes, mine.value - so_far.value))
            total.value = fma(added, factors[-1], total.value * before[-1])
        return before, factors

    def _exponentiate(self, n: Value, block: Block, largest: list[Value]) -> None:
        """Turn scores into weights, and add these to the totals that are so many keys apart."""
        shape, lanes, b = self._shape, self._shape.lanes, n.b
        with loop(b, 0, shape.n_strided * shape.n_columns, lanes.width) as i:
            lanes.store(block.totals + i, lanes.constant(b, 0))
        with loop(b, 0, n) as t:
            place = block.scores + t * shape.n_columns
            totals = block.totals + (t & (shape.n_strided - 1)) * shape.n_columns
            for number, score in enumerate(shape.vectors(place)):
                weight, at = exp(lanes, score - largest[number]), number * lanes.width
                lanes.store(place + at, weight)
                lanes.store(totals + at, lanes.load(totals + at) + weight)

    def _total(self, block: Block) -> list[Value]:
        """The sums of a tile's weights: half of the totals and the other half, until one is left,
        as the lanes of a vector are added up.
        """
        shape = self._shape
        rows = [shape.vectors(block.totals + i * shape.n_columns) for i in range(shape.n_strided)]
        while len(rows) > 1:
            half = len(rows) // 2
            pairs = zip(rows[:half], rows[half:], strict=True)
            rows = [[one + other for one, other in zip(*pair, strict=True)] for pair in pairs]
        return rows[0]


def _store(
    shape: BlockShape, out: Value, columns: _Columns, softmax: _Softmax, block: Block
) -> None:
    """out = sums / totals."""
    lanes, b, stride = shape.lanes, out.b, columns.call.out_stride
    for number, total in enumerate(softmax.totals):
        lanes.store(block.scores + number * lanes.width, 1 / total.value)
    with loop(b, 0, shape.n_columns, lanes.width) as first:
        share = lanes.load(block.scores + first)
        each = range(lanes.width)
        rows = [columns.row(out, stride, first + lane, shape.head_dim) for lane in each]
        with loop(b, 0, shape.head_dim, lanes.width) as i:
            own = block.sums + i * shape.n_columns + first
            numbers = [lanes.load(own + n * shape.n_columns) * share for n in each]
            for row, of_row in zip(rows, transposed(numbers), strict=True):
                lanes.store(row + i, of_row, shape.mask(i))
