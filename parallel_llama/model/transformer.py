"""The Llama transformer, as one rank sees it.

The residual stream x is replicated; each rank works on its own heads and channels, and the
row-parallel layers, wo and w2, sum over the ranks. One forward pass takes 2 n_layers + 1
all_reduces: one for the embedding, and one for each attention and feed-forward. Blocks that run
both in parallel need one, so n_layers + 1 in all. A norm of queries and keys across heads
(`qk_norm_across_heads`) adds one all_reduce to each attention, so 3 n_layers + 1 in all. With exact
sums, exchanges of inputs and outputs replace the all_reduces of row-parallel layers; see
`layers.RowCut`.

In a pipeline the stages run their blocks one after another. A block's exchanges are within its
stage, and after each stage all ranks receive the residual stream from its first rank.

Source: LLaMA, arXiv 2302.13971; Megatron-LM, arXiv 1909.08053; stages of layers,
GPipe, arXiv 1811.06965.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.weights import Axis
from parallel_llama.model.attention import Attention
from parallel_llama.model.batch import Batch
from parallel_llama.model.feed_forward import FeedForward
from parallel_llama.model.kv_cache import KVCache
from parallel_llama.model.layers import (
    Addend,
    Backend,
    ColumnParallelLinear,
    Norm,
    VocabParallelEmbedding,
    norm_of,
    row_parallel_sum,
)
from parallel_llama.model.moe import MixtureOfExperts
from parallel_llama.plan import Shard


class TransformerBlock:
    """Attention and feed-forward: each reads the residual stream, normalised, and adds to it.

    With `post_norms` both outputs are normalised before they are added. Without `pre_norms`
    attention and feed-forward read the residual stream without a norm.
    """

    def __init__(self, args: ModelArgs, shard: Shard, layer: int, backend: Backend) -> None:
        self.ops = backend.ops
        self.attention = Attention(args, shard, layer, backend)
        self.feed_forward: FeedForward | MixtureOfExperts
        if args.n_experts and layer not in args.dense_layers:
            self.feed_forward = MixtureOfExperts(args, shard, backend)
        else:
            axis: Axis = "dense_ffn" if args.n_experts else "ffn"
            self.feed_forward = FeedForward(args, shard, axis, backend)
        self.attention_norm = norm_of(args, backend) if args.pre_norms else None
        has_ffn_norm = args.pre_norms and not args.shared_norm
        self.ffn_norm = norm_of(args, backend) if has_ffn_norm else None
        self.post_attention_norm, self.post_ffn_norm = (
            norm_of(args, backend) if args.post_norms else None for _ in range(2)
        )

    def fuse(self) -> None:
        self.attention.fuse()
        self.feed_forward.fuse()

    def __call__(
        self,
        x: Tensor,
        y: Addend | None,
        batch: Batch,
        caches: Sequence[KVCache],
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Addend]:
        """Runs the block on the residual stream x + y; may overwrite x.

        y is the output of the previous block, which the first norm adds; None for the first block.

        Returns: x and y of the residual stream after the block.
        Shapes: x, y [T, dim] replicated -> [T, dim] replicated, or with `rows` these rows only,
        [n, dim].
        Collective: as `Attention` and the feed-forward.
        """
        normed = self._add_and_norm(x, y, self.attention_norm)
        o = self.attention(normed, batch, caches, rows)  # [T, dim] or [n, dim] replicated
        x = x if rows is None else x[rows]
        adapters = batch.adapters if rows is None else batch.adapters_of_rows
        normed = self._add_and_norm(x, Addend(o, self.post_attention_norm), self.ffn_norm)
        return x, Addend(self.feed_forward(normed, adapters), self.post_ffn_norm)

    def _add_and_norm(self, x: Tensor, y: Addend | None, norm: Norm | None) -> Tensor:
        """Adds y to x in place and returns norm(x), or x without a norm."""
        if y is None:
            return x if norm is None else norm(x)
        return y.add_to(x, self.ops) if norm is None else norm.add_and_norm(x, y)


class ParallelBlock(TransformerBlock):
    """Attention and feed-forward of the same x, added to x with one `row_parallel_sum`.

    Collective: that of `row_parallel_sum`, and of `Attention.heads`.
    Source: PaLM, arXiv 2204.02311, section 2; Falcon, arXiv 2311.16867.
    """

    def __call__(
        self,
        x: Tensor,
        y: Addend | None,
        batch: Batch,
        caches: Sequence[KVCache],
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Addend]:
        assert isinstance(self.feed_forward, FeedForward)
        normed = self._add_and_norm(x, y, self.attention_norm)
        o = self.attention.heads(normed, batch, caches, rows)  # [T, H * D] local
        adapters = batch.adapters
        if rows is not None:
            x, normed, adapters = x[rows], normed[rows], batch.adapters_of_rows
        if self.ffn_norm is not None:
            normed = self.ffn_norm(x)
        h = self.feed_forward.channels(normed, adapters)  # [T, channels] local
        terms = (self.attention.wo, o), (self.feed_forward.w2, h)
        return x, Addend(row_parallel_sum(*terms, adapters=adapters))


class Transformer:
    """The model, with this rank's shards of the weights.

    It takes no memory until `model.weights.WeightLoader` loads its weights.

    With a `residual_scale` s, the residual stream is stored divided by s, as x / s. A block then
    adds its output y unscaled, because x / s + y = (x + s y) / s, and the norms (see
    `layers.norm_of`) cancel the division.
    """

    def __init__(self, args: ModelArgs, shard: Shard, backend: Backend) -> None:
        self.ops, self.comm = backend.ops, backend.comm
        self.stages, self.stage = shard.stages, shard.stage
        # The factor on embeddings is rounded to the dtype of the residual stream, except with a
        # `residual_scale`; None for a factor of 1.
        scale = args.embedding_scale / args.residual_scale
        rounded = backend.dtype if args.residual_scale == 1 else torch.float64
        self._embedding_scale = None if scale == 1 else torch.tensor(scale, dtype=rounded)
        self.first_scaled_position = args.first_scaled_position
        self._logit_scale, self._logit_soft_cap = args.logit_scale, args.logit_soft_cap
        block = ParallelBlock if args.parallel_block else TransformerBlock
        self.tok_embeddings = VocabParallelEmbedding(shard.vocab, args.dim, backend)
        # By the number of the layer in the model; without the layers of other stages.
        self.layers = {layer: block(args, shard, layer, backend.in_stage) for layer in shard.layers}
        self.norm = norm_of(args, backend)
        self.output = (
            None
            if args.tied_embeddings
            else ColumnParallelLinear(args.dim, shard.vocab, backend, bias=False)
        )

    def __call__(self, batch: Batch, caches: Sequence[KVCache]) -> Tensor:
        """Runs the batch's tokens through all blocks and stores their keys and values.

        Args:
            caches: One KV cache per KV group.

        Returns: the residual stream after the last block, [T, dim] replicated, or [n, dim] for the
        batch's rows: the last block runs wo and the feed-forward for these rows only.
        Collective: as the embedding and, in each block, `Attention` and the feed-forward; a
        `ParallelBlock` has one `row_parallel_sum` instead of wo and w2. In a pipeline also one
        gather_columns after each stage.
        """
        return self.blocks(self.embedded(batch.tokens), batch, caches)

    def run_pieces(self, batches: Sequence[Batch], caches: Sequence[KVCache]) -> Tensor:
        """Runs consecutive pieces of a step; pipeline stages run different pieces at the same time.

        Returns: the results of all pieces, concatenated.
        Collective: as one call per piece, but with one all_reduce for all embeddings.
        """
        x = self.embedded(torch.cat([batch.tokens for batch in batches]))
        pieces = torch.split(x, [len(batch.tokens) for batch in batches])
        return torch.cat(self._run_stages(pieces, batches, caches))

    def embedded(self, tokens: Tensor) -> Tensor:
        """The residual stream before the first block. Shapes: [T] -> [T, dim] replicated.

        Collective: one all_reduce.
        """
        x = self.tok_embeddings(tokens)
        return x if self._embedding_scale is None else x.mul_(self._embedding_scale)

    def blocks(self, x: Tensor, batch: Batch, caches: Sequence[KVCache]) -> Tensor:
        """Runs all blocks on the result of `embedded`; may overwrite x."""
        return self._run_stages([x], [batch], caches)[0]

    def _run_stages(
        self, pieces: Sequence[Tensor], batches: Sequence[Batch], caches: Sequence[KVCache]
    ) -> list[Tensor]:
        """Runs all blocks on pieces of a step: in tick t, stage s runs piece t - s.

        At the end of a tick the stages send their results in order, so all ranks call the same
        collectives.

        Shapes: each piece and its result [T, dim] replicated; after the last stage [n, dim] if the
        batch has `rows`.
        """
        results = list(pieces)
        for tick in range(len(results) + len(self.stages) - 1):
            running = [
                (stage, tick - number)
                for number, stage in enumerate(self.stages)
                if 0 <= tick - number < len(results)
            ]
            for stage, piece in running:
                rows = batches[piece].rows if stage is self.stages[-1] else None
                if stage == self.stage:
                    results[piece] = self._own_blocks(results[piece], batches[piece], caches, rows)
                elif rows is not None:
                    results[piece] = results[piece].new_empty(len(rows), results[piece].shape[1])
            for stage, piece in running if len(self.stages) > 1 else ():
                results[piece] = self._received(results[piece], stage.ranks.start)
        return results

    def _received(self, x: Tensor, src: int) -> Tensor:
        """Returns the x of rank `src` on all ranks. Shapes: x and the result [T, dim].

        The other ranks send no columns. gather_columns has a kernel, so decode steps can record it.
        """
        widths = [x.shape[1] if rank == src else 0 for rank in range(self.comm.size)]
        return self.ops.gather_columns(x[:, : widths[self.comm.rank]], widths, self.comm)

    def _own_blocks(
        self, x: Tensor, batch: Batch, caches: Sequence[KVCache], rows: Tensor | None
    ) -> Tensor:
        """Runs the blocks of this rank's stage; with `rows`, the result has these rows only."""
        *blocks, last = self.layers.values()
        y = None
        for block in blocks:
            x, y = block(x, y, batch, caches)
        x, y = last(x, y, batch, caches, rows)
        return y.add_to(x, self.ops)

    def logits(self, x: Tensor) -> Tensor:
        """The logits of this rank's vocabulary rows, in at least float32.

        Shapes: x [n, dim] replicated, rows of the residual stream; the result [n, V_local] local.
        """
        return self.finish_logits(self.scores(x))

    def scores(self, x: Tensor) -> Tensor:
        """The product with the output layer, before `finish_logits`. Shapes: as `logits`."""
        head = self.tok_embeddings if self.output is None else self.output
        return head.weight.apply(self.norm(x), self.ops)  # [n, V_local] local

    @property
    def has_embedding_scale(self) -> bool:
        """Whether `embedded` scales the rows of the embedding."""
        return self._embedding_scale is not None

    @property
    def has_logit_scaling(self) -> bool:
        """Whether logits differ from `scores` in more than their dtype."""
        return self._logit_scale != 1 or self._logit_soft_cap is not None

    def finish_logits(self, scores: Tensor) -> Tensor:
        """The logits of `scores`, scaled and capped; may overwrite `scores`."""
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if self._logit_scale != 1:
            scores.mul_(self._logit_scale)
        if self._logit_soft_cap is not None:
            scores.div_(self._logit_soft_cap).tanh_().mul_(self._logit_soft_cap)
        return scores
