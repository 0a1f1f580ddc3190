"""Random variants of the tiny models: other heads, widths, vocabularies, windows and experts."""

import math
import random
from dataclasses import replace
from typing import Any

from tiny_models import HEAD_DIM_FROM_DIM, TinyModel

WIDE = 32  # inputs of a quantised group
_MAX_EXPERTS = {"num_local_experts": 7, "num_experts": 12}


def random_model(rng: random.Random, base: TinyModel, wide: bool) -> TinyModel:
    """A model of the family of `base`, with its rotary scaling, biases and ties.

    Args:
        wide: the inputs of every matrix are whole groups of WIDE, so that every format can hold it.
    """
    few = base.vocab_size < 100 and not wide  # fewer rows and channels than heads
    n_heads = base.n_heads if base.n_heads > 12 else rng.randint(2, 12)
    head_dim = rng.choice([WIDE, WIDE, 2 * WIDE] if wide else [4, 8, 12, 16])
    if base.family not in ("glm", "glm4") and not wide:
        head_dim += rng.choice([0, 2])
    # transformers wants a multiple of the number of heads.
    unit = math.lcm(n_heads, WIDE) if wide else n_heads
    dim = unit * rng.randint(1, max(1, (400 if wide else 90) // unit))
    if base.family in HEAD_DIM_FROM_DIM:
        dim = n_heads * head_dim
    has_layer_types = "layer_types" in base.own
    return replace(
        base,
        n_heads=n_heads,
        n_kv_heads=_random_kv_heads(rng, base, n_heads),
        head_dim=head_dim,
        dim=dim,
        ffn_dim=rng.randint(1, 8) if few else _channels(rng, wide),
        vocab_size=rng.randint(3, 12) if few else rng.choice([1, 5]) * rng.randint(100, 300),
        n_layers=base.n_layers if has_layer_types else base.n_layers + rng.randint(0, 2),
        # Dynamic scaling starts at a short context; other requests are longer than a few windows.
        max_seq_len=rng.randint(12, 200) if base.rope["rope_type"] == "dynamic" else 512,
        own={key: _random_value(rng, key, value, wide) for key, value in base.own.items()},
    )


def _random_kv_heads(rng: random.Random, base: TinyModel, n_heads: int) -> int:
    if base.family == "falcon" and not base.own.get("new_decoder_architecture"):
        return 1
    return rng.choice([n for n in range(1, n_heads + 1) if n_heads % n == 0])


def _channels(rng: random.Random, wide: bool) -> int:
    return rng.randint(1, 13) * WIDE if wide else rng.randint(9, 150)


def _random_value(rng: random.Random, key: str, value: Any, wide: bool) -> Any:
    """The value of one of the family's own keys."""
    if key == "sliding_window" and value is not None:
        return rng.choice([rng.randint(2, 40), rng.randint(41, 260)])
    if key in _MAX_EXPERTS:
        return rng.randint(3, _MAX_EXPERTS[key])
    if key == "num_experts_per_tok":
        return rng.randint(1, 3)
    if key == "moe_intermediate_size":
        return _channels(rng, wide)
    return value
