"""Fused layers give the outputs of the single layers, and `add_and_norm` the norm of the sum."""

import pytest
import torch

from parallel_llama.model.layers import (
    Addend,
    Backend,
    ColumnParallelLinear,
    LayerNorm,
    RMSNorm,
    concat_outputs,
)
from parallel_llama.ops import TorchOps
from parallel_llama.parallel.collectives import Solo

BACKEND = Backend(Solo(), TorchOps(), torch.float64)


@pytest.mark.parametrize("bias", [False, True])
def test_concat_outputs_fuses_layers_and_makes_them_views(bias):
    layers = [ColumnParallelLinear(6, range(rows), BACKEND, bias=bias) for rows in (4, 0, 3)]
    for layer in layers:
        for weight in (layer.weight, layer.bias):
            if weight is not None:
                weight.load(torch.randn(weight.values.shape, dtype=torch.float64))
    x = torch.randn(2, 6, dtype=torch.float64)
    apart = torch.cat([layer(x) for layer in layers], dim=1)
    whole = concat_outputs(*layers)
    torch.testing.assert_close(whole(x), apart, rtol=1e-14, atol=1e-14)
    whole.weight.values.zero_()
    assert not any(layer.weight.values.any() for layer in layers)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_add_and_norm_stores_the_sum_and_returns_its_norm(kind):
    dtype = torch.float64
    norm = (
        RMSNorm(6, 1e-5, BACKEND, 1.0) if kind == "rms" else LayerNorm(6, 1e-5, BACKEND, bias=False)
    )
    norm.weight.load(torch.randn(6, dtype=dtype))
    x, y = torch.randn(2, 3, 6, dtype=dtype)
    total = x + y
    assert torch.equal(norm.add_and_norm(x, Addend(y)), norm(total))
    assert torch.equal(x, total)
    normed = x + norm(y)
    assert torch.equal(norm.add_and_norm(x, Addend(y, norm)), norm(normed))
    assert torch.equal(x, normed)
