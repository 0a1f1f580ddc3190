"""Tokens sampled in Triton are those sampled on the CPU with the same keys."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from parallel_llama.ops import SamplingKeys, TorchOps
from parallel_llama.parallel.collectives import Solo
from parallel_llama.request import SamplingParams
from parallel_llama.sampling.draw import SamplingRow, row_sampling_key
from parallel_llama.sampling.pending import PendingDraws
from parallel_llama.sampling.sampler import sample

pytest.importorskip("triton", reason="kernels for CUDA devices need triton")

from parallel_llama.ops.cuda_ops import CUDAOps

KEYS = [0, -1, 2**63 - 1, -(2**63), 12345, -5405627362230748553]
TEMPERATURES = [0.8, 0.0, 1.5, 1e-3, 0.0, 40.0]
VOCAB = 2600
CUTS = {
    1: [0, VOCAB],
    3: [0, 0, 1281, VOCAB],
    5: [0, 127, 128, 1500, 1500, VOCAB],
    7: [0, 1, 400, 900, 1024, 2048, 2599, VOCAB],
}


def sampling_keys_of(n_rows: int, device: torch.device) -> SamplingKeys:
    keys = torch.tensor(KEYS[:n_rows], dtype=torch.int64, device=device)
    return SamplingKeys(
        keys, torch.tensor(TEMPERATURES[:n_rows], dtype=torch.float64, device=device)
    )


def both(x: Tensor, sampling_keys: SamplingKeys, first: int) -> tuple[Tensor, Tensor]:
    return CUDAOps().draw(x, sampling_keys, first), TorchOps().draw(x, sampling_keys, first)


@pytest.mark.parametrize("place", [0, 999])
def test_token_is_found_at_first_and_last_position(device, place):
    """The first and the last tile may extend beyond the vocabulary."""
    x = torch.zeros(2, 1000, device=device)
    x[:, place] = 1000
    assert CUDAOps().draw(x, sampling_keys_of(2, device), 127)[:, 1].tolist() == [127 + place] * 2


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_draw_reports_nan_and_inf(device, temperature):
    x = torch.zeros(5, 2100, device=device)
    x[0], x[1, 60], x[2, 3], x[3, 7], x[3, 2090] = -torch.inf, torch.nan, torch.inf, -torch.inf, 50
    x[4, 2], x[4, 2090], x[4, 1500] = torch.inf, torch.nan, torch.nan
    keys = torch.arange(5, device=device)
    temperatures = torch.full((5,), temperature, dtype=torch.float64, device=device)
    ours, torchs = both(x, SamplingKeys(keys, temperatures), 9)
    assert [str(score) for score in ours[[0, 1, 2, 4], 0].tolist()] == ["-inf", "nan", "inf", "nan"]
    assert ours[:, 1].tolist() == [9, 69, 12, 2099, 1509] == torchs[:, 1].tolist()


def test_draw_of_a_row_is_bitwise_equal_alone_and_in_batch(device):
    x, noise = torch.randn(6, 1300, device=device), sampling_keys_of(6, device)
    together = CUDAOps().draw(x, noise, 5)
    for row in range(6):
        own = SamplingKeys(noise.keys[row : row + 1], noise.temperatures[row : row + 1])
        assert torch.equal(CUDAOps().draw(x[row : row + 1], own, 5), together[row : row + 1])


@pytest.mark.parametrize("tp_size", CUTS)
def test_vocab_sharded_draw_equals_cpu_draw(device, tp_size):
    """For any shards of the vocabulary, some of them empty."""
    torch.manual_seed(1)
    x = torch.randn(6, VOCAB) * 2
    x[3] = x[3].round()
    draws = [
        SamplingRow(SamplingParams(temperature=temperature), 7, choice, 100 + choice)
        for choice, temperature in enumerate(TEMPERATURES)
    ]
    rows = [row_sampling_key(each.params, each.seed, each.choice, each.position) for each in draws]
    keys, temperatures = zip(*rows, strict=True)
    noise = SamplingKeys(
        torch.tensor(keys, device=device),
        torch.tensor(temperatures, dtype=torch.float64, device=device),
    )
    borders = CUTS[tp_size]
    of_ranks = [
        CUDAOps().draw(x[:, start:stop].to(device), noise, start)
        for start, stop in pairwise(borders)
    ]

    class Ranks(Solo):
        def all_gather(self, _: Tensor) -> Tensor:
            return torch.stack(of_ranks)

    pending = PendingDraws(x, of_ranks[0], range(VOCAB), VOCAB, draws, Ranks(), CUDAOps())
    expected = sample(x, range(VOCAB), draws, Solo())
    assert pending.read() == (expected, True)
    assert pending.tokens.tolist() == [drawn.token for drawn in expected]
