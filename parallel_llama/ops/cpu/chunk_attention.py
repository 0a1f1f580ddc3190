"""Attention of consecutive queries of one sequence, over keys where they lie in the KV cache.

With queries in lanes, keys and values are used as they lie, number by number; those of a narrow
cache are made numbers a tile at a time. The sums of some keys, or of some numbers of a value, for
a block of columns stay in registers.

A query gets to the last bit what `attention` gives it: that kernel multiplies vectors of W numbers
of a query and a key, and adds their lanes up. Here the numbers i, i + W, i + 2 W, ... of a head are
summed for every i, and these sums are added as lanes are. Tiles are the parts of `attention`.
"""

import math
from functools import cache, partial
from itertools import product

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.attention import PART_KEYS, QueryChunk, Scores
from parallel_llama.ops.cpu.builder import I64, Thread, Value, Variable, fma, in_this_order, loop
from parallel_llama.ops.cpu.kv_rows import KVRows
from parallel_llama.ops.cpu.program import Machine, Program, Run, at_once, this_machine
from parallel_llama.ops.cpu.query_columns import Block, BlockShape, Call, Keys, attend, room

_VECTORS = 3  # of columns in a block
_KEYS = 2  # that are scored together: registers have room for the sums that wait for each other


class ChunkAttentionKernel:
    """Softmax attention of a chunk's queries over their keys, for one run of equal groups.

    Other rows of `out` are left as they are.

    Shapes: q, out [T, K * G, D], heads contiguous, rows anywhere; k, v [K, n_slots, W] in the
    cache's dtype, slots contiguous, heads anywhere.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        head_dim: int,
        scores: Scores,
        machine: Machine,
    ) -> None:
        of_head, lanes = machine.lanes(dtype, head_dim), machine.lanes(dtype)
        self._rows = KVRows(cache_dtype, of_head, head_dim)
        n_at_once = 8 if machine.n_vectors > 16 else 4  # whose sums registers have room for
        sizes = _VECTORS, PART_KEYS, n_at_once, of_head.width
        self._shape = BlockShape(lanes, head_dim, scores, *sizes)
        types = [*Call.types(lanes), *[self._rows.pointer, I64] * 2]
        body = partial(_attention, self._shape, self._rows)
        self._program = Program("chunk_attention", types, body)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, chunk: QueryChunk, out: Tensor, run: Run = at_once
    ) -> None:
        assert k.stride()[1:] == v.stride()[1:] == (self._rows.width, 1)
        assert k.dtype == v.dtype == self._rows.stored
        call = Call.arguments(self._shape, q, len(k), chunk, out)
        cache = (k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0))
        run(self._program, torch.get_num_threads(), *call, *cache)


@cache
def make_chunk_attention(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, scores: Scores
) -> ChunkAttentionKernel:
    """The kernel for this machine, compiled when first asked for; `computes` says for what."""
    return ChunkAttentionKernel(dtype, cache_dtype, head_dim, scores, this_machine())


def _attention(
    shape: BlockShape, rows: KVRows, b: ir.IRBuilder, thread: Thread, arguments: list[Value]
) -> None:
    """The kernel."""
    *told, k, k_stride, v, v_stride = arguments
    call, block = Call(*told), Block.of(shape, b)
    products = _VectorProducts(shape, rows, block, call.keys, (k, k_stride), (v, v_stride))
    attend(shape, block, products, thread, call)


class _VectorProducts:
    """Products number by number; the `places` of a tile are where its keys and values begin."""

    def __init__(
        self,
        shape: BlockShape,
        rows: KVRows,
        block: Block,
        keys: Keys,
        k: tuple[Value, Value],
        v: tuple[Value, Value],
    ) -> None:
        self._shape, self._rows, self._block, self._keys = shape, rows, block, keys
        self._k, self._v, b = k, v, k[0].b
        self._places = room(b, I64, shape.tile)
        n_wide = 0 if rows.is_plain else shape.tile * shape.head_dim
        element = shape.lanes.vector.element
        self._wide = room(b, element, n_wide)

    def prepare(self) -> None:
        pass

    def score(self, head: Value, tile: Value, n: Value) -> None:
        """A few keys at a time."""
        shape, block, b, lanes = self._shape, self._block, n.b, self._shape.lanes
        self._head = head
        with loop(b, 0, n) as t:
            self._places[t] = self._keys.slot(tile + t) * self._rows.width
        k = self._numbers(self._k, n)
        with loop(b, 0, n, _KEYS) as t:
            keys = [k + self._place(t + i) for i in range(_KEYS)]
            for at, total in enumerate(self._dots(keys, 0, 1)):
                lanes.store(block.scores + t * shape.n_columns + at * lanes.width, total)

    def _dots(self, keys: list[Value], lane: int, apart: int) -> list[Value]:
        """Of a head's numbers from this one on, so many apart: keys by all columns.

        They are summed in the order that `attention` has, whose lanes are added up by halves.
        """
        shape, lanes, b = self._shape, self._shape.lanes, keys[0].b
        if apart < shape.n_strided:
            one, other = (self._dots(keys, lane + i * apart, 2 * apart) for i in (0, 1))
            return [x + y for x, y in zip(one, other, strict=True)]
        sums = [lanes.constant(b, 0)] * (len(keys) * shape.n_vectors)
        for i in range(lane, shape.head_dim, apart):
            own = shape.vectors(self._block.q + i * shape.n_columns)
            factors = product([lanes.splat(key[i]) for key in keys], own)
            sums = [fma(*each, total) for each, total in zip(factors, sums, strict=True)]
        in_this_order(b)
        return sums

    def add_values(self, n: Value, before: list[Value], factors: list[Value]) -> None:
        """Some numbers of a value at a time; the places are those of the keys."""
        shape, block, b = self._shape, self._block, n.b
        lanes = shape.lanes
        v = self._numbers(self._v, n)
        size = math.gcd(shape.head_dim, shape.n_at_once)
        with loop(b, 0, shape.head_dim, size) as first:
            out = block.sums + first * shape.n_columns
            sums = [Variable(lanes.constant(b, 0)) for _ in range(size * shape.n_vectors)]
            with loop(b, 0, n) as t:
                own = v + self._place(t) + first
                weights = shape.vectors(block.scores + t * shape.n_columns)
                numbers = [lanes.splat(own[i]) for i in range(size)]
                for total, (number, weight) in zip(sums, product(numbers, weights), strict=True):
                    total.value = fma(number, weight, total.value)
            for at, total in enumerate(sums):
                place, column = out + at * lanes.width, at % shape.n_vectors
                earlier = lanes.load(place) * before[column]
                lanes.store(place, fma(total.value, factors[column], earlier))

    def _numbers(self, cache: tuple[Value, Value], n: Value) -> Value:
        """Where n rows of a tile are as numbers to compute with, each at its `_place`."""
        rows, head_stride = cache
        own = rows + self._head * head_stride
        if self._rows.is_plain:
            return own
        with loop(n.b, 0, n) as t:
            self._rows.read(own + self._places[t], self._wide + t * self._shape.head_dim)
        return self._wide

    def _place(self, t: Value) -> Value:
        return self._places[t] if self._rows.is_plain else t * self._shape.head_dim
