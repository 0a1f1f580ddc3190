"""One rank's step: pieces of sequences in, hidden states or logits out.

The runner owns the model and the KV cache of one rank. It does not know requests, sampling or
stop conditions; every rank calls it with the same pieces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_llama.attention import Batch, Window
from parallel_llama.cache import KVCache, Span
from parallel_llama.checkpoint import Checkpoint, load
from parallel_llama.config import ModelArgs
from parallel_llama.model import Transformer
from parallel_llama.parallel import Communicator
from parallel_llama.plan import ShardPlan
from parallel_llama.rope import rotary_tables
from parallel_llama.sampling import gather_logits


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one sequence, the first of them at position `start`."""

    span: Span
    tokens: Sequence[int]
    start: int


class Runner:
    """The model and the cache of one rank, and the forward pass over a batch of pieces."""

    def __init__(self, args: ModelArgs, plan: ShardPlan, comm: Communicator, model: Transformer):
        self.args, self.plan, self.comm, self.model = args, plan, comm, model
        self.share = plan.shares[comm.rank]
        weight = model.norm.weight
        self.dtype, self.device = weight.dtype, weight.device
        self.reserve(0)

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
        n_slots: int = 0,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> "Runner":
        """Read this rank's share of a checkpoint, tensor by tensor.

        Raises: CheckpointError if the files do not hold exactly this model; DamagedWeights if a
        weight is not what it should be.
        """
        share = plan.shares[comm.rank]
        model = Transformer(args, share, comm, dtype=dtype, device=torch.device("meta"))
        for name, value in load(checkpoint, args, share, dtype, device, on_bytes):
            model.assign(name, value)
        model.complete()
        runner = cls(args, plan, comm, model)
        runner.reserve(n_slots)
        return runner

    def reserve(self, n_slots: int) -> None:
        """Replace the cache by an empty one for `n_slots` tokens."""
        self.cache = KVCache(self.args, self.share, n_slots, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        """Run the pieces through the model, end to end in one batch.

        Returns: the residual stream after the last block, [T, dim] replicated.
        Collective: 2 n_layers + 1 all_reduces.
        """
        return self.model(self._batch(pieces), self.cache)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of this rank's vocabulary rows. Shapes: [n, dim] replicated -> [n, V_local]."""
        return self.model.logits(hidden)

    def full_logits(self, hidden: Tensor) -> Tensor:
        """Scores of the whole vocabulary. Shapes: [n, dim] replicated -> [n, vocab_size].

        Collective: one all_gather.
        """
        vocabs = [share.vocab for share in self.plan.shares]
        return gather_logits(self.logits(hidden), vocabs, self.comm)

    def _batch(self, pieces: Sequence[Piece]) -> Batch:
        tokens = [token for piece in pieces for token in piece.tokens]
        slots, rotary, windows, first = [], [], [], 0
        wide = torch.promote_types(self.dtype, torch.float32)
        for piece in pieces:
            stop = piece.start + len(piece.tokens)
            assert piece.tokens and stop <= len(piece.span)
            positions = torch.arange(piece.start, stop, device=self.device)
            slots.append(positions + piece.span.start)
            rotary.append(rotary_tables(self.args, positions, len(piece.span)).to(wide))
            windows.append(
                Window(
                    slice(first, first + len(piece.tokens)),
                    slice(piece.span.start, piece.span.start + stop),
                    _mask(positions, stop),
                )
            )
            first += len(piece.tokens)
        return Batch(
            torch.tensor(tokens, dtype=torch.int64, device=self.device),
            torch.cat(slots),
            torch.cat(rotary, dim=1),
            tuple(windows),
        )


def _mask(positions: Tensor, n_keys: int) -> Tensor | None:
    """Which keys each position may see, [T, n_keys]; None where torch's own causal mask serves."""
    if len(positions) in (1, n_keys):
        return None
    return positions[:, None] >= torch.arange(n_keys, device=positions.device)
