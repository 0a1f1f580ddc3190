"""Candidates, and tokens sampled from them, are the same in Triton and torch."""

from itertools import pairwise

import pytest
import torch

from parallel_llama.ops import SamplingKeys, TorchOps
from parallel_llama.ops.filters import Filters

pytest.importorskip("triton", reason="kernels for CUDA devices need triton")

from parallel_llama.ops.cuda_ops import CUDAOps

K = 64
# top_k, top_p, min_p and temperature
SETTINGS = [
    (0, 0.9, 0.0, 0.8),
    (20, 1.0, 0.0, 1.0),
    (40, 0.95, 0.0, 0.7),
    (0, 1.0, 0.05, 1.3),
    (64, 0.5, 0.01, 2.0),
    (1, 1.0, 0.0, 1.0),
    (3, 0.2, 0.0, 1e-3),
    (0, 0.999, 0.0, 40.0),  # a nucleus larger than the candidates
    (0, 1e-9, 0.0, 1.5),
    (9999, 0.9, 0.0, 0.5),  # more than the candidates
]
CUTS = {1: [0, 1.0], 3: [0, 0, 0.45, 1.0], 5: [0, 0.001, 0.03, 0.5, 0.98, 1.0]}


def rows_of(n: int, device: torch.device) -> Filters:
    top_k, top_p, min_p, temperatures = zip(*(SETTINGS * n)[:n], strict=True)

    def column(values: tuple[float, ...]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)

    keys = torch.arange(n, device=device) * 0x7E3779B97F4A7C15
    sampling_keys = SamplingKeys(keys, column(temperatures))
    return Filters(sampling_keys, torch.tensor(top_k, device=device), column(top_p), column(min_p))


def same(ours: torch.Tensor, torchs: torch.Tensor) -> None:
    """Logits and tokens have equal bits; the total probability is summed in another order."""
    assert torch.equal(ours[:, 1:], torchs[:, 1:])
    torch.testing.assert_close(ours[:, 0], torchs[:, 0], rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("n_rows", "n_columns", "first"),
    [(3, 0, 9), (3, 1, 127), (0, 70, 0), (3, 70, 0), (3, 1024, 3), (3, 2001, 7)],
)
def test_candidates_match_torch(device, dtype, n_rows, n_columns, first):
    around = (torch.randn(n_rows, n_columns + 9, device=device) * 3).to(dtype)
    around[:, :4], around[:, -5:] = 99, 99
    x, temperatures = (
        around[:, 4:-5],
        rows_of(n_rows or 1, device).sampling_keys.temperatures[:n_rows],
    )
    same(*(ops.candidates(x, temperatures, K, first) for ops in (CUDAOps(), TorchOps())))


def test_candidates_match_torch_with_two_levels_of_merging(device):
    """Lists of the top k of parts of 1024 logits are merged by 16, twice."""
    x, temperatures = torch.randn(1, 17 * 1024 + 5, device=device), rows_of(1, device)
    x[0, ::1000] += 9
    same(
        *(
            ops.candidates(x, temperatures.sampling_keys.temperatures, K, 0)
            for ops in (CUDAOps(), TorchOps())
        )
    )


def test_equal_logits_are_ordered_as_in_torch(device):
    """Repeated values, 0 and -0, and rows that are mostly or entirely -inf."""
    x = torch.randint(-2, 3, (4, 2500), device=device).float() * 0.5
    x[1, ::2], x[1, 1::2] = 0.0, -0.0
    x[2, 7:] = -torch.inf
    x[3] = -torch.inf
    temperatures = torch.tensor([1, 0.5, 2, 1], dtype=torch.float64, device=device)
    same(*(ops.candidates(x, temperatures, K, 70) for ops in (CUDAOps(), TorchOps())))


@pytest.mark.slow
@pytest.mark.parametrize(("tp_size", "vocab_size"), [(1, 40), (3, 2600), (5, 40)])
def test_vocab_sharded_draw_matches_torch(device, tp_size, vocab_size):
    """Peaked rows, flat rows, rounded rows and rows with forbidden tokens."""
    filters = rows_of(2 * len(SETTINGS), device)
    x = torch.randn(len(filters.top_k), vocab_size, device=device)
    x[: len(SETTINGS)] *= 4
    x[3::7] = x[3::7].round()
    x[5::7, 1::2] = -torch.inf
    borders = [int(share * vocab_size) for share in CUTS[tp_size]]
    of_ranks = [
        TorchOps().candidates(x[:, start:stop], filters.sampling_keys.temperatures, K, start)
        for start, stop in pairwise(borders)
    ]
    ours, torchs = (
        ops.draw_filtered(torch.stack(of_ranks), filters, vocab_size).tolist()
        for ops in (CUDAOps(), TorchOps())
    )
    whole = TorchOps().candidates(x, filters.sampling_keys.temperatures, K, 0)[None]
    assert ours == torchs == TorchOps().draw_filtered(whole, filters, vocab_size).tolist()
    # With candidates for the whole vocabulary every row is decided.
    assert 0 < ours.count(-1) < len(ours) / 2 if vocab_size > K else -1 not in ours


def test_row_gets_same_candidates_and_token_alone_and_in_batch(device):
    n_rows = 4
    filters = rows_of(n_rows, device)
    x = torch.randn(n_rows, 1300, device=device) * 3
    found = CUDAOps().candidates(x, filters.sampling_keys.temperatures, K, 5)
    together = CUDAOps().draw_filtered(found[None], filters, 1305)
    for row in range(n_rows):
        own = filters.rows([row])
        alone = CUDAOps().candidates(x[row : row + 1], own.sampling_keys.temperatures, K, 5)
        assert torch.equal(alone, found[row : row + 1])
        assert CUDAOps().draw_filtered(alone[None], own, 1305).tolist() == [together[row]]
