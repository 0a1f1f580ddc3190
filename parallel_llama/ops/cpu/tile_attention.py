"""Attention of consecutive queries over a cache in bfloat16, on the CPU's matrix tiles (AMX).

Queries and weights, in float32, are split into two of bfloat16 as in `tile_linear`; keys and values
are exact, and so are the products. Before, keys and values are laid out as tiles, once for all
queries of a chunk:

    tile of keys    [16 keys, 32 numbers]
    tile of values  [16 numbers, 32 keys]
    tile of queries [16 pairs of numbers, 16 columns, 2]
    tile of weights [16 pairs of keys, 16 columns, 2]
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import product

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.attention import QueryChunk, Scores
from parallel_llama.ops.cpu.builder import (
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
from parallel_llama.ops.cpu.narrow_floats import to_bfloat16
from parallel_llama.ops.cpu.program import Program, Run, at_once
from parallel_llama.ops.cpu.query_columns import Block, BlockShape, Call, Keys, attend, room
from parallel_llama.ops.cpu.tile_linear import (
    make_tile_linear,
    release_tiles,
    tile_instruction,
    tile_shape,
    tiles_are_allowed,
)

_SIDE = 16  # rows of a tile, and columns, keys or numbers in one
_DEPTH = 2 * _SIDE  # what two tiles are multiplied over
_VECTORS = 2  # of columns in a block
_TILE = 128  # keys
_TILE_BYTES = 64 * _SIDE
_LANES = Lanes(torch.float32, torch.float32, _SIDE)
_WORDS = ir.VectorType(I32, _SIDE)


class TileAttentionKernel:
    """What `ChunkAttentionKernel` computes, for numbers of float32 and a cache in bfloat16.

    Shapes: as there; D a multiple of 32.
    """

    def __init__(self, head_dim: int, scores: Scores) -> None:
        assert tiles_are_allowed() and self.takes(head_dim)
        self._head_dim, self._tiles = head_dim, tile_shape()
        self._shape = BlockShape(_LANES, head_dim, scores, _VECTORS, _TILE, _DEPTH, 1)
        integers, bytes_ = I64.as_pointer(), I8.as_pointer()
        halves = [I16.as_pointer(), I64]
        types = [integers, *[I64] * 5, *halves, *halves, bytes_, bytes_]
        self._lay_out = Program("lay_out", types, partial(_lay_out, head_dim))
        types = [*Call.types(_LANES), bytes_, bytes_, bytes_, I64, I64]
        self._program = Program("tile_attention", types, partial(_attention, self._shape))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, chunk: QueryChunk, out: Tensor, run: Run = at_once
    ) -> None:
        assert k.stride()[1:] == v.stride()[1:] == (self._head_dim, 1)
        assert k.dtype == v.dtype == torch.bfloat16
        call = Call.arguments(self._shape, q, len(k), chunk, out)
        n_threads = torch.get_num_threads()
        first = chunk.first_key // _TILE * _TILE
        n_rows = -(-(chunk.positions.stop - first) // _DEPTH) * _DEPTH
        held = torch.empty(2, len(k), n_rows, self._head_dim, dtype=torch.bfloat16)
        run(
            self._lay_out, n_threads,
            chunk.slots.data_ptr(), chunk.first_key, chunk.positions.stop, first, n_rows, len(k),
            k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0),
            held[0].data_ptr(), held[1].data_ptr(),
        )  # fmt: skip
        addresses = (each.data_ptr() for each in (self._tiles, held[0], held[1]))
        run(self._program, n_threads, *call, *addresses, first, n_rows)

    @staticmethod
    def takes(head_dim: int) -> bool:
        """Whether heads fill tiles."""
        return head_dim % _DEPTH == 0


@cache
def make_tile_attention(head_dim: int, scores: Scores) -> TileAttentionKernel | None:
    """The kernel, where heads fill tiles and this machine has such as pay."""
    if not TileAttentionKernel.takes(head_dim) or make_tile_linear() is None:
        return None
    return TileAttentionKernel(head_dim, scores)


def _lay_out(head_dim: int, b: ir.IRBuilder, thread: Thread, arguments: list[Value]) -> None:
    """Keys and values from position `start` on, in blocks of 32; those that nobody sees are others.

    Shapes: k, v [K, n_slots, D] -> keys [K, n_rows, D], values [K, n_rows / 32, D, 32].
    """
    slots, first, stop, start, n_rows, n_kv_heads, k, k_stride, v, v_stride, keys, values = (
        arguments
    )
    seen, n_blocks = Keys(slots, first, stop), n_rows // _DEPTH
    with loop(b, *thread.part_of(n_kv_heads * n_blocks)) as block:
        head, at = block // n_blocks, block % n_blocks * _DEPTH
        to = block * (_DEPTH * head_dim * 2)
        rows = [seen.slot(start + at + t) * head_dim for t in range(_DEPTH)]
        with loop(b, 0, head_dim, _SIDE) as i:
            for t, row in enumerate(rows):
                _put(keys + to + i * 2 + t * head_dim * 2, _halves(k + head * k_stride + row + i))
            numbers = [_halves(v + head * v_stride + row + i).resized(_WORDS) for row in rows]
            pairs = [
                (one & 0xFFFF) | (other << 16)
                for one, other in zip(numbers[::2], numbers[1::2], strict=True)
            ]
            for number, of_number in enumerate(transposed(pairs)):
                _put(values + to + (i + number) * (_DEPTH * 2), of_number)


def _attention(shape: BlockShape, b: ir.IRBuilder, thread: Thread, arguments: list[Value]) -> None:
    """The kernel."""
    *told, tiles, keys, values, first, n_rows = arguments
    call, block = Call(*told), Block.of(shape, b)
    intrinsic("x86.ldtilecfg", ir.VoidType(), tiles)
    attend(shape, block, _TileProducts(shape, block, keys, values, first, n_rows), thread, call)
    release_tiles(b)


class _TileProducts:
    """Products of two vectors of columns and as many tiles of keys or of numbers at a time."""

    def __init__(
        self,
        shape: BlockShape,
        block: Block,
        keys: Value,
        values: Value,
        first: Value,
        n_rows: Value,
    ) -> None:
        self._shape, self._block, b = shape, block, keys.b
        self._keys, self._values, self._first, self._n_rows = keys, values, first, n_rows
        self._q = _Pairs(shape, room(b, I8, 4 * shape.head_dim * shape.n_columns), shape.head_dim)
        self._weights = _Pairs(shape, room(b, I8, 4 * _TILE * shape.n_columns), _TILE)
        self._sums = room(b, F32, shape.head_dim * shape.n_columns)
        self._row = first  # among the keys as they are laid out, of the first scored last

    def prepare(self) -> None:
        self._q.split(self._block.q, self._first.like(self._shape.head_dim), to_bfloat16)

    def score(self, head: Value, tile: Value, n: Value) -> None:
        head_bytes = self._shape.head_dim * 2
        self._row = head * self._n_rows + tile - self._first
        with loop(n.b, 0, n, _DEPTH) as t:
            keys = self._keys + (self._row + t) * head_bytes
            out = self._block.scores + t * self._shape.n_columns
            steps = self._shape.head_dim // _DEPTH
            self._multiply(keys, head_bytes, 64, self._q, n.like(steps), out)

    def add_values(self, n: Value, before: list[Value], factors: list[Value]) -> None:
        shape, lanes = self._shape, self._shape.lanes
        n_steps = (n + (_DEPTH - 1)) // _DEPTH
        self._weights.split(self._block.scores, n_steps * _DEPTH, _near_bfloat16)
        step_bytes = _DEPTH * shape.head_dim * 2
        with loop(n.b, 0, shape.head_dim, _DEPTH) as i:
            values = self._values + self._row * (shape.head_dim * 2) + i * (_DEPTH * 2)
            self._multiply(
                values, 64, step_bytes, self._weights, n_steps, self._sums + i * shape.n_columns
            )
        with loop(n.b, 0, shape.head_dim) as i:
            place, own = (each + i * shape.n_columns for each in (self._block.sums, self._sums))
            for number, (total, added) in enumerate(
                zip(shape.vectors(place), shape.vectors(own), strict=True)
            ):
                added = fma(added, factors[number], total * before[number])
                lanes.store(place + number * lanes.width, added)

    def _multiply(
        self,
        rows: Value,
        row_bytes: int,
        step_bytes: int,
        pairs: "_Pairs",
        n_steps: Value,
        out: Value,
    ) -> None:
        """32 rows by a block's columns into `out`, in steps of 32 to sum over.

        Shapes: rows [32, n_steps * 32], each step's tiles in rows of so many bytes; out [32, C].
        """
        b, totals, of_rows, of_pairs = rows.b, [0, 1, 2, 3], [4, 5], [6, 7]
        in_out, in_rows, in_pairs = (
            Value(b, I64(each)) for each in (4 * self._shape.n_columns, row_bytes, 64)
        )
        places = [
            (out + (i * _SIDE * self._shape.n_columns + j * _SIDE)).bits_as(I8.as_pointer())
            for i, j in product(range(2), range(2))
        ]
        for total in totals:
            tile_instruction(b, "tilezero", total)
        with loop(b, 0, n_steps) as step:
            for number, tile in enumerate(of_rows):
                own = rows + step * step_bytes + number * _SIDE * row_bytes
                tile_instruction(b, "tileloadd64", tile, own, in_rows)
            for part in (0, 1):
                for number, tile in enumerate(of_pairs):
                    own = pairs.tile(part, number, step)
                    tile_instruction(b, "tileloadd64", tile, own, in_pairs)
                for total, (one, other) in zip(totals, product(of_rows, of_pairs), strict=True):
                    tile_instruction(b, "tdpbf16ps", total, one, other)
        for total, place in zip(totals, places, strict=True):
            tile_instruction(b, "tilestored64", total, place, in_out)


class _Pairs:
    """Rows of a block's columns in two parts of bfloat16, two rows side by side.

    Shapes: [2 parts, vectors, n / 32, 16, 16, 2] in bytes, for n rows at the most.
    """

    def __init__(self, shape: BlockShape, place: Value, n: int) -> None:
        self._shape, self._place, self._n = shape, place, n

    def tile(self, part: int, vector: int, step: Value) -> Value:
        start = (part * _VECTORS + vector) * self._n * _SIDE * 2
        return self._place + start + step * _TILE_BYTES

    def split(self, rows: Value, n: Value, rounded: Callable[[Value], Value]) -> None:
        """Take up n rows, a multiple of 2. Shapes: rows [n, C]."""
        shape = self._shape
        with loop(n.b, 0, n, 2) as row:
            one, other = (shape.vectors(rows + (row + i) * shape.n_columns) for i in (0, 1))
            for vector, each in enumerate(zip(one, other, strict=True)):
                highs = [rounded(number) for number in each]
                rests = [
                    number - (high << 16).bits_as(_LANES.vector)
                    for number, high in zip(each, highs, strict=True)
                ]
                lows = [rounded(rest) for rest in rests]
                for part, (first, second) in enumerate((highs, lows)):
                    place = self.tile(part, vector, row.like(0)) + row * (_SIDE * 2)
                    _put(place, first | (second << 16))


def _near_bfloat16(numbers: Value) -> Value:
    """`to_bfloat16` but for ties, in fewer steps; of NaN it makes something or other.

    A weight that is NaN makes NaN of its column's total, and so of the result.
    """
    return (numbers.bits_as(_WORDS) + 0x8000) >> 16


def _halves(address: Value) -> Value:
    """16 numbers of bfloat16, as they are stored."""
    place = address.bits_as(ir.VectorType(I16, _SIDE).as_pointer())
    return Value(address.b, address.b.load(place.raw, align=2))


def _put(address: Value, vector: Value) -> None:
    address.b.store(vector.raw, address.bits_as(vector.raw.type.as_pointer()).raw, align=2)
