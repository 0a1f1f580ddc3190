"""Weights keep their values when they move to huge pages, and still share memory if they did."""

import errno
import mmap
import os
import platform
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from mixes import ARGS
from torch import Tensor

from parallel_llama.checkpoint.checkpoint import random_checkpoint
from parallel_llama.dtypes import make_precision
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.model import weights
from parallel_llama.model.huge_pages import HugePages, huge_pages
from parallel_llama.ops.formats import DenseWeight, QuantWeight
from parallel_llama.parallel.collectives import Solo
from parallel_llama.plan import make_plan


def weight(values: Tensor) -> DenseWeight:
    own = DenseWeight(values.shape, dtype=values.dtype, device=torch.device("meta"))
    own.load(values)
    return own


def test_moved_weights_keep_values_strides_and_shared_memory():
    whole = weight(torch.randn(6, 5))
    part = weight(whole.values[2:4])
    turned = weight(torch.randn(3, 7).t())
    small, wide = weight(torch.randn(3).bfloat16()), weight(torch.randn(2).double())
    none = weight(torch.empty(0, 4))
    moved = [whole, part, turned, small, wide, none]
    before = [(w.values.clone(), w.values.stride(), w.values.data_ptr()) for w in moved]
    pages = HugePages([each.values for each in moved])
    pages.move(moved[:4])  # the weights may move in several calls
    pages.move(moved[4:])
    for own, (content, stride, address) in zip(moved, before, strict=True):
        assert torch.equal(own.values, content) and own.values.stride() == stride
        assert own.values.data_ptr() != address or own is none
    part.values.zero_()
    assert not whole.values[2:4].any() and whole.values[:2].any()
    starts = sorted(own.values.data_ptr() for own in (whole, turned, small, wide))
    assert all(start % 64 == 0 for start in starts) and starts[-1] - starts[0] < 1024


def test_empty_weights_and_empty_lists_can_be_moved():
    none = weight(torch.empty(0, 4))
    HugePages([none.values]).move([none])
    HugePages([]).move([])


def test_memory_is_in_small_pages_where_the_kernel_has_no_huge_pages(monkeypatch):
    """Regression: every start on a real-time kernel ended with OSError: Invalid argument."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 1 << 20)  # no advice has this number
    assert huge_pages(5000).fill_(3).sum() == 15000


# Prints the bytes that loading needed above those of the loaded model.
_LOADING = r"""
import re
from pathlib import Path

import torch

from parallel_llama.checkpoint.checkpoint import random_checkpoint
from parallel_llama.dtypes import Precision
from parallel_llama.engine.free_memory import return_freed_memory
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.parallel.collectives import Solo
from parallel_llama.plan import make_plan

def n_bytes(name):
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) << 10

args = ModelArgs(
    dim=512, n_layers=1, n_heads=8, n_kv_heads=8, head_dim=64, ffn_dim=64, vocab_size=1 << 17
)
return_freed_memory()
runner = ModelRunner.load(
    args,
    random_checkpoint(args, 1),
    make_plan(args, 1),
    Solo(),
    precision=Precision.plain("float32"),
    device=torch.device("cpu"),
)
print(n_bytes("VmHWM") - n_bytes("VmRSS"))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc returns freed memory")
def test_loading_holds_a_large_matrix_once():
    """Regression: the output layer, 256 MiB here, was in memory twice, which no plan counted."""
    command = [sys.executable, "-c", _LOADING]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 100 << 20


def refused_reservation(_: object) -> HugePages:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.mark.parametrize("n_experts", [0, 3])
def test_weights_are_packed_while_loading_without_huge_pages(n_experts, monkeypatch):
    """On a GPU, unpacked weights took memory that the KV cache needed.

    Regression: under a limit of address space, quantised weights were refused by their size in
    float32.
    """
    sizes = {"dim": 96, "n_heads": 3, "n_kv_heads": 3, "head_dim": 32, "ffn_dim": 64}
    args = replace(ARGS, **sizes, n_experts=n_experts, n_active_experts=min(n_experts, 2))
    monkeypatch.setattr(weights, "HugePages", refused_reservation)
    loaded: list[QuantWeight] = []
    replacing = QuantWeight.replacing
    monkeypatch.setattr(
        QuantWeight, "replacing", lambda *own: loaded.append(replacing(*own)) or loaded[-1]
    )
    plan = make_plan(args, 1, quant_group_size=32)
    precision = make_precision(args, "float32", "cpu", "int4", None)
    runner = ModelRunner.load(
        args,
        random_checkpoint(args, 1),
        plan,
        Solo(),
        precision=precision,
        device=torch.device("cpu"),
    )
    assert loaded and not any(each.unstored_bytes for each in loaded)
    for _, each in weights._named(runner.model, ""):
        assert not each.unstored_bytes
