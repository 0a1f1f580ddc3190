"""The rows of a batch that run with each adapter."""

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel_llama.engine.step_buffer import Chunk, has_adapters
from parallel_llama.model.low_rank import AdapterRows


def adapter_rows(
    chunks: Sequence[Chunk], rows: Sequence[int] | None, device: torch.device
) -> tuple[tuple[AdapterRows, ...], tuple[AdapterRows, ...]]:
    """The tokens that run with each adapter, as indices into the batch and into `rows`.

    `rows` is None for all tokens.
    """
    if not has_adapters(chunks):
        return (), ()
    names = [chunk.adapter for chunk in chunks for _ in chunk.tokens]
    of_tokens = _by_adapter(names, device)
    if rows is None:
        return of_tokens, of_tokens
    return of_tokens, _by_adapter([names[row] for row in rows], device)


def _by_adapter(names: Sequence[str | None], device: torch.device) -> tuple[AdapterRows, ...]:
    found = []
    for name in dict.fromkeys(names):
        if name is not None:
            own = [row for row, each in enumerate(names) if each == name]
            rows = None if len(own) == len(names) else _int64(own, device)
            found.append(AdapterRows(name, rows))
    return tuple(found)


def _int64(rows: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)
