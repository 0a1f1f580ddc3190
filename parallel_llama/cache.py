"""The KV cache: keys and values of this rank's KV heads.

A slot is one token's place. Each sequence owns one span of consecutive slots for its whole life, so
attention reads its keys and values in place. The bookkeeping is the same on every rank, since it
counts tokens and not bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_llama.config import ModelArgs
from parallel_llama.plan import Share


@dataclass(frozen=True)
class Span:
    """The slots [start, stop) of one sequence; its position p lives in slot start + p."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class OutOfSlots(RuntimeError):
    """No span of that length is free; nothing was allocated."""


class KVCache:
    """Keys and values of all layers for `n_slots` tokens, and who owns which slots.

    Shapes: `k` and `v` are [n_layers, K, n_slots, D] local.
    """

    def __init__(
        self,
        args: ModelArgs,
        share: Share,
        n_slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (args.n_layers, share.n_local_kv_heads, n_slots, args.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.n_slots = n_slots
        self._used: list[Span] = []  # in the order of their starts

    def allocate(self, n_tokens: int) -> Span:
        """The first free span of `n_tokens` slots.

        Raises: OutOfSlots, with the cache unchanged.
        """
        start = 0
        for index, used in enumerate([*self._used, Span(self.n_slots, self.n_slots)]):
            if used.start - start >= n_tokens:
                span = Span(start, start + n_tokens)
                self._used.insert(index, span)
                return span
            start = used.stop
        raise OutOfSlots(f"no {n_tokens} consecutive slots are free among {self.n_slots}")

    def free(self, span: Span) -> None:
        """Give a span back. Raises: ValueError if it is not in use."""
        self._used.remove(span)

    @property
    def n_used(self) -> int:
        return sum(len(span) for span in self._used)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of new tokens. Shapes: slots [T]; k and v [T, K, D] local."""
        self.k[layer].index_copy_(1, slots, k.transpose(0, 1))
        self.v[layer].index_copy_(1, slots, v.transpose(0, 1))
