"""Packed layers are the layers that went into them."""

import pytest
import torch

from parallel_llama.layers import ColumnParallelLinear, RMSNorm, end_to_end

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [False, True])
def test_layers_end_to_end_give_their_outputs_side_by_side_and_become_views(bias):
    layers = [
        ColumnParallelLinear(6, range(rows), bias=bias, dtype=torch.float64, device=CPU)
        for rows in (4, 0, 3)
    ]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.normal_()
    x = torch.randn(2, 6, dtype=torch.float64)
    apart = torch.cat([layer(x) for layer in layers], dim=1)
    whole = end_to_end(*layers)
    torch.testing.assert_close(whole(x), apart, rtol=1e-14, atol=1e-14)
    whole.weight.zero_()
    assert not any(layer.weight.any() for layer in layers)


def test_rms_norm_is_its_definition_and_counts_squares_in_float32():
    norm = RMSNorm(96, 1e-5, dtype=torch.bfloat16, device=CPU)
    norm.weight.normal_()
    x = 300 * torch.randn(4, 96).to(torch.bfloat16)
    before = x.clone()
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    ours = norm(x)
    torch.testing.assert_close(ours, expected.to(torch.bfloat16) * norm.weight, rtol=1e-2, atol=0)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_is_too_large_to_be_normed_becomes_nan(dtype):
    """It became zeros, and the model went on to token 0 with exit code 0."""
    norm = RMSNorm(96, 1e-5, dtype=dtype, device=CPU)
    norm.weight.fill_(1)
    x = torch.randn(3, 96, dtype=dtype)
    x[1, 7] = 1e38
    y = norm(x)
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()
