"""Routed products in Triton: those of torch, and independent of the batch."""

from itertools import product

import pytest
import torch

from parallel_llama.engine.recorded_steps import BUCKETS
from parallel_llama.ops import Dispatch, TorchOps

pytest.importorskip("triton", reason="kernels for CUDA devices need triton")

from parallel_llama.ops.cuda import linear as kernels
from parallel_llama.ops.cuda.linear import MAX_ROUTED_ROWS, most_tiles
from parallel_llama.ops.cuda_ops import CUDAOps

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}  # the interpreter has no bfloat16 products


def cut_into(monkeypatch, n_parts):
    monkeypatch.setattr(kernels, "parts_of", lambda *_: n_parts)


def random_routes(counts, n_sources, n_others, device):
    """Routes with `counts` rows per weight and `n_others` rows without one, in random order."""
    n_given = sum(counts)
    n_rows = n_given + n_others
    sources = torch.randint(n_sources, (n_rows,), device=device)
    targets = torch.randperm(n_rows, device=device)
    starts = torch.tensor([0, *counts], device=device).cumsum(0)
    return Dispatch(sources, targets, starts, max_rows=n_given)


def columns_of_more(n, n_columns, dtype, device):
    """A view of some columns; the other columns are NaN."""
    around = torch.full((n, n_columns + 8), torch.nan, device=device).to(dtype)
    return around[:, 3:-5].normal_()


@pytest.mark.parametrize(("dtype", "n_parts"), [(torch.float32, 3), (torch.float16, 1)], ids=str)
@pytest.mark.parametrize(
    ("counts", "n_others", "shape"),
    [
        ((1,), 0, (300, 70)),
        ((0, 3, 0, 1), 2, (129, 65)),
        ((0, 0, 0), 5, (37, 9)),
        ((40, 0, 16, 17), 20, (37, 5)),
        ((2, 1), 3, (0, 5)),
        ((2, 1), 3, (5, 0)),
        ((0, 0), 0, (37, 5)),
    ],
    ids=str,
)
def test_routed_linear(device, monkeypatch, dtype, n_parts, counts, n_others, shape):
    """A rank may have no channels, an expert no rows, and a row no expert."""
    cut_into(monkeypatch, n_parts)
    n_inputs, n_outputs = shape
    x = columns_of_more(9, n_inputs, dtype, device)
    weights = [torch.randn(n_outputs, n_inputs, device=device).to(dtype) for _ in counts]
    dispatch = random_routes(counts, len(x), n_others, device)
    ours = CUDAOps().routed_linear(x, weights, dispatch)
    wide = [weight.double() for weight in weights]
    expected = TorchOps().routed_linear(x.double(), wide, dispatch)
    assert ours.dtype == dtype
    atol = TOLERANCE[dtype] * n_inputs**0.5
    torch.testing.assert_close(ours.double(), expected, rtol=TOLERANCE[dtype], atol=atol)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("n_parts", [1, 2])
def test_routed_row_is_bitwise_equal_to_a_separate_product(device, monkeypatch, dtype, n_parts):
    cut_into(monkeypatch, n_parts)
    counts, ops = (20, 0, 3, 1), CUDAOps()
    x = torch.randn(9, 200, device=device).to(dtype)
    weights = [torch.randn(20, 200, device=device).to(dtype) for _ in counts]
    dispatch = random_routes(counts, len(x), 1, device)
    y = ops.routed_linear(x, weights, dispatch)
    for number, (first, last) in enumerate(zip(*dispatch.bounds(), strict=True)):
        for i in range(first, last):
            alone = ops.linear(x[dispatch.sources[i]][None], weights[number])
            assert torch.equal(y[dispatch.targets[i]], alone[0])


def test_weights_may_have_fewer_bits_than_inputs(device):
    x = torch.randn(4, 50, device=device)
    weights = [torch.randn(9, 50, device=device).half() for _ in range(2)]
    dispatch = random_routes((2, 1), len(x), 0, device)
    expected = TorchOps().routed_linear(x, weights, dispatch)
    torch.testing.assert_close(CUDAOps().routed_linear(x, weights, dispatch), expected)


def test_mixed_dtypes_and_too_many_rows_fall_back_to_torch(device, monkeypatch):
    monkeypatch.setattr(kernels, "_routed", None)
    x = torch.randn(4, 50, device=device)
    weights = [torch.randn(9, 50, device=device) for _ in range(2)]
    for counts, own in (((2, 1), [weights[0], weights[1].half()]), ((MAX_ROUTED_ROWS, 1), weights)):
        dispatch = random_routes(counts, len(x), 0, device)
        expected = TorchOps().routed_linear(x, own, dispatch)
        torch.testing.assert_close(CUDAOps().routed_linear(x, own, dispatch), expected)


def test_every_graph_size_fits_the_routed_kernel():
    assert max(BUCKETS) <= MAX_ROUTED_ROWS


@pytest.mark.parametrize("n_weights", [1, 2])
def test_number_of_tiles_is_the_worst_case_over_all_routings(n_weights):
    rows = kernels.MAX_ROWS
    for n in (0, 1, 2, 3, rows, rows + 1, 2 * rows, 2 * rows + 2, 3 * rows + 3):
        splits = (each for each in product(range(n + 1), repeat=n_weights + 1) if sum(each) == n)
        most = max(sum(-(-count // rows) for count in counts) for counts in splits)
        assert most_tiles(n, n_weights) == most
