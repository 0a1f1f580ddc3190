"""Packs all inputs of a step into one buffer, so that one copy moves them to the device.

The inputs are tokens, positions, slots, block tables and sampling keys. On a GPU a copy costs more
than a small kernel, and a CUDA graph reads its inputs from fixed addresses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from parallel_llama.engine.llm_config import MAX_DRAFTS
from parallel_llama.model.batch import Batch, KVGroupBatch
from parallel_llama.model.kv_cache import Blocks
from parallel_llama.ops import PagedPlan, PagedQueries, Queries, SamplingKeys

_RANGE = 5  # integers of a range of queries, as in PagedQueries

# Maximum tokens of a chunk that are decoded as separate queries: a token and its drafts, so that
# the results are bitwise equal to decoding without drafts.
MAX_DECODED = 1 + MAX_DRAFTS

# The key and the temperature of a row's draw, as in `SamplingKeys`.
SamplingKey = tuple[int, float]


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence, the first at position `start`.

    Args:
        tables: the sequence's block table in each KV group, at least up to the chunk's last token.
        n_prompt: the length of the sequence's prompt.
        adapter: the name of its LoRA adapter.
    """

    tokens: Sequence[int]
    start: int
    tables: Sequence[Blocks]
    n_prompt: int
    adapter: str | None = None

    @property
    def positions(self) -> range:
        return range(self.start, self.start + len(self.tokens))

    @property
    def is_decoded(self) -> bool:
        """Whether its tokens are separate queries instead of tiles of queries."""
        return len(self.tokens) <= MAX_DECODED


def has_adapters(chunks: Sequence[Chunk]) -> bool:
    """Whether any token runs with a LoRA adapter."""
    return any(chunk.adapter is not None for chunk in chunks)


def has_scaled_queries(first_position: int | None, chunks: Sequence[Chunk]) -> bool:
    """Whether any token's queries are scaled.

    Args:
        first_position: The first position with scaled queries; None if the model scales none.
    """
    return first_position is not None and any(
        chunk.positions.stop > first_position for chunk in chunks
    )


class KVGroupStep(NamedTuple):
    """A step in the layers of one KV group.

    Args:
        slots: The slot of each token.
        spare_slot: A slot for tokens that are not kept.
        queries: The queries that are not in `beyond_window`.
        beyond_window: The queries that also attend to attention sinks outside of their window. The
            first `Queries` has the keys of their window. The second one has the sinks; the
            positions of its queries are shifted back by the window, so that each query sees
            exactly the sinks before its window.
    """

    slots: list[int]
    spare_slot: int
    queries: Queries
    beyond_window: tuple[Queries, Queries] | None = None


@dataclass(frozen=True)
class StepSize:
    """The capacity of a buffer.

    Args:
        n_rows: output rows; None for all tokens, in order.
        n_decoded: tokens that are separate queries.
        n_chunks: chunks with tiles of queries.
        n_blocks: blocks, each counted once for each chunk and KV group that sees it.
        max_queries: maximum queries of one chunk.
    """

    n_tokens: int
    n_rows: int | None
    n_decoded: int
    n_chunks: int
    n_blocks: int
    max_queries: int

    @property
    def n_results(self) -> int:
        """The number of output rows."""
        return self.n_tokens if self.n_rows is None else self.n_rows

    @classmethod
    def of(
        cls, chunks: Sequence[Chunk], kv_groups: Sequence[KVGroupStep], n_rows: int | None
    ) -> "StepSize":
        """The exact size of a step."""
        tiled = [len(chunk.tokens) for chunk in chunks if not chunk.is_decoded]
        n_tokens = sum(len(chunk.tokens) for chunk in chunks)
        n_blocks = sum(len(item.blocks) for group in kv_groups for item in group.queries.ranges)
        n_decoded = n_tokens - sum(tiled)
        return cls(n_tokens, n_rows, n_decoded, len(tiled), n_blocks, max(tiled, default=0))


@dataclass(frozen=True)
class _Parts:
    """Views of a buffer. Shapes: ranges [n_groups, n_decoded + n_chunks, 5], slots [.., T]."""

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    sampling_keys: SamplingKeys
    slots: Tensor
    ranges: Tensor
    blocks: Tensor

    @classmethod
    def of(cls, words: Tensor, size: StepSize, n_kv_groups: int) -> "_Parts":
        n, n_drawn, n_ranges = size.n_tokens, size.n_results, size.n_decoded + size.n_chunks
        ends = accumulate((n, n, size.n_rows or 0, n_drawn, n_drawn, n_kv_groups * n))
        tokens, positions, rows, keys, temperatures, slots, rest = words.tensor_split(tuple(ends))
        ints = rest.view(torch.int32)
        n_fields = n_kv_groups * n_ranges * _RANGE
        return cls(
            tokens,
            positions,
            rows,
            SamplingKeys(keys, temperatures.view(torch.float64)),
            slots.view(n_kv_groups, n),
            ints[:n_fields].view(n_kv_groups, n_ranges, _RANGE),
            ints[n_fields:],
        )


class StepBuffer:
    """The inputs of a step, filled on the host and copied to the device.

    It may be filled again before the device has finished the step: `fill` waits only until the copy
    before the previous one has ended.

    Args:
        size: Its capacity.
        rotations: [n_positions, 1, head_dim / 2] complex, the rotary table of each KV group.
    """

    def __init__(self, size: StepSize, rotations: Sequence[Tensor], device: torch.device) -> None:
        self.size, self._rotations = size, rotations
        self._queries: Sequence[Queries] = ()
        n_kv_groups = len(rotations)
        n_ints = n_kv_groups * (size.n_decoded + size.n_chunks) * _RANGE + size.n_blocks
        n_rows = (size.n_rows or 0) + 2 * size.n_results
        n_words = (2 + n_kv_groups) * size.n_tokens + n_rows + -(-n_ints // 2)
        # Two: a copy to the device may be in flight while the next step is filled in.
        shape, is_cuda = (2, n_words), device.type == "cuda"
        self._copied: list[torch.cuda.Event] = []
        if is_cuda:
            self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=is_cuda)
        self._device = torch.empty(n_words, dtype=torch.int64, device=device)
        self._host_parts = [_Parts.of(words, size, n_kv_groups) for words in self._host]
        self._device_parts = _Parts.of(self._device, size, n_kv_groups)
        self._index = 0

    def fill(
        self,
        chunks: Sequence[Chunk],
        kv_groups: Sequence[KVGroupStep],
        rows: Sequence[int] = (),
        sampling_keys: Sequence[SamplingKey] = (),
        tokens: Tensor | None = None,
    ) -> None:
        """Fill in a step, at most `size`, and copy it to the device; the rest is padding.

        Args:
            sampling_keys: the keys of the first output rows; the other rows are greedy.
            tokens: the tokens of the chunks, if only the device has them.

        Shapes: tokens [T] int64, on the device.
        """
        self._index = 1 - self._index
        if self._copied:
            self._copied[self._index].synchronize()
        words, parts = self._host[self._index], self._host_parts[self._index]
        n_tokens = sum(len(chunk.tokens) for chunk in chunks)
        for target, values in (
            (parts.tokens, chain.from_iterable(chunk.tokens for chunk in chunks)),
            (parts.positions, chain.from_iterable(chunk.positions for chunk in chunks)),
        ):
            target.numpy()[:n_tokens] = np.fromiter(values, np.int64, n_tokens)
            target[n_tokens:] = 0
        parts.rows.numpy()[:] = rows
        parts.sampling_keys.keys.numpy()[: len(sampling_keys)] = [key for key, _ in sampling_keys]
        parts.sampling_keys.temperatures.numpy()[: len(sampling_keys)] = [
            temperature for _, temperature in sampling_keys
        ]
        parts.sampling_keys.temperatures[len(sampling_keys) :] = 0
        n_blocks, self._queries = 0, [kv_group.queries for kv_group in kv_groups]
        for number, kv_group in enumerate(kv_groups):
            n_blocks = self._fill_kv_group(parts, number, kv_group, n_blocks)
        n_used = len(words) - (len(parts.blocks) - n_blocks) // 2
        self._device[:n_used].copy_(words[:n_used], non_blocking=True)
        if self._copied:
            self._copied[self._index].record()
        if tokens is not None:
            self._device_parts.tokens[:n_tokens].copy_(tokens)

    def batch(self) -> Batch:
        """The batch, whose tensors are views of the device's buffer."""
        parts, tables = self._device_parts, self._rotations
        rotations = {table: table.index_select(0, parts.positions) for table in set(tables)}
        kv_groups = tuple(
            KVGroupBatch(slots, rotations[table], self._plan(number))
            for number, (slots, table) in enumerate(zip(parts.slots, tables, strict=True))
        )
        rows = None if self.size.n_rows is None else parts.rows
        return Batch(parts.tokens, kv_groups, rows, parts.sampling_keys)

    def _plan(self, number: int) -> PagedPlan:
        ranges, n = self._device_parts.ranges[number], self.size.n_decoded
        queries, blocks = self._queries[number], self._device_parts.blocks
        parts = (ranges[:n], 1), (ranges[n:], self.size.max_queries)
        return PagedPlan(
            tuple(
                PagedQueries(rows, blocks, queries.block_size, max_queries, queries.window)
                for rows, max_queries in parts
                if len(rows)
            )
        )

    def _fill_kv_group(self, parts: _Parts, number: int, step: KVGroupStep, n_blocks: int) -> int:
        """Returns: `n_blocks`, the number of blocks of previous KV groups, plus this group's."""
        slots = parts.slots[number].numpy()
        slots[: len(step.slots)] = step.slots
        slots[len(step.slots) :] = step.spare_slot
        decoded, tiled, n_blocks = PagedQueries.pack(step.queries, parts.blocks.numpy(), n_blocks)
        ranges = parts.ranges[number].numpy()
        ranges[: self.size.n_decoded] = 0
        for start, packed in ((0, decoded), (self.size.n_decoded, tiled)):
            if packed:
                ranges[start : start + len(packed)] = packed
        return n_blocks
