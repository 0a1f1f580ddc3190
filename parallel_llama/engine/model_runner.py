"""The forward pass of one rank: takes chunks of sequences, returns hidden states or logits.

The runner owns the model and the KV caches of one rank. It does not handle requests, sampling or
stop conditions. Every rank calls it with the same chunks.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from parallel_llama.checkpoint.adapter_tensors import load_pairs
from parallel_llama.checkpoint.checkpoint import Checkpoint
from parallel_llama.checkpoint.prefetch import prefetch
from parallel_llama.checkpoint.reading import load
from parallel_llama.config.adapter import Adapter
from parallel_llama.dtypes import KVFormat, Precision
from parallel_llama.engine.adapter_rows import adapter_rooms, adapter_rows
from parallel_llama.engine.integrity import IntegrityCheck
from parallel_llama.engine.kv_capacity import MemoryFor
from parallel_llama.engine.kv_layout import CachePart, KVLayout
from parallel_llama.engine.pipeline_pieces import cut_step
from parallel_llama.engine.recorded_steps import (
    CUDAGraphs,
    KernelCalls,
    Logits,
    Recorder,
    bytes_of,
    is_all,
    rotations_of,
)
from parallel_llama.engine.step_buffer import (
    Chunk,
    SamplingKey,
    StepBuffer,
    StepSize,
    has_scaled_queries,
)
from parallel_llama.families.model_args import ModelArgs, context_length, kv_groups
from parallel_llama.model.adapters import (
    adapter_addresses,
    add_adapter,
    number_layers,
    remove_adapter,
)
from parallel_llama.model.batch import Batch, KVGroupBatch, SinkTile
from parallel_llama.model.kv_cache import KVCache
from parallel_llama.model.layers import Backend
from parallel_llama.model.rope import (
    RotaryTables,
    back_rotations_of,
    query_scales,
    rotary_of_windows,
)
from parallel_llama.model.transformer import Transformer
from parallel_llama.model.weights import WeightLoader
from parallel_llama.ops import (
    AdapterAddresses,
    CPUOps,
    Scores,
    TorchOps,
    choose_ops,
    part_tiles,
)
from parallel_llama.ops.formats import dtype_name, kv_dtype, matrix_forms, torch_dtype
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.communicators import use_device
from parallel_llama.parallel.cuda_graphs import GraphRecorder
from parallel_llama.plan import PART_KEYS, ShardPlan, why_unrecorded

# Number of weights to prefetch.
_READ_AHEAD = 2

_MEMORY = MemoryFor("a step of this batch", "use a smaller KV cache, or more ranks")


class ModelRunner:
    """The model and the KV caches of one rank, and the forward pass over a batch of chunks."""

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
        self.weights: WeightLoader | None = None  # set by `load`
        # The loaded adapters by name, each with a number that is never reused.
        self.adapters: dict[str, int] = {}
        self._n_adapters = 0
        # The addresses of the adapters' matrices, for the kernels of the CPU.
        self._adapter_addresses: dict[str, AdapterAddresses] = {}
        number_layers(model)
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
        stage_comm: Communicator | None = None,
        precision: Precision,
        device: torch.device,
        kv_format: KVFormat | None = None,
        ops: TorchOps | None = None,
        on_bytes: Callable[[int], None] = lambda _: None,
        old_runner: "ModelRunner | None" = None,
    ) -> "ModelRunner":
        """Read this rank's shard of a checkpoint, tensor by tensor.

        Args:
            kv_format: by default the compute dtype.
            ops: by default the fastest operators for this device.
            old_runner: a runner of the same model with another shard. Rows that both shards have
                are copied from there. Its weights are freed, so it cannot run afterwards.

        Raises: CheckpointError if the files do not hold exactly this model; DamagedWeights for a
        damaged weight.
        """
        if device.type == "cuda":
            set_cuda_options()
        shard, dtype = plan.shards[comm.rank], torch_dtype(precision.computed)
        if ops is None:
            heads_per_kv = {len(run.heads) // len(run.kv_heads) for run in shard.runs}
            scores = Scores(args.attention_scale, args.attention_soft_cap, args.sink_logits)
            cache_dtype = dtype if kv_format is None else kv_dtype(kv_format)
            forms = matrix_forms(precision)
            is_exact = shard.exact is not None
            ops = choose_ops(
                dtype,
                device,
                args.head_dim,
                heads_per_kv,
                scores,
                cache_dtype,
                forms,
                exact=is_exact,
            )
        model = Transformer(args, shard, Backend(comm, ops, dtype, stage_comm))
        old_loader = None if old_runner is None else old_runner.weights
        loader = WeightLoader(model, args, shard, old_loader, precision.inputs)
        use_own_device = partial(use_device, device)
        with ThreadPoolExecutor(1, initializer=use_own_device) as thread:
            # Kernels compile while the weights are read.
            compilation = thread.submit(
                ops.compile,
                has_experts=args.n_experts > 0,
                has_shared_gate=args.shared_gate,
                has_sigmoid_router=args.sigmoid_router,
                has_unrotated=bool(args.unrotated_layers),
                has_clamped_swiglu=args.activation == "clamped_swiglu",
                has_expert_bias=args.expert_bias,
            )
            weights = load(checkpoint, args, shard, precision, device, on_bytes, held=old_loader)
            with closing(prefetch(weights, _READ_AHEAD, use_own_device)) as prefetched:
                for name, value in prefetched:
                    loader.assign(name, value)
            loader.complete()
            compilation.result()
        runner = cls(args, plan, comm, model, kv_format)
        runner.weights = loader
        return runner

    def load_adapter(
        self, name: str, adapter: Adapter, on_pair: Callable[[], None] = lambda: None
    ) -> None:
        """Read this rank's part of a LoRA adapter of this model; chunks may then name it.

        Args:
            on_pair: called after each pair of A and B has been read.

        Raises: DamagedWeights for a value that is NaN or Inf, or too large for the dtype.
        """
        assert name not in self.adapters
        pairs = []
        for pair in load_pairs(adapter, self.shard, self.dtype, self.device):
            pairs.append(pair)
            on_pair()
        add_adapter(self.model, name, pairs)
        if isinstance(self.model.ops, CPUOps):
            self.model.ops.compile_low_rank()
            self._adapter_addresses[name] = adapter_addresses(self.model, name)
        self.adapters[name] = self._n_adapters
        self._n_adapters += 1
        if self.integrity is not None:
            self.integrity.watch_adapters()

    def unload_adapter(self, name: str) -> None:
        """Free the memory of an adapter."""
        del self.adapters[name]
        self._adapter_addresses.pop(name, None)
        remove_adapter(self.model, name)
        if self.integrity is not None:
            self.integrity.watch_adapters()

    def reserve(self, n_blocks: Sequence[int], block_size: int) -> None:
        """Replace the KV caches by empty ones.

        Args:
            n_blocks: the blocks of each KV group.
        """
        self.block_size, n_parts = block_size, self.shard.kv_parts
        self.integrity: IntegrityCheck | None = None
        part = CachePart(self.comm.rank, n_parts) if n_parts > 1 else None
        # Whether operators read keys through block tables (paged attention).
        is_paged = self.model.ops.is_paged and not why_unrecorded(self.args, n_parts, "cuda")
        self.caches = tuple(
            KVCache(
                self.args,
                self.shard,
                len(self.shard.layers_of(kv_group)),
                part.n_blocks(n) if part else n + is_paged,
                block_size,
                form=self.kv_format,
                device=self.device,
            )
            for kv_group, n in zip(self.kv_groups, n_blocks, strict=True)
        )
        spare_slots = tuple(cache.n_slots - 1 for cache in self.caches)
        n_sinks = self.args.attention_sinks
        self._layout = KVLayout(self.kv_groups, block_size, spare_slots, n_sinks, part)
        self._no_rows = torch.empty(0, self.args.dim, dtype=self.dtype, device=self.device)
        self._calls = KernelCalls(
            self.model, self.caches, self._layout, self._rotary_of, self._adapter_addresses
        )
        self._rotations = self._graphs = None
        if is_paged:
            longest = context_length(self.args)
            if self.kv_groups[0].window is None:  # the cache holds whole sequences
                longest = min(longest, max(n_blocks[0], 1) * block_size)
            tables = {table: table.up_to(longest) for table in set(self._rotary_of)}
            self._rotations = tuple(tables[table] for table in self._rotary_of)
            self._graphs = CUDAGraphs(self._layout, self._rotations, longest, self.device)

    def check_integrity(self) -> IntegrityCheck:
        """Start an integrity check of all following forward passes, until the next `reserve`."""
        assert self.device.type == "cpu"
        caches = self.caches if self._layout.part is None else ()
        exact = self.shard.exact is not None and isinstance(self.model.ops, CPUOps)
        self.integrity = IntegrityCheck(self.model, caches, self.comm, exact=exact)
        return self.integrity

    def record(
        self,
        recorder: Recorder | None = None,
        on_graph: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Capture the decode steps as CUDA graphs, if the operators support it.

        Args:
            recorder: by default a new `GraphRecorder`.

        Collective: as `CUDAGraphs.prepare`.
        """
        if self._graphs is not None:
            with torch.inference_mode():
                recorder = recorder or GraphRecorder()
                self._graphs.prepare(self._logits, self.comm, recorder, on_graph)

    def close(self) -> None:
        """Drop the references to the communicator; the runner must not be used afterwards."""
        if self._graphs is not None:
            self._graphs.close()

    def forward(self, chunks: Sequence[Chunk], rows: Sequence[int] | None = None) -> Tensor:
        """Run the chunks through the model, concatenated in one batch.

        Returns: the residual stream after the last block, [T, dim] replicated. With `rows`, only
            these rows are computed, in this order, which saves most of the work of the last block.
        Collective: as `Transformer.__call__`.
        """
        with _MEMORY:
            hidden = self._calls.hidden(chunks, rows)
            if hidden is None:
                with torch.inference_mode():
                    hidden = self._hidden(chunks, rows)
            self._record_for_check(chunks, hidden)
            return hidden

    def step(
        self,
        chunks: Sequence[Chunk],
        sampled_rows: Sequence[int],
        hidden_rows: Sequence[int] = (),
        sampling_keys: Sequence[SamplingKey] = (),
    ) -> tuple[Logits, Tensor]:
        """Run the chunks. Returns: logits of `sampled_rows`, hidden states of `hidden_rows`.

        Args:
            sampling_keys: the key of each sampled row, if `draws_on_device`.

        Shapes: [len(sampled_rows), V_local] local, which the next step may overwrite;
        [len(hidden_rows), dim] replicated.
        Collective: as `Transformer.__call__`.
        """
        if sampled_rows and not hidden_rows:
            with _MEMORY:
                return self._step_logits(chunks, sampled_rows, sampling_keys), self._no_rows
        # A chunk that ends before its prompt needs no row, but a forward pass returns at least one.
        hidden = self.forward(chunks, [*sampled_rows, *hidden_rows] or [0])
        return Logits(self.logits(hidden[: len(sampled_rows)])), hidden[len(sampled_rows) :]

    @property
    def draws_on_device(self) -> bool:
        """Whether steps also sample on the device, so that `step_ahead` can be called."""
        return self._graphs is not None

    @torch.inference_mode()
    def step_ahead(
        self, chunks: Sequence[Chunk], sampling_keys: Sequence[SamplingKey], tokens: Tensor
    ) -> Logits:
        """Run a decode step on `tokens`, which are on the device; the chunks' tokens are ignored.

        Returns: the logits of all rows, which the next step may overwrite.

        Shapes: tokens [T] int64.
        Collective: as `Transformer.__call__`.
        """
        assert self._graphs is not None
        with _MEMORY:
            logits = self._graphs.logits(chunks, range(len(tokens)), sampling_keys, tokens)
            return logits or self._logits(self._paged_batch(chunks, None, sampling_keys, tokens))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of this rank's vocabulary rows. Shapes: [n, dim] replicated -> [n, V_local]."""
        return self.model.logits(hidden)

    def _step_logits(
        self, chunks: Sequence[Chunk], rows: Sequence[int], sampling_keys: Sequence[SamplingKey]
    ) -> Logits:
        """The logits of these rows, from a recorded step if one fits."""
        if self._graphs is not None:
            logits = self._graphs.logits(chunks, rows, sampling_keys)
        else:
            logits = self._calls.logits(chunks, rows)
        if logits is not None:
            if self.integrity is not None:
                self.integrity.record_step(self._calls.slots, self._calls.residual)
            return logits
        with torch.inference_mode():
            if len(self.plan.stages) > 1:
                hidden = self._hidden(chunks, rows)
                self._record_for_check(chunks, hidden)
                return Logits(self.model.logits(hidden))
            batch = self.batch(chunks, rows, sampling_keys)
            hidden = self.model(batch, self.caches)
            self._record_for_check(chunks, hidden)
            return self._sampled_logits(hidden, batch)

    def _hidden(self, chunks: Sequence[Chunk], rows: Sequence[int] | None) -> Tensor:
        """The residual stream of these rows, operator by operator."""
        pieces, indices = cut_step(chunks, rows, len(self.plan.stages))
        if len(pieces) == 1:
            return self.model(self.batch(chunks, rows), self.caches)
        batches = [self.batch(piece.chunks, piece.rows) for piece in pieces]
        hidden = self.model.run_pieces(batches, self.caches)
        return hidden if indices is None else hidden[self._int64(indices)]

    def _record_for_check(self, chunks: Sequence[Chunk], hidden: Tensor) -> None:
        """Report a forward pass to the integrity check, if there is one."""
        if self.integrity is None:
            return
        residual = bytes_of(hidden.contiguous())
        groups = range(len(self.caches)) if self._layout.part is None else ()
        self.integrity.record_step([self._layout.slots(n, chunks) for n in groups], residual)

    def _logits(self, batch: Batch) -> Logits:
        """The logits of the batch's rows, with sampled tokens if it has sampling keys."""
        return self._sampled_logits(self.model(batch, self.caches), batch)

    def _sampled_logits(self, hidden: Tensor, batch: Batch) -> Logits:
        logits = self.model.logits(hidden)
        if batch.sampling_keys is None:
            return Logits(logits)
        drawn = self.model.ops.draw(logits, batch.sampling_keys, self.shard.vocab.start)
        return Logits(logits, drawn=drawn)

    def _rotary_tables(self) -> list[RotaryTables]:
        """The rotary tables of each KV group; groups with equal tables share them."""
        args = [
            self.args if kv_group.window is None else rotary_of_windows(self.args)
            for kv_group in self.kv_groups
        ]
        tables = {
            table_args: RotaryTables(table_args, dtype=self.dtype, device=self.device)
            for table_args in args
        }
        return [tables[table_args] for table_args in args]

    def batch(
        self,
        chunks: Sequence[Chunk],
        rows: Sequence[int] | None = None,
        sampling_keys: Sequence[SamplingKey] = (),
    ) -> Batch:
        """Build the batch of some chunks: tokens, slots, and the keys that each token sees."""
        assert all(chunk.tokens for chunk in chunks)
        if self._graphs is not None:
            return self._paged_batch(chunks, rows, sampling_keys)
        rotations = rotations_of(self._rotary_of, chunks)
        tokens = [token for chunk in chunks for token in chunk.tokens]
        if isinstance(self.model.ops, CPUOps):
            adapters, adapters_of_rows = adapter_rooms(
                chunks, rows, self._adapter_addresses, self.dtype
            )
        else:
            adapters, adapters_of_rows = adapter_rows(chunks, rows, self.device)
        return Batch(
            tokens=self._int64(tokens),
            kv_groups=tuple(
                self._kv_group_batch(
                    number, chunks, torch.from_numpy(group_rotations).to(self.device)
                )
                for number, group_rotations in enumerate(rotations)
            ),
            rows=None if rows is None or is_all(rows, len(tokens)) else self._int64(rows),
            query_scales=self._query_scales(chunks),
            adapters=adapters,
            adapters_of_rows=adapters_of_rows,
        )

    def _paged_batch(
        self,
        chunks: Sequence[Chunk],
        rows: Sequence[int] | None,
        sampling_keys: Sequence[SamplingKey],
        tokens: Tensor | None = None,
    ) -> Batch:
        assert self._rotations is not None
        n_rows, kv_groups = None if rows is None else len(rows), self._layout.steps(chunks)
        buffer = StepBuffer(StepSize.of(chunks, kv_groups, n_rows), self._rotations, self.device)
        buffer.fill(chunks, kv_groups, rows or (), sampling_keys, tokens)
        adapters, adapters_of_rows = adapter_rows(chunks, rows, self.device)
        return replace(buffer.batch(), adapters=adapters, adapters_of_rows=adapters_of_rows)

    def _kv_group_batch(
        self, number: int, chunks: Sequence[Chunk], rotations: Tensor
    ) -> KVGroupBatch:
        slot_list, _, queries, beyond_window = self._layout.step(number, chunks)
        slots = self._int64(slot_list)
        part = self._layout.part
        if part is not None and self.shard.exact is not None:
            assert self.block_size % PART_KEYS == 0  # a part is on one rank
            tiles_of_parts = part_tiles(queries, part.number, part.n_parts)
            return KVGroupBatch(slots, rotations, part_tiles=tuple(tiles_of_parts))
        if part is not None:
            tiles = queries.tiles(self.dtype, self.device)
            return KVGroupBatch(slots, rotations, tiles=tuple(tiles))
        plan = self.model.ops.plan(queries, self.device) if queries.ranges else None
        sink_tiles: list[SinkTile] = []
        if beyond_window is not None:
            last_position = self.args.attention_sinks + (queries.window or 0) - 1
            compute_dtype = torch.promote_types(self.dtype, torch.float32).to_complex()
            args = rotary_of_windows(self.args)
            for sink_plan in self.model.ops.plan_sinks(*beyond_window, self.dtype, self.device):
                back_rotations = back_rotations_of(args, sink_plan.positions, last_position)
                sink_tiles.append(
                    SinkTile(sink_plan, back_rotations.to(self.device, compute_dtype))
                )
        return KVGroupBatch(slots, rotations, plan, tuple(sink_tiles))

    def _query_scales(self, chunks: Sequence[Chunk]) -> Tensor | None:
        if not has_scaled_queries(self.args.first_scaled_position, chunks):
            return None
        scales = query_scales(self.args, [chunk.positions for chunk in chunks])
        return scales.to(self.device, torch.promote_types(self.dtype, torch.float32))

    def _int64(self, values: Sequence[object]) -> Tensor:
        return torch.from_numpy(np.array(values, dtype=np.int64)).to(self.device)


def set_cuda_options() -> None:
    """Set torch's CUDA options for this process, overriding earlier settings."""
    # On sm_90 torch prefers cuDNN's attention, which builds a plan for each new sequence length.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Half types accumulate in float32, and float32 is not reduced to TF32, although NVIDIA's
    # containers set an environment variable that enables TF32.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.set_float32_matmul_precision("highest")
