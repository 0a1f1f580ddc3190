"""Random variants of the tiny models: other heads, widths, vocabularies, windows and experts."""

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from family_models import longrope
from tiny_models import HEAD_DIM_FROM_DIM, TinyModel

WIDE = 32  # inputs of a quantised group
# transformers expects as many longrope factors as dim / n_heads needs.
_HEAD_DIM_FROM_DIM = HEAD_DIM_FROM_DIM | {"phi3"}
_MAX_EXPERTS = {"num_local_experts": 7, "num_experts": 12}
_WINDOWS = ("sliding_window", "attention_chunk_size")
_CHANNELS = ("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp")
# Families that rotate a quarter, a half or three quarters of a head, which must be an even number.
_PARTLY_ROTATED = ("glm", "glm4", "glm4_moe", "nemotron", "phi3", "stablelm")


def is_narrow(base: TinyModel) -> bool:
    """Whether the model has fewer channels and rows than heads, so quantised formats cannot be."""
    return base.vocab_size < 100


def random_model(rng: random.Random, base: TinyModel, wide: bool) -> TinyModel:
    """A model of the family of `base`, with its rotary scaling, biases and ties.

    Args:
        wide: the inputs of every matrix are whole groups of WIDE, so that every format can hold it.
    """
    few = is_narrow(base) and not wide
    n_heads = base.n_heads if base.n_heads > 12 else rng.randint(2, 9)
    partly = base.family in _PARTLY_ROTATED
    head_dim = rng.choice([WIDE, WIDE, 2 * WIDE] if wide else [8, 16] if partly else [4, 8, 12, 16])
    if not partly and not wide:
        head_dim += rng.choice([0, 2])
    # transformers wants a multiple of the number of heads.
    unit = math.lcm(n_heads, WIDE) if wide else n_heads
    dim = unit * rng.randint(1, max(1, (400 if wide else 90) // unit))
    if base.family in _HEAD_DIM_FROM_DIM:
        dim = n_heads * head_dim
    lists_layers = any(isinstance(value, list) for value in base.own.values())
    return replace(
        base,
        n_heads=n_heads,
        n_kv_heads=_random_kv_heads(rng, base, n_heads),
        head_dim=head_dim,
        dim=dim,
        ffn_dim=rng.randint(1, 8) if few else _channels(rng, wide),
        vocab_size=rng.randint(3, 12) if few else rng.choice([1, 5]) * rng.randint(100, 300),
        n_layers=base.n_layers if lists_layers else base.n_layers + rng.randint(0, 2),
        # Dynamic scaling starts at a short context; other requests are longer than a few windows.
        max_seq_len=rng.randint(12, 200) if base.rope.get("rope_type") == "dynamic" else 512,
        rope=resized_rope(base, head_dim),
        own={key: _random_value(rng, key, value, wide) for key, value in base.own.items()},
    )


def _random_kv_heads(rng: random.Random, base: TinyModel, n_heads: int) -> int:
    if base.family == "falcon" and not base.own.get("new_decoder_architecture"):
        return 1
    return rng.choice([n for n in range(1, n_heads + 1) if n_heads % n == 0])


def resized_rope(base: TinyModel, head_dim: int) -> Mapping[str, Any]:
    """The rotary scaling of `base`, with as many factors as another head size needs."""
    if base.rope.get("rope_type") != "longrope":
        return base.rope
    rotated = int(head_dim * base.own.get("partial_rotary_factor", 1.0))
    return {**base.rope, **longrope(rotated // 2)}


def _channels(rng: random.Random, wide: bool) -> int:
    return rng.randint(1, 13) * WIDE if wide else rng.randint(9, 150)


def _random_value(rng: random.Random, key: str, value: Any, wide: bool) -> Any:
    """The value of one of the family's own keys."""
    if key in _WINDOWS and value is not None:
        return rng.choice([rng.randint(2, 40), rng.randint(41, 260)])
    if key in _MAX_EXPERTS:
        return rng.randint(3, _MAX_EXPERTS[key])
    if key == "num_experts_per_tok":
        return rng.randint(1, 3)
    if key in _CHANNELS:
        return _channels(rng, wide)
    return value
