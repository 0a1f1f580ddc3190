"""Rotary embedding and the store into the KV cache, in one pass over queries, keys and values.

Source: RoFormer, arXiv 2104.09864, section 3.4.2.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Integer, Integers, Numbers, Rows, T
from parallel_llama.ops.cpu.ir import Lanes, Thread, Value, fma, loop, shuffle
from parallel_llama.ops.cpu.jit import (
    CompiledKernel,
    CPUFeatures,
    Launcher,
    at_once,
    this_machine,
    threads_for,
)
from parallel_llama.ops.cpu.kv_rows import KVRows


@dataclass(slots=True, kw_only=True)
class _Arguments(Generic[T]):
    qkv: Numbers[T]
    rotations: Numbers[T]
    slots: Integers[T]
    k_cache: Rows[T]
    v_cache: Rows[T]
    cache_stride: Integer[T]
    n: Integer[T]
    n_heads: Integer[T]
    n_kv_heads: Integer[T]


class RotaryKernel:
    """Rotates queries and keys in place, and stores keys and values in their slots of the cache.

    Args:
        rotates: Whether a call gets `rotations`; if false, it only stores keys and values.

    Shapes: qkv [T, H + 2 K, D], contiguous, each token's H queries, K keys and K values; rotations
    [T, 1, D / 2] complex, where pair i rotates numbers 2 i and 2 i + 1; slots [T] int64; k, v
    [K, n_slots, W] in the cache's dtype, contiguous for each head.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        head_dim: int,
        machine: CPUFeatures,
        *,
        rotates: bool = True,
    ) -> None:
        self.dtype, self.head_dim, self._rotates = dtype, head_dim, rotates
        lanes = machine.lanes(dtype, head_dim)
        self._rows = KVRows(cache_dtype, lanes, head_dim)
        self._program = CompiledKernel(
            _Arguments[float],
            partial(_rotary, self._rows, rotates),
            numbers=lanes.pointer,
            rows=self._rows.pointer,
        )

    def __call__(
        self,
        qkv: Tensor,
        rotations: Tensor | None,
        slots: Tensor,
        k: Tensor,
        v: Tensor,
        run: Launcher = at_once,
    ) -> None:
        n, n_kv_heads = len(qkv), len(k)
        assert qkv.is_contiguous() and qkv.shape[2] == self.head_dim
        assert (rotations is not None) == self._rotates and len(slots) == n
        if rotations is not None:
            assert rotations.is_contiguous() and rotations.dtype == self.dtype.to_complex()
            assert len(rotations) == n
        assert k.stride() == v.stride() and k.stride()[1:] == (self._rows.width, 1)
        assert k.dtype == v.dtype == self._rows.stored
        arguments = _Arguments(
            qkv=qkv.data_ptr(), rotations=0 if rotations is None else rotations.data_ptr(),
            slots=slots.data_ptr(), k_cache=k.data_ptr(), v_cache=v.data_ptr(),
            cache_stride=k.stride(0), n=n, n_heads=qkv.shape[1] - 2 * n_kv_heads,
            n_kv_heads=n_kv_heads,
        )  # fmt: skip
        run(self._program, threads_for(qkv.numel()), arguments)


@cache
def make_rotary(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, *, rotates: bool = True
) -> RotaryKernel:
    return RotaryKernel(dtype, cache_dtype, head_dim, this_machine(), rotates=rotates)


def _rotary(
    rows: KVRows, rotates: bool, b: ir.IRBuilder, thread: Thread, args: _Arguments[Value]
) -> None:
    """
    (without the rotations if not `rotates`)
    for token in this thread's tokens:
        for head in the query heads:
            q[token, head] = rotate(q[token, head])
        for head in the KV heads:
            k[token, head] = rotate(k[token, head])
            k_cache[head, slots[token]] = k[token, head], converted
            v_cache[head, slots[token]] = v[token, head], converted
    """
    lanes, head_dim = rows.lanes, rows.head_dim
    n_heads, n_kv_heads = args.n_heads, args.n_kv_heads
    with loop(b, *thread.part_of(args.n)) as token:
        q = args.qkv + token * (n_heads + n_kv_heads * 2) * head_dim
        k = q + n_heads * head_dim
        v = k + n_kv_heads * head_dim
        rotations, slot = args.rotations + token * head_dim, args.slots[token] * rows.width
        if rotates:
            with loop(b, 0, n_heads) as head:
                _rotate(lanes, head_dim, q + head * head_dim, rotations)
        with loop(b, 0, n_kv_heads) as head:
            offset, row = head * head_dim, head * args.cache_stride + slot
            if rotates:
                _rotate(lanes, head_dim, k + offset, rotations)
            rows.write(k + offset, args.k_cache + row)
            rows.write(v + offset, args.v_cache + row)


def _rotate(lanes: Lanes, head_dim: int, numbers: Value, rotations: Value) -> None:
    """Rotates a head: (x + iy)(c + is) = (xc - ys) + i(yc + xs) for adjacent x and y."""
    element = lanes.vector.element
    signs = Value(numbers.b, lanes.vector([element(-1), element(1)] * (lanes.width // 2)))
    with loop(numbers.b, 0, head_dim, lanes.width) as i:
        x, rotation = lanes.load(numbers + i), lanes.load(rotations + i)
        cos = shuffle(rotation, [lane & ~1 for lane in range(lanes.width)])
        sin = shuffle(rotation, [lane | 1 for lane in range(lanes.width)])
        other = shuffle(x, [lane ^ 1 for lane in range(lanes.width)])
        lanes.store(numbers + i, fma(x, cos, other * sin * signs))
