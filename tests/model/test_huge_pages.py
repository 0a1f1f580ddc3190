"""Weights keep their values, and shared memory, when they move to huge pages."""

import torch
from torch import Tensor

from parallel_llama.model.huge_pages import HugePages
from parallel_llama.ops.formats import DenseWeight


def weight(values: Tensor) -> DenseWeight:
    own = DenseWeight(values.shape, dtype=values.dtype, device=torch.device("meta"))
    own.load(values)
    return own


def test_weights_are_the_same_after_the_move_and_share_what_they_shared():
    whole = weight(torch.randn(6, 5))
    part = weight(whole.values[2:4])
    turned = weight(torch.randn(3, 7).t())
    small, wide = weight(torch.randn(3).bfloat16()), weight(torch.randn(2).double())
    none = weight(torch.empty(0, 4))
    moved = [whole, part, turned, small, wide, none]
    before = [(w.values.clone(), w.values.stride(), w.values.data_ptr()) for w in moved]
    pages = HugePages([each.values for each in moved])
    pages.move(moved[:4])  # some of them, and later the others
    pages.move(moved[4:])
    for own, (content, stride, address) in zip(moved, before, strict=True):
        assert torch.equal(own.values, content) and own.values.stride() == stride
        assert own.values.data_ptr() != address or own is none
    part.values.zero_()
    assert not whole.values[2:4].any() and whole.values[:2].any()
    starts = sorted(own.values.data_ptr() for own in (whole, turned, small, wide))
    assert all(start % 64 == 0 for start in starts) and starts[-1] - starts[0] < 1024


def test_nothing_to_move_is_no_trouble():
    none = weight(torch.empty(0, 4))
    HugePages([none.values]).move([none])
    HugePages([]).move([])
