"""The signature of a collective: a number that all ranks must agree on.

It encodes the kind, the dtype and the number of values. Ranks publish or send it with their values.
If a rank calls another collective, the others report it and do not use its values.
"""

import torch
from torch import Tensor

DTYPES = (
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
SUMMED = DTYPES[1:]
_KINDS = ("barrier", "all_reduce", "all_gather", "broadcast", "gather_columns")
BARRIER, ALL_REDUCE, ALL_GATHER, BROADCAST, GATHER_COLUMNS = range(5)


def signature_of(kind: int, piece: Tensor) -> int:
    return (kind << 60) | (DTYPES.index(piece.dtype) << 52) | piece.numel()


def described(signature: int) -> str:
    """A signature in words, for messages; defined for any number."""
    kind = _KINDS[(signature >> 60 & 7) % len(_KINDS)]
    dtype = DTYPES[(signature >> 52 & 255) % len(DTYPES)]
    n_values = signature & ((1 << 52) - 1)
    return kind if kind == "barrier" else f"{kind} of {n_values} values of {dtype}"
