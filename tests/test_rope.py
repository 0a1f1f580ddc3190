"""Rotary tables: what each scaling does to the frequencies, against its own definition."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from parallel_llama.config import ModelArgs, RopeScaling
from parallel_llama.rope import apply_rotary, frequencies, rotary_tables

ARGS = ModelArgs(
    dim=64,
    n_layers=1,
    n_heads=2,
    n_kv_heads=2,
    head_dim=64,
    ffn_dim=64,
    vocab_size=8,
    rope_theta=500000.0,
    max_seq_len=128,
)

LLAMA3 = RopeScaling("llama3", 8.0, 32, 1.0, 4.0)
SCALINGS = {
    "linear": (RopeScaling("linear", 4.0), {"factor": 4.0}),
    "llama3": (
        LLAMA3,
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "yarn": (
        RopeScaling("yarn", 4.0, 32),
        {"factor": 4.0, "original_max_position_embeddings": 32},
    ),
    "dynamic": (RopeScaling("dynamic", 2.0), {"factor": 2.0}),
}


@pytest.mark.parametrize("total_len", [100, 128, 200])
@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_are_those_of_transformers(kind, total_len):
    """transformers computes them in float32, so they agree to a few units in its last place."""
    scaling, keys = SCALINGS[kind]
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=128,
        rope_parameters={"rope_type": kind, "rope_theta": 500000.0, **keys},
    )
    theirs, their_factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=total_len)
    ours, factor = frequencies(replace(ARGS, rope_scaling=scaling), total_len)
    torch.testing.assert_close(ours, theirs.double(), rtol=2e-6, atol=0)
    assert factor == pytest.approx(their_factor, rel=1e-12)


def test_dynamic_scaling_leaves_sequences_within_the_trained_context_alone():
    dynamic = replace(ARGS, rope_scaling=RopeScaling("dynamic", 2.0))
    assert torch.equal(frequencies(dynamic, 128)[0], frequencies(ARGS, 128)[0])
    assert not torch.equal(frequencies(dynamic, 129)[0], frequencies(ARGS, 129)[0])


def test_factors_divide_each_frequency_by_its_own_number():
    """A GGUF file carries Llama 3.1's scaling as the factors that it comes to."""
    base, _ = frequencies(ARGS, 1)
    scaled, _ = frequencies(replace(ARGS, rope_scaling=LLAMA3), 1)
    factors = RopeScaling("factors", factors=tuple((base / scaled).tolist()))
    again, _ = frequencies(replace(ARGS, rope_scaling=factors), 1)
    torch.testing.assert_close(again, scaled, rtol=1e-14, atol=0)


def test_a_rotation_depends_on_the_distance_of_two_positions_alone():
    q, k = torch.randn(2, 1, 1, 64, dtype=torch.float64)

    def product(at: int, seen: int) -> float:
        turned_q = apply_rotary(q, rotary_tables(ARGS, torch.tensor([at]), 1))
        turned_k = apply_rotary(k, rotary_tables(ARGS, torch.tensor([seen]), 1))
        return float((turned_q * turned_k).sum())

    assert product(9, 4) == pytest.approx(product(105, 100), rel=1e-12)
    assert product(9, 4) != pytest.approx(product(9, 5), rel=1e-3)


def test_pairs_are_the_two_halves_of_a_head():
    x = torch.zeros(1, 1, 64, dtype=torch.float64)
    x[0, 0, 3] = 1.0
    turned = apply_rotary(x, rotary_tables(ARGS, torch.tensor([2]), 1))[0, 0]
    angle = 2 * 500000.0 ** (-6 / 64)
    assert turned[3] == pytest.approx(math.cos(angle))
    assert turned[35] == pytest.approx(math.sin(angle))
    assert turned.count_nonzero() == 2
