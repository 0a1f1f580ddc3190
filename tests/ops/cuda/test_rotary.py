"""Triton stores the same keys and values as torch."""

import pytest
import torch

from parallel_llama.ops import TorchOps, kv_rows

pytest.importorskip("triton", reason="kernels for CUDA devices need triton")

from parallel_llama.ops.cuda.rotary import can_store
from parallel_llama.ops.cuda_ops import CUDAOps


def bytes_of(cache):
    return cache.contiguous().view(torch.uint8)


@pytest.mark.parametrize("stored", kv_rows.LARGEST, ids=str)
def test_every_value_is_rounded_to_8_bits_as_in_torch(device, stored):
    """Numbers of all exponents, numbers between two bytes, zeros, NaN and infinity."""
    largest = kv_rows.LARGEST[stored]
    if stored == torch.int8:
        between = torch.arange(-127, 127.5, 0.5)
    else:
        bytes_ = torch.arange(127, dtype=torch.uint8).view(stored).to(torch.float32)
        between = torch.cat((bytes_, (bytes_[1:] + bytes_[:-1]) / 2))
        between = torch.cat((between, -between))
    x = between[: between.numel() // 127 * 127].view(-1, 1, 127).to(device)
    x = torch.cat((x, torch.full_like(x[..., :1], largest)), -1)  # so that the scale is 1
    odd = torch.zeros(4, 1, 128, device=device)
    odd[1, 0, 3], odd[2, 0, 5], odd[3, 0, 6] = torch.nan, -torch.inf, 1e-44
    x = torch.cat((x, odd))
    n = len(x)
    k, v, ours = torch.zeros(3, 1, n, 132, dtype=torch.uint8, device=device).view(stored)
    slots, turns = torch.arange(n, device=device), torch.ones(n, 1, 64, dtype=torch.complex64)
    CUDAOps().rotate_and_store(torch.cat((x, x), 1), turns.to(device), slots, k, ours)
    kv_rows.store(x, slots, v)
    is_number = torch.ones(n, dtype=torch.bool)
    is_number[-3:-1] = False
    assert torch.equal(bytes_of(ours)[:, is_number], bytes_of(v)[:, is_number])
    assert kv_rows.unpack(ours, torch.float32)[0, ~is_number].isnan().all()


def test_rows_with_unaligned_scales_fall_back_to_torch(device):
    assert not can_store(18, torch.int8)
    qkv, angles = torch.randn(2, 9, 18, device=device), torch.randn(2, 1, 9, device=device)
    rotations = torch.polar(torch.ones_like(angles), angles)
    theirs, slots = qkv.clone(), torch.tensor([3, 1], device=device)
    caches = torch.zeros(2, 2, 2, 16, 22, dtype=torch.int8, device=device)
    CUDAOps().rotate_and_store(qkv, rotations, slots, *caches[0])
    TorchOps().rotate_and_store(theirs, rotations, slots, *caches[1])
    assert torch.equal(caches[0], caches[1]) and caches[0].any()
    assert torch.equal(qkv[:, :5], theirs[:, :5])
