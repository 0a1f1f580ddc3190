"""Products with quantised integer matrices in Triton: torch's, and independent of the batch."""

import pytest
import torch
from group_samples import (
    BLOCKS,
    INT4_MIN,
    INT8,
    INTEGER_FORMS,
    INTEGERS,
    a_matrix,
    factors_of,
    integers,
)

pytest.importorskip("triton", reason="kernels for CUDA devices need triton")

from parallel_llama.ops.cuda import quant_linear as kernels
from parallel_llama.ops.cuda_ops import CUDAOps
from parallel_llama.ops.groups import Groups, PanelShape, group_linear
from parallel_llama.ops.groups import rounded_inputs as rounded_by_torch

SOME = pytest.mark.parametrize("form", [INT8, INT4_MIN, BLOCKS["Q6_K"]], ids=lambda f: f.name)


def cut_into(monkeypatch, n_parts):
    monkeypatch.setattr(kernels, "parts_of", lambda *_: n_parts)


def multiplied(x, weight):
    """Into a view of some columns."""
    ops = CUDAOps()
    shape = PanelShape(weight.form, weight.shape[1], ops.panel_rows, weight.n_before)
    whole = torch.full((len(x), weight.shape[0] + 7), 5.0, dtype=x.dtype)
    ops.group_linear(x, shape.pack(weight), shape, whole[:, 3:-4])
    assert (whole[:, :3] == 5).all() and (whole[:, -4:] == 5).all()
    return whole[:, 3:-4]


@INTEGER_FORMS
def test_a_product_is_the_exact_integer_where_scales_are_one(form):
    """Inputs with a largest value of 127 in every group are quantised exactly."""
    ones = torch.ones(9, -(-3 // form.n_shared), dtype=torch.float16)
    mins = -5 * ones if form.has_min else None
    weight = Groups(form, integers(form, 9, 96), ones, mins, factors_of(form, 9, 96))
    x = integers(INT8, 3, 96)
    x[:, ::32] = 127
    exact = x.long() @ weight.values().long().T
    assert torch.equal(multiplied(x.float(), weight).long(), exact)


@SOME
@pytest.mark.parametrize("n_parts", [1, 2])
def test_a_product_is_that_of_torch_for_any_shape(monkeypatch, form, n_parts):
    """Groups of one block, and of two blocks."""
    cut_into(monkeypatch, n_parts)
    for n, k, m in [(0, 32, 3), (3, 96, 65), (17, 64, 5), (5, 64, 0), (2, 0, 3)]:
        x, weight = torch.randn(n, k), a_matrix(form, m, k, n_before=n + k // 32)
        longest = weight.values().norm(dim=1).max().item() if m else 0
        atol = 1e-5 * x.norm(dim=1).max().item() * longest if n else 0
        expected = group_linear(x, weight)
        torch.testing.assert_close(multiplied(x, weight), expected, rtol=0, atol=atol)


@SOME
def test_a_row_is_the_same_in_any_company(monkeypatch, form):
    """For few rows, with one program per part, and for many, with all parts in one program."""
    cut_into(monkeypatch, 2)
    weight, x = a_matrix(form, 5, 96), torch.randn(17, 96)
    together = multiplied(x, weight)
    assert torch.equal(multiplied(x[:16], weight), together[:16])
    for n in (1, 2, 9):
        assert torch.equal(multiplied(x[16 - n : 16], weight), together[16 - n : 16])


def test_half_precision_comes_and_goes():
    x, weight = torch.randn(2, 64).half(), a_matrix(INT8, 9, 64)
    expected = group_linear(x, weight)
    torch.testing.assert_close(multiplied(x, weight), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.filterwarnings("ignore:.*encountered in")
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_none_spoils_its_own_row_alone(wrong):
    x, weight = torch.randn(3, 64), a_matrix(INT4_MIN, 20, 64)
    x[1, 40] = wrong
    result = multiplied(x, weight)
    assert result[1].isnan().all() and result[[0, 2]].isfinite().all()


def test_inputs_are_rounded_alike_by_kernels_and_torch():
    x = torch.randn(5, 320) * torch.tensor([1e-38, 1e-31, 1e-20, 1.0, 1e30])[:, None]
    for form in INTEGERS:
        ours = kernels._rounded(x, form)
        rounded, scales = rounded_by_torch(x)
        assert torch.equal(ours[0], rounded.flatten(1)) and torch.equal(ours[1], scales)
        sums = rounded.float().reshape(5, -1, 32 // form.n_parts).sum(-1)
        assert torch.equal(ours[2], sums)
