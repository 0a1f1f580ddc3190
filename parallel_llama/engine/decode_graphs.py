"""Decode steps as CUDA graphs: one launch instead of a thousand.

A graph is a step that is captured once: its kernels and all-reduces, with fixed addresses. There is
a graph for each bucket of rows; a batch takes the smallest bucket that fits, and is padded. A batch
without a bucket runs kernel by kernel.

Source: CUDA C++ Programming Guide, CUDA graphs; torch.cuda.graph.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_llama.engine.kv_layout import KVLayout
from parallel_llama.engine.step_buffer import Chunk, Paging, SamplingKey, StepBuffer, StepSize
from parallel_llama.model.batch import Batch
from parallel_llama.model.recorded_steps import Logits
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.failures import RankError, first_line

logger = logging.getLogger(__name__)

# Rows of the graphs, close enough that padding costs little.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

# Time limit for capturing graphs at the start; sizes that are missing then have no graph.
LIMIT_S = 120.0

Recorder = Callable[[Callable[[], Logits]], tuple[Logits, Callable[[], object]]]


@dataclass(frozen=True)
class _Graph:
    """A captured step: its input buffer, its output logits, and its launch."""

    buffer: StepBuffer
    logits: Logits
    replay: Callable[[], object]


class DecodeGraphs:
    """A model's captured decode steps over its KV caches; none before `record`.

    `longest` is the length of the longest sequence.
    """

    def __init__(
        self, layout: KVLayout, paging: Paging, longest: int, device: torch.device
    ) -> None:
        self._layout, self._paging, self._device = layout, paging, device
        # A token and its drafts are rows that share blocks, so this suffices for any batch.
        self._blocks_of_row = layout.most_blocks(longest)
        self._graphs: dict[int, _Graph] = {}

    def record(
        self,
        step: Callable[[Batch], Logits],
        comm: Communicator,
        recorder: Recorder,
        on_graph: Callable[[int], None],
    ) -> None:
        """Capture `step` for each bucket, smallest first, until LIMIT_S have passed or one fails.

        `step` is not kept: it holds the model, which must be freed with its LLM. `on_graph` is
        called with the number of rows before each capture. Capturing fails if an operator
        synchronises with the device, or memory is exhausted.

        Collective: a broadcast and an all_gather for each bucket, and its steps.
        """
        deadline = time.monotonic() + LIMIT_S
        for n_rows in BUCKETS:
            goes_on = torch.tensor([time.monotonic() < deadline])
            if not comm.broadcast(goes_on):
                break
            on_graph(n_rows)
            graph = self._try(step, n_rows, recorder)
            if not comm.all_gather(torch.tensor([graph is not None])).all():
                break
            assert graph is not None
            self._graphs[n_rows] = graph

    def __call__(
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
        if not all(chunk.is_decoded for chunk in chunks):
            return None
        is_all = n_rows == sum(len(chunk.tokens) for chunk in chunks)
        room = min((each for each in self._graphs if each >= n_rows), default=0)
        if not room or not is_all:
            return None
        graph = self._graphs[room]
        graph.buffer.fill(
            chunks, self._layout.steps(chunks), sampling_keys=sampling_keys, tokens=tokens
        )
        graph.replay()
        return graph.logits.rows(slice(n_rows))

    def close(self) -> None:
        """Drop the graphs: a communicator cannot be destroyed while a graph holds it."""
        self._graphs.clear()

    def _try(
        self, step: Callable[[Batch], Logits], n_rows: int, recorder: Recorder
    ) -> _Graph | None:
        try:
            return self._recorded(step, n_rows, recorder)
        except RankError:
            raise
        except RuntimeError as error:
            logger.warning(
                "decode steps of %d rows and more run without a graph: %s",
                n_rows,
                first_line(error, 200),
            )
            return None

    def _recorded(self, step: Callable[[Batch], Logits], n_rows: int, recorder: Recorder) -> _Graph:
        n_blocks = n_rows * self._blocks_of_row
        size = StepSize(n_rows, None, n_rows, 0, n_blocks, 1)
        buffer = StepBuffer(size, self._paging, self._device)
        buffer.fill((), self._layout.steps(()))
        logits, replay = recorder(lambda: step(buffer.batch()))
        return _Graph(buffer, logits, replay)


def record_cuda_graph(step: Callable[[], Logits]) -> tuple[Logits, Callable[[], object]]:
    """The default recorder: runs `step` once, then captures what it launches in a CUDA graph."""
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles kernels and allocates workspaces, which is not allowed in a capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads may launch kernels meanwhile, which are not captured.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        logits = step()
    return logits, graph.replay
