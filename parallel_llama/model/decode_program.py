"""Decode steps as programs: one call in the place of hundreds, for steps of equal numbers of rows.

A step that is nothing but a few decode rows, in operators that are kernels, is recorded the first
time; after that its batch is copied to where the recording looks, and all blocks and the head are
one call. Every other step runs block by block, and so does a model with operators of torch's. Both
give the same to the last bit, and take part in the same collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel_llama.model.batch import Batch, GroupBatch
from parallel_llama.model.kv_cache import KVCache
from parallel_llama.model.transformer import Transformer
from parallel_llama.ops import CPUOps, DecodeBatch, NotRecorded

# Keys of a row, and ranges of slots for each row, for which there is room at the least.
_LEAST_KEYS, _LEAST_RANGES = 1024, 8

# Programs are kept, one for each number of rows up to this one. Beyond it arithmetic takes so long
# that calls from Python cost little beside it, and a program would seldom be run again.
_MAX_ROWS = 32


@dataclass(frozen=True)
class Logits:
    """Scores of this rank's vocabulary rows, and what is known of each row besides.

    That is its largest, or what `TorchOps.draw` makes of it.

    Shapes: values [n, V_local] local; largest and drawn [n, 2] float64 local, the second of each
    pair being the token.
    """

    values: Tensor
    largest: Tensor | None = None
    drawn: Tensor | None = None

    def rows(self, which: slice | list[int]) -> "Logits":
        """The same of some rows."""
        known = (None if each is None else each[which] for each in (self.largest, self.drawn))
        return Logits(self.values[which], *known)


class DecodePrograms:
    """A model's forward pass over these caches, by a program where the batch is one for it.

    Raises, and Collective: as `Transformer.forward`.
    """

    def __init__(self, model: Transformer, caches: Sequence[KVCache]) -> None:
        self._model, self._caches = model, caches
        self._ops = model.ops if isinstance(model.ops, CPUOps) else None
        self._first = model.tok_embeddings.rows.start
        # By number of rows; None where something was no kernel.
        self._programs: dict[int, _Program | None] = {}

    def __call__(self, batch: Batch) -> Tensor:
        """What `Transformer.forward` gives."""
        program = self._program_for(batch)
        if program is None:
            return self._model(batch, self._caches)  # type: ignore[no-any-return]
        program.run(batch)
        return program.hidden.clone()

    def logits(self, batch: Batch) -> Logits:
        """What `Transformer.logits` makes of that; the next step may put its own in their place."""
        program = self._program_for(batch)
        if program is None:
            logits = self._model.logits(self._model(batch, self._caches))
            if batch.noise is None:
                return Logits(logits)
            return Logits(logits, drawn=self._model.ops.draw(logits, batch.noise, self._first))
        program.run(batch)
        if program.largest is None:
            return Logits(self._model.scaled(program.scores))
        return Logits(program.scores, program.largest)

    def _program_for(self, batch: Batch) -> "_Program | None":
        if self._ops is None or not _is_decode(batch):
            return None
        n_rows = len(batch.tokens)
        program = self._programs.get(n_rows)
        if n_rows not in self._programs or (program and not program.has_room_for(batch)):
            try:
                program = _Program(self._model, self._ops, self._caches, batch)
            except NotRecorded:
                program = None
            self._programs[n_rows] = program
        return program


def _is_decode(batch: Batch) -> bool:
    """Whether few rows are decoded in every group of layers, and the result of each is wanted."""
    n_rows = len(batch.tokens)
    return (
        n_rows <= _MAX_ROWS
        and batch.rows is None
        and all(
            group.decode is not None and group.decode.n_rows == n_rows for group in batch.groups
        )
    )


class _Program:
    """A model over batches like one: of as many rows, with no more keys than it has room for.

    Shapes: of the batch that was run last, `hidden` [T, dim] and `scores` [T, V_local], which are
    no logits before they are `scaled`; `largest` [T, 2] float64, where they are that already.
    Raises: NotRecorded if something behind the embedding is no kernel.
    """

    def __init__(
        self,
        model: Transformer,
        ops: CPUOps,
        caches: Sequence[KVCache],
        batch: Batch,
    ) -> None:
        self._groups = tuple(_with_room(group) for group in batch.groups)
        self._tokens, embedding = torch.empty_like(batch.tokens), model.tok_embeddings
        self._model = model
        shape = len(batch.tokens), embedding.dim
        self._x = torch.empty(shape, dtype=embedding.weight.computed)
        with ops.recording() as self._recording:
            x = model.embedded(self._tokens) if model.embeds_plainly else self._x
            self.hidden = model.blocks(x, replace(batch, groups=self._groups), caches)
            scores = model.scores(self.hidden)
            first = embedding.rows.start
            self.largest = None if model.scales_logits else ops.largest(scores, first)
            # By far the largest of a step's tensors: all programs may have theirs in one place,
            # which the next step's first kernels may take as well.
            self.scores = self._recording.borrowed(scores)

    def has_room_for(self, batch: Batch) -> bool:
        return all(
            _decode(own).has_room_for(_decode(other))
            for own, other in zip(self._groups, batch.groups, strict=True)
        )

    def run(self, batch: Batch) -> None:
        """Run the batch through the model."""
        if self._model.embeds_plainly:
            self._tokens.copy_(batch.tokens)
        else:
            self._x.copy_(self._model.embedded(batch.tokens))
        for own, other in zip(self._groups, batch.groups, strict=True):
            own.slots.copy_(other.slots)
            own.rotations.copy_(other.rotations)
            _decode(own).fill(_decode(other))
        self._recording.replay()


def _with_room(group: GroupBatch) -> GroupBatch:
    """A batch to be filled by others of as many rows, with room for keys that come later."""
    decode = _decode(group)
    n_rows, n_ranges = decode.n_rows, len(decode.slot_ranges)
    room = DecodeBatch.with_room(
        n_rows,
        max(_LEAST_RANGES * n_rows, 2 * n_ranges),
        max(_LEAST_KEYS, 2 * decode.max_len),
    )
    slots, rotations = torch.empty_like(group.slots), torch.empty_like(group.rotations)
    return GroupBatch(slots, rotations, decode=room)


def _decode(group: GroupBatch) -> DecodeBatch:
    assert group.decode is not None
    return group.decode
