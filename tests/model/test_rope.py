"""Rotary tables: what each scaling does to the frequencies, against its own definition."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from parallel_llama.checkpoint.checkpoint import reordered
from parallel_llama.families.model_args import ModelArgs, RopeScaling
from parallel_llama.model.rope import RotaryTables, frequencies, rotations
from parallel_llama.ops.torch_ops import rotate_

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
    "yarn": (RopeScaling("yarn", 4.0, 32), {"factor": 4.0, "original_max_position_embeddings": 32}),
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


def turned(x: Tensor, position: int) -> Tensor:
    """A head [D] in interleaved order, rotated by its position."""
    x = x.clone()[None, None]
    rotate_(x, rotations(ARGS, range(position, position + 1), 1))
    return x[0, 0]


def test_a_rotation_depends_on_the_distance_of_two_positions_alone():
    q, k = torch.randn(2, 64, dtype=torch.float64)

    def product(at: int, seen: int) -> float:
        return float(turned(q, at) @ turned(k, seen))

    assert product(9, 4) == pytest.approx(product(105, 100), rel=1e-12)
    assert product(9, 4) != pytest.approx(product(9, 5), rel=1e-3)


def test_the_halves_of_a_head_become_its_pairs():
    """Row 3 of a head in a checkpoint turns with row 35; they become 6 and 7."""
    rows = torch.zeros(2 * 64, dtype=torch.float64)
    rows[64 + 3] = 1.0
    x = reordered(rows, 64, "interleaved")[64:]
    rotated = turned(x, 2)
    angle = 2 * 500000.0 ** (-6 / 64)
    assert rotated[6] == pytest.approx(math.cos(angle))
    assert rotated[7] == pytest.approx(math.sin(angle))
    assert rotated.count_nonzero() == 2
    rows[64 + 3], rows[64 + 35] = 0.0, 1.0
    assert turned(reordered(rows, 64, "interleaved")[64:], 2)[6] == pytest.approx(-math.sin(angle))


def test_half_types_are_rotated_in_float32_and_in_place():
    x = torch.randn(3, 4, 64).to(torch.bfloat16)
    tables = RotaryTables(ARGS, dtype=torch.bfloat16, device=torch.device("cpu"))
    own = torch.from_numpy(tables.rows(range(5, 8), 9))
    assert own.dtype == torch.complex64
    wide = x.float()
    rotate_(wide, own)
    part = torch.cat((x, x), dim=1)[:, :4]  # heads of a wider product
    rotate_(part, own)
    assert torch.equal(part, wide.to(torch.bfloat16))


def test_tables_grow_and_keep_one_base_per_length_where_scaling_is_dynamic():
    dynamic = replace(ARGS, rope_scaling=RopeScaling("dynamic", 2.0))
    for args in (ARGS, dynamic):
        tables = RotaryTables(args, dtype=torch.float64, device=torch.device("cpu"))
        for n_prompt in (200, 130, *range(201, 300), 200):
            for positions in (range(0, 3), range(120, 125)):
                own = torch.from_numpy(tables.rows(positions, n_prompt))
                assert torch.equal(own, rotations(args, positions, n_prompt))


def test_with_dynamic_scaling_each_token_behind_the_prompt_has_the_base_of_its_own_length():
    """The base went by the longest that a sequence might become, and max_tokens changed tokens."""
    args = replace(ARGS, rope_scaling=RopeScaling("dynamic", 2.0))  # trained for 128
    tables = RotaryTables(args, dtype=torch.float64, device=torch.device("cpu"))
    for n_prompt in (1, 100, 128, 129, 150):
        expected = torch.cat(
            [rotations(args, range(at, at + 1), max(n_prompt, at + 1, 128)) for at in range(200)]
        )
        for positions in (range(0, 200), range(90, 150), range(140, 141), range(150, 155)):
            own = torch.from_numpy(tables.rows(positions, n_prompt))
            assert torch.equal(own, expected[positions.start : positions.stop])
