"""Groups the rows of a batch by their LoRA adapter."""

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel_llama.engine.step_buffer import Chunk, has_adapters
from parallel_llama.model.low_rank import AdapterRows


def adapter_rows(
    chunks: Sequence[Chunk], rows: Sequence[int] | None, device: torch.device
) -> tuple[tuple[AdapterRows, ...], tuple[AdapterRows, ...]]:
    """The rows of each adapter, as indices into the batch's tokens and as indices into `rows`.

    Args:
        rows: the output rows of the step; None for all tokens.
    """
    if not has_adapters(chunks):
        return (), ()
    names = [chunk.adapter for chunk in chunks for _ in chunk.tokens]
    token_rows = _by_adapter(names, device)
    if rows is None:
        return token_rows, token_rows
    return token_rows, _by_adapter([names[row] for row in rows], device)


def _by_adapter(names: Sequence[str | None], device: torch.device) -> tuple[AdapterRows, ...]:
    groups = []
    for name in dict.fromkeys(names):
        if name is not None:
            rows_of_adapter = [row for row, name_of_row in enumerate(names) if name_of_row == name]
            rows = None if len(rows_of_adapter) == len(names) else _int64(rows_of_adapter, device)
            groups.append(AdapterRows(name, rows))
    return tuple(groups)


def _int64(rows: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)
