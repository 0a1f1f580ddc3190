"""Which rows of a batch run with which LoRA adapter."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from parallel_llama.engine.step_buffer import Chunk, has_adapters
from parallel_llama.model.low_rank import AdapterRows, Adapters
from parallel_llama.ops import AdapterAddresses, AdapterRoom


def adapter_rows(
    chunks: Sequence[Chunk], rows: Sequence[int] | None, device: torch.device
) -> tuple[Adapters, Adapters]:
    """The rows of each adapter, as indices into the batch's tokens and as indices into `rows`.

    Args:
        rows: The output rows of the step; None for all tokens.
    """
    if not has_adapters(chunks):
        return (), ()
    names = [chunk.adapter for chunk in chunks for _ in chunk.tokens]
    token_rows = _by_adapter(names, device)
    if rows is None:
        return token_rows, token_rows
    return token_rows, _by_adapter([names[row] for row in rows], device)


def adapter_rooms(
    chunks: Sequence[Chunk],
    rows: Sequence[int] | None,
    adapters: Mapping[str, AdapterAddresses],
    dtype: torch.dtype,
) -> tuple[Adapters, Adapters]:
    """As `adapter_rows`, for the kernels of the CPU.

    Args:
        adapters: The loaded adapters.
        dtype: The dtype of computation.
    """
    if not has_adapters(chunks):
        return (), ()
    of_tokens = adapter_of_rows(chunks, adapters)
    room = _room(of_tokens, dtype)
    if rows is None:
        return room, room
    return room, _room([of_tokens[row] for row in rows], dtype)


def adapter_of_rows(
    chunks: Sequence[Chunk], adapters: Mapping[str, AdapterAddresses]
) -> list[AdapterAddresses | None]:
    """The adapter of each token of a batch."""
    return [
        None if chunk.adapter is None else adapters[chunk.adapter]
        for chunk in chunks
        for _ in chunk.tokens
    ]


def _room(adapters: Sequence[AdapterAddresses | None], dtype: torch.dtype) -> AdapterRoom:
    room = AdapterRoom(len(adapters), dtype)
    room.fill(adapters)
    return room


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
