"""Whole tensors in the order of the model, each read and hashed while the one before is written."""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from parallel_llama.checkpoint.manifest import DTypeName, TensorEntry, hash_tensor
from parallel_llama.checkpoint.reading import Checkpoint
from parallel_llama.errors import DamagedWeights
from parallel_llama.plan import Param

# A tensor is read ahead while it and the one before are small against this or the largest.
AHEAD_BYTES = 128 << 20


@dataclass(frozen=True)
class Canonical:
    """A whole tensor in canonical form and in the target's dtype.

    `source` is its hash before a change of dtype, None where there was none.
    """

    param: Param
    value: Tensor
    entry: TensorEntry
    source: str | None


def dtype_name(dtype: torch.dtype) -> DTypeName:
    name: DTypeName = msgspec.convert(str(dtype).removeprefix("torch."), DTypeName)
    return name


def read_ahead(
    checkpoint: Checkpoint, params: Sequence[Param], dtypes: Mapping[str, torch.dtype]
) -> Iterator[Canonical]:
    """Each tensor in turn; the caller lets go of one before it takes the next.

    Raises: DamagedWeights if one cannot be read, or does not fit into its dtype.
    """
    sizes = [math.prod(param.shape) * _width(checkpoint, param, dtypes) for param in params]
    room = max(AHEAD_BYTES, 2 * max(sizes, default=0))
    with ThreadPoolExecutor(1) as thread:
        ahead: Future[Canonical] | None = None
        for at, param in enumerate(params):
            if ahead is None:
                tensor = canonical(checkpoint, param, dtypes[param.name])
            else:
                tensor = ahead.result()
            ahead = None
            # Reading takes the tensor and a copy in another order or dtype.
            if at + 1 < len(params) and sizes[at] + 2 * sizes[at + 1] <= room:
                following = params[at + 1]
                ahead = thread.submit(canonical, checkpoint, following, dtypes[following.name])
            yield tensor
            del tensor


def canonical(checkpoint: Checkpoint, param: Param, dtype: torch.dtype) -> Canonical:
    """One whole tensor, read, converted where asked for, and hashed."""
    stored = checkpoint.read(param, range(param.shape[param.dim]))
    if stored.dtype == dtype:
        entry = TensorEntry(dtype_name(dtype), param.shape, hash_tensor(stored))
        return Canonical(param, stored, entry, None)
    value = stored.to(dtype)
    if _has_infinity(value) and not _has_infinity(stored):
        raise DamagedWeights(
            f"{param.name}: a value of {stored.abs().max().item():g} does not fit into "
            f"{dtype_name(dtype)}; use bfloat16 or float32"
        )
    entry = TensorEntry(dtype_name(dtype), param.shape, hash_tensor(value))
    return Canonical(param, value, entry, hash_tensor(stored))


def _has_infinity(tensor: Tensor) -> bool:
    """In one pass and without a copy; NaN hides infinities, and such weights are lost anyway."""
    return tensor.numel() > 0 and any(map(math.isinf, (b.item() for b in torch.aminmax(tensor))))


def _width(checkpoint: Checkpoint, param: Param, dtypes: Mapping[str, torch.dtype]) -> int:
    return max(checkpoint.read(param, range(0)).itemsize, dtypes[param.name].itemsize)
