"""The number of threads of ranks that another program has started."""

import math
from collections.abc import Iterator

import pytest
import torch

from parallel_llama.engine import ranks
from parallel_llama.engine.llm_config import LLMConfig
from parallel_llama.engine.ranks import Ranks
from parallel_llama.engine.setup import ModelSetup

N_THREADS = 3
ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
TWO = {**ONE, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(N_THREADS)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("variables", "quota", "expected"),
    [
        (ONE, 2.5, 2),
        (ONE, 0.5, 1),
        (ONE, math.inf, N_THREADS),
        (ONE, 64.0, N_THREADS),
        (TWO, 4.0, 2),
        (TWO, math.inf, N_THREADS),
        ({**BY_HAND, "MASTER_ADDR": "127.0.0.1"}, 4.0, 2),
        ({**BY_HAND, "MASTER_ADDR": "host0"}, 2.0, 2),  # perhaps a rank for each container
        ({**ONE, "OMP_NUM_THREADS": "5"}, 1.0, N_THREADS),
    ],
)
def test_cpu_quota_limits_the_threads_of_ranks_of_another_program(
    model, monkeypatch, variables, quota, expected
):
    """Regression: a rank of torchrun on 64 cores with a quota of 8 had 64 threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "cpu_quota", lambda: quota)
    rank = Ranks(ModelSetup(LLMConfig(str(model), device="cpu")))
    assert torch.get_num_threads() == expected
    rank.end()
    assert torch.get_num_threads() == N_THREADS
