"""Ranks that die or hang under a server, servers that are told to end, and more than they take."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from served import ROOT, Served
from tiny_folder import write_chat_folder

LONG = {"model": "tiny", "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tiny(folder: Path) -> Iterator[Served]:
    """A model so small that a step takes a millisecond, on two ranks."""
    with Served("--model", str(folder), "--nproc=2", "--timeout=10", "--drain=20") as served:
        yield served


def rank_pids(served: Served) -> list[int]:
    """The engine's processes: rank 0, and the one that it has started."""
    (engine,) = (
        child
        for child in psutil.Process(served.process.pid).children()
        if "parallel_llama.cli.serve_engine" in child.cmdline()
    )
    return [engine.pid, *(child.pid for child in engine.children())]


def waits_for(what: Callable[[], bool], limit_s: float) -> float:
    """How long it took to become so."""
    started = time.monotonic()
    while not what():
        assert time.monotonic() - started < limit_s, f"not within {limit_s} s"
        time.sleep(0.02)
    return time.monotonic() - started


def n_running(served: Served) -> int:
    return served.get("/status")["n_running"] or 0


def health(served: Served) -> int:
    return served.send("GET", "/health")[0]


def texts(served: Served, n: int) -> list[str]:
    """Streams of different seeds, read side by side."""

    def one(seed: int) -> str:
        events = served.events("/v1/completions", **{**LONG, "temperature": 1.0, "seed": seed})
        return "".join(choice["text"] for event in events for choice in event["choices"])

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(one, range(n)))


@pytest.mark.parametrize("victim", [0, 1], ids=["rank 0", "rank 1"])
def test_a_rank_that_is_killed_is_replaced_and_no_answer_changes(tiny, victim):
    alone = texts(tiny, 4)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(texts, tiny, 4)
        waits_for(lambda: n_running(tiny) == 4, 10)
        os.kill(rank_pids(tiny)[victim], signal.SIGKILL)
        assert waits_for(lambda: health(tiny) == 503, 5) < 1.0
        status, headers, body = tiny.send("POST", "/v1/completions", LONG)
        assert status == 503 and int(headers["retry-after"]) >= 1
        assert json.loads(body)["error"]["type"] == "service_unavailable_error"
        assert asked.result(60) == alone
    assert health(tiny) == 200
    assert tiny.get("/status")["n_restarts"] >= 1
    assert "started again" in tiny.stderr


def test_a_rank_that_hangs_is_replaced(tiny):
    alone = texts(tiny, 2)
    stopped = rank_pids(tiny)[1]
    with ThreadPoolExecutor(1) as pool:
        os.kill(stopped, signal.SIGSTOP)
        asked = pool.submit(texts, tiny, 2)
        waits_for(lambda: health(tiny) == 503, 15)  # the ranks' limit is 10 s
        assert asked.result(60) == alone
    assert not psutil.pid_exists(stopped)


def test_an_idle_engine_that_hangs_is_not_healthy_for_long(tiny):
    os.kill(rank_pids(tiny)[0], signal.SIGSTOP)
    waits_for(lambda: health(tiny) == 503, 25)
    waits_for(lambda: health(tiny) == 200, 60)


def test_an_engine_that_dies_again_and_again_ends_the_server_with_its_reason(folder):
    with Served("--model", str(folder), "--restarts=1") as served:
        for _ in range(2):
            waits_for(lambda: health(served) == 200, 40)
            os.kill(rank_pids(served)[0], signal.SIGKILL)
            waits_for(lambda: served.process.poll() is not None or health(served) != 200, 10)
        assert served.process.wait(20) == 1
    assert "died of SIGKILL" in served.stderr


def test_a_model_that_cannot_be_loaded_ends_the_server_at_once(folder, tmp_path):
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in folder.iterdir():
        data = path.read_bytes()
        (damaged / path.name).write_bytes(data[:-64] if path.suffix == ".safetensors" else data)
    done = subprocess.run(
        [sys.executable, "-m", "parallel_llama", "serve", "--port=0", "--model", str(damaged)],
        capture_output=True, text=True, cwd=ROOT, timeout=100,
    )  # fmt: skip
    assert done.returncode in (1, 2) and "safetensors" in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_lets_requests_finish_and_takes_no_new_ones(tiny):
    alone = texts(tiny, 4)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(texts, tiny, 4)
        waits_for(lambda: n_running(tiny) == 4, 10)
        tiny.process.send_signal(signal.SIGTERM)
        waits_for(lambda: health(tiny) == 503, 2)
        assert tiny.send("POST", "/v1/completions", LONG)[0] == 503
        assert asked.result(60) == alone
        assert tiny.process.wait(20) == 0


def test_under_torchrun_sigterm_lets_requests_finish_too(folder):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    with Served("--model", str(folder), "--drain=20", launcher=launcher) as served:
        alone = texts(served, 2)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(texts, served, 2)
            waits_for(lambda: n_running(served) == 2, 10)
            served.process.send_signal(signal.SIGTERM)
            assert asked.result(60) == alone
        served.process.wait(40)  # torchrun's own code says that a signal came
    assert "[rank" not in served.stderr


def test_a_second_sigterm_does_not_wait(tiny):
    slow = {**LONG, "max_tokens": 460, "n": 16}
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(tiny.send, "POST", "/v1/completions", slow) for _ in range(4)]
        waits_for(lambda: n_running(tiny) > 0, 10)
        children = rank_pids(tiny)
        tiny.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        tiny.process.send_signal(signal.SIGTERM)
        assert tiny.process.wait(10) in (0, 128 + signal.SIGTERM)
        for one in asked:
            one.exception(10)
    waits_for(lambda: not any(map(psutil.pid_exists, children)), 5)


def test_nothing_is_left_of_a_server_that_is_killed(tiny):
    children = rank_pids(tiny)
    tiny.process.kill()
    waits_for(lambda: not any(map(psutil.pid_exists, children)), 5)


def test_more_than_the_server_takes_is_told_to_come_again(folder):
    with Served("--model", str(folder), "--max-requests=4") as served:
        long = {**LONG, "n": 4}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(served.post, "/v1/completions", **long)
            waits_for(lambda: n_running(served) == 4, 10)
            started = time.monotonic()
            status, headers, body = served.send("POST", "/v1/completions", LONG)
            assert time.monotonic() - started < 0.25
            assert status == 429 and headers["retry-after"] == "1"
            assert json.loads(body)["error"]["type"] == "rate_limit_error"
            asked.result(60)
        assert served.send("POST", "/v1/completions", LONG)[0] == 200
        status, _, body = served.send("POST", "/v1/completions", {**LONG, "n": 5})
        assert status == 400 and b"4 are the most" in body
