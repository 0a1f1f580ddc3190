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
from parallel_llama.model import rope
from parallel_llama.model.rope import RotaryTables, frequencies, rotary_of_windows, rotations
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
def test_frequencies_match_transformers(kind, total_len):
    """transformers computes frequencies in float32, so a few units in the last place differ."""
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


@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_of_partly_rotated_heads_match_transformers(kind):
    """Regression: rope scaling was refused for models that rotate a part of each head."""
    scaling, keys = SCALINGS[kind]
    rope = {"rope_type": kind, "rope_theta": 500000.0, "partial_rotary_factor": 0.5, **keys}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=128, rope_parameters=rope
    )
    theirs, _ = ROPE_INIT_FUNCTIONS[kind](config, seq_len=200)
    ours, factor = frequencies(replace(ARGS, rotary_dim=32, rope_scaling=scaling), 200)
    torch.testing.assert_close(ours[:16], theirs.double(), rtol=2e-6, atol=0)
    assert not ours[16:].any()
    args = replace(ARGS, rotary_dim=32, rope_scaling=scaling)
    rotated, kept = rotations(args, range(9), 200).abs().split(16, dim=-1)
    torch.testing.assert_close(rotated, torch.full_like(rotated, factor))
    assert torch.equal(kept, torch.ones_like(kept))


def test_dynamic_scaling_does_not_apply_within_trained_context():
    dynamic = replace(ARGS, rope_scaling=RopeScaling("dynamic", 2.0))
    assert torch.equal(frequencies(dynamic, 128)[0], frequencies(ARGS, 128)[0])
    assert not torch.equal(frequencies(dynamic, 129)[0], frequencies(ARGS, 129)[0])


def test_factors_divide_each_frequency_individually():
    """A GGUF file stores Llama 3.1's scaling as one factor per frequency."""
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


def test_score_depends_only_on_distance_between_positions():
    q, k = torch.randn(2, 64, dtype=torch.float64)

    def product(at: int, seen: int) -> float:
        return float(turned(q, at) @ turned(k, seen))

    assert product(9, 4) == pytest.approx(product(105, 100), rel=1e-12)
    assert product(9, 4) != pytest.approx(product(9, 5), rel=1e-3)


def test_half_split_rows_are_reordered_into_rotary_pairs():
    """Rows 3 and 35 of a head in a checkpoint rotate together and become rows 6 and 7."""
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


def test_bfloat16_is_rotated_in_float32_and_in_place():
    x = torch.randn(3, 4, 64).to(torch.bfloat16)
    tables = RotaryTables(ARGS, dtype=torch.bfloat16, device=torch.device("cpu"))
    own = torch.from_numpy(tables.rows(range(5, 8), 9))
    assert own.dtype == torch.complex64
    wide = x.float()
    rotate_(wide, own)
    part = torch.cat((x, x), dim=1)[:, :4]  # heads of a wider product
    rotate_(part, own)
    assert torch.equal(part, wide.to(torch.bfloat16))


def test_growing_tables_keep_the_rotations_of_each_length():
    dynamic = replace(ARGS, rope_scaling=RopeScaling("dynamic", 2.0))
    for args in (ARGS, dynamic):
        tables = RotaryTables(args, dtype=torch.float64, device=torch.device("cpu"))
        for n_prompt in (200, 130, *range(201, 300), 200):
            for positions in (range(0, 3), range(120, 125)):
                own = torch.from_numpy(tables.rows(positions, n_prompt))
                assert torch.equal(own, rotations(args, positions, n_prompt))


def test_tables_have_no_more_rows_than_the_context_or_the_prompt():
    """Regression: up to twice the context, in float64 at once, which took 0.7 GB for Llama 3.1."""
    dynamic = replace(ARGS, rope_scaling=RopeScaling("dynamic", 2.0))
    for args, n_rows in ((ARGS, ARGS.max_seq_len), (dynamic, 201)):
        tables = RotaryTables(args, dtype=torch.float32, device=torch.device("cpu"))
        tables.rows(range(110, 120), 201)
        assert tables.n_bytes == n_rows * args.head_dim // 2 * torch.complex64.itemsize


def test_tables_reach_the_context_that_yarn_extends():
    """Regression: positions beyond max_seq_len were computed again in every step."""
    yarn = replace(ARGS, max_seq_len=32, rope_scaling=RopeScaling("yarn", 4.0, 32))
    for args in (yarn, rotary_of_windows(replace(yarn, local_rope_theta=100.0))):
        tables = RotaryTables(args, dtype=torch.float64, device=torch.device("cpu"))
        for positions in (range(0, 3), range(30, 40), range(127, 128)):
            own = torch.from_numpy(tables.rows(positions, 9))
            assert torch.equal(own, rotations(args, positions, 9))
        assert tables.n_bytes == 128 * args.head_dim // 2 * torch.complex128.itemsize


def test_least_recently_used_tables_are_dropped_above_the_limit(monkeypatch):
    """Regression: a table for each prompt length, up to 64 tables of any size."""
    args = replace(ARGS, rope_scaling=RopeScaling("dynamic", 2.0))
    tables = RotaryTables(args, dtype=torch.float32, device=torch.device("cpu"))
    tables.rows(range(0, 128), 128)
    limit = 3 * tables.n_bytes
    monkeypatch.setattr(rope, "_MAX_TABLE_BYTES", limit)
    for n_prompt in range(129, 300):
        for positions in (range(0, 100), range(100, n_prompt)):
            own = torch.from_numpy(tables.rows(positions, n_prompt))
            assert torch.equal(own, rotations(args, positions, n_prompt).to(torch.complex64))
            assert tables.n_bytes <= limit


def test_dynamic_scaling_uses_each_decoded_tokens_own_length():
    """Regression: the base followed from the maximum length, so max_tokens changed the output."""
    args = replace(ARGS, rope_scaling=RopeScaling("dynamic", 2.0))  # trained for 128
    tables = RotaryTables(args, dtype=torch.float64, device=torch.device("cpu"))
    for n_prompt in (1, 100, 128, 129, 150):
        expected = torch.cat(
            [rotations(args, range(at, at + 1), max(n_prompt, at + 1, 128)) for at in range(200)]
        )
        for positions in (range(0, 200), range(90, 150), range(140, 141), range(150, 155)):
            own = torch.from_numpy(tables.rows(positions, n_prompt))
            assert torch.equal(own, expected[positions.start : positions.stop])
