"""Loads the tensors of one rank from a checkpoint.

Every weight is cut to the rank's shard, converted, and checked for NaN and Inf. Besides its shard,
a rank needs memory for one bounded piece at a time.
"""

import math
from collections.abc import Callable, Generator
from typing import Protocol

import torch
from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import Empty, new_memory, sliced_shape
from parallel_llama.checkpoint.checkpoint import Checkpoint
from parallel_llama.checkpoint.hf_folder import HFFolder
from parallel_llama.checkpoint.meta_folder import MetaFolder, MistralFolder
from parallel_llama.checkpoint.native_folder import NativeFolder
from parallel_llama.checkpoint.prefetch import workers
from parallel_llama.dtypes import Precision, QuantFormat
from parallel_llama.errors import CheckpointError, DamagedWeights
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.weights import Param
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.ops.formats import LoadedWeight, dtype_name, torch_dtype
from parallel_llama.ops.quant import PackedRows, QuantMatrix, QuantRows, joined, quantise
from parallel_llama.plan import Shard

# Values read at once: at most 256 MiB (in float64). Most shards of a weight are smaller; a larger
# shard is read in pieces and concatenated. On a CPU, pieces of rows are smaller, and are
# concatenated where the weight is stored, so no large matrix is in memory twice.
PIECE_VALUES = 1 << 25
_ROW_PIECE_VALUES = 1 << 22

# Pieces start at boundaries of quantised blocks (at most 256 values) and of heads, so nothing is
# decoded or read twice.
PIECE_ALIGNMENT = 256

# Values that a thread quantises at once; its float32 copies then fit into the cache of a core.
QUANTISED_AT_ONCE = 1 << 17


class HeldWeights(Protocol):
    """Another shard of the same weights in memory: its rows are copied, not read from the files."""

    def rows_of(self, param: Param) -> range:
        """The rows (or columns) of a weight that can be taken; `param` as for `Shard.rows_of`."""

    def take(self, param: Param, rows: range) -> Tensor | PackedRows:
        """Returns rows of a weight that are held, in the model's format.

        The result may share the memory of the weight.
        """


def open_checkpoint(files: ModelFiles, args: ModelArgs, empty: Empty = new_memory) -> Checkpoint:
    """Opens the checkpoint of a model's files, reading headers only; `empty` allocates its tensors.

    Raises: CheckpointError if a file is damaged, or there are no weights.
    """
    if not files.weights:
        raise CheckpointError(
            f"{files.path}: a configuration without weights; use a folder or file with weights, or "
            "random weights"
        )
    try:
        return _READERS[files.kind](files, args, empty)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _meta(files: ModelFiles, args: ModelArgs, empty: Empty) -> Checkpoint:
    return MetaFolder(files, args) if files.is_pickled else MistralFolder(files, args, empty)


def _gguf(files: ModelFiles, args: ModelArgs, empty: Empty) -> Checkpoint:
    from parallel_llama.checkpoint.gguf_file import GGUFFile

    return GGUFFile(files, args, empty)


# By the names of layouts in `config.layouts`.
_READERS = {"hf": HFFolder, "meta": _meta, "native": NativeFolder, "gguf": _gguf}


def load(
    checkpoint: Checkpoint,
    args: ModelArgs,
    shard: Shard,
    precision: Precision,
    device: torch.device,
    on_bytes: Callable[[int], None] = lambda _: None,
    is_wanted: Callable[[Param], bool] = lambda _: True,
    held: HeldWeights | None = None,
) -> Generator[tuple[str, LoadedWeight], None, None]:
    """Yields name and shard of every weight of a rank, in the order of the forward pass.

    If some rows of a weight are held, or if its rows are read in pieces on a CPU, the weight is a
    list of parts in the order of rows.

    Args:
        is_wanted: whether a weight is read.
        on_bytes: called with the size of each loaded piece; the sum is `memory.weight_bytes`.
        held: a shard in memory. Its rows are copied instead of read.

    Raises: CheckpointError if the checkpoint does not fit the model; DamagedWeights if a weight is
    NaN or Inf, or too large for its dtype.
    """
    checkpoint.check(args)
    for param in map(shard.cut, filter(shard.holds, filter(is_wanted, parameters(args)))):
        form = precision.form_of(param.kind, param.name)
        if isinstance(form, QuantFormat):
            parts = _quantised(checkpoint, param, shard, form, on_bytes, held)
            read = [part for part in parts if isinstance(part, QuantMatrix)]
            if len(read) < len(parts):
                yield param.name, parts
            else:
                yield param.name, joined(read, param.dim).to(device)
        else:
            dtype = torch_dtype(form.dtype)
            yield param.name, _converted(checkpoint, param, shard, dtype, device, on_bytes, held)


def quantised(param: Param, values: Tensor, form: QuantFormat) -> QuantMatrix:
    """Quantises rows of a matrix; each thread works on a bounded piece.

    Raises: DamagedWeights if a value is NaN or Inf.
    """
    at_once = QUANTISED_AT_ONCE if values.device.type == "cpu" else PIECE_VALUES
    n_rows = max(1, at_once // max(1, values.shape[1]))

    def part(start: int) -> QuantMatrix:
        return quantise(finite(param, values[start : start + n_rows], torch.float32), form)

    starts = range(0, max(1, len(values)), n_rows)
    if len(starts) == 1:
        return part(0)
    with workers() as threads:
        return joined(list(threads.map(part, starts)), dim=0)


def _quantised(
    checkpoint: Checkpoint,
    param: Param,
    shard: Shard,
    form: QuantFormat,
    on_bytes: Callable[[int], None],
    held: HeldWeights | None,
) -> list[QuantRows]:
    parts: list[QuantRows] = []
    # Held columns are not taken, because they may begin in the middle of a block with one scale.
    rows = shard.rows_of(param)
    for piece, is_held in _sources(param, rows, None if param.dim else held, "cpu"):
        part: Tensor | QuantRows
        if held is not None and is_held:
            part = held.take(param, piece)
        else:
            part = _read_quantised(checkpoint, param, piece, form)
        assert not isinstance(part, Tensor)
        parts.append(part)
        on_bytes(form.n_bytes(part.shape.numel()))
    return parts


def _read_quantised(
    checkpoint: Checkpoint, param: Param, piece: range, form: QuantFormat
) -> QuantMatrix:
    part = checkpoint.groups(param, piece, form, "interleaved")
    if part is None:
        return quantised(param, checkpoint.read(param, piece, "interleaved"), form)
    for numbers in [part.values()] if form.is_float else part.tensors[1:]:
        finite(param, numbers, torch.float32)  # the integers need no check
    return part


def _converted(
    checkpoint: Checkpoint,
    param: Param,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
    on_bytes: Callable[[int], None],
    held: HeldWeights | None,
) -> Tensor | list[Tensor]:
    rows = shard.rows_of(param)
    sources = _sources(param, rows, held, device.type)
    if sources == [(rows, False)]:  # the usual case: returns the read tensor without a copy
        tensor = finite(param, checkpoint.read(param, rows, "interleaved"), dtype)
        on_bytes(tensor.nbytes)
        return tensor.to(device)
    parts: list[Tensor] = []
    whole: Tensor | None = None
    for piece, is_held in sources:
        if held is not None and is_held:
            part = held.take(param, piece)
            assert isinstance(part, Tensor)  # this weight is not quantised
        else:
            part = finite(param, checkpoint.read(param, piece, "interleaved"), dtype)
        if param.dim == 0 and (held is not None or device.type == "cpu"):
            parts.append(part)
        else:
            if whole is None:
                whole = torch.empty(sliced_shape(param, rows), dtype=dtype, device=device)
            whole.narrow(param.dim, piece.start - rows.start, len(piece)).copy_(part)
        on_bytes(part.nbytes)
    return parts if whole is None else whole


def _sources(
    param: Param, rows: range, held: HeldWeights | None, device: str
) -> list[tuple[range, bool]]:
    """Consecutive pieces of rows, and whether each is held; at least one piece."""
    n_values = PIECE_VALUES
    if param.dim == 0 and device == "cpu":
        n_values = min(n_values, _ROW_PIECE_VALUES)
    held_rows = range(0) if held is None else held.rows_of(param)
    start = min(max(rows.start, held_rows.start), rows.stop)
    stop = max(min(rows.stop, held_rows.stop), start)
    between = range(rows.start, start), range(stop, rows.stop)
    read = [piece for span in between if span for piece in pieces_of(param, span, n_values)]
    sources = [(piece, False) for piece in read]
    if start < stop:
        sources.append((range(start, stop), True))
    sources.sort(key=lambda source: source[0].start)
    return sources or [(rows, False)]


def pieces_of(param: Param, rows: range, n_values: int) -> list[range]:
    """Cut a range of rows into aligned pieces of about `n_values` values."""
    per_row = math.prod(param.shape) // max(1, param.shape[param.dim])
    alignment = math.lcm(PIECE_ALIGNMENT, param.unit)
    step = max(1, n_values // max(1, per_row) // alignment) * alignment
    if len(rows) <= step:
        return [rows]
    starts = range(rows.start // step * step, rows.stop, step)
    return [range(max(rows.start, at), min(rows.stop, at + step)) for at in starts]


def finite(param: Param, stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a tensor to `dtype`; raises DamagedWeights if a value is not finite in it."""
    tensor = stored.to(dtype)
    if tensor.numel() == 0:
        return tensor
    # Minimum and maximum in one pass; NaN propagates to both. isfinite would allocate a copy.
    if all(math.isfinite(bound.item()) for bound in torch.aminmax(tensor)):
        return tensor
    if all(math.isfinite(bound.item()) for bound in torch.aminmax(stored)):
        raise DamagedWeights(
            f"{param.name}: a value of {stored.abs().max().item():g} does not fit into "
            f"{dtype_name(dtype)}; use a dtype of a larger range (the order is float16, bfloat16, "
            "float32, float64)"
        )
    count = int((~torch.isfinite(stored)).sum())
    raise DamagedWeights(
        f"{param.name}: {count} of {stored.numel()} values are NaN or Inf; the weights are "
        "damaged: fetch them again"
    )
