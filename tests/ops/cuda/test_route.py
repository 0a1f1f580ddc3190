"""Routing in Triton: equal and invalid scores, the limit on pairs, and any batch."""

import pytest
import torch

from parallel_llama.ops import TorchOps

pytest.importorskip("triton", reason="kernels for CUDA devices need triton")

from parallel_llama.ops.cuda import route as kernels
from parallel_llama.ops.cuda_ops import CUDAOps


def routed(ops, scores, n_active, *, normed=True):
    """Routing with these scores."""
    gate = torch.eye(scores.shape[1], device=scores.device)
    return ops.route(scores, gate, n_active, normed=normed)


def test_ties_choose_the_expert_with_lowest_number(device):
    rows = [[1, 3, 2, 3, 3], [0, -0.0, 0, 0, 0], [2, 1, 2, 9, 2], [-1, -2, -3, -1, -torch.inf]]
    scores = torch.tensor(rows, device=device)
    # No product with a gate: it would turn infinity into NaN.
    _, experts = kernels.route(scores, 2, normed=True)
    assert experts.tolist() == [[1, 3], [0, 1], [3, 0], [0, 3]]


@pytest.mark.filterwarnings("ignore:.*encountered in")
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
def test_invalid_scores_give_nan_weights_and_valid_experts(device, bad):
    """NaN makes the step fail with an error; the experts are valid numbers."""
    scores = torch.randn(4, 5, device=device)
    scores[0, 2] = scores[2] = bad
    scores[3] = -torch.inf
    routing_weights, experts = kernels.route(scores, 3, normed=True)
    assert routing_weights[[0, 2, 3]].isnan().all() and not routing_weights[1].isnan().any()
    assert all(len({*own} & {*range(5)}) == 3 for own in experts.tolist())


def test_the_experts_of_a_token_do_not_depend_on_the_batch(device):
    x, gate = torch.randn(18, 900, device=device), torch.randn(6, 900, device=device)
    together = CUDAOps().route(x, gate, 2, normed=True)
    for row in (0, 15, 17):
        alone = CUDAOps().route(x[row : row + 1], gate, 2, normed=True)
        assert all(map(torch.equal, alone, (each[row : row + 1] for each in together)))


def same_dispatch(ours, theirs):
    for mine, their in zip(ours, theirs, strict=True):
        for name in ("sources", "targets", "starts"):
            assert torch.equal(getattr(mine, name), getattr(their, name))
        assert mine.max_rows == their.max_rows


def test_dispatch_of_too_many_pairs_falls_back_to_torch(device, monkeypatch):
    monkeypatch.setattr(kernels, "launch", None)
    experts = torch.zeros(kernels.MAX_PAIRS // 2 + 1, 2, dtype=torch.int64, device=device)
    same_dispatch(
        CUDAOps().expert_dispatch(experts, range(3)), TorchOps().expert_dispatch(experts, range(3))
    )
