"""Attention of consecutive queries of one sequence, over keys where they lie in the KV cache.

With queries in lanes, keys and values are used as they lie, number by number; those of a narrow
cache are made numbers a tile at a time. The sums of some keys, or of some numbers of a value, for
a block of columns stay in registers.
"""

import math
from functools import cache, partial
from itertools import product

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.builder import I64, Thread, Value, Variable, fma, loop
from parallel_llama.ops.cpu.kv_rows import KVRows
from parallel_llama.ops.cpu.program import Machine, Program, Run, at_once, this_machine
from parallel_llama.ops.cpu.query_columns import Block, BlockShape, Call, Keys, attend, room
from parallel_llama.ops.query_chunk import QueryChunk
from parallel_llama.ops.scores import Scores

_VECTORS = 3  # of columns in a block
_TILE = 64  # keys


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
        self._rows = KVRows(cache_dtype, machine.lanes(dtype, head_dim), head_dim)
        n_at_once = 8 if machine.n_vectors > 16 else 4  # whose sums registers have room for
        lanes = machine.lanes(dtype)
        self._shape = BlockShape(lanes, head_dim, scores, _VECTORS, _TILE, n_at_once)
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
        self._wide = room(b, shape.lanes.vector.element, n_wide)

    def prepare(self) -> None:
        pass

    def score(self, head: Value, tile: Value, n: Value) -> None:
        """So many keys at a time as there is room for."""
        shape, block, b = self._shape, self._block, n.b
        lanes, n_at_once = shape.lanes, shape.n_at_once
        self._head = head
        with loop(b, 0, n) as t:
            self._places[t] = self._keys.slot(tile + t) * self._rows.width
        k = self._numbers(self._k, n)
        with loop(b, 0, n, n_at_once) as t:
            keys = [k + self._place(t + i) for i in range(n_at_once)]
            sums = [Variable(lanes.constant(b, 0)) for _ in range(n_at_once * shape.n_vectors)]
            with loop(b, 0, shape.head_dim) as i:
                own = shape.vectors(block.q + i * shape.n_columns)
                numbers = [lanes.splat(key[i]) for key in keys]
                for total, (number, q) in zip(sums, product(numbers, own), strict=True):
                    total.value = fma(number, q, total.value)
            for at, total in enumerate(sums):
                lanes.store(block.scores + t * shape.n_columns + at * lanes.width, total.value)

    def add_values(self, n: Value, corrections: list[Value]) -> None:
        """Some numbers of a value at a time; the places are those of the keys."""
        shape, block, b = self._shape, self._block, n.b
        lanes = shape.lanes
        v = self._numbers(self._v, n)
        size = math.gcd(shape.head_dim, shape.n_at_once)
        with loop(b, 0, shape.head_dim, size) as first:
            addresses = [block.sums + (first + i) * shape.n_columns for i in range(size)]
            sums = [
                Variable(total * correction)
                for address in addresses
                for total, correction in zip(shape.vectors(address), corrections, strict=True)
            ]
            with loop(b, 0, n) as t:
                own = v + self._place(t) + first
                weights = shape.vectors(block.scores + t * shape.n_columns)
                numbers = [lanes.splat(own[i]) for i in range(size)]
                for total, (number, weight) in zip(sums, product(numbers, weights), strict=True):
                    total.value = fma(number, weight, total.value)
            for at, total in enumerate(sums):
                lanes.store(addresses[0] + at * lanes.width, total.value)

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
