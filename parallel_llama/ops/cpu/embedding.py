"""Embedding lookups, dense and quantised, as kernels that a decode step can record."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.dtypes import QUANT_GROUP_SIZE, QuantFormat
from parallel_llama.ops.cpu.arguments import Bytes, Floats, Integer, Integers, Numbers, T, Weights
from parallel_llama.ops.cpu.ir import I8, I32, Lanes, Thread, Value, loop, when
from parallel_llama.ops.cpu.jit import (
    CompiledKernel,
    CPUFeatures,
    Launcher,
    at_once,
    this_machine,
    threads_for,
)
from parallel_llama.ops.cpu.panels import (
    Group,
    Panel,
    PanelArguments,
    PanelReader,
    panel_arguments,
    panel_at,
)
from parallel_llama.ops.cpu.vector_math import from_e4m3
from parallel_llama.ops.quant import PanelShape


@dataclass(slots=True, kw_only=True)
class _LookupArguments(Generic[T]):
    tokens: Integers[T]
    weight: Weights[T]
    y: Numbers[T]
    n: Integer[T]
    m: Integer[T]
    dim: Integer[T]
    first: Integer[T]


class LookupKernel:
    """y[t] = weight[tokens[t] - first], or -0.0 if the weight has no such row.

    The weight may have 16 bits if the result is float32.

    Shapes: tokens [n] int64; weight [m, dim] contiguous; the result [n, dim].
    """

    def __init__(self, dtype: torch.dtype, stored: torch.dtype, machine: CPUFeatures) -> None:
        lanes, self._dtype, self._stored = machine.lanes(dtype), dtype, stored
        of_weight = replace(lanes, stored=stored)
        self._program = CompiledKernel(
            _LookupArguments[float],
            partial(_lookup, lanes, of_weight),
            numbers=lanes.pointer,
            weights=of_weight.pointer,
        )

    def __call__(
        self, tokens: Tensor, weight: Tensor, first: int, run: Launcher = at_once
    ) -> Tensor:
        n, (m, dim) = len(tokens), weight.shape
        assert tokens.is_contiguous() and tokens.dtype == torch.int64
        assert weight.is_contiguous() and weight.dtype == self._stored
        y = weight.new_empty((n, dim), dtype=self._dtype)
        arguments = _LookupArguments(
            tokens=tokens.data_ptr(), weight=weight.data_ptr(), y=y.data_ptr(), n=n, m=m, dim=dim,
            first=first,
        )  # fmt: skip
        run(self._program, threads_for(n * dim), arguments)
        return y


@cache
def make_lookup(dtype: torch.dtype, stored: torch.dtype) -> LookupKernel:
    return LookupKernel(dtype, stored, this_machine())


def _lookup(
    lanes: Lanes,
    of_weight: Lanes,
    b: ir.IRBuilder,
    thread: Thread,
    args: _LookupArguments[Value],
) -> None:
    """
    for t in this thread's tokens:
        y[t] = weight[tokens[t] - first] if that row exists else -0.0
    """
    dim = args.dim
    with loop(b, *thread.part_of(args.n)) as t:
        row, y = args.tokens[t] - args.first, args.y + t * dim
        is_there = (row > -1) & (row < args.m)
        with loop(b, 0, dim, lanes.width) as i:
            mask = lanes.first(dim - i)
            lanes.store(y + i, lanes.constant(b, -0.0), mask)
            with when(is_there):
                lanes.store(y + i, of_weight.load(args.weight + row * dim + i, mask), mask)


_FOUR = Lanes(torch.float32, torch.float32, 4)  # the inputs of a word of integers


@dataclass(slots=True, kw_only=True)
class _QuantLookupArguments(Generic[T]):
    tokens: Integers[T]
    panels: Bytes[T]
    y: Floats[T]
    n: Integer[T]
    m: Integer[T]
    first: Integer[T]
    shape: PanelArguments[T]


class QuantEmbeddingKernel:
    """y[t] = A[tokens[t] - first], or -0.0 if A has no such row, with A quantised and in panels.

    Shapes: tokens [n] int64; panels [n_panels, n_bytes] uint8 with `n_outputs` rows; the result
    [n, in] float32.
    """

    def __init__(self, form: QuantFormat, machine: CPUFeatures) -> None:
        reader = PanelReader(machine.lanes(torch.float32), form)
        self._program = CompiledKernel(
            _QuantLookupArguments[float], partial(_quant_embedding, reader)
        )

    def __call__(
        self,
        tokens: Tensor,
        panels: Tensor,
        shape: PanelShape,
        first: int,
        n_outputs: int,
        run: Launcher = at_once,
    ) -> Tensor:
        n = len(tokens)
        assert tokens.is_contiguous() and tokens.dtype == torch.int64
        assert panels.is_contiguous() and panels.shape[1] == shape.n_bytes
        y = torch.empty((n, shape.n_inputs), dtype=torch.float32)
        arguments = _QuantLookupArguments(
            tokens=tokens.data_ptr(), panels=panels.data_ptr(), y=y.data_ptr(), n=n, m=n_outputs,
            first=first, shape=panel_arguments(shape),
        )  # fmt: skip
        run(self._program, threads_for(y.numel()), arguments)
        return y


@cache
def make_quant_embedding(form: QuantFormat) -> QuantEmbeddingKernel:
    return QuantEmbeddingKernel(form, this_machine())


def _quant_embedding(
    reader: PanelReader, b: ir.IRBuilder, thread: Thread, args: _QuantLookupArguments[Value]
) -> None:
    """
    for t in this thread's tokens:
        y[t] = dequantised A[tokens[t] - first] if that row exists else -0.0
    """
    width, n_groups = reader.lanes.width, args.shape.n_groups
    group_lanes = Lanes(torch.float32, torch.float32, QUANT_GROUP_SIZE)
    with loop(b, *thread.part_of(args.n)) as t:
        row, y = args.tokens[t] - args.first, args.y + t * n_groups * QUANT_GROUP_SIZE
        is_there = (row > -1) & (row < args.m)
        panel = panel_at(args.panels, row // width, args.shape)
        lane = (row % width).resized(I32)
        with loop(b, 0, n_groups) as index:
            target = y + index * QUANT_GROUP_SIZE
            group_lanes.store(target, group_lanes.constant(b, -0.0))
            with when(is_there):
                group = reader.group_at(index, args.shape.n_before)
                for part in range(reader.form.n_parts):
                    _store_part(reader, panel, group, part, lane, target)


def _store_part(
    reader: PanelReader, panel: Panel, group: Group, part: int, lane: Value, target: Value
) -> None:
    """Writes a row's values of a part of a group; `target` is where the group's values begin."""
    bytes_, words = ir.VectorType(I8, 4), ir.VectorType(I32, 4)
    scale = _FOUR.splat(reader.scale(panel, group, part).lane(lane))
    has_min = reader.form.has_min
    least = _FOUR.splat(reader.least(panel, group, part).lane(lane)) if has_min else None
    for column, unsigned in reader.unsigned(panel, group, part):
        stored = unsigned.lane(lane).bits_as(bytes_)
        if reader.form.is_float:
            values = from_e4m3(stored, _FOUR.vector) * scale
        else:
            values = (stored - reader.form.zero).resized(words).to(_FOUR.vector) * scale
        _FOUR.store(target + 4 * column, values if least is None else values + least)
