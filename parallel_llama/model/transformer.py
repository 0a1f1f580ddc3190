"""The Llama transformer, as one rank sees it.

The residual stream x is replicated; inside a block each rank works on its own heads and channels,
and the row-parallel layer at the block's end makes the sum whole. One forward pass is
2 n_layers + 1 all_reduces: one for the embedding, and one for each attention and feed-forward;
where a block has both side by side they share one, which makes n_layers + 1.

Source: LLaMA, arXiv 2302.13971; Megatron-LM, arXiv 1909.08053.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from parallel_llama.config import ModelArgs
from parallel_llama.families import parameters
from parallel_llama.model.attention import Attention
from parallel_llama.model.batch import Batch
from parallel_llama.model.huge_pages import HugePages
from parallel_llama.model.kv_cache import KVCache
from parallel_llama.model.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    activation_of,
    end_to_end,
    norm_of,
    summed,
)
from parallel_llama.model.moe import Expert, MixtureOfExperts
from parallel_llama.ops import TorchOps
from parallel_llama.ops.formats import DenseWeight, GroupWeight, Weight
from parallel_llama.ops.groups import Groups
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.plan import Share


class FeedForward(nn.Module):
    """w2(f(w1 x) * w3 x), w1 and w3 by columns, w2 by rows; without a gate w2(f(w1 x)).

    `pack` lays w1 and w3 end to end once they are filled; `channels` needs it done.

    Shapes: x [T, dim] replicated; the result [T, dim] replicated.
    Collective: the all_reduce of w2.
    Source: arXiv 2002.05202.
    """

    def __init__(
        self, args: ModelArgs, share: Share, comm: Communicator, ops: TorchOps, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.activation, self.gated, bias = activation_of(args, ops), args.gated, args.mlp_bias
        self.w1 = ColumnParallelLinear(args.dim, share.ffn, ops, dtype, bias=bias)
        if args.gated:
            self.w3 = ColumnParallelLinear(args.dim, share.ffn, ops, dtype, bias=bias)
        self.w2 = RowParallelLinear(share.ffn, args.dim, comm, ops, dtype, bias=bias)

    def pack(self) -> None:
        self.w13 = end_to_end(self.w1, self.w3) if self.gated else self.w1

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.channels(x))  # type: ignore[no-any-return]

    def channels(self, x: Tensor) -> Tensor:
        """What w2 takes. Shapes: [T, dim] replicated -> [T, channels] local."""
        return self.activation(self.w13(x))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each on the normed residual stream and added to it.

    Some families norm what they add as well (`post_norms`).
    """

    def __init__(
        self,
        args: ModelArgs,
        share: Share,
        layer: int,
        comm: Communicator,
        ops: TorchOps,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.attention = Attention(args, share, layer, comm, ops, dtype)
        feed_forward: type[FeedForward | MixtureOfExperts]
        feed_forward = MixtureOfExperts if args.n_experts else FeedForward
        self.feed_forward = feed_forward(args, share, comm, ops, dtype)
        self.attention_norm = norm_of(args, ops, dtype)
        self.ffn_norm = None if args.shared_norm else norm_of(args, ops, dtype)
        self.post_norms = args.post_norms
        if args.post_norms:
            self.post_attention_norm = norm_of(args, ops, dtype)
            self.post_ffn_norm = norm_of(args, ops, dtype)

    def pack(self) -> None:
        self.attention.pack()
        self.feed_forward.pack()

    def forward(
        self, x: Tensor, batch: Batch, caches: Sequence[KVCache], rows: Tensor | None = None
    ) -> Tensor:
        """Changes x. With `rows` the result is that of these rows alone, [n, dim]."""
        assert self.ffn_norm is not None
        o = self.attention(self.attention_norm(x), batch, caches, rows)
        if self.post_norms:
            o = self.post_attention_norm(o)
        normed = self.ffn_norm.of_sum(o, x if rows is None else x[rows])
        y = self.feed_forward(normed)
        return self.ops.add_(o, self.post_ffn_norm(y) if self.post_norms else y)


class ParallelBlock(TransformerBlock):
    """Attention and feed-forward of the same x, added to it with one all_reduce.

    Source: PaLM, arXiv 2204.02311, section 2; Falcon, arXiv 2311.16867.
    """

    def forward(
        self, x: Tensor, batch: Batch, caches: Sequence[KVCache], rows: Tensor | None = None
    ) -> Tensor:
        assert isinstance(self.feed_forward, FeedForward)
        normed = self.attention_norm(x)
        o = self.attention.heads(normed, batch, caches, rows)  # [T, H * D] local
        if rows is not None:
            x, normed = x[rows], normed[rows]
        if self.ffn_norm is not None:
            normed = self.ffn_norm(x)
        h = self.feed_forward.channels(normed)  # [T, channels] local
        y = summed((self.attention.wo, o), (self.feed_forward.w2, h))
        return self.ops.add_(x, y)


class Transformer(nn.Module):
    """The whole model with this rank's share of every weight.

    It costs no memory until `assign` puts each weight in its place.
    """

    def __init__(
        self, args: ModelArgs, share: Share, comm: Communicator, ops: TorchOps, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.ops = ops
        # Rounded as the stream is; None where there is nothing to scale.
        scale = args.embedding_scale
        self._embedding_scale = None if scale == 1 else torch.tensor(scale, dtype=dtype)
        self._logit_scale, self._logit_soft_cap = args.logit_scale, args.logit_soft_cap
        block = ParallelBlock if args.parallel_block else TransformerBlock
        self._huge_pages: HugePages | None = None  # on a CPU, from the first weight on
        self.tok_embeddings = VocabParallelEmbedding(share.vocab, args.dim, comm, ops, dtype)
        self.layers = nn.ModuleList(
            block(args, share, layer, comm, ops, dtype) for layer in range(args.n_layers)
        )
        self.norm = norm_of(args, ops, dtype)
        self.output = (
            None
            if args.tied_embeddings
            else ColumnParallelLinear(args.dim, share.vocab, ops, dtype, bias=False)
        )
        held = filter(share.holds, parameters(args))
        self._weights: dict[str, Weight] = {param.name: self._weight(param.name) for param in held}
        self._unfilled = Counter(part for name in self._weights for part in _parts_of(name))

    def forward(self, batch: Batch, caches: Sequence[KVCache]) -> Tensor:
        """Run the batch's tokens through all blocks and store their keys and values.

        `caches` has one for each group of layers.

        Returns: the residual stream after the last block, [T, dim] replicated, or [n, dim] of the
        batch's rows: all tokens pass the last block's keys and values, these alone the rest.
        Collective: 2 n_layers + 1 all_reduces; n_layers + 1 with parallel blocks; two all_gathers
        more for each layer where the cache's tokens are spread.
        """
        return self.blocks(self.embedded(batch.tokens), batch, caches)

    def embedded(self, tokens: Tensor) -> Tensor:
        """The residual stream before the first block. Shapes: [T] -> [T, dim] replicated.

        Collective: one all_reduce.
        """
        x: Tensor = self.tok_embeddings(tokens)
        if self._embedding_scale is not None:
            x.mul_(self._embedding_scale)
        return x

    def blocks(self, x: Tensor, batch: Batch, caches: Sequence[KVCache]) -> Tensor:
        """What `forward` does after the embedding; it changes x."""
        *others, last = self.layers
        for block in others:
            x = block(x, batch, caches)
        return last(x, batch, caches, batch.rows)  # type: ignore[no-any-return]

    def logits(self, x: Tensor) -> Tensor:
        """Scores of this rank's vocabulary rows, in at least float32.

        Shapes: x [n, dim] replicated, rows of the residual stream; the result [n, V_local] local.
        """
        return self.scaled(self.scores(x))

    def scores(self, x: Tensor) -> Tensor:
        """What `scaled` makes logits of. Shapes: as `logits`."""
        head = self.tok_embeddings if self.output is None else self.output
        return head.weight.apply(self.norm(x), self.ops)  # [n, V_local] local

    @property
    def embeds_plainly(self) -> bool:
        """Whether the residual stream begins with what the files have for each token."""
        return self._embedding_scale is None

    @property
    def scales_logits(self) -> bool:
        """Whether logits are not what the head's product gives."""
        return self._logit_scale != 1 or self._logit_soft_cap is not None

    def scaled(self, scores: Tensor) -> Tensor:
        """Logits from `scores`, whose place they may take."""
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if self._logit_scale != 1:
            scores.mul_(self._logit_scale)
        if self._logit_soft_cap is not None:
            scores.div_(self._logit_soft_cap).tanh_().mul_(self._logit_soft_cap)
        return scores

    def assign(self, name: str, values: Tensor | Groups) -> None:
        """Fill one weight with its values, already cut to this rank's share.

        Raises: KeyError for a name the model does not have, ValueError for another shape or for a
        weight that is already there.
        """
        if name not in self._weights:
            raise KeyError(f"the model has no weight {name}")
        if self._huge_pages is None and values.device.type == "cpu":
            self._huge_pages = HugePages([each.values for each in self._weights.values()])
        try:
            self._fill(name, values)
        except ValueError as error:
            raise ValueError(f"weight {name} {error}") from error
        for part in _parts_of(name):
            self._unfilled[part] -= 1
            if not self._unfilled[part]:
                self._settle(self.get_submodule(part))

    def complete(self) -> None:
        """See that every weight is filled; `forward` works from here on.

        Raises: ValueError if one was never filled.
        """
        missing = [name for name, weight in self._weights.items() if not weight.is_filled]
        if missing:
            raise ValueError(f"{len(missing)} weights were never filled: {missing[:10]}")

    def _weight(self, name: str) -> DenseWeight:
        module, _, leaf = name.rpartition(".")
        weight: DenseWeight = getattr(self.get_submodule(module), leaf)
        return weight

    def _fill(self, name: str, values: Tensor | Groups) -> None:
        empty = self._weights[name]
        if isinstance(values, Tensor):
            empty.fill(values)
            return
        module, _, leaf = name.rpartition(".")
        self._weights[name] = GroupWeight.in_place_of(empty, values, self.ops.panel_rows)
        setattr(self.get_submodule(module), leaf, self._weights[name])

    def _settle(self, part: nn.Module) -> None:
        """Pack a part of the model that is whole now, in the memory that is read fastest."""
        if isinstance(part, TransformerBlock | Expert):
            part.pack()
        if self._huge_pages is not None:
            self._huge_pages.move(_weights_of(part))


def _parts_of(name: str) -> list[str]:
    """The parts of the model that settle with this weight, the inner one first.

    >>> _parts_of("layers.3.feed_forward.experts.5.w1.weight"), _parts_of("norm.weight")
    (['layers.3.feed_forward.experts.5', 'layers.3'], ['norm'])
    """
    path = name.split(".")
    lengths = (5, 2) if "experts" in path else (2,) if path[0] == "layers" else (1,)
    return [".".join(path[:length]) for length in lengths]


def _weights_of(part: nn.Module) -> list[Weight]:
    held = (value for module in part.modules() for value in vars(module).values())
    return [value for value in held if isinstance(value, Weight)]
