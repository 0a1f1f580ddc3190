"""The name table and the rotary orders, each rule against a second implementation."""

from dataclasses import replace

import pytest
import torch
from checkpoint_samples import TINY, gguf_name, hf_name

from parallel_llama.checkpoint.checkpoint import reordered
from parallel_llama.families import FAMILIES, parameters
from parallel_llama.families.names import LLAMA_NAMES, renamed

PARAMS = [param.name for param in parameters(TINY)]


@pytest.mark.parametrize("layout", ["hf", "gguf"])
def test_every_weight_name_maps_to_each_layout_and_back(layout):
    there = [renamed(name, "meta", layout) for name in PARAMS]
    assert there == [(hf_name if layout == "hf" else gguf_name)(name) for name in PARAMS]
    assert [renamed(name, layout, "meta") for name in there] == PARAMS


def test_a_name_that_no_row_matches_is_an_error():
    with pytest.raises(KeyError, match="0 rows"):
        renamed("layers.0.attention.wx.weight", "meta", "hf")


def test_a_name_that_two_rows_match_is_an_error():
    rows = (*LLAMA_NAMES, LLAMA_NAMES[0])
    with pytest.raises(KeyError, match="2 rows"):
        renamed("tok_embeddings.weight", "meta", "hf", rows)


@pytest.mark.parametrize("layout", ["meta", "hf", "gguf"])
def test_only_the_head_is_skipped_and_only_with_tied_embeddings(layout):
    family = FAMILIES[TINY.family]
    tied = replace(TINY, tied_embeddings=True)
    for name in PARAMS:
        there = family.name_in(layout, name, TINY)
        assert not family.skips(there, layout, TINY)
        assert family.skips(there, layout, tied) == (name == "output.weight")


def test_tied_head_is_skipped_under_its_family_specific_name():
    names = tuple(
        replace(row, hf="head.weight") if row.meta == "output.weight" else row
        for row in LLAMA_NAMES
    )
    family = replace(FAMILIES["llama"], names=names)
    tied = replace(TINY, tied_embeddings=True)
    assert family.skips("head.weight", "hf", tied)
    assert not family.skips("lm_head.weight", "hf", tied)


@pytest.mark.parametrize("shape", [(24,), (24, 5)])
def test_the_two_rotary_orders_are_inverses(shape):
    rows = torch.randn(shape)
    half, interleaved = reordered(rows, 6, "half"), reordered(rows, 6, "interleaved")
    assert not torch.equal(half, rows)
    assert torch.equal(reordered(half, 6, "interleaved"), rows)
    assert torch.equal(reordered(interleaved, 6, "half"), rows)


def test_reordering_weights_for_half_rotation_preserves_scores():
    """Stored weights rotate adjacent pairs, reordered weights rotate halves of each head."""
    n_heads, head_dim, dim = 3, 8, 16
    wq, wk = torch.randn(2, n_heads * head_dim, dim, dtype=torch.float64)
    x = torch.randn(5, dim, dtype=torch.float64)
    frequencies = 100.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(5, dtype=torch.float64), frequencies)  # [T, D/2]

    def neighbours(rows):
        heads = (x @ rows.T).view(5, n_heads, head_dim // 2, 2)
        turned = (
            torch.view_as_complex(heads) * torch.polar(torch.ones_like(angles), angles)[:, None]
        )
        return torch.view_as_real(turned).flatten(2)

    def halves(rows):
        heads = (x @ rows.T).view(5, n_heads, head_dim)
        first, second = heads.chunk(2, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    stored = torch.einsum("qhd,khd->hqk", neighbours(wq), neighbours(wk))
    wq, wk = (reordered(weight, 8, "half") for weight in (wq, wk))
    model = torch.einsum("qhd,khd->hqk", halves(wq), halves(wk))
    torch.testing.assert_close(model, stored, rtol=0, atol=1e-12)
