"""Prefill attention over a KV cache in bfloat16, on the CPU's matrix tiles (AMX).

Each float32 number of a query or weight is split into two bfloat16 numbers, as in `gemm_amx`; keys,
values and products are exact. First, keys and values are packed as tiles, once for all queries of a
chunk:

    tile of keys    [16 keys, 32 numbers]
    tile of values  [16 numbers, 32 keys]
    tile of queries [16 pairs of numbers, 16 columns, 2]
    tile of weights [16 pairs of keys, 16 columns, 2]
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Annotated, Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.attention import QueryChunk, Scores
from parallel_llama.ops.cpu.arguments import Bytes, Integer, Integers, T
from parallel_llama.ops.cpu.gemm_amx import (
    make_gemm_amx,
    release_tiles,
    tile_instruction,
    tile_shape,
    tiles_are_allowed,
)
from parallel_llama.ops.cpu.ir import (
    F32,
    I8,
    I16,
    I32,
    I64,
    Lanes,
    Thread,
    Value,
    fma,
    intrinsic,
    loop,
    transposed,
)
from parallel_llama.ops.cpu.jit import CompiledKernel, Launcher, at_once
from parallel_llama.ops.cpu.prefill_attention import (
    BlockShape,
    ChunkArguments,
    Keys,
    QueryBlock,
    attend,
    chunk_arguments,
    stack_array,
)
from parallel_llama.ops.cpu.vector_math import to_bfloat16

_SIDE = 16  # rows of a tile, and its columns of 4 bytes
_DEPTH = 2 * _SIDE  # numbers that a product of two tiles sums over
_VECTORS = 2  # of columns in a block
_TILE = 128  # keys of a tile of the softmax
_TILE_BYTES = 64 * _SIDE
_LANES = Lanes(torch.float32, torch.float32, _SIDE)
_WORDS = ir.VectorType(I32, _SIDE)


_Halves = Annotated[T, I16.as_pointer()]


@dataclass(slots=True, kw_only=True)
class _PackArguments(Generic[T]):
    slots: Integers[T]
    first: Integer[T]
    stop: Integer[T]
    start: Integer[T]
    n_rows: Integer[T]
    n_kv_heads: Integer[T]
    k: _Halves[T]
    k_stride: Integer[T]
    v: _Halves[T]
    v_stride: Integer[T]
    keys: Bytes[T]
    values: Bytes[T]


@dataclass(slots=True, kw_only=True)
class _Arguments(Generic[T]):
    chunk: ChunkArguments[T]
    tiles: Bytes[T]
    keys: Bytes[T]
    values: Bytes[T]
    first: Integer[T]
    n_rows: Integer[T]


class PrefillAttentionAMXKernel:
    """`PrefillAttentionKernel` for float32 and a cache in bfloat16.

    Shapes: as in `PrefillAttentionKernel`, with D a multiple of 32.
    """

    def __init__(self, head_dim: int, scores: Scores) -> None:
        assert tiles_are_allowed() and self.takes(head_dim)
        self._head_dim, self._tiles = head_dim, tile_shape()
        self._shape = BlockShape(_LANES, head_dim, scores, _VECTORS, _TILE, _DEPTH, 1)
        self._pack = CompiledKernel(_PackArguments[float], partial(_pack, head_dim))
        self._program = CompiledKernel(
            _Arguments[float], partial(_attention, self._shape), numbers=_LANES.pointer
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
        assert k.stride()[1:] == v.stride()[1:] == (self._head_dim, 1)
        assert k.dtype == v.dtype == torch.bfloat16
        n_threads = torch.get_num_threads()
        first = chunk.first_key // _TILE * _TILE
        n_rows = -(-(chunk.positions.stop - first) // _DEPTH) * _DEPTH
        packed = torch.empty(2, len(k), n_rows, self._head_dim, dtype=torch.bfloat16)
        keys, values = packed[0].data_ptr(), packed[1].data_ptr()
        packing = _PackArguments(
            slots=chunk.slots.data_ptr(), first=chunk.first_key, stop=chunk.positions.stop,
            start=first, n_rows=n_rows, n_kv_heads=len(k), k=k.data_ptr(), k_stride=k.stride(0),
            v=v.data_ptr(), v_stride=v.stride(0), keys=keys, values=values,
        )  # fmt: skip
        run(self._pack, n_threads, packing)
        arguments = _Arguments(
            chunk=chunk_arguments(self._shape, q, len(k), chunk, out, sinks),
            tiles=self._tiles.data_ptr(), keys=keys, values=values, first=first, n_rows=n_rows,
        )  # fmt: skip
        run(self._program, n_threads, arguments)

    @staticmethod
    def takes(head_dim: int) -> bool:
        """Whether the kernel supports this size of heads."""
        return head_dim % _DEPTH == 0


@cache
def make_prefill_attention_amx(head_dim: int, scores: Scores) -> PrefillAttentionAMXKernel | None:
    """The kernel, or None if heads do not fill tiles or `make_gemm_amx` returns None."""
    if not PrefillAttentionAMXKernel.takes(head_dim) or make_gemm_amx() is None:
        return None
    return PrefillAttentionAMXKernel(head_dim, scores)


def _pack(head_dim: int, b: ir.IRBuilder, thread: Thread, args: _PackArguments[Value]) -> None:
    """Packs keys and values from position `start` on, in blocks of 32.

    Positions without a key get the key and value of the nearest position.

    Shapes: k, v [K, n_slots, D] -> keys [K, n_rows, D], values [K, n_rows / 32, D, 32].
    """
    key_slots, n_blocks = Keys(args.slots, args.first, args.stop), args.n_rows // _DEPTH
    with loop(b, *thread.part_of(args.n_kv_heads * n_blocks)) as block:
        head, at = block // n_blocks, block % n_blocks * _DEPTH
        block_offset = block * (_DEPTH * head_dim * 2)
        rows = [key_slots.slot(args.start + at + t) * head_dim for t in range(_DEPTH)]
        with loop(b, 0, head_dim, _SIDE) as i:
            for t, row in enumerate(rows):
                target = args.keys + block_offset + i * 2 + t * head_dim * 2
                _store(target, _load_bfloat16(args.k + head * args.k_stride + row + i))
            numbers = [
                _load_bfloat16(args.v + head * args.v_stride + row + i).resized(_WORDS)
                for row in rows
            ]
            pairs = [
                (one & 0xFFFF) | (other << 16)
                for one, other in zip(numbers[::2], numbers[1::2], strict=True)
            ]
            for number, tile_row in enumerate(transposed(pairs)):
                _store(args.values + block_offset + (i + number) * (_DEPTH * 2), tile_row)


def _attention(shape: BlockShape, b: ir.IRBuilder, thread: Thread, args: _Arguments[Value]) -> None:
    block = QueryBlock.of(shape, b)
    intrinsic("x86.ldtilecfg", ir.VoidType(), args.tiles)
    attend(shape, block, _TileProducts(shape, block, args), thread, args.chunk)
    release_tiles(b)


class _TileProducts:
    """Products of two vectors of columns with two tiles of keys or values at a time."""

    def __init__(self, shape: BlockShape, block: QueryBlock, args: _Arguments[Value]) -> None:
        self._shape, self._block, self._args, b = shape, block, args, args.keys.b
        self._q = _Pairs(
            shape, stack_array(b, I8, 4 * shape.head_dim * shape.n_columns), shape.head_dim
        )
        self._weights = _Pairs(shape, stack_array(b, I8, 4 * _TILE * shape.n_columns), _TILE)
        self._sums = stack_array(b, F32, shape.head_dim * shape.n_columns)
        self._row = args.first  # the packed row of the first key of the last `score`

    def prepare(self) -> None:
        n = self._args.first.like(self._shape.head_dim)
        self._q.split(self._block.q, n, to_bfloat16)

    def score(self, head: Value, tile: Value, n: Value) -> None:
        head_bytes = self._shape.head_dim * 2
        self._row = head * self._args.n_rows + tile - self._args.first
        with loop(n.b, 0, n, _DEPTH) as t:
            keys = self._args.keys + (self._row + t) * head_bytes
            out = self._block.scores + t * self._shape.n_columns
            steps = self._shape.head_dim // _DEPTH
            self._multiply(keys, head_bytes, 64, self._q, n.like(steps), out)

    def add_values(self, n: Value, before: list[Value], factors: list[Value]) -> None:
        shape, lanes = self._shape, self._shape.lanes
        n_steps = (n + (_DEPTH - 1)) // _DEPTH
        self._weights.split(self._block.scores, n_steps * _DEPTH, _near_bfloat16)
        step_bytes = _DEPTH * shape.head_dim * 2
        with loop(n.b, 0, shape.head_dim, _DEPTH) as i:
            values = self._args.values + self._row * (shape.head_dim * 2) + i * (_DEPTH * 2)
            self._multiply(
                values, 64, step_bytes, self._weights, n_steps, self._sums + i * shape.n_columns
            )
        with loop(n.b, 0, shape.head_dim) as i:
            sums, tile_sums = (
                each + i * shape.n_columns for each in (self._block.sums, self._sums)
            )
            for number, (total, tile_sum) in enumerate(
                zip(shape.vectors(sums), shape.vectors(tile_sums), strict=True)
            ):
                tile_sum = fma(tile_sum, factors[number], total * before[number])
                lanes.store(sums + number * lanes.width, tile_sum)

    def _multiply(
        self,
        rows: Value,
        row_bytes: int,
        step_bytes: int,
        pairs: "_Pairs",
        n_steps: Value,
        out: Value,
    ) -> None:
        """out = rows @ a block's columns, in steps that sum over 32 numbers.

        In memory the rows of a step's tiles are `row_bytes` apart, and steps `step_bytes` apart.

        Shapes: rows [32, n_steps * 32]; out [32, C].
        """
        b, result_tiles, row_tiles, pair_tiles = rows.b, [0, 1, 2, 3], [4, 5], [6, 7]
        out_stride, row_stride, pair_stride = (
            Value(b, I64(each)) for each in (4 * self._shape.n_columns, row_bytes, 64)
        )
        targets = [
            (out + (i * _SIDE * self._shape.n_columns + j * _SIDE)).bits_as(I8.as_pointer())
            for i, j in product(range(2), range(2))
        ]
        for total in result_tiles:
            tile_instruction(b, "tilezero", total)
        with loop(b, 0, n_steps) as step:
            for number, tile in enumerate(row_tiles):
                address = rows + step * step_bytes + number * _SIDE * row_bytes
                tile_instruction(b, "tileloadd64", tile, address, row_stride)
            for part in (0, 1):
                for number, tile in enumerate(pair_tiles):
                    address = pairs.tile(part, number, step)
                    tile_instruction(b, "tileloadd64", tile, address, pair_stride)
                for total, (one, other) in zip(
                    result_tiles, product(row_tiles, pair_tiles), strict=True
                ):
                    tile_instruction(b, "tdpbf16ps", total, one, other)
        for total, target in zip(result_tiles, targets, strict=True):
            tile_instruction(b, "tilestored64", total, target, out_stride)


class _Pairs:
    """Rows of a block's columns, split into high and low parts in bfloat16, in interleaved pairs.

    Shapes: [2 parts, vectors, n / 32, 16, 16, 2] for at most n rows.
    """

    def __init__(self, shape: BlockShape, memory: Value, n: int) -> None:
        self._shape, self._memory, self._n = shape, memory, n

    def tile(self, part: int, vector: int, step: Value) -> Value:
        start = (part * _VECTORS + vector) * self._n * _SIDE * 2
        return self._memory + start + step * _TILE_BYTES

    def split(self, rows: Value, n: Value, rounded: Callable[[Value], Value]) -> None:
        """Splits and stores n rows, with n even. Shapes: rows [n, C]."""
        shape = self._shape
        with loop(n.b, 0, n, 2) as row:
            one, other = (shape.vectors(rows + (row + i) * shape.n_columns) for i in (0, 1))
            for vector, pair in enumerate(zip(one, other, strict=True)):
                highs = [rounded(numbers) for numbers in pair]
                rests = [
                    numbers - (high << 16).bits_as(_LANES.vector)
                    for numbers, high in zip(pair, highs, strict=True)
                ]
                lows = [rounded(rest) for rest in rests]
                for part, (first, second) in enumerate((highs, lows)):
                    target = self.tile(part, vector, row.like(0)) + row * (_SIDE * 2)
                    _store(target, first | (second << 16))


def _near_bfloat16(numbers: Value) -> Value:
    """A faster `to_bfloat16` that rounds ties away from zero and does not keep NaN.

    The result of attention is NaN nevertheless: a NaN weight makes its column's total NaN.
    """
    return (numbers.bits_as(_WORDS) + 0x8000) >> 16


def _load_bfloat16(address: Value) -> Value:
    """Loads the bits of 16 bfloat16 numbers."""
    vector_address = address.bits_as(ir.VectorType(I16, _SIDE).as_pointer())
    return Value(address.b, address.b.load(vector_address.raw, align=2))


def _store(address: Value, vector: Value) -> None:
    address.b.store(vector.raw, address.bits_as(vector.raw.type.as_pointer()).raw, align=2)
