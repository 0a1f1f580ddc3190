"""Operators that add the sums over parts of a product have the bits of the whole product."""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from meta_models import meta_runner, with_layers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="kernels for CUDA devices need triton")

from parallel_llama.config.layouts import load_model_args
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.files.model_files import find_model
from parallel_llama.ops import HeadNorms
from parallel_llama.ops.cuda import linear as kernels
from parallel_llama.ops.cuda.launch import launch
from parallel_llama.ops.cuda_ops import CUDAOps
from parallel_llama.ops.part_sums import PartSums

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
BIAS = pytest.mark.parametrize("has_bias", [False, True])


@pytest.fixture
def product(device, monkeypatch):
    """Makes a product of 5 rows as sums over 3 parts, and the same product as a tensor."""
    monkeypatch.setattr(kernels, "parts_of", lambda *_: 3)

    def make(n_outputs: int, dtype: torch.dtype, has_bias: bool) -> tuple[PartSums, Tensor]:
        x = torch.randn(5, 390, device=device).to(dtype)
        weight = torch.randn(n_outputs, 390, device=device).to(dtype)
        bias = torch.randn(n_outputs, device=device).to(dtype) if has_bias else None
        sums = CUDAOps().product(x, weight, bias)
        assert isinstance(sums, PartSums) and sums.shape == (5, n_outputs)
        return sums, CUDAOps().linear(x, weight, bias)

    return make


@DTYPES
@BIAS
@pytest.mark.parametrize("has_post_norm", [False, True])
def test_add_rms_norm_of_part_sums_equals_whole_product(
    product, device, dtype, has_bias, has_post_norm
):
    sums, y = product(36, dtype, has_bias)
    x, weight = (
        torch.randn(5, 36, device=device).to(dtype),
        torch.randn(36, device=device).to(dtype),
    )
    stream, ops = x.clone(), CUDAOps()
    post_weight = weight.flip(0) if has_post_norm else None
    normed = ops.add_rms_norm(stream, sums, weight, 1e-5, 1.0, post_weight)
    assert torch.equal(normed, ops.add_rms_norm(x, y, weight, 1e-5, 1.0, post_weight))
    assert torch.equal(stream, x)


@DTYPES
@BIAS
def test_activations_of_part_sums_equal_whole_product(product, dtype, has_bias):
    sums, y = product(1030, dtype, has_bias)
    ops = CUDAOps()
    assert torch.equal(ops.silu_and_mul(sums), ops.silu_and_mul(y))
    assert torch.equal(ops.clamped_swiglu(sums, 1.7, 0.5), ops.clamped_swiglu(y, 1.7, 0.5))
    for is_tanh in (False, True):
        expected = ops.gelu_and_mul(y, is_tanh=is_tanh)
        assert torch.equal(ops.gelu_and_mul(sums, is_tanh=is_tanh), expected)


@DTYPES
@BIAS
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.int8], ids=str)
def test_rotate_and_store_of_part_sums_equals_whole_product(
    product, device, dtype, has_bias, has_norms, rotates, stored
):
    """3 query heads and 2 KV heads; an operator that takes only tensors adds the sums first."""
    sums, y = product(7 * 12, dtype, has_bias)
    angles = torch.randn(5, 1, 6, device=device)
    rotations = torch.polar(torch.ones_like(angles), angles) if rotates else None
    slots = torch.tensor([3, 0, 7, 1, 4], device=device)
    width = 16 if stored == torch.int8 else 12
    caches = torch.zeros(2, 2, 2, 8, width, device=device).to(stored)
    weights = torch.randn(2, 12, device=device).to(dtype)
    norms = HeadNorms(*weights, 1e-5, 0.0) if has_norms else None
    found = [
        CUDAOps().rotate_and_store(qkv.view(5, 7, 12), rotations, slots, *cache, norms)
        for qkv, cache in zip((sums, y), caches, strict=True)
    ]
    assert found[0].shape == (5, 3, 12) and torch.equal(*found)
    assert torch.equal(caches[0], caches[1]) and caches[0].any()


@DTYPES
def test_expert_ops_on_part_sums_equal_whole_product(monkeypatch, device, dtype):
    """Two experts of three; the last token has one expert that is not on this rank."""
    monkeypatch.setattr(kernels, "parts_of", lambda *_: 3)
    dispatch, _ = CUDAOps().expert_dispatch(torch.tensor([[0, 1], [1, 0], [0, 2]]), range(2))
    x = torch.randn(3, 390, device=device).to(dtype)
    weights = [*torch.randn(2, 40, 390, device=device).to(dtype)]
    ops, routing_weights = CUDAOps(), torch.rand(3, 2, device=device)
    sums, y = ops.routed_product(x, weights, dispatch), ops.routed_linear(x, weights, dispatch)
    assert isinstance(sums, PartSums) and isinstance(y, Tensor)
    assert torch.equal(ops.silu_and_mul(sums), ops.silu_and_mul(y))
    expected = ops.weighted_sum(y, routing_weights)
    assert torch.equal(ops.weighted_sum(sums, routing_weights), expected)


def test_product_is_a_tensor_for_one_part_or_many_rows(device, monkeypatch):
    ops, weight = CUDAOps(), torch.randn(9, 50, device=device)
    for n, n_parts in ((3, 1), (17, 3)):
        monkeypatch.setattr(kernels, "parts_of", lambda *_, n_parts=n_parts: n_parts)
        assert isinstance(ops.product(torch.randn(n, 50, device=device), weight), Tensor)


class _Launches(TorchDispatchMode):
    """Counts what a step on the meta device would launch on a GPU, by kernel or operator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        for module in [*sys.modules.values()]:
            if getattr(module, "launch", None) is launch:
                monkeypatch.setattr(module, "launch", self._launch)

    def _launch(self, kernel: Any, grid: Sequence[int], *_: Any, **__: Any) -> None:
        assert all(grid)
        self.counts[kernel.fn.__name__] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [each.alias_info for each in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if not is_view and "empty" not in func.name():
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def launches_of_layer(monkeypatch: pytest.MonkeyPatch, model: str, tp_size: int) -> Counter[str]:
    """The launches of one more layer in a decode step of one row."""
    args, counts = load_model_args(find_model(model)), []
    for n_layers in (2, 3):
        runner = meta_runner(with_layers(args, n_layers), CUDAOps, tp_size)
        chunk = Chunk((7,), 30, [list(range(20))] * len(runner.kv_groups), 9)
        runner.step([chunk], range(1))
        with monkeypatch.context() as patched, _Launches(patched) as launches:
            runner.step([chunk], range(1))
        counts.append(launches.counts)
    return counts[1] - counts[0]


@pytest.mark.parametrize(
    ("model", "tp_size", "n"),
    [
        ("llama-3-8b", 1, 10),
        ("llama-3-8b", 8, 11),
        ("qwen3-30b-a3b", 1, 14),
        ("qwen3-30b-a3b", 8, 14),
        ("gemma-2-9b", 1, 10),
        ("gemma-2-9b", 8, 11),
    ],
)
def test_number_of_launches_per_layer(monkeypatch, model, tp_size, n):
    """Launches of collectives are not counted."""
    counts = launches_of_layer(monkeypatch, model, tp_size)
    assert counts.total() == n, counts
