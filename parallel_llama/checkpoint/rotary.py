"""The two orders of the rows of wq and wk, and of their norms.

Rotary embedding turns pairs of rows of each head. Meta's files keep a pair in neighbouring rows
(interleaved: 0, 1 | 2, 3 | ...), and so does the model; HF's keep it half a head apart (half-split:
0, D/2 | 1, D/2+1 | ...), which is the canonical order of hashes and of native folders.

Source: RoFormer, arXiv 2104.09864, section 3.2.2 (the interleaved order).
"""

import torch
from torch import Tensor

from parallel_llama.families.names import RotaryOrder


def reordered(
    rows: Tensor, head_dim: int, order: RotaryOrder, rotary_dim: int | None = None
) -> Tensor:
    """Whole heads that are in the other order, in this one; a new contiguous tensor.

    Of each head the first `rotary_dim` rows are rotated, all where that is None; the others stay.

    Shapes: rows [n_heads * head_dim, ...], weight or bias.
    """
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    rotated, kept = heads[:, :rotary_dim], heads[:, rotary_dim or head_dim :]
    n_pairs = rotated.shape[1] // 2
    pairs = (n_pairs, 2) if order == "half" else (2, n_pairs)
    turned = rotated.reshape(-1, *pairs, *rows.shape[1:]).transpose(1, 2).reshape(rotated.shape)
    if kept.numel():
        turned = torch.cat([turned, kept], dim=1)
    return turned.reshape(rows.shape)


def is_rotary(name: str) -> bool:
    """Whether the rows of the weight of this name come in rotary pairs."""
    return any(f".attention.{part}." in name for part in ("wq", "wk", "q_norm", "k_norm"))
