"""One rank's step: chunks of sequences to prefill or decode in, hidden states or logits out.

The runner owns the model and the KV cache of one rank. It does not know requests, sampling or
stop conditions; every rank calls it with the same chunks.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_llama.checkpoint import Checkpoint, load
from parallel_llama.config import ModelArgs
from parallel_llama.dtypes import KVFormat
from parallel_llama.engine.kv_capacity import memory_for
from parallel_llama.model.attention import Batch, Window
from parallel_llama.model.kv_cache import KVCache, slices_of, slots_of, without_last
from parallel_llama.model.rope import RotaryTables
from parallel_llama.model.transformer import Transformer
from parallel_llama.ops import DecodeBatch, Scores, TorchOps, choose_ops
from parallel_llama.ops.formats import dtype_name, kv_dtype
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.plan import ShardPlan

# Queries that attention takes at once: so many that a call is worth it, so few that a long prompt's
# first ones need not pass over its last keys.
_MAX_QUERIES = 64

# Tokens of a chunk that are decoded one by one: a token and its drafts, so that these get to the
# last bit what they would get alone.
_MAX_DECODED = 9


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence, the first of them at position `start`.

    `blocks` is the sequence's block table as far as the chunk's last token, or longer; `n_prompt`
    is the number of tokens that the sequence began with.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    n_prompt: int

    @property
    def positions(self) -> range:
        return range(self.start, self.start + len(self.tokens))


class ModelRunner:
    """The model and the cache of one rank, and the forward pass over a batch of chunks."""

    def __init__(
        self,
        args: ModelArgs,
        plan: ShardPlan,
        comm: Communicator,
        model: Transformer,
        kv_format: KVFormat | None = None,
    ) -> None:
        self.args, self.plan, self.comm, self.model = args, plan, comm, model
        self.share = plan.shares[comm.rank]
        weight = model.norm.weight.values
        self.dtype, self.device = weight.dtype, weight.device
        self.kv_format = kv_format or KVFormat(dtype_name(self.dtype))
        self.rotary = RotaryTables(args, dtype=self.dtype, device=self.device)
        self.reserve(0, 1)

    @classmethod
    def load(
        cls,
        args: ModelArgs,
        checkpoint: Checkpoint,
        plan: ShardPlan,
        comm: Communicator,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kv_format: KVFormat | None = None,
        ops: TorchOps | None = None,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> "ModelRunner":
        """Read this rank's share of a checkpoint, tensor by tensor.

        `kv_format` is that of the cache, the model's own dtype where none is given; `ops` are the
        operators of the model, else the fastest there are.

        Raises: CheckpointError if the files do not hold exactly this model; DamagedWeights if a
        weight is not what it should be.
        """
        share = plan.shares[comm.rank]
        if ops is None:
            groups = {len(run.heads) // len(run.kv_heads) for run in share.runs}
            scores = Scores(args.attention_scale, args.attention_soft_cap)
            cache_dtype = dtype if kv_format is None else kv_dtype(kv_format)
            ops = choose_ops(dtype, device, args.head_dim, groups, scores, cache_dtype)
        model = Transformer(args, share, comm, ops, dtype)
        with ThreadPoolExecutor(1) as thread:
            compiled = thread.submit(ops.compile)  # beside the reading
            for name, value in load(checkpoint, args, share, dtype, device, on_bytes):
                model.assign(name, value)
            model.complete()
            compiled.result()
        return cls(args, plan, comm, model, kv_format)

    def reserve(self, n_blocks: int, block_size: int) -> None:
        """Replace the cache by an empty one."""
        self.cache = KVCache(
            self.args, self.share, n_blocks, block_size, form=self.kv_format, device=self.device
        )

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], rows: Sequence[int] | None = None) -> Tensor:
        """Run the chunks through the model, end to end in one batch.

        Returns: the residual stream after the last block, [T, dim] replicated; of `rows` alone, in
        their order, where they are given, which spares the last block most of its work.
        Collective: 2 n_layers + 1 all_reduces.
        """
        with memory_for("a step of this batch", "lower kv_cache_bytes, or use more ranks"):
            return self.model(self._batch(chunks, rows), self.cache)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of this rank's vocabulary rows. Shapes: [n, dim] replicated -> [n, V_local]."""
        return self.model.logits(hidden)

    def _batch(self, chunks: Sequence[Chunk], rows: Sequence[int] | None) -> Batch:
        block_size = self.cache.block_size
        tokens: list[int] = []
        slots: list[int] = []
        rotations: list[Tensor] = []
        windows: list[Window] = []
        decoded: dict[int, tuple[slice, ...]] = {}
        for chunk in chunks:
            positions = chunk.positions
            assert positions
            if len(positions) <= _MAX_DECODED:
                seen = slices_of(chunk.blocks, block_size, positions.stop)
                for row in reversed(range(len(tokens), len(tokens) + len(positions))):
                    decoded[row] = seen
                    seen = without_last(seen)
            else:
                windows += self._windows(len(tokens), chunk)
            tokens += chunk.tokens
            slots += slots_of(chunk.blocks, block_size, positions)
            rotations.append(self.rotary.rows(positions, chunk.n_prompt))
        ids = self._int64((tokens, slots))
        return Batch(
            tokens=ids[0],
            slots=ids[1],
            rotations=rotations[0] if len(rotations) == 1 else torch.cat(rotations),
            windows=tuple(windows),
            decode=DecodeBatch.of(decoded) if decoded else None,
            rows=None if rows is None else self._int64(rows),
        )

    def _windows(self, row: int, chunk: Chunk) -> Iterator[Window]:
        """What the tokens of a chunk see, the first of them in this row of the batch."""
        for first in range(0, len(chunk.tokens), _MAX_QUERIES):
            seeing = chunk.positions[first : first + _MAX_QUERIES]
            slots = slices_of(chunk.blocks, self.cache.block_size, seeing.stop)
            yield Window(
                slice(row + first, row + first + len(seeing)),
                tuple(self.cache.past(run.kv_heads, slots) for run in self.share.runs),
                self._mask(seeing),
            )

    def _int64(self, values: Sequence[object]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _mask(self, positions: range) -> Tensor | None:
        """What is added to each position's scores; None where torch's own causal mask serves.

        Shapes: [len(positions), positions.stop].
        """
        if len(positions) in (1, positions.stop):
            return None
        shape = (len(positions), positions.stop)
        hidden = torch.full(shape, -torch.inf, dtype=self.dtype, device=self.device)
        return hidden.triu(positions.start + 1)
