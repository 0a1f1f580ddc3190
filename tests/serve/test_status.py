"""What /status reports about ranks and speed."""

import os
from types import SimpleNamespace

import msgspec
import pytest

from parallel_llama.request import SamplingParams
from parallel_llama.serve import metrics, status
from parallel_llama.serve.metrics import LONG_WINDOW_S, Rate
from parallel_llama.serve.status import status_of
from parallel_llama.serve.wire import Loaded, RankFacts, framed, from_engine


@pytest.mark.parametrize("cuda_bytes", [5 << 30, None])
def test_status_reports_weight_and_cuda_bytes_of_each_rank(cuda_bytes):
    """Host memory does not show a model on a GPU."""
    ranks = tuple(RankFacts(rank, 7, None, cuda_bytes) for rank in range(2))
    loaded = Loaded("bfloat16", "none", 1, 1000, 16, 1000, ranks)
    loaded = from_engine.decode(framed(loaded)[4:])
    engine = SimpleNamespace(
        loaded=loaded, last_step=None, state="ready", step_age_s=0.0, n_restarts=0, n_losses=0,
        n_returns=0, metrics=SimpleNamespace(token_rate=Rate()),
    )  # fmt: skip
    inputs = SimpleNamespace(max_seq_len=1000, sampling_params=SamplingParams)
    found = status_of(SimpleNamespace(engine=engine, names=["m"], inputs=inputs))
    assert [rank["cuda_bytes"] for rank in found["ranks"]] == [cuda_bytes] * 2
    assert [rank["weight_bytes"] for rank in found["ranks"]] == [7, 7]
    assert msgspec.json.encode(found)


def test_resident_memory_is_counted_in_pages_of_the_host(monkeypatch):
    """Regression: ARM hosts with pages of 64 KiB showed a sixteenth of the memory."""
    monkeypatch.setattr(status, "getpagesize", lambda: 65536)
    n_bytes = status._resident_bytes(os.getpid())
    assert n_bytes > 16 * (1 << 20) and n_bytes % 65536 == 0
    monkeypatch.setattr(status, "getpagesize", lambda: 4096)
    assert status._resident_bytes(os.getpid()) < n_bytes / 8


def test_rate_reports_current_and_last_minute_speed(monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now_s))
    counted = Rate()
    now_s += 1
    counted.add(50)
    assert counted.per_s() == counted.per_s(LONG_WINDOW_S) == 10
    now_s += 19
    assert (counted.per_s(), counted.per_s(LONG_WINDOW_S)) == (0, 50 / 20)
    now_s += 30
    for _ in range(100):
        counted.add(1)
    assert len(counted._counts) == 2
    assert (counted.per_s(), counted.per_s(LONG_WINDOW_S)) == (20, 150 / 50)
    now_s += 40
    assert (counted.per_s(), counted.per_s(LONG_WINDOW_S)) == (0, 100 / 60)
    counted.add(6)
    assert len(counted._counts) == 2
