"""All kernels of a model, compiled before its first step."""

from collections.abc import Collection

import torch

from parallel_llama.kernels.attention import make_attention
from parallel_llama.kernels.norm import make_norm
from parallel_llama.kernels.product import make_product
from parallel_llama.kernels.program import computes
from parallel_llama.kernels.rotary import make_rotary
from parallel_llama.kernels.swiglu import make_swiglu


def prepare(
    dtype: torch.dtype, device: torch.device, head_dim: int, groups: Collection[int]
) -> bool:
    """Compile what a model of this kind, with such groups of query heads, is going to use.

    Returns: whether there are kernels for it; where there are none, torch has to do.
    """
    if not computes(dtype, device):
        return False
    for kernel in (make_product, make_norm, make_swiglu):
        kernel(dtype, device)
    make_rotary(dtype, head_dim)
    for n_group in groups:
        make_attention(dtype, head_dim, n_group)
    return True
