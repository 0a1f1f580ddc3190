"""Rotary position embeddings and the ways they are stretched to longer contexts.

Heads are in half-split order (HF's): pair i of a head is its values i and i + head_dim / 2. The
checkpoint readers bring Meta's and GGUF's interleaved order into this one. Frequencies and angles
are computed in float64 and rounded once, so the tables do not depend on the runtime dtype.

Source: RoFormer, arXiv 2104.09864, section 3.2.2.
"""

import math

import torch
from torch import Tensor

from parallel_llama.config import ModelArgs, RopeScaling


def frequencies(args: ModelArgs, total_len: int) -> tuple[Tensor, float]:
    """Radians per position of each rotary pair, and the factor on cos and sin.

    `total_len` is the longest the sequence may become (prompt and new tokens); only dynamic
    scaling looks at it, and so its base stays fixed for the life of a request.

    Shapes: [head_dim / 2] float64.
    """
    base, scaling = args.rope_theta, args.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        base = _dynamic_base(args, scaling, total_len)
    pair = torch.arange(0, args.head_dim, 2, dtype=torch.float64)
    freqs = base ** (-pair / args.head_dim)
    if scaling is None or scaling.kind == "dynamic":
        return freqs, 1.0
    if scaling.kind == "linear":
        return freqs / scaling.factor, 1.0
    if scaling.kind == "factors":
        return freqs / torch.tensor(scaling.factors, dtype=torch.float64), 1.0
    if scaling.kind == "llama3":
        return _llama3(freqs, scaling), 1.0
    return _yarn(freqs, args, scaling), _yarn_attention_factor(scaling)


def rotary_tables(args: ModelArgs, positions: Tensor, total_len: int) -> Tensor:
    """cos and sin of every position's angles in float64, spread over both halves of a head.

    The sine of a first half is negative, so that `apply_rotary` is two products and a sum.

    Shapes: `positions` [T]; the result [2, T, 1, head_dim].
    """
    freqs, scale = frequencies(args, total_len)
    angles = positions.to(torch.float64)[:, None, None] * freqs.to(positions.device)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))


def apply_rotary(x: Tensor, tables: Tensor) -> Tensor:
    """Rotate every head of x by the angle of its token's position.

    Shapes: x [T, H, D]; `tables` [2, T, 1, D] in at least float32; the result like x.
    """
    wide = x.to(tables.dtype)
    other_half = wide.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(wide * tables[0], other_half, tables[1]).to(x.dtype)


def _dynamic_base(args: ModelArgs, scaling: RopeScaling, total_len: int) -> float:
    """Source: NTK-aware scaling as in transformers' dynamic rotary embedding."""
    trained = scaling.original_max_seq_len or args.max_seq_len
    stretch = scaling.factor * max(total_len, trained) / trained - (scaling.factor - 1)
    return float(args.rope_theta * stretch ** (args.head_dim / (args.head_dim - 2)))


def _llama3(freqs: Tensor, scaling: RopeScaling) -> Tensor:
    """Keep high frequencies, divide low ones by the factor, blend those in between.

    Source: Llama 3.1, apply_scaling in Meta's llama-models (models/llama3/model.py).
    """
    assert scaling.original_max_seq_len is not None
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_seq_len * freqs / (2 * math.pi)  # within the trained context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return freqs * kept + freqs / scaling.factor * (1 - kept)


def _yarn(freqs: Tensor, args: ModelArgs, scaling: RopeScaling) -> Tensor:
    """Source: YaRN, arXiv 2309.00071, section 3.2 (NTK-by-parts)."""
    assert scaling.original_max_seq_len is not None
    trained, dim = scaling.original_max_seq_len, args.head_dim

    def pair_that_turns(times: float) -> float:
        return dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(args.rope_theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001  # no division by zero where the range is one pair
    interpolated = ((torch.arange(dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    return freqs * (1 - interpolated) + freqs / scaling.factor * interpolated


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    """Source: YaRN, arXiv 2309.00071, section 3.4 (the temperature sqrt(1/t))."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return temperature(1.0)
