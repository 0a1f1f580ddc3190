"""GEMM for many rows and a weight in bfloat16, on the CPU's matrix tiles (AMX).

A float32 row is split into two rows of bfloat16, x = high + low, with a relative error of at most
2^-17. The products of both with the weight are exact; they are summed in float32, in an order that
depends only on the number of inputs. So a row's result does not depend on the other rows.

    tile of the weight [16 outputs, 32 inputs]
    tile of rows       [16 pairs of inputs, 16 rows, 2]
    tile of the result [16 outputs, 16 rows]

The weight and the rows are first copied so that each tile is contiguous in memory: if the rows of a
tile were a power of two apart, they would evict each other from the cache.

Source: Intel 64 and IA-32 architectures, optimization reference manual, chapter on Intel AMX.
"""

import ctypes
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Generic

import llvmlite.binding as llvm
import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Bytes, Floats, Integer, T
from parallel_llama.ops.cpu.gemm import make_gemm
from parallel_llama.ops.cpu.ir import (
    F32,
    I8,
    I32,
    I64,
    VOID,
    Lanes,
    Thread,
    Value,
    call_function,
    intrinsic,
    loop,
    shuffle,
    smaller,
    transposed,
    when,
)
from parallel_llama.ops.cpu.jit import CompiledKernel, Launcher, at_once
from parallel_llama.ops.cpu.vector_math import to_bfloat16

_SIDE = 16  # outputs, rows, and pairs of inputs of a tile
_INPUTS = 2 * _SIDE
_LANES = range(_SIDE)
_WORDS, _NUMBERS = ir.VectorType(I32, _SIDE), ir.VectorType(F32, _SIDE)
_ROW_BYTES, _TILE_BYTES = 4 * _SIDE, 4 * _SIDE * _SIDE
_BLOCK = 2 * _SIDE  # outputs, and rows, that are multiplied together: four tiles of results

# Rows per chunk; a chunk fits a cache, and is multiplied by the whole weight before the next chunk.
_CHUNK = 6 * _BLOCK

# Linux's arch_prctl on x86-64, with which a process requests permission to use tiles.
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18

# Tiles are used if they are faster by this factor, so that noise does not change the choice.
_MIN_SPEEDUP = 1.5


@dataclass(slots=True, kw_only=True)
class _SplitArguments(Generic[T]):
    x: Floats[T]
    x_stride: Integer[T]
    pairs: Bytes[T]
    n: Integer[T]
    n_rows: Integer[T]
    k: Integer[T]


@dataclass(slots=True, kw_only=True)
class _GemmAMXArguments(Generic[T]):
    shape: Bytes[T]
    weight: Bytes[T]
    pairs: Bytes[T]
    packed: Bytes[T]
    y: Floats[T]
    n: Integer[T]
    n_rows: Integer[T]
    m: Integer[T]
    k: Integer[T]


class GemmAMXKernel:
    """x @ weight.T for many rows of x.

    Shapes: x [n, k] float32, rows contiguous; weight [m, k] bfloat16, contiguous, with k a multiple
    of 32 and m at least 32; the result [n, m].
    """

    def __init__(self) -> None:
        assert tiles_are_allowed()  # otherwise the first instruction kills the process
        self._split = CompiledKernel(_SplitArguments[float], _split)
        self._program = CompiledKernel(_GemmAMXArguments[float], _gemm_amx)
        self._shape = tile_shape()

    def __call__(self, x: Tensor, weight: Tensor, run: Launcher = at_once) -> Tensor:
        (n, k), m = x.shape, len(weight)
        assert self.takes(weight) and weight.is_contiguous() and weight.shape[1] == k
        assert x.dtype == torch.float32 and x.stride(1) == 1
        n_rows = -(-n // _BLOCK) * _BLOCK
        n_threads = torch.get_num_threads()
        pairs = torch.empty(2, n_rows, k, dtype=torch.bfloat16)
        packed = torch.empty(n_threads, _BLOCK, k, dtype=torch.bfloat16)
        split = _SplitArguments(
            x=x.data_ptr(), x_stride=x.stride(0), pairs=pairs.data_ptr(), n=n, n_rows=n_rows, k=k
        )
        run(self._split, n_threads, split)
        y = x.new_empty(n, m)
        arguments = _GemmAMXArguments(
            shape=self._shape.data_ptr(), weight=weight.data_ptr(), pairs=pairs.data_ptr(),
            packed=packed.data_ptr(), y=y.data_ptr(), n=n, n_rows=n_rows, m=m, k=k,
        )  # fmt: skip
        run(self._program, n_threads, arguments)
        return y

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether the kernel supports this weight."""
        m, k = weight.shape
        return weight.dtype == torch.bfloat16 and m >= _BLOCK and k > 0 and k % _INPUTS == 0


@cache
def make_gemm_amx() -> GemmAMXKernel | None:
    """The kernel, or None if tiles are missing, not allowed, or not faster on this CPU."""
    if not tiles_are_allowed():
        return None
    kernel = GemmAMXKernel()
    x, weight = torch.ones(8 * _BLOCK, 512), torch.ones(512, 512, dtype=torch.bfloat16)
    plain = make_gemm(x.dtype, weight.dtype)
    pays = _seconds(lambda: kernel(x, weight)) * _MIN_SPEEDUP < _seconds(lambda: plain(x, weight))
    return kernel if pays else None


@cache
def tiles_are_allowed() -> bool:
    """Requests permission to use tiles. Returns: whether it is granted."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    features = llvm.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    answer: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA)
    return answer == 0


def _seconds(work: Callable[[], object]) -> float:
    """The time of the shortest of a few runs, which other processes have delayed least."""
    times = []
    for _ in range(4):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def tile_shape() -> Tensor:
    """The configuration of the CPU's eight tiles: all have 16 rows of 64 bytes."""
    shape = torch.zeros(64, dtype=torch.uint8)
    shape[0] = 1  # the palette
    shape[16:32].view(torch.int16)[:] = 64
    shape[48:56] = _SIDE
    return shape


def _split(b: ir.IRBuilder, thread: Thread, args: _SplitArguments[Value]) -> None:
    """Splits inputs into high and low parts, pairs adjacent, padded to whole blocks with zeros.

    Shapes: x [n, k] -> pairs [2, n_rows / 16, k / 2, 16, 2].
    """
    n_rows, k = args.n_rows, args.k
    with (
        loop(b, *thread.part_of(n_rows // _SIDE)) as tile,
        loop(b, 0, k, _INPUTS) as column,
    ):
        rows = [
            _high_and_low(args.x, args.x_stride, args.n, tile * _SIDE + row, column)
            for row in _LANES
        ]
        for part in (0, 1):
            first = args.pairs + ((n_rows * part + tile * _SIDE) * k + column * _SIDE) * 2
            for number, tile_row in enumerate(transposed([row[part] for row in rows])):
                target = (first + number * _ROW_BYTES).bits_as(_WORDS.as_pointer())
                b.store(tile_row.raw, target.raw, align=4)


def _high_and_low(x: Value, x_stride: Value, n: Value, row: Value, column: Value) -> list[Value]:
    """The high and the low part of 32 inputs of a row, a pair of inputs in each lane.

    Rows beyond the last are zeros.
    """
    lanes = Lanes(torch.float32, torch.float32, _SIDE)
    mask = lanes.splat(row < n)
    inputs = x + row * x_stride + column
    one, other = lanes.load(inputs, mask), lanes.load(inputs + _SIDE, mask)
    even, odd = (shuffle(one, range(start, _INPUTS, 2), other) for start in (0, 1))
    highs = [to_bfloat16(numbers) for numbers in (even, odd)]
    rests = [
        numbers - (high << 16).bits_as(lanes.vector)
        for numbers, high in zip((even, odd), highs, strict=True)
    ]
    lows = [to_bfloat16(rest) for rest in rests]
    return [first | (second << 16) for first, second in (highs, lows)]


def _gemm_amx(b: ir.IRBuilder, thread: Thread, args: _GemmAMXArguments[Value]) -> None:
    """
    for outputs in this thread's blocks of outputs:
        for rows in blocks of rows:
            y[rows, outputs] = sum over tiles of inputs of weight[outputs] @ (high + low)[rows]
    """
    n_rows, m, k = args.n_rows, args.m, args.k
    with b.goto_entry_block():
        room = b.alloca(ir.ArrayType(F32, _BLOCK * _BLOCK))
    results = Value(b, room).bits_as(F32.as_pointer())  # [outputs, rows] of a block
    packed = args.packed + thread.number * _BLOCK * k * 2
    intrinsic("x86.ldtilecfg", VOID, args.shape)
    with (
        loop(b, 0, n_rows, _CHUNK) as start,
        loop(b, *thread.part_of((m + (_BLOCK - 1)) // _BLOCK)) as block,
    ):
        # The last block starts early enough to be whole: some outputs are computed twice.
        first = smaller(block * _BLOCK, m - _BLOCK)
        _copy_tiles(args.weight + first * k * 2, packed, k)
        with loop(b, start, smaller(start + _CHUNK, n_rows), _BLOCK) as row:
            _multiply(packed, args.pairs + row * k * 2, results, n_rows, k)
            for i, j in product(range(2), range(2)):
                outputs = [_row_of(results, i * _SIDE + lane, j * _SIDE) for lane in _LANES]
                for number, values in enumerate(transposed(outputs)):
                    y_row = row + (j * _SIDE + number)
                    target = args.y + y_row * m + first + i * _SIDE
                    with when(y_row < args.n):
                        b.store(values.raw, target.bits_as(_NUMBERS.as_pointer()).raw, align=4)
    release_tiles(b)


def _copy_tiles(weight: Value, packed: Value, k: Value) -> None:
    """Copies a block of outputs of the weight so that its tiles are contiguous."""
    with loop(k.b, 0, k * 2, _ROW_BYTES) as column:
        for output in range(_BLOCK):
            tile = packed + k * (output // _SIDE * _SIDE * 2) + column * _SIDE
            words = (weight + k * (output * 2) + column).bits_as(_WORDS.as_pointer())
            values = k.b.load(words.raw, align=2)
            target = (tile + output % _SIDE * _ROW_BYTES).bits_as(_WORDS.as_pointer())
            k.b.store(values, target.raw, align=2)


def _multiply(packed: Value, pairs: Value, results: Value, n_rows: Value, k: Value) -> None:
    """Multiplies a block of outputs by a block of rows, over all inputs."""
    b = k.b
    result_tiles, weight_tiles, row_tiles = [0, 1, 2, 3], [4, 5], [6, 7]
    tile_stride, result_stride = (Value(b, I64(each)) for each in (_ROW_BYTES, _BLOCK * 4))
    for tile in result_tiles:
        tile_instruction(b, "tilezero", tile)
    with loop(b, 0, k * 2 * _SIDE, _TILE_BYTES) as at:
        for number, tile in enumerate(weight_tiles):
            tile_instruction(
                b, "tileloadd64", tile, packed + k * (number * _SIDE * 2) + at, tile_stride
            )
        for part in (0, 1):
            part_tiles = pairs + n_rows * part * k * 2 + at
            for number, tile in enumerate(row_tiles):
                tile_instruction(
                    b, "tileloadd64", tile, part_tiles + k * (number * _SIDE * 2), tile_stride
                )
            for total, (one, other) in zip(
                result_tiles, product(weight_tiles, row_tiles), strict=True
            ):
                tile_instruction(b, "tdpbf16ps", total, one, other)
    for total, (i, j) in zip(result_tiles, product(range(2), range(2)), strict=True):
        address = (results + i * _SIDE * _BLOCK + j * _SIDE).bits_as(I8.as_pointer())
        tile_instruction(b, "tilestored64", total, address, result_stride)


def _row_of(results: Value, output: int, row: int) -> Value:
    """The results of an output for 16 rows."""
    address = (results + output * _BLOCK + row).bits_as(_NUMBERS.as_pointer())
    return Value(results.b, results.b.load(address.raw, align=4))


def tile_instruction(b: ir.IRBuilder, name: str, *operands: int | Value) -> None:
    """Emits an instruction on tiles; an int operand is the number of a tile."""
    values = [Value(b, I8(each)) if isinstance(each, int) else each for each in operands]
    intrinsic(f"x86.{name}", VOID, *values)


def release_tiles(b: ir.IRBuilder) -> None:
    """Releases the tiles at the end of a kernel; context switches would save them otherwise."""
    call_function(b, "llvm.x86.tilerelease", VOID)
