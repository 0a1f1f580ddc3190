"""The two orders of the rows of wq and wk, and of their norms.

Rotary embedding turns pairs of rows of each head. Meta's files keep a pair in neighbouring rows
(interleaved: 0, 1 | 2, 3 | ...), and so does the model; HF's keep it half a head apart (half-split:
0, D/2 | 1, D/2+1 | ...), which is the canonical order of hashes and of native folders.

Source: RoFormer, arXiv 2104.09864, section 3.2.2 (the interleaved order).
"""

from torch import Tensor

from parallel_llama.families.names import RotaryOrder
from parallel_llama.families.weights import Param


def reordered(rows: Tensor, head_dim: int, order: RotaryOrder) -> Tensor:
    """Whole heads that are in the other order, in this one; a new contiguous tensor.

    Shapes: rows [n_heads * head_dim, ...], weight or bias.
    """
    pairs = (head_dim // 2, 2) if order == "half" else (2, head_dim // 2)
    heads = rows.reshape(-1, *pairs, *rows.shape[1:])
    return heads.transpose(1, 2).contiguous().view(rows.shape)


def is_rotary(param: Param) -> bool:
    """Whether the rows of this weight come in rotary pairs."""
    return any(f".attention.{name}." in param.name for name in ("wq", "wk", "q_norm", "k_norm"))
