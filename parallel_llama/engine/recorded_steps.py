"""Records decode steps and replays them, which takes one call from Python instead of hundreds.

A recording contains the kernels and collectives of a step, with fixed addresses. A later step with
the same number of rows writes its inputs to these addresses and replays the recording. Steps
without a recording run operator by operator.

`CUDAGraphs` captures a graph for each bucket of rows at the start. A step is padded to the smallest
bucket that fits it. `KernelCalls`, on the CPU, records the first step with each number of rows,
separately for steps with LoRA adapters. Replays have the same bits as the operators.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel_llama.engine.adapter_rows import adapter_of_rows
from parallel_llama.engine.kv_layout import KVLayout
from parallel_llama.engine.step_buffer import (
    Chunk,
    KVGroupStep,
    SamplingKey,
    StepBuffer,
    StepSize,
    has_adapters,
    has_scaled_queries,
)
from parallel_llama.model.batch import Batch, KVGroupBatch
from parallel_llama.model.kv_cache import KVCache
from parallel_llama.model.rope import HostRotations, RotaryTables
from parallel_llama.model.transformer import Transformer
from parallel_llama.ops import AdapterAddresses, AdapterRoom, CPUOps, DecodeRoom, NotRecorded
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.failures import RankError, first_line

logger = logging.getLogger(__name__)

# Steps with more rows are not recorded on the CPU: their arithmetic outweighs the calls from
# Python, and a recording would seldom be replayed.
_MAX_ROWS = 32

# Rows of the graphs, close enough that padding costs little.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

# Time limit for capturing graphs at the start; buckets that are missing then have no graph.
CAPTURE_LIMIT_S = 120.0


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

    def rows(self, rows: slice | list[int]) -> "Logits":
        largest = None if self.largest is None else self.largest[rows]
        drawn = None if self.drawn is None else self.drawn[rows]
        return Logits(self.values[rows], largest, drawn)


# Runs a step, and returns its logits and a function that replays it.
Recorder = Callable[[Callable[[], Logits]], tuple[Logits, Callable[[], object]]]


@dataclass(frozen=True)
class _Graph:
    """A captured step: its input buffer, its output logits, and its launch."""

    buffer: StepBuffer
    logits: Logits
    replay: Callable[[], object]


class CUDAGraphs:
    """The captured decode steps of a model; `prepare` captures them.

    Args:
        longest: the length of the longest sequence in tokens.
    """

    def __init__(
        self, layout: KVLayout, rotations: Sequence[Tensor], longest: int, device: torch.device
    ) -> None:
        self._layout, self._rotations, self._device = layout, rotations, device
        # Enough for any batch: the rows of a token and of its drafts share blocks.
        self._blocks_of_row = layout.max_blocks(longest)
        self._graphs: dict[int, _Graph] = {}

    def prepare(
        self,
        step: Callable[[Batch], Logits],
        comm: Communicator,
        recorder: Recorder,
        on_rows: Callable[[int], None],
    ) -> None:
        """Capture `step` for each bucket, smallest first, until a capture fails or time is up.

        A capture fails if an operator waits for the device, or memory is exhausted. `step` is not
        kept, because it refers to the model, which must be freed with its LLM.

        Args:
            on_rows: called with the number of rows before each capture.

        Collective: a broadcast and an all_gather for each bucket, and its steps.
        """
        deadline = time.monotonic() + CAPTURE_LIMIT_S
        for n_rows in BUCKETS:
            has_time = torch.tensor([time.monotonic() < deadline])
            if not comm.broadcast(has_time):
                break
            on_rows(n_rows)
            graph = self._capture(step, n_rows, recorder)
            if not comm.all_gather(torch.tensor([graph is not None])).all():
                break
            assert graph is not None
            self._graphs[n_rows] = graph

    @torch.inference_mode()
    def logits(
        self,
        chunks: Sequence[Chunk],
        rows: Sequence[int],
        sampling_keys: Sequence[SamplingKey] = (),
        tokens: Tensor | None = None,
    ) -> Logits | None:
        """The logits of these rows, or None if no graph fits this step.

        The next step overwrites them. `sampling_keys` and `tokens` are as in `StepBuffer.fill`.
        """
        n_rows = len(rows)
        bucket = min((n for n in self._graphs if n >= n_rows), default=0)
        if not bucket or has_adapters(chunks) or not is_decode_step(chunks, rows):
            return None
        graph = self._graphs[bucket]
        graph.buffer.fill(
            chunks, self._layout.steps(chunks), sampling_keys=sampling_keys, tokens=tokens
        )
        graph.replay()
        return graph.logits.rows(slice(n_rows))

    def close(self) -> None:
        """Drop the graphs: a communicator cannot be destroyed while a graph holds it."""
        self._graphs.clear()

    def _capture(
        self, step: Callable[[Batch], Logits], n_rows: int, recorder: Recorder
    ) -> _Graph | None:
        try:
            size = StepSize(n_rows, None, n_rows, 0, n_rows * self._blocks_of_row, 1)
            buffer = StepBuffer(size, self._rotations, self._device)
            buffer.fill((), self._layout.steps(()))
            return _Graph(buffer, *recorder(lambda: step(buffer.batch())))
        except RankError:
            raise
        except RuntimeError as error:
            logger.warning(
                "decode steps that need a CUDA graph of %d rows or more run without one: %s",
                n_rows,
                first_line(error, 200),
            )
            return None


class KernelCalls:
    """The recorded kernel calls of a model on the CPU, for each number of rows.

    Steps with adapters have recordings of their own, which are the same for all adapters.

    Args:
        model: Nothing is recorded if its operators are torch's, or if it scales queries.
        caches: One KV cache per KV group.
        layout: Nothing is recorded if the caches are sharded by token.
        tables: The rotary tables of each KV group.
        adapters: The loaded adapters; may change between steps.
    """

    def __init__(
        self,
        model: Transformer,
        caches: Sequence[KVCache],
        layout: KVLayout,
        tables: Sequence[RotaryTables],
        adapters: Mapping[str, AdapterAddresses],
    ) -> None:
        self._model, self._caches, self._layout, self._tables = model, caches, layout, tables
        self._adapters = adapters
        # By number of rows, and whether there are adapters; None if torch computes an operator.
        self._steps: dict[tuple[int, bool], _KernelCallStep | None] = {}
        self.residual = memoryview(b"")
        self.slots: Sequence[Sequence[int]] = ()

    def logits(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> Logits | None:
        """The logits of these rows, or None if the step must run operator by operator.

        The next step may overwrite the logits and `residual`, the bytes of the residual stream.
        `slots` has the slots of the step's tokens in each KV group.

        Collective: as `Transformer.__call__`.
        """
        step = self._replayed(chunks, rows)
        if step is None:
            return None
        self.residual = step.residual
        return step.logits

    @torch.inference_mode()
    def hidden(self, chunks: Sequence[Chunk], rows: Sequence[int] | None) -> Tensor | None:
        """As `logits`, but returns the residual stream. Shapes: [T, dim] replicated."""
        step = self._replayed(chunks, rows)
        return None if step is None else step.hidden.clone()

    def _replayed(
        self, chunks: Sequence[Chunk], rows: Sequence[int] | None
    ) -> "_KernelCallStep | None":
        """Run a step. Returns: its recording, or None if it must run operator by operator."""
        ops = self._model.ops
        if not isinstance(ops, CPUOps) or self._layout.part is not None:
            return None
        if has_scaled_queries(self._model.first_scaled_position, chunks):
            return None
        tokens = [token for chunk in chunks for token in chunk.tokens]
        n_rows = len(tokens)
        key = n_rows, has_adapters(chunks)
        step = self._steps.get(key)
        is_refused = n_rows > _MAX_ROWS or (step is None and key in self._steps)
        if is_refused or not is_decode_step(chunks, rows) or self._layout.needs_sinks(chunks):
            return None
        kv_groups = self._layout.steps(chunks)
        rotations = rotations_of(self._tables, chunks)
        if step is None or not step.fill(tokens, kv_groups, rotations):
            try:
                with torch.inference_mode():
                    step = _KernelCallStep(
                        self._model, ops, self._caches, kv_groups, rotations, key[1]
                    )
            except NotRecorded:
                self._steps[key] = None
                return None
            self._steps[key] = step
            step.fill(tokens, kv_groups, rotations)
        if step.adapters is not None:
            step.adapters.fill(adapter_of_rows(chunks, self._adapters))
        step.replay()
        self.slots = [kv_group.slots for kv_group in kv_groups]
        return step


class _KernelCallStep:
    """A recorded step. It replays steps with its number of rows, if their keys fit its buffers.

    `kv_groups` and `rotations` belong to the first step. `adapters` is filled before a replay. A
    scaled embedding is not recorded; it is computed before each replay.

    Shapes: `hidden` [T, dim], of the latest step; `residual` has its bytes.
    Raises: NotRecorded if torch computes an operator.
    """

    def __init__(
        self,
        model: Transformer,
        ops: CPUOps,
        caches: Sequence[KVCache],
        kv_groups: Sequence[KVGroupStep],
        rotations: Sequence[HostRotations],
        with_adapters: bool,
    ) -> None:
        self._model, embedding = model, model.tok_embeddings
        self._kv_groups = [
            _KVGroupInputs(*inputs) for inputs in zip(kv_groups, rotations, strict=True)
        ]
        self._token_ids = np.zeros(len(rotations[0]), dtype=np.int64)
        self._tokens = torch.from_numpy(self._token_ids)
        shape = len(self._tokens), embedding.dim
        self._x = torch.empty(shape, dtype=embedding.weight.computed)
        self.adapters = AdapterRoom(len(self._x), self._x.dtype) if with_adapters else None
        batch = Batch(
            self._tokens,
            tuple(group.batch for group in self._kv_groups),
            rows=None,
            adapters=self.adapters or (),
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
        self.residual = bytes_of(self.hidden)
        self._logits = Logits(borrowed, None if largest is None else largest.numpy())

    @property
    def logits(self) -> Logits:
        """The logits of the latest step; the next step may overwrite them."""
        if not self._model.has_logit_scaling:
            return self._logits
        with torch.inference_mode():
            return Logits(self._model.finish_logits(self._logits.values))

    def fill(
        self,
        tokens: Sequence[int],
        kv_groups: Sequence[KVGroupStep],
        rotations: Sequence[HostRotations],
    ) -> bool:
        """Write a step's inputs. Returns: False if there is no room for its keys."""
        # With numpy: reading a step's weights evicts torch's code and data from the CPU's caches,
        # which makes a call of torch ten times slower.
        self._token_ids[:] = tokens
        return all(map(_KVGroupInputs.fill, self._kv_groups, kv_groups, rotations))

    def replay(self) -> None:
        """Run the step of the last `fill`."""
        if self._model.has_embedding_scale:
            with torch.inference_mode():
                self._x.copy_(self._model.embedded(self._tokens))
        self._recording.replay()


class _KVGroupInputs:
    """The part of a batch for one KV group at fixed addresses, with room for more keys."""

    def __init__(self, step: KVGroupStep, rotations: HostRotations) -> None:
        self._room = DecodeRoom(step.queries)
        self._slots = np.zeros(len(step.slots), dtype=np.int64)
        self._rotations = np.zeros_like(rotations)
        self.batch = KVGroupBatch(
            torch.from_numpy(self._slots), torch.from_numpy(self._rotations), self._room.plan
        )

    def fill(self, step: KVGroupStep, rotations: HostRotations) -> bool:
        self._slots[:] = step.slots
        self._rotations[:] = rotations
        return self._room.fill(step.queries)


def bytes_of(values: Tensor) -> memoryview:
    """The memory of a tensor, which must be contiguous."""
    return values.view(torch.uint8).numpy().reshape(-1).data


def is_decode_step(chunks: Sequence[Chunk], rows: Sequence[int] | None) -> bool:
    """Whether all tokens are separate queries, and all rows are wanted, in order."""
    n_tokens = sum(len(chunk.tokens) for chunk in chunks)
    return all(chunk.is_decoded for chunk in chunks) and is_all(rows, n_tokens)


def is_all(rows: Sequence[int] | None, n_rows: int) -> bool:
    """Whether these are all of `n_rows` rows, in order."""
    return rows is None or list(rows) == list(range(n_rows))


def rotations_of(tables: Sequence[RotaryTables], chunks: Sequence[Chunk]) -> list[HostRotations]:
    """The rotary embedding of each token, by KV group. Shapes: [T, 1, head_dim / 2] complex."""
    by_table: dict[RotaryTables, HostRotations] = {}
    for table in tables:
        if table not in by_table:
            rows = [table.rows(chunk.positions, chunk.n_prompt) for chunk in chunks]
            by_table[table] = rows[0] if len(rows) == 1 else np.concatenate(rows)
    return [by_table[table] for table in tables]
