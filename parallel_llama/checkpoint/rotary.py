"""The two orders of the rows of wq and wk, and nothing else.

Rotary embedding turns pairs of rows of each head. Meta's files keep a pair in neighbouring rows
(interleaved: 0, 1 | 2, 3 | ...), HF's keep it half a head apart (half-split: 0, D/2 | 1, D/2+1 |
...). Every reader gives the half-split order; the model lays its rows in the other (see `rope`).

Source: RoFormer, arXiv 2104.09864, section 3.2.2 (the interleaved order).
"""

from torch import Tensor

from parallel_llama.plan import Param


def to_half(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder whole heads from interleaved to half-split; a new contiguous tensor.

    Shapes: rows [n_heads * head_dim, ...], weight or bias.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).contiguous().view(rows.shape)


def to_interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder whole heads from half-split to interleaved; the inverse of `to_half`."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).contiguous().view(rows.shape)


def is_rotary(param: Param) -> bool:
    """Whether the rows of this weight come in rotary pairs."""
    return ".attention.wq." in param.name or ".attention.wk." in param.name


def whole_heads(rows: range, head_dim: int) -> range:
    """The rows of every head that `rows` touches.

    >>> whole_heads(range(3, 9), 4)
    range(0, 12)
    """
    return range(rows.start // head_dim * head_dim, -(-rows.stop // head_dim) * head_dim)
