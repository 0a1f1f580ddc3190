"""Rotary positions and the way into the KV cache, in one pass over queries, keys and values.

Source: RoFormer, arXiv 2104.09864, section 3.4.2.
"""

from collections.abc import Sequence
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.kernels.builder import I32, I64, Lanes, at, loop, part_of
from parallel_llama.kernels.program import Machine, Program, this_machine, worthwhile_threads


class Rotary:
    """Rotate queries in place; store rotated keys, and values, in their slots.

    The keys in `qkv` stay as they are.

    Shapes: qkv [T, H + 2 K, D] in one piece, each token's H queries, K keys and K values;
    rotations [T, 1, D / 2] complex, pair i turning numbers 2 i and 2 i + 1; slots [T] int64; k, v
    [K, n_slots, D], slots in one piece, heads anywhere.
    """

    def __init__(self, dtype: torch.dtype, head_dim: int, machine: Machine) -> None:
        self.dtype, self.head_dim = dtype, head_dim
        width = min(machine.vector_bytes // dtype.itemsize, head_dim & -head_dim)
        self._program = Program("rotary", 9, _Body(Lanes(dtype, width), head_dim))

    def __call__(self, qkv: Tensor, rotations: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        n, n_kv_heads = len(qkv), len(k)
        assert qkv.is_contiguous() and qkv.shape[2] == self.head_dim
        assert rotations.is_contiguous() and rotations.dtype == self.dtype.to_complex()
        assert len(rotations) == len(slots) == n
        assert k.stride() == v.stride() and k.stride()[1:] == (self.head_dim, 1)
        self._program(
            worthwhile_threads(qkv.numel()),
            qkv.data_ptr(),
            rotations.data_ptr(),
            slots.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            k.stride(0),
            n,
            qkv.shape[1] - 2 * n_kv_heads,
            n_kv_heads,
        )


@cache
def make_rotary(dtype: torch.dtype, head_dim: int) -> Rotary:
    """The kernel for this machine; `computes` says for what."""
    return Rotary(dtype, head_dim, this_machine())


class _Body:
    """Builds the kernel: arguments qkv, rotations, slots, k, v, heads' stride, T, H, K."""

    def __init__(self, lanes: Lanes, head_dim: int) -> None:
        self.lanes, self.head_dim = lanes, head_dim

    def __call__(
        self, b: ir.IRBuilder, arguments: Sequence[ir.Value], thread: ir.Value, n_threads: ir.Value
    ) -> None:
        numbers, integers, size = self.lanes.pointer, I64.as_pointer(), I64(self.head_dim)
        qkv, rotations, slots, k, v, stride, n, n_heads, n_kv_heads = arguments
        qkv, rotations, k, v = (b.inttoptr(value, numbers) for value in (qkv, rotations, k, v))
        slots = b.inttoptr(slots, integers)
        row_size = b.mul(b.add(n_heads, b.mul(n_kv_heads, I64(2))), size)
        with loop(b, *part_of(b, n, thread, n_threads)) as token:
            queries = at(b, qkv, b.mul(token.index, row_size))
            keys = at(b, queries, b.mul(n_heads, size))
            values = at(b, keys, b.mul(n_kv_heads, size))
            turns = at(b, rotations, b.mul(token.index, size))
            slot = b.mul(b.load(at(b, slots, token.index)), size)
            with loop(b, I64(0), n_heads) as head:
                query = at(b, queries, b.mul(head.index, size))
                self._rotate(b, query, turns, query)
            with loop(b, I64(0), n_kv_heads) as head:
                own, place = b.mul(head.index, size), b.add(b.mul(head.index, stride), slot)
                self._rotate(b, at(b, keys, own), turns, at(b, k, place))
                self._copy(b, at(b, values, own), at(b, v, place))

    def _rotate(self, b: ir.IRBuilder, source: ir.Value, turns: ir.Value, target: ir.Value) -> None:
        """One head: (x + iy)(c + is), the numbers of a pair side by side."""
        lanes = self.lanes
        signs = ir.Constant(
            lanes.vector, [lanes.scalar(-1 if i % 2 == 0 else 1) for i in range(lanes.width)]
        )
        with loop(b, I64(0), I64(self.head_dim), lanes.width) as i:
            x = lanes.load(b, at(b, source, i.index))
            turn = lanes.load(b, at(b, turns, i.index))
            cos = self._picked(b, turn, [lane & ~1 for lane in range(lanes.width)])
            sin = self._picked(b, turn, [lane | 1 for lane in range(lanes.width)])
            other = self._picked(b, x, [lane ^ 1 for lane in range(lanes.width)])
            y = lanes.fma(b, x, cos, b.fmul(b.fmul(other, sin), signs))
            lanes.store(b, y, at(b, target, i.index))

    def _picked(self, b: ir.IRBuilder, value: ir.Value, lanes: Sequence[int]) -> ir.Value:
        mask = ir.Constant(ir.VectorType(I32, self.lanes.width), [I32(lane) for lane in lanes])
        return b.shuffle_vector(value, ir.Constant(self.lanes.vector, ir.Undefined), mask)

    def _copy(self, b: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
        lanes = self.lanes
        with loop(b, I64(0), I64(self.head_dim), lanes.width) as i:
            lanes.store(b, lanes.load(b, at(b, source, i.index)), at(b, target, i.index))
