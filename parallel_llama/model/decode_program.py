"""Decode steps as programs: one call in the place of hundreds, for steps of equal numbers of rows.

A step that is nothing but decode rows, in operators that are kernels, is recorded the first time;
after that its batch is copied to where the recording looks, and all blocks are one call. Every
other step runs block by block, and so does a model with operators of torch's. Both give the same
to the last bit, and take part in the same collectives.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from parallel_llama.model.batch import Batch, GroupBatch
from parallel_llama.model.kv_cache import KVCache
from parallel_llama.model.transformer import Transformer
from parallel_llama.ops import CPUOps, DecodeBatch, NotRecorded

# Keys of a row, and ranges of slots for each row, for which there is room at the least.
_LEAST_KEYS, _LEAST_RANGES = 1024, 8

# Programs that are kept, one for each number of rows.
_MAX_PROGRAMS = 64


class DecodePrograms:
    """A model's forward pass over these caches, by a program where the batch is one for it.

    Raises, and Collective: as `Transformer.forward`.
    """

    def __init__(self, model: Transformer, caches: Sequence[KVCache]) -> None:
        self._model, self._caches = model, caches
        self._ops = model.ops if isinstance(model.ops, CPUOps) else None
        # By number of rows; None where something was no kernel.
        self._programs: dict[int, _Program | None] = {}

    def __call__(self, batch: Batch) -> Tensor:
        """What `Transformer.forward` gives."""
        x = self._model.embedded(batch.tokens)
        program = self._program_for(x, batch)
        if program is None:
            return self._model.blocks(x, batch, self._caches)
        return program(x, batch)

    def _program_for(self, x: Tensor, batch: Batch) -> "_Program | None":
        if self._ops is None or not _is_decode(batch):
            return None
        n_rows = len(x)
        program = self._programs.get(n_rows)
        if n_rows not in self._programs or (program and not program.has_room_for(batch)):
            try:
                program = _Program(self._model, self._ops, self._caches, x, batch)
            except NotRecorded:
                program = None
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.clear()
            self._programs[n_rows] = program
        return program


def _is_decode(batch: Batch) -> bool:
    """Whether every row is decoded in every group of layers, and the result of each is wanted."""
    n_rows = len(batch.tokens)
    return batch.rows is None and all(
        group.decode is not None and len(group.decode.rows) == n_rows for group in batch.groups
    )


class _Program:
    """All blocks of a model over batches like one: of as many rows, with no more keys than it has
    room for.

    Raises: NotRecorded if something in the blocks is no kernel.
    """

    def __init__(
        self,
        model: Transformer,
        ops: CPUOps,
        caches: Sequence[KVCache],
        x: Tensor,
        batch: Batch,
    ) -> None:
        self._groups = tuple(_with_room(group) for group in batch.groups)
        self._x = torch.empty_like(x)
        with ops.recording() as self._recording:
            self._y = model.blocks(self._x, replace(batch, groups=self._groups), caches)

    def has_room_for(self, batch: Batch) -> bool:
        return all(
            _decode(own).has_room_for(_decode(other))
            for own, other in zip(self._groups, batch.groups, strict=True)
        )

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """The residual stream after the last block. Shapes: x [T, dim], and so is the result."""
        self._x.copy_(x)
        for own, other in zip(self._groups, batch.groups, strict=True):
            own.slots.copy_(other.slots)
            own.rotations.copy_(other.rotations)
            _decode(own).fill(_decode(other))
        self._recording.replay()
        return self._y.clone()


def _with_room(group: GroupBatch) -> GroupBatch:
    """A batch to be filled by others of as many rows, with room for keys that come later."""
    decode = _decode(group)
    n_rows, n_ranges = len(decode.rows), len(decode.slot_ranges)
    room = DecodeBatch.with_room(
        n_rows,
        max(_LEAST_RANGES * n_rows, 2 * n_ranges),
        max(_LEAST_KEYS, 2 * decode.max_len),
    )
    slots, rotations = torch.empty_like(group.slots), torch.empty_like(group.rotations)
    return GroupBatch(slots, rotations, tiles=(), decode=room)


def _decode(group: GroupBatch) -> DecodeBatch:
    assert group.decode is not None
    return group.decode
