"""Recorded decode steps on the CPU: one call in place of hundreds, per number of rows.

The first step of a few decode rows records the kernel calls of all blocks and of the output layer.
Later steps with as many rows write their inputs into the recorded tensors and replay the calls.
All other steps, and models with an operator that is not a kernel, run operator by operator. Both
give the same bits and take part in the same collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel_llama.model.batch import Batch, KVGroupBatch
from parallel_llama.model.kv_cache import KVCache
from parallel_llama.model.rope import HostRotations
from parallel_llama.model.transformer import Transformer
from parallel_llama.ops import CPUOps, DecodeRoom, NotRecorded, Queries

# Steps with more rows are not recorded: their arithmetic outweighs the calls from Python, and a
# recording would seldom be replayed.
_MAX_ROWS = 32


@dataclass(frozen=True)
class Logits:
    """Logits of this rank's vocabulary rows, and perhaps the best token of each row.

    Args:
        values: [n, V_local] local.
        largest: [n, 2] float64 local, on the host: the largest logit of each row and its token.
        drawn: [n, 2] float64 local: the result of `TorchOps.draw`.
    """

    values: Tensor
    largest: npt.NDArray[np.float64] | None = None
    drawn: Tensor | None = None

    def rows(self, which: slice | list[int]) -> "Logits":
        """The logits of some rows."""
        largest = None if self.largest is None else self.largest[which]
        drawn = None if self.drawn is None else self.drawn[which]
        return Logits(self.values[which], largest, drawn)


@dataclass(frozen=True)
class KVGroupRows:
    """Decode rows in the layers of one KV group, in plain numbers, as in `KVGroupBatch`.

    Shapes: rotations [T, 1, head_dim / 2] complex.
    """

    slots: list[int]
    rotations: HostRotations
    queries: Queries


@dataclass(frozen=True)
class DecodeStep:
    """A batch of decode rows alone, all with a wanted result, in plain numbers."""

    tokens: list[int]
    kv_groups: tuple[KVGroupRows, ...]


class RecordedSteps:
    """The recorded decode steps of a model, one per number of rows.

    Args:
        model: The model.
        caches: One KV cache per KV group.
    """

    def __init__(self, model: Transformer, caches: Sequence[KVCache]) -> None:
        self._model, self._caches = model, caches
        self._ops = model.ops if isinstance(model.ops, CPUOps) else None
        # By number of rows; None if an operator is not a kernel.
        self._recorded_steps: dict[int, RecordedStep | None] = {}

    def may_take(self, n_rows: int) -> bool:
        """Whether a step with this number of rows may be recorded."""
        is_refused = n_rows in self._recorded_steps and self._recorded_steps[n_rows] is None
        return self._ops is not None and n_rows <= _MAX_ROWS and not is_refused

    def run(self, step: DecodeStep) -> "RecordedStep | None":
        """Run a step. Returns: its recording, or None if the step must run operator by operator.

        Raises, and Collective: as `Transformer.forward`.
        """
        n_rows = len(step.tokens)
        recorded = self._recorded_steps.get(n_rows)
        if recorded is None or not recorded.fill(step):
            recorded = self._recorded_steps[n_rows] = self._recorded(step)
            if recorded is None:
                return None
            recorded.fill(step)
        recorded.run()
        return recorded

    @torch.inference_mode()
    def _recorded(self, step: DecodeStep) -> "RecordedStep | None":
        assert self._ops is not None
        try:
            return RecordedStep(self._model, self._ops, self._caches, step)
        except NotRecorded:
            return None


class RecordedStep:
    """A recorded decode step, for steps with as many rows and at most as many keys as it has room.

    Args:
        model: The model.
        ops: Its operators.
        caches: One KV cache per KV group.
        step: The first step.

    Shapes: `hidden` [T, dim], of the step that ran last.
    Raises: NotRecorded if an operator after the embedding is not a kernel.
    """

    def __init__(
        self,
        model: Transformer,
        ops: CPUOps,
        caches: Sequence[KVCache],
        step: DecodeStep,
    ) -> None:
        self._model, embedding = model, model.tok_embeddings
        self._kv_groups = [_KVGroupRoom(rows) for rows in step.kv_groups]
        self._token_ids = np.zeros(len(step.tokens), dtype=np.int64)
        self._tokens = torch.from_numpy(self._token_ids)
        shape = len(step.tokens), embedding.dim
        self._x = torch.empty(shape, dtype=embedding.weight.computed)
        batch = Batch(
            self._tokens, tuple(kv_group.batch for kv_group in self._kv_groups), rows=None
        )
        with ops.recording() as self._recording:
            x = self._x if model.has_embedding_scale else model.embedded(self._tokens)
            self.hidden = model.blocks(x, batch, caches)
            scores = model.scores(self.hidden)
            first = embedding.rows.start
            largest = None if model.has_logit_scaling else ops.largest(scores, first)
            # The logits are the largest tensor of a step. All recordings share its memory, which
            # the first kernels of the next step may overwrite.
            borrowed = self._recording.borrowed(scores)
        self._scores = Logits(borrowed, None if largest is None else largest.numpy())

    @property
    def logits(self) -> Logits:
        """The logits of the step that ran last; the next step may overwrite them."""
        if not self._model.has_logit_scaling:
            return self._scores
        with torch.inference_mode():
            return Logits(self._model.finish_logits(self._scores.values))

    def fill(self, step: DecodeStep) -> bool:
        """Take a step in. Returns: False if there is no room for its keys."""
        # With numpy, since a call of torch touches so much code and data that it takes ten times as
        # long once a step's weights have evicted them from the caches.
        self._token_ids[:] = step.tokens
        pairs = zip(self._kv_groups, step.kv_groups, strict=True)
        return all(kv_group.fill(rows) for kv_group, rows in pairs)

    def run(self) -> None:
        """Run the step that was taken in through the model."""
        if self._model.has_embedding_scale:
            with torch.inference_mode():
                self._x.copy_(self._model.embedded(self._tokens))
        self._recording.replay()


class _KVGroupRoom:
    """The part of a batch for one KV group at fixed addresses, with room for more keys."""

    def __init__(self, rows: KVGroupRows) -> None:
        self._room = DecodeRoom(rows.queries)
        self._slots = np.zeros(len(rows.slots), dtype=np.int64)
        self._rotations = np.zeros_like(rows.rotations)
        slots, rotations = torch.from_numpy(self._slots), torch.from_numpy(self._rotations)
        self.batch = KVGroupBatch(slots, rotations, self._room.plan)

    def fill(self, rows: KVGroupRows) -> bool:
        self._slots[:] = rows.slots
        self._rotations[:] = rows.rotations
        return self._room.fill(rows.queries)
