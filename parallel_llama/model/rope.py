"""Rotary position embeddings and their scaling to longer contexts.

Queries and keys are in interleaved order (Meta's): pair i of a head is its values 2 i and 2 i + 1,
so that rotating a pair is one complex product. Checkpoints in another order are reordered when they
are read (see `checkpoint.checkpoint`), which leaves q k^T unchanged. Frequencies and angles are
computed in float64 and rounded once.

Source: RoFormer, arXiv 2104.09864, section 3.2.2.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel_llama.families.model_args import ModelArgs, RopeScaling, context_length

# Bytes of tables that are kept. Only dynamic scaling needs several tables, one per prompt length.
_MAX_TABLE_BYTES = 256 << 20
_ROWS_AT_ONCE = 8192  # computed in float64 at once

# Rotations on the host, as arrays from which decode steps copy without torch.
HostRotations = npt.NDArray[np.complexfloating]


def frequencies(args: ModelArgs, n_tokens: int) -> tuple[Tensor, float]:
    """Radians per position of each rotary pair, and the factor on cos and sin.

    `n_tokens` is the length of the sequence, used only for dynamic scaling.

    Shapes: [head_dim / 2] float64.
    """
    base, scaling = args.rope_theta, args.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        base = _dynamic_base(args, scaling, n_tokens)
    rotary_dim = args.rotary_dim or args.head_dim
    pair = torch.arange(0, args.head_dim, 2, dtype=torch.float64)
    freqs = base ** (-pair / rotary_dim)
    freqs[rotary_dim // 2 :] = 0  # the part of each head that is not rotated
    if scaling is None or scaling.kind == "dynamic":
        return freqs, 1.0
    if scaling.kind == "linear":
        return freqs / scaling.factor, 1.0
    if scaling.kind == "factors":
        return freqs / torch.tensor(scaling.factors, dtype=torch.float64), 1.0
    if scaling.kind == "longrope":
        return _longrope(freqs, args, scaling), _longrope_attention_factor(scaling)
    if scaling.kind == "llama3":
        return _llama3(freqs, scaling), 1.0
    return _yarn(freqs, args, scaling), _yarn_attention_factor(scaling)


def rotary_of_windows(args: ModelArgs) -> ModelArgs:
    """The arguments for the rotary embeddings of layers with a sliding window."""
    if args.local_rope_theta is None:
        return args
    return replace(
        args,
        rope_theta=args.local_rope_theta,
        rope_scaling=None,
        max_seq_len=context_length(args),
    )


class RotaryTables:
    """The rotations of positions, computed on first use and cached.

    With dynamic scaling the base depends on a length: that of the prompt for prompt tokens, and the
    position plus one for later tokens. Cached keys keep their rotation, as in transformers'
    generate.

    Args:
        dtype: The dtype of the model; the tables have at least float32.
        device: The device of `up_to`.
    """

    def __init__(self, args: ModelArgs, *, dtype: torch.dtype, device: torch.device) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        self._args, self._dtype, self._device = args, wide.to_complex(), device
        self._longest = context_length(args)
        self._tables: dict[int, HostRotations] = {}

    def rows(self, positions: range, n_prompt: int) -> HostRotations:
        """Rotations of consecutive positions in a sequence that began with `n_prompt` tokens.

        Shapes: [T, 1, head_dim / 2] complex, on the host.
        """
        dynamic_len = base_len(self._args, n_prompt)
        if not dynamic_len and positions.stop > self._longest:
            # With attention sinks a sequence, and its table, could grow without limit.
            return self._rounded(rotations(self._args, positions, n_prompt))
        if not dynamic_len or positions.stop <= dynamic_len:
            return self._from_table(positions, n_prompt)
        # Positions below `dynamic_len` have one base; each later position has its own.
        with_table = range(positions.start, max(positions.start, dynamic_len))
        later = [range(at, at + 1) for at in range(with_table.stop, positions.stop)]
        rows = torch.cat([rotations(self._args, position, position.stop) for position in later])
        parts = [self._from_table(with_table, n_prompt)] if with_table else []
        return np.concatenate([*parts, self._rounded(rows)])

    def up_to(self, n_positions: int) -> Tensor:
        """Rotations of the first `n_positions` positions; not for dynamic scaling.

        Shapes: [n_positions, 1, head_dim / 2] complex.
        """
        assert not base_len(self._args, 1)
        table = rotations(self._args, range(n_positions), 1)
        return table.to(device=self._device, dtype=self._dtype)

    def _from_table(self, positions: range, n_tokens: int) -> HostRotations:
        """Rotations of positions in a sequence of `n_tokens` tokens."""
        key = base_len(self._args, n_tokens)
        table = self._tables.pop(key, None)
        if table is None or len(table) < positions.stop:
            # Twice the length, so that a growing sequence rarely needs a new table.
            table = self._table(min(2 * positions.stop, key or self._longest), n_tokens)
        self._tables[key] = table  # now the last, so the first is the least recently used
        while len(self._tables) > 1 and self.n_bytes > _MAX_TABLE_BYTES:
            del self._tables[next(iter(self._tables))]
        return table[positions.start : positions.stop]

    @property
    def n_bytes(self) -> int:
        """Bytes of the tables that are kept on the host."""
        return sum(table.nbytes for table in self._tables.values())

    def _table(self, n_rows: int, n_tokens: int) -> HostRotations:
        starts = range(0, n_rows, _ROWS_AT_ONCE)
        ranges = [range(start, min(start + _ROWS_AT_ONCE, n_rows)) for start in starts]
        return np.concatenate(
            [self._rounded(rotations(self._args, positions, n_tokens)) for positions in ranges]
        )

    def _rounded(self, exact: Tensor) -> HostRotations:
        rounded: HostRotations = exact.to(self._dtype).numpy()
        return rounded


def rotations(args: ModelArgs, positions: range, n_tokens: int) -> Tensor:
    """exp(i angle) of every position and pair, times the factor on cos and sin.

    Shapes: [T, 1, head_dim / 2] complex128.
    """
    freqs, scale = frequencies(args, n_tokens)
    position = torch.arange(positions.start, positions.stop, dtype=torch.float64)
    angles = position[:, None, None] * freqs
    scales = torch.full_like(angles, scale)
    scales[..., (args.rotary_dim or args.head_dim) // 2 :] = 1  # values that are not rotated
    return torch.polar(scales, angles)


def back_rotations_of(args: ModelArgs, positions: Sequence[int], latest: int) -> Tensor:
    """Rotations that move queries at later positions back to position `latest`.

    Shapes: [T, 1, head_dim / 2] complex128.
    """
    freqs, _ = frequencies(args, 0)
    position = torch.tensor(positions, dtype=torch.float64)
    angles = (latest - position).clamp(max=0)[:, None, None] * freqs
    return torch.polar(torch.ones_like(angles), angles)


def query_scales(args: ModelArgs, positions: Sequence[range]) -> Tensor:
    """The factors on queries at these positions, in the layers that have factors.

    Shapes: [number of positions] float64.
    Source: Llama4TextAttention and Ministral3Attention of transformers 5.24; arXiv 2501.19399.
    """
    position = torch.cat([torch.arange(p.start, p.stop, dtype=torch.float64) for p in positions])
    if not args.scales_all_queries:
        position += 1
    return 1 + args.query_scale * torch.log1p(torch.floor(position / args.query_scale_step))


def base_len(args: ModelArgs, n_tokens: int) -> int:
    """The sequence length for dynamic scaling of the base; 0 without dynamic scaling.

    Two sequences can share the keys of equal tokens if their prompts have the same `base_len`.
    """
    scaling = args.rope_scaling
    if scaling is None or scaling.kind != "dynamic":
        return 0
    return max(n_tokens, _trained_len(args, scaling))


def _trained_len(args: ModelArgs, scaling: RopeScaling) -> int:
    return scaling.original_max_seq_len or args.max_seq_len


def _dynamic_base(args: ModelArgs, scaling: RopeScaling, n_tokens: int) -> float:
    """Source: NTK-aware scaling as in transformers' dynamic rotary embedding."""
    stretch = scaling.factor * base_len(args, n_tokens) / _trained_len(args, scaling)
    stretch -= scaling.factor - 1
    dim = args.rotary_dim or args.head_dim
    return float(args.rope_theta * stretch ** (dim / (dim - 2)))


def _llama3(freqs: Tensor, scaling: RopeScaling) -> Tensor:
    """Keep high frequencies, divide low ones by the factor, interpolate in between."""
    kept_part = torch.tensor(
        [scaling.kept_part(freq) for freq in freqs.tolist()], dtype=freqs.dtype
    )
    return freqs * kept_part + freqs / scaling.factor * (1 - kept_part)


def _longrope(freqs: Tensor, args: ModelArgs, scaling: RopeScaling) -> Tensor:
    """Source: LongRoPE, arXiv 2402.13753, section 3; the choice of factors is transformers'."""
    assert scaling.original_max_seq_len is not None
    is_long = args.max_seq_len > scaling.original_max_seq_len
    rotated_factors = torch.tensor(
        scaling.long_factors if is_long else scaling.factors, dtype=torch.float64
    )
    factors = torch.ones_like(freqs)
    factors[: len(rotated_factors)] = rotated_factors
    return freqs / factors


def _longrope_attention_factor(scaling: RopeScaling) -> float:
    """Source: as `_longrope`, the scale of attention scores."""
    assert scaling.original_max_seq_len is not None
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    stretch = math.log(max(scaling.factor, 1.0))
    return math.sqrt(1 + stretch / math.log(scaling.original_max_seq_len))


def _yarn(freqs: Tensor, args: ModelArgs, scaling: RopeScaling) -> Tensor:
    """Source: YaRN, arXiv 2309.00071, section 3.2 (NTK-by-parts)."""
    assert scaling.original_max_seq_len is not None
    trained, dim = scaling.original_max_seq_len, args.rotary_dim or args.head_dim

    def pair_that_turns(times: float) -> float:
        return dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(args.rope_theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001  # no division by zero where the range is one pair
    interpolated = ((torch.arange(len(freqs), dtype=torch.float64) - low) / width).clamp(0, 1)
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
