"""Decode steps as programs: one call in the place of hundreds, for steps of equal numbers of rows.

A step that is nothing but a few decode rows, in operators that are kernels, is recorded the first
time; after that its numbers are written to where the recording looks, and all blocks and the head
are one call. Every other step runs block by block, and so does a model with operators of torch's.
Both give the same to the last bit, and take part in the same collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel_llama.model.batch import Batch, GroupBatch
from parallel_llama.model.kv_cache import KVCache
from parallel_llama.model.rope import HostRotations
from parallel_llama.model.transformer import Transformer
from parallel_llama.ops import CPUOps, DecodeRoom, DecodeRows, NotRecorded

# Keys of a row, and ranges of slots for each row, for which there is room at the least.
_LEAST_KEYS, _LEAST_RANGES = 1024, 8

# Programs are kept, one for each number of rows up to this one. Beyond it arithmetic takes so long
# that calls from Python cost little beside it, and a program would seldom be run again.
_MAX_ROWS = 32


@dataclass(frozen=True)
class Logits:
    """Scores of this rank's vocabulary rows, and what is known of each row besides.

    That is its largest, on the host, or what `TorchOps.draw` makes of it.

    Shapes: values [n, V_local] local; largest and drawn [n, 2] float64 local, the second of each
    pair being the token.
    """

    values: Tensor
    largest: npt.NDArray[np.float64] | None = None
    drawn: Tensor | None = None

    def rows(self, which: slice | list[int]) -> "Logits":
        """The same of some rows."""
        largest = None if self.largest is None else self.largest[which]
        drawn = None if self.drawn is None else self.drawn[which]
        return Logits(self.values[which], largest, drawn)


@dataclass(frozen=True)
class GroupRows:
    """What decode rows are to the layers of one group, in plain numbers: see `GroupBatch`.

    Shapes: rotations [T, 1, head_dim / 2] complex.
    """

    slots: list[int]
    rotations: HostRotations
    decode: DecodeRows


@dataclass(frozen=True)
class DecodeStep:
    """A batch of nothing but decode rows, the result of each being wanted, in plain numbers."""

    tokens: list[int]
    groups: tuple[GroupRows, ...]


class DecodePrograms:
    """A model's forward pass over these caches, as programs: one for each number of rows."""

    def __init__(self, model: Transformer, caches: Sequence[KVCache]) -> None:
        self._model, self._caches = model, caches
        self._ops = model.ops if isinstance(model.ops, CPUOps) else None
        # By number of rows; None where something was no kernel.
        self._programs: dict[int, Program | None] = {}

    def may_take(self, n_rows: int) -> bool:
        """Whether a step of so many rows is worth its `DecodeStep`."""
        is_refused = n_rows in self._programs and self._programs[n_rows] is None
        return self._ops is not None and n_rows <= _MAX_ROWS and not is_refused

    def run(self, step: DecodeStep) -> "Program | None":
        """The program that has run a step; None where operators have to.

        Raises, and Collective: as `Transformer.forward`.
        """
        n_rows = len(step.tokens)
        program = self._programs.get(n_rows)
        if program is None or not program.has_room_for(step):
            program = self._programs[n_rows] = self._recorded(step)
        if program is not None:
            program.run(step)
        return program

    @torch.inference_mode()
    def _recorded(self, step: DecodeStep) -> "Program | None":
        assert self._ops is not None
        try:
            return Program(self._model, self._ops, self._caches, step)
        except NotRecorded:
            return None


class Program:
    """A model over steps like one: of as many rows, with no more keys than it has room for.

    Shapes: of the step that was run last, `hidden` [T, dim].
    Raises: NotRecorded if something behind the embedding is no kernel.
    """

    def __init__(
        self,
        model: Transformer,
        ops: CPUOps,
        caches: Sequence[KVCache],
        step: DecodeStep,
    ) -> None:
        self._model, embedding = model, model.tok_embeddings
        self._groups = [_GroupRoom(rows) for rows in step.groups]
        self._token_ids = np.zeros(len(step.tokens), dtype=np.int64)
        self._tokens = torch.from_numpy(self._token_ids)
        shape = len(step.tokens), embedding.dim
        self._x = torch.empty(shape, dtype=embedding.weight.computed)
        batch = Batch(self._tokens, tuple(group.batch for group in self._groups), rows=None)
        with ops.recording() as self._recording:
            x = model.embedded(self._tokens) if model.embeds_plainly else self._x
            self.hidden = model.blocks(x, batch, caches)
            scores = model.scores(self.hidden)
            first = embedding.rows.start
            largest = None if model.scales_logits else ops.largest(scores, first)
            # By far the largest of a step's tensors: all programs may have theirs in one place,
            # which the next step's first kernels may take as well.
            borrowed = self._recording.borrowed(scores)
        self._scores = Logits(borrowed, None if largest is None else largest.numpy())

    @property
    def logits(self) -> Logits:
        """Those of the step that was run last; the next may put its own in their place."""
        if not self._model.scales_logits:
            return self._scores
        with torch.inference_mode():
            return Logits(self._model.scaled(self._scores.values))

    def has_room_for(self, step: DecodeStep) -> bool:
        pairs = zip(self._groups, step.groups, strict=True)
        return all(group.decode.has_room_for(rows.decode) for group, rows in pairs)

    def run(self, step: DecodeStep) -> None:
        """Run the step through the model."""
        # With numpy alone: a call of torch's goes through so much code and data that it takes ten
        # times as long as usual once a step's weights have passed through the caches.
        self._token_ids[:] = step.tokens
        for group, rows in zip(self._groups, step.groups, strict=True):
            group.fill(rows)
        if not self._model.embeds_plainly:
            with torch.inference_mode():
                self._x.copy_(self._model.embedded(self._tokens))
        self._recording.replay()


class _GroupRoom:
    """A group's part of a batch, to be filled by others of as many rows.

    It has room for more keys than these rows have, which come later.
    """

    def __init__(self, rows: GroupRows) -> None:
        n_rows, n_ranges = rows.decode.n_rows, len(rows.decode.slot_ranges)
        self.decode = DecodeRoom(
            n_rows,
            max(_LEAST_RANGES * n_rows, 2 * n_ranges),
            max(_LEAST_KEYS, 2 * rows.decode.max_len),
        )
        self._slots = np.zeros(n_rows, dtype=np.int64)
        self._rotations = np.zeros_like(rows.rotations)
        slots, rotations = torch.from_numpy(self._slots), torch.from_numpy(self._rotations)
        self.batch = GroupBatch(slots, rotations, decode=self.decode.batch)

    def fill(self, rows: GroupRows) -> None:
        self._slots[:] = rows.slots
        self._rotations[:] = rows.rotations
        self.decode.fill(rows.decode)
