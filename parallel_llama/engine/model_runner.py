"""One rank's forward pass: chunks of sequences in, hidden states or logits out.

The runner owns the model and the KV caches of one rank. It does not know requests, sampling or stop
conditions. Every rank calls it with the same chunks.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import numpy as np
import torch
from torch import Tensor

from parallel_llama.checkpoint.checkpoint import Checkpoint
from parallel_llama.checkpoint.prefetch import prefetch
from parallel_llama.checkpoint.reading import load
from parallel_llama.dtypes import KVFormat, Precision
from parallel_llama.engine.decode_graphs import DecodeGraphs, Recorder, record_cuda_graph
from parallel_llama.engine.kv_capacity import MemoryFor
from parallel_llama.engine.kv_sequence_shard import CachePart, mask_of
from parallel_llama.engine.step_buffer import Chunk, Paging, SamplingKey, StepBuffer, StepSize
from parallel_llama.families.model_args import ModelArgs, kv_groups
from parallel_llama.model.batch import Batch, KVGroupBatch, QueryTile, SinkTile
from parallel_llama.model.kv_cache import KVCache, part_of, slices_of, slots_of
from parallel_llama.model.layers import Backend
from parallel_llama.model.recorded_steps import (
    DecodeStep,
    KVGroupRows,
    Logits,
    RecordedStep,
    RecordedSteps,
)
from parallel_llama.model.rope import (
    HostRotations,
    RotaryTables,
    back_rotations_of,
    base_len,
    rotary_of_windows,
)
from parallel_llama.model.transformer import Transformer
from parallel_llama.model.weights import WeightLoader
from parallel_llama.ops import DecodeBatch, DecodeRows, QueryChunk, Scores, TorchOps, choose_ops
from parallel_llama.ops.attention import SeenKeys
from parallel_llama.ops.formats import dtype_name, kv_dtype, matrix_forms, torch_dtype
from parallel_llama.ops.torch_ops import MAX_QUERIES
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.communicators import use_device
from parallel_llama.plan import ShardPlan

# Weights that are prefetched.
_READ_AHEAD = 2

_MEMORY = MemoryFor("a step of this batch", "lower kv_cache_bytes, or use more ranks")


class ModelRunner:
    """The model and the caches of one rank, and the forward pass over a batch of chunks."""

    def __init__(
        self,
        args: ModelArgs,
        plan: ShardPlan,
        comm: Communicator,
        model: Transformer,
        kv_format: KVFormat | None = None,
    ) -> None:
        self.args, self.plan, self.comm, self.model = args, plan, comm, model
        self.shard = plan.shards[comm.rank]
        weight = model.norm.weight.values
        self.dtype, self.device = weight.dtype, weight.device
        self.kv_format = kv_format or KVFormat(dtype_name(self.dtype))
        self.kv_groups = kv_groups(args)
        self._rotary_of = self._rotary_tables()
        self.reserve([0] * len(self.kv_groups), 1)

    @classmethod
    def load(
        cls,
        args: ModelArgs,
        checkpoint: Checkpoint,
        plan: ShardPlan,
        comm: Communicator,
        *,
        precision: Precision,
        device: torch.device,
        kv_format: KVFormat | None = None,
        ops: TorchOps | None = None,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> "ModelRunner":
        """Read this rank's shard of a checkpoint, tensor by tensor.

        By default `kv_format` is the compute dtype, and `ops` are the fastest operators.

        Raises: CheckpointError if the files do not hold exactly this model; DamagedWeights for a
        damaged weight.
        """
        if device.type == "cuda":
            settle_cuda()
        shard, dtype = plan.shards[comm.rank], torch_dtype(precision.computed)
        if ops is None:
            heads_per_kv = {len(run.heads) // len(run.kv_heads) for run in shard.runs}
            scores = Scores(args.attention_scale, args.attention_soft_cap)
            cache_dtype = dtype if kv_format is None else kv_dtype(kv_format)
            forms = matrix_forms(precision)
            ops = choose_ops(dtype, device, args.head_dim, heads_per_kv, scores, cache_dtype, forms)
        model = Transformer(args, shard, Backend(comm, ops, dtype))
        loader = WeightLoader(model, args, shard)
        own = partial(use_device, device)
        with ThreadPoolExecutor(1, initializer=own) as thread:
            # Concurrently with reading the weights.
            compiled = thread.submit(ops.compile, has_experts=args.n_experts > 0)
            weights = load(checkpoint, args, shard, precision, device, on_bytes)
            with closing(prefetch(weights, _READ_AHEAD, own)) as read:
                for name, value in read:
                    loader.assign(name, value)
            loader.complete()
            compiled.result()
        return cls(args, plan, comm, model, kv_format)

    def reserve(self, n_blocks: Sequence[int], block_size: int) -> None:
        """Replace the KV caches by empty ones of `n_blocks` blocks, one for each KV group."""
        self.block_size, n_parts = block_size, self.shard.kv_parts
        self._part = CachePart(self.comm.rank, n_parts, block_size) if n_parts > 1 else None
        is_paged = self._is_paged()
        self.caches = tuple(
            KVCache(
                self.args,
                self.shard,
                len(kv_group.layers),
                self._part.n_blocks(n) if self._part else n + is_paged,
                block_size,
                form=self.kv_format,
                device=self.device,
            )
            for kv_group, n in zip(self.kv_groups, n_blocks, strict=True)
        )
        self._steps = RecordedSteps(self.model, self.caches)
        self._no_rows = torch.empty(0, self.args.dim, dtype=self.dtype, device=self.device)
        self._paging = self._graphs = None
        if is_paged:
            whole = {each: each.whole() for each in set(self._rotary_of)}
            tables = tuple(whole[each] for each in self._rotary_of)
            self._paging = Paging(self.kv_groups, tables, block_size, tuple(n_blocks))
            longest = self.args.max_seq_len
            if self.kv_groups[0].window is None:  # the cache holds whole sequences
                longest = min(longest, max(n_blocks[0], 1) * block_size)
            self._graphs = DecodeGraphs(self._paging, longest, self.device)

    def _is_paged(self) -> bool:
        """Whether operators read keys through block tables (paged attention).

        Not with a sequence-sharded cache, attention sinks, or rotations that depend on the length.
        """
        is_plain = self._part is None and not self.args.attention_sinks
        return self.model.ops.is_paged and is_plain and not base_len(self.args, 1)

    def record(
        self,
        recorder: Recorder = record_cuda_graph,
        on_graph: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Capture the decode steps as CUDA graphs, if the operators support it.

        Collective: those of `DecodeGraphs.record`.
        """
        if self._graphs is not None:
            with torch.inference_mode():
                self._graphs.record(self._logits, self.comm, recorder, on_graph)

    def close(self) -> None:
        """Drop what holds the communicator; the runner must not be used afterwards."""
        if self._graphs is not None:
            self._graphs.close()

    def forward(self, chunks: Sequence[Chunk], rows: Sequence[int] | None = None) -> Tensor:
        """Run the chunks through the model, concatenated in one batch.

        Returns: the residual stream after the last block, [T, dim] replicated. With `rows` only
            those rows are computed, in their order, which saves most of the last block's work.
        Collective: those of `Transformer.forward`.
        """
        with _MEMORY:
            program = self._recorded_step(chunks, rows)
            with torch.inference_mode():
                if program is not None:
                    return program.hidden.clone()
                batch = self.batch(chunks, rows)
                return self.model(batch, self.caches)

    def step(
        self,
        chunks: Sequence[Chunk],
        drawing: Sequence[int],
        others: Sequence[int] = (),
        sampling_keys: Sequence[SamplingKey] = (),
    ) -> tuple[Logits, Tensor]:
        """Run the chunks as `forward`; rows that are sampled become logits, others hidden states.

        `sampling_keys` is that of the sampled rows, if `draws_on_device`.

        Shapes: [len(drawing), V_local] local, which the next step may overwrite; [len(others), dim]
        replicated.
        Collective: those of `Transformer.forward`.
        """
        if drawing and not others:
            with _MEMORY:
                return self._logits_of(chunks, drawing, sampling_keys), self._no_rows
        # The middle of a prompt needs no row, but a forward pass returns at least one.
        hidden = self.forward(chunks, [*drawing, *others] or [0])
        return Logits(self.logits(hidden[: len(drawing)])), hidden[len(drawing) :]

    @property
    def draws_on_device(self) -> bool:
        """Whether a step also draws from its logits, so that `step_ahead` can be called."""
        return self._paging is not None

    @torch.inference_mode()
    def step_ahead(
        self, chunks: Sequence[Chunk], sampling_keys: Sequence[SamplingKey], tokens: Tensor
    ) -> Logits:
        """A decode step of tokens that only the device knows; the chunks' tokens are ignored.

        Returns: the logits of all rows, which the next step may overwrite.

        Shapes: tokens [T] int64.
        Collective: those of `Transformer.forward`.
        """
        assert self._paging is not None and self._graphs is not None
        with _MEMORY:
            logits = self._graphs(chunks, range(len(tokens)), sampling_keys, tokens)
            return logits or self._logits(self._paged_batch(chunks, None, sampling_keys, tokens))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of this rank's vocabulary rows. Shapes: [n, dim] replicated -> [n, V_local]."""
        return self.model.logits(hidden)

    def _logits_of(
        self, chunks: Sequence[Chunk], rows: Sequence[int], sampling_keys: Sequence[SamplingKey]
    ) -> Logits:
        """The logits of these rows, by a recorded step if one fits."""
        program = self._recorded_step(chunks, rows)
        if program is not None:
            return program.logits
        with torch.inference_mode():
            logits = self._graphs(chunks, rows, sampling_keys) if self._graphs else None
            return logits or self._logits(self.batch(chunks, rows, sampling_keys))

    def _logits(self, batch: Batch) -> Logits:
        """The logits of the batch's rows, and the tokens drawn from them if the batch has noise."""
        logits = self.model.logits(self.model(batch, self.caches))
        if batch.sampling_keys is None:
            return Logits(logits)
        drawn = self.model.ops.draw(logits, batch.sampling_keys, self.shard.vocab.start)
        return Logits(logits, drawn=drawn)

    def _recorded_step(
        self, chunks: Sequence[Chunk], rows: Sequence[int] | None
    ) -> RecordedStep | None:
        """Run these chunks by a recorded step; None if they are not a decode step."""
        n_tokens = sum(len(chunk.tokens) for chunk in chunks)
        is_wanted = self._steps.may_take(n_tokens) and _is_all(rows, n_tokens)
        if not is_wanted or not all(map(self._is_decoded, chunks)):
            return None
        rotations = {each: _rotations(each, chunks) for each in set(self._rotary_of)}
        kv_groups = (
            self._kv_group_rows(number, chunks, rotations[rotary])
            for number, rotary in enumerate(self._rotary_of)
        )
        tokens = [token for chunk in chunks for token in chunk.tokens]
        return self._steps.run(DecodeStep(tokens, tuple(kv_groups)))

    def _is_decoded(self, chunk: Chunk) -> bool:
        """Whether its tokens are separate queries that see slots of this rank's cache alone."""
        is_here = self._paging is None and self._part is None
        kv_groups = range(len(self.kv_groups) if self.args.attention_sinks else 0)
        near = (self._before_sinks(number, chunk.positions) for number in kv_groups)
        return is_here and chunk.is_decoded and all(each == chunk.positions for each in near)

    def _kv_group_rows(
        self, number: int, chunks: Sequence[Chunk], rotations: HostRotations
    ) -> KVGroupRows:
        slots: list[int] = []
        decoded: dict[int, SeenKeys] = {}
        for chunk in chunks:
            decoded |= self._decoded(number, len(slots), chunk, chunk.positions)
            slots += slots_of(chunk.tables[number], self.block_size, chunk.positions)
        return KVGroupRows(slots, rotations, DecodeRows.of(decoded))

    def _rotary_tables(self) -> list[RotaryTables]:
        """The rotary tables of each KV group; groups with equal tables share them."""
        args = [
            self.args if kv_group.window is None else rotary_of_windows(self.args)
            for kv_group in self.kv_groups
        ]
        tables = {each: RotaryTables(each, dtype=self.dtype, device=self.device) for each in args}
        return [tables[each] for each in args]

    def batch(
        self,
        chunks: Sequence[Chunk],
        rows: Sequence[int] | None = None,
        sampling_keys: Sequence[SamplingKey] = (),
    ) -> Batch:
        """The batch of some chunks: tokens, slots, and the keys that each token sees."""
        assert all(chunk.tokens for chunk in chunks)
        if self._paging is not None:
            return self._paged_batch(chunks, rows, sampling_keys)
        rotations = {
            each: torch.from_numpy(_rotations(each, chunks)).to(self.device)
            for each in set(self._rotary_of)
        }
        tokens = [token for chunk in chunks for token in chunk.tokens]
        return Batch(
            tokens=self._int64(tokens),
            kv_groups=tuple(
                self._kv_group_batch(number, chunks, rotations[rotary])
                for number, rotary in enumerate(self._rotary_of)
            ),
            rows=None if rows is None or _is_all(rows, len(tokens)) else self._int64(rows),
        )

    def _paged_batch(
        self,
        chunks: Sequence[Chunk],
        rows: Sequence[int] | None,
        sampling_keys: Sequence[SamplingKey],
        tokens: Tensor | None = None,
    ) -> Batch:
        """The batch for paged attention."""
        assert self._paging is not None
        n_rows = None if rows is None else len(rows)
        buffer = StepBuffer(StepSize.of(chunks, n_rows, self._paging), self._paging, self.device)
        buffer.fill(chunks, rows or (), sampling_keys, tokens)
        return buffer.batch()

    def _kv_group_batch(
        self, number: int, chunks: Sequence[Chunk], rotations: Tensor
    ) -> KVGroupBatch:
        if self._part is not None:
            return self._spread_batch(number, chunks, rotations, self._part)
        slots: list[int] = []
        prefilled: list[QueryChunk] = []
        decoded: dict[int, SeenKeys] = {}
        sink_tiles: list[SinkTile] = []
        for chunk in chunks:
            row, blocks = len(slots), chunk.tables[number]
            slots += slots_of(blocks, self.block_size, chunk.positions)
            near = self._before_sinks(number, chunk.positions)
            sink_tiles += self._sink_tiles(number, row, chunk, near.stop)
            if not near:
                continue
            if chunk.is_decoded:
                decoded |= self._decoded(number, row, chunk, near)
                continue
            slices = slices_of(blocks, self.block_size, self._seen(number, near))
            window = self.kv_groups[number].window
            prefilled.append(QueryChunk.of(row, near, slices, window, self.device))
        return KVGroupBatch(
            slots=self._int64(slots),
            rotations=rotations,
            chunks=tuple(prefilled),
            decode=DecodeBatch.of(decoded) if decoded else None,
            sink_tiles=tuple(sink_tiles),
        )

    def _decoded(
        self, number: int, row: int, chunk: Chunk, positions: range
    ) -> dict[int, SeenKeys]:
        """The keys that tokens of a chunk see, by row; `row` is that of the chunk's first token."""
        seen = self._seen(number, positions)
        slices = slices_of(chunk.tables[number], self.block_size, seen)
        if len(positions) == 1:
            return {row + positions.start - chunk.start: (seen.start, slices)}
        own = {at: self._seen(number, range(at, at + 1)) for at in positions}
        return {
            row + at - chunk.start: (keys.start, part_of(slices, _from(seen.start, keys)))
            for at, keys in own.items()
        }

    def _spread_batch(
        self, number: int, chunks: Sequence[Chunk], rotations: Tensor, part: CachePart
    ) -> KVGroupBatch:
        """The batch of a KV group whose cache is sharded by sequence."""
        cache, window = self.caches[number], self.kv_groups[number].window
        slots: list[int] = []
        tiles: list[QueryTile] = []
        for chunk in chunks:
            row, blocks = len(slots), chunk.tables[number]
            slots += part.slots_of(blocks, chunk.positions, spare=cache.n_slots - 1)
            n_queries = 1 if chunk.is_decoded else MAX_QUERIES
            for first in range(0, len(chunk.tokens), n_queries):
                queries = chunk.positions[first : first + n_queries]
                held, slices = part.kept(blocks, self._seen(number, queries))
                if held:
                    tiles.append(
                        QueryTile(
                            slice(row + first, row + first + len(queries)),
                            tuple(cache.past(run.kv_heads, slices) for run in self.shard.runs),
                            mask_of(queries, held, window, self.dtype, self.device),
                        )
                    )
        return KVGroupBatch(self._int64(slots), rotations, tiles=tuple(tiles))

    def _before_sinks(self, number: int, positions: range) -> range:
        """The positions whose window starts at the sequence's start, or all without sinks."""
        window = self.kv_groups[number].window
        if not self.args.attention_sinks or window is None:
            return positions
        return range(positions.start, max(positions.start, min(positions.stop, window)))

    def _sink_tiles(self, number: int, row: int, chunk: Chunk, first: int) -> Iterator[SinkTile]:
        """The queries of a chunk from position `first` on; `row` is that of its first token."""
        cache, blocks = self.caches[number], chunk.tables[number]
        window, n_sinks = self.kv_groups[number].window, self.args.attention_sinks

        def tile(queries: range, keys: range, mask: Tensor) -> QueryTile:
            slots = slices_of(blocks, self.block_size, keys)
            at = row + queries.start - chunk.start
            pasts = tuple(cache.past(run.kv_heads, slots) for run in self.shard.runs)
            return QueryTile(slice(at, at + len(queries)), pasts, mask)

        n_queries = 1 if chunk.is_decoded else MAX_QUERIES
        device = self.device
        for start in range(first, chunk.positions.stop, n_queries):
            queries = range(start, min(start + n_queries, chunk.positions.stop))
            assert window is not None
            seen = self._seen(number, queries)
            sinks = range(min(n_sinks, queries.stop - window))
            # A sink inside a query's window is seen there.
            before = range(queries.start - window, queries.stop - window)
            back_rotations = back_rotations_of(self.args, queries, n_sinks + window - 1)
            yield SinkTile(
                tile(queries, seen, mask_of(queries, [seen], window, self.dtype, device)),
                tile(queries, sinks, mask_of(before, [sinks], None, self.dtype, device)),
                back_rotations.to(
                    device, torch.promote_types(self.dtype, torch.float32).to_complex()
                ),
            )

    def _seen(self, number: int, queries: range) -> range:
        """The positions that any of these consecutive queries sees in a KV group."""
        window = self.kv_groups[number].window
        return range(0 if window is None else max(queries.start - window + 1, 0), queries.stop)

    def _int64(self, values: Sequence[object]) -> Tensor:
        return torch.from_numpy(np.array(values, dtype=np.int64)).to(self.device)


def settle_cuda() -> None:
    """Set torch's CUDA options for this process, whatever was set before."""
    # On sm_90 torch prefers cuDNN's attention, which builds a plan for each new sequence length.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Half types accumulate in float32, and float32 is not reduced to TF32: NVIDIA's containers set
    # an environment variable that would.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.set_float32_matmul_precision("highest")


def _rotations(rotary: RotaryTables, chunks: Sequence[Chunk]) -> HostRotations:
    rows = [rotary.rows(chunk.positions, chunk.n_prompt) for chunk in chunks]
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _is_all(rows: Sequence[int] | None, n_rows: int) -> bool:
    """Whether these are all of `n_rows` rows, in order."""
    return rows is None or list(rows) == list(range(n_rows))


def _from(first: int, positions: range) -> range:
    """Positions relative to `first`."""
    return range(positions.start - first, positions.stop - first)
