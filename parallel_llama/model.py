"""The Llama transformer, as one rank sees it.

The residual stream x is replicated; inside a block each rank works on its own heads and channels,
and the row-parallel layer at the block's end makes the sum whole. One forward pass is
2 n_layers + 1 all_reduces: one for the embedding, and one for each attention and feed-forward.

Source: LLaMA, arXiv 2302.13971; Megatron-LM, arXiv 1909.08053.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_llama.attention import Attention, Batch
from parallel_llama.cache import KVCache
from parallel_llama.config import ModelArgs
from parallel_llama.kernels import make_swiglu
from parallel_llama.large_pages import LargePages
from parallel_llama.layers import (
    ColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    end_to_end,
    product,
)
from parallel_llama.parallel import Communicator
from parallel_llama.plan import Share


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x), w1 and w3 by columns, w2 by rows.

    `pack` lays w1 and w3 end to end once they are filled; `forward` needs it done.

    Shapes: x [T, dim] replicated; the result [T, dim] replicated.
    Collective: the all_reduce of w2.
    Source: arXiv 2002.05202.
    """

    def __init__(
        self,
        args: ModelArgs,
        share: Share,
        comm: Communicator,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        bias = args.mlp_bias
        self.w1 = ColumnParallelLinear(args.dim, share.ffn, bias=bias, dtype=dtype, device=device)
        self.w3 = ColumnParallelLinear(args.dim, share.ffn, bias=bias, dtype=dtype, device=device)
        self.w2 = RowParallelLinear(
            share.ffn, args.dim, comm, bias=bias, dtype=dtype, device=device
        )

    def pack(self) -> None:
        self.w13 = end_to_end(self.w1, self.w3)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(swiglu(self.w13(x)))  # type: ignore[no-any-return]


def swiglu(both: Tensor) -> Tensor:
    """silu(gate) * up, which lie side by side. Shapes: [T, 2 * channels] -> [T, channels] local."""
    kernel = make_swiglu(both.dtype, both.device)
    if kernel is not None:
        return kernel(both)
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each on the normed residual stream and added to it."""

    def __init__(
        self,
        args: ModelArgs,
        share: Share,
        layer: int,
        comm: Communicator,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.attention = Attention(args, share, layer, comm, dtype=dtype, device=device)
        self.feed_forward = FeedForward(args, share, comm, dtype=dtype, device=device)
        self.attention_norm = RMSNorm(args.dim, args.norm_eps, dtype=dtype, device=device)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps, dtype=dtype, device=device)

    def forward(
        self, x: Tensor, batch: Batch, cache: KVCache, rows: Tensor | None = None
    ) -> Tensor:
        """Changes x. With `rows` the result is that of these rows alone, [n, dim]."""
        o = self.attention(self.attention_norm(x), batch, cache, rows)
        x = o.add_(x if rows is None else x[rows])
        return x.add_(self.feed_forward(self.ffn_norm(x)))


class Transformer(nn.Module):
    """The whole model with this rank's share of every weight.

    Built on the meta device it costs no memory; `assign` then puts each weight in its place.
    """

    def __init__(
        self,
        args: ModelArgs,
        share: Share,
        comm: Communicator,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._large_pages: LargePages | None = None  # on a CPU, from the first weight on
        self.tok_embeddings = VocabParallelEmbedding(
            share.vocab, args.dim, comm, dtype=dtype, device=device
        )
        self.layers = nn.ModuleList(
            TransformerBlock(args, share, layer, comm, dtype=dtype, device=device)
            for layer in range(args.n_layers)
        )
        self.norm = RMSNorm(args.dim, args.norm_eps, dtype=dtype, device=device)
        self.output = (
            None
            if args.tied_embeddings
            else ColumnParallelLinear(args.dim, share.vocab, bias=False, dtype=dtype, device=device)
        )

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Run the batch's tokens through all blocks and store their keys and values.

        Returns: the residual stream after the last block, [T, dim] replicated, or [n, dim] of the
        batch's rows: all tokens pass the last block's keys and values, these alone the rest.
        Collective: 2 n_layers + 1 all_reduces.
        """
        x = self.tok_embeddings(batch.tokens)  # [T, dim] replicated
        *others, last = self.layers
        for block in others:
            x = block(x, batch, cache)
        return last(x, batch, cache, batch.rows)  # type: ignore[no-any-return]

    def logits(self, x: Tensor) -> Tensor:
        """Scores of this rank's vocabulary rows, in at least float32.

        Shapes: x [n, dim] replicated, rows of the residual stream; the result [n, V_local] local.
        """
        x = self.norm(x)
        head = self.tok_embeddings if self.output is None else self.output
        scores = product(x, head.weight)  # [n, V_local] local
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def assign(self, name: str, value: Tensor) -> None:
        """Put one weight, already cut to this rank's share, in the place of its meta parameter.

        Raises: KeyError for a name the model does not have, ValueError for another shape or for a
        weight that is already there.
        """
        module_name, _, leaf = name.rpartition(".")
        module = self.get_submodule(module_name)
        current = module._parameters.get(leaf)
        if current is None:
            raise KeyError(f"the model has no parameter {name}")
        if not current.is_meta:
            raise ValueError(f"parameter {name} is filled twice")
        if current.shape != value.shape or current.dtype != value.dtype:
            raise ValueError(
                f"parameter {name} is {list(current.shape)} {current.dtype} on this rank, "
                f"got {list(value.shape)} {value.dtype}"
            )
        if self._large_pages is None and value.device.type == "cpu":
            self._large_pages = LargePages(list(self.parameters()))
        setattr(module, leaf, nn.Parameter(value, requires_grad=False))
        top, number = (*name.split(".", 2), "")[:2]
        self._settle(self.get_submodule(f"{top}.{number}" if top == "layers" else top))

    def complete(self) -> None:
        """See that every parameter is filled; `forward` works from here on.

        Raises: ValueError if a parameter was never filled.
        """
        missing = [name for name, value in self.named_parameters() if value.is_meta]
        if missing:
            raise ValueError(f"{len(missing)} parameters were never filled: {missing[:10]}")

    def _settle(self, part: nn.Module) -> None:
        """Pack a part of the model once it is whole, in the memory that is read fastest."""
        if any(parameter.is_meta for parameter in part.parameters()):
            return
        if isinstance(part, TransformerBlock):
            part.attention.pack()
            part.feed_forward.pack()
        if self._large_pages is not None:
            self._large_pages.move(part.parameters())
