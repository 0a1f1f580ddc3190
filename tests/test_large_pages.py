"""Weights stay what they are, and shared where they were, when they move."""

import torch
from torch import Tensor, nn

from parallel_llama.large_pages import LargePages


def parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def test_weights_are_the_same_after_the_move_and_share_what_they_shared():
    whole = parameter(torch.randn(6, 5))
    part = parameter(whole[2:4])
    turned = parameter(torch.randn(3, 7).t())
    small, wide = parameter(torch.randn(3).bfloat16()), parameter(torch.randn(2).double())
    none = parameter(torch.empty(0, 4))
    moved = [whole, part, turned, small, wide, none]
    before = [(value.clone(), value.stride(), value.data_ptr()) for value in moved]
    pages = LargePages(moved)
    pages.move(moved[:4])  # some of them, and later the others
    pages.move(moved[4:])
    for value, (content, stride, address) in zip(moved, before, strict=True):
        assert torch.equal(value, content) and value.stride() == stride
        assert value.data_ptr() != address or value is none
    part.zero_()
    assert not whole[2:4].any() and whole[:2].any()
    starts = sorted(value.data_ptr() for value in (whole, turned, small, wide))
    assert all(start % 64 == 0 for start in starts) and starts[-1] - starts[0] < 1024


def test_nothing_to_move_is_no_trouble():
    none = parameter(torch.empty(0, 4))
    LargePages([none]).move([none])
    LargePages([]).move([])
