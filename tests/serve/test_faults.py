"""Ranks that die or hang under a server, servers that are stopped, and servers under overload."""

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from commands import run_command
from served import ONLY_RANK, Served
from tiny_folder import write_endless_folder

from parallel_llama.serve import server
from parallel_llama.serve.access import Access
from parallel_llama.serve.app import make_app
from parallel_llama.serve.service import Service

LONG = {"model": "tiny", "prompt": "Once", "max_tokens": 250, "ignore_eos": True, "seed": 3}
ENDLESS = {**LONG, "max_tokens": 60_000}  # takes minutes if the client stays connected
LIMIT_S = 120  # for what takes a second or two: a busy machine passes, and a hang fails


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_endless_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tiny(folder: Path) -> Iterator[Served]:
    """A model so small that a step takes a millisecond, on two ranks."""
    with Served("--model", str(folder), "--nproc=2", "--drain=1000") as served:
        yield served


def restarting(folder: Path) -> Iterator[Served]:
    """A server that starts its ranks again after each death or hang.

    The ranks wait for each other for 7 s; where they take longer to start, the server tries again.
    """
    limits = "--timeout=7", "--restarts=20"
    with Served("--model", str(folder), "--nproc=2", *limits) as served:
        yield served


# Tests that kill ranks and tests that stop them have a server each, because a server waits twice as
# long before each further restart.
restarted = pytest.fixture(restarting, scope="module")
unstuck = pytest.fixture(restarting, scope="module")


def rank_pids(served: Served) -> list[int]:
    """The engine's processes: rank 0, and the one that it has started."""
    (engine,) = (
        child
        for child in psutil.Process(served.process.pid).children()
        if "parallel_llama.engine_process" in child.cmdline()
    )
    return [engine.pid, *(child.pid for child in engine.children())]


def wait_for(what: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    started = time.monotonic()
    while not what():
        assert time.monotonic() - started < limit_s, f"not within {limit_s} s"
        time.sleep(0.02)


def n_running(served: Served) -> int:
    return served.get("/status")["n_running"] or 0


def health(served: Served) -> int:
    """The status of the answer, or 0 if the server does not answer any more."""
    try:
        return served.send("GET", "/health")[0]
    except (OSError, http.client.HTTPException):
        return 0


def texts(served: Served, n: int, begun: threading.Barrier | None = None) -> list[str]:
    """Streams of different seeds, read side by side; each passes `begun` with its first token."""

    def one(seed: int) -> str:
        events = served.events("/v1/completions", **{**LONG, "temperature": 1.0, "seed": seed})
        pieces = ["".join(choice["text"] for choice in next(events)["choices"])]
        if begun is not None:
            begun.wait(LIMIT_S)
        pieces += [choice["text"] for event in events for choice in event["choices"]]
        return "".join(pieces)

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(one, range(n)))


@contextmanager
def endless(served: Served, n: int = 1) -> Iterator[None]:
    """A client that reads nothing of its endless answers and disconnects at the end."""
    connection = served.connect()
    data = json.dumps({**ENDLESS, "n": n, "stream": True}).encode()
    connection.request("POST", "/v1/completions", data, {"content-type": "application/json"})
    assert connection.getresponse().read(1)
    try:
        yield
    finally:
        connection.close()


@pytest.mark.parametrize("victim", [0, 1], ids=["rank 0", "rank 1"])
def test_a_rank_that_is_killed_is_replaced_and_no_answer_changes(restarted, victim):
    n_lines, n_restarts = len(restarted.lines), restarted.get("/status")["n_restarts"]
    alone = texts(restarted, 4)
    begun = threading.Barrier(5)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(texts, restarted, 4, begun)
        begun.wait(LIMIT_S)
        os.kill(rank_pids(restarted)[victim], signal.SIGKILL)
        wait_for(lambda: health(restarted) == 503)
        status, headers, body = restarted.send("POST", "/v1/completions", LONG)
        assert status == 503 and int(headers["retry-after"]) >= 1
        assert json.loads(body)["error"]["type"] == "service_unavailable_error"
        assert asked.result(LIMIT_S) == alone
    assert health(restarted) == 200
    assert restarted.get("/status")["n_restarts"] > n_restarts
    (why, *_) = (line for line in restarted.lines[n_lines:] if "is being restarted" in line)
    assert "was killed" in why, why  # and not only that the rank is late


def test_elastic_server_continues_every_answer_after_rank_loss(folder):
    """One rank is lost while answers stream, another one while the server is idle; both return."""
    with Served("--model", str(folder), "--nproc=3", "--elastic", "--spares=1") as served:
        alone = texts(served, 4)
        begun = threading.Barrier(5)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(texts, served, 4, begun)
            begun.wait(LIMIT_S)
            os.kill(rank_pids(served)[1], signal.SIGKILL)
            assert asked.result(LIMIT_S) == alone
        os.kill(rank_pids(served)[2], signal.SIGKILL)
        wait_for(lambda: served.get("/status")["n_losses"] == 2)
        wait_for(lambda: served.get("/status")["n_returns"] == 2)
        assert texts(served, 4) == alone
        assert served.get("/health") == {"status": "ready", "tp_size": 3}
        assert served.get("/status")["n_restarts"] == 0
        _, _, exported = served.send("GET", "/metrics")
        assert re.search(rb"parallel_llama:rank_losses_total{[^}]*} 2.0", exported)
        assert re.search(rb"parallel_llama:rank_returns_total{[^}]*} 2.0", exported)
        assert re.search(rb"parallel_llama:tp_size{[^}]*} 3.0", exported)
    assert re.search(r"rank \d of 3 was killed by SIGKILL; the other ranks continue", served.stderr)
    assert re.search(
        r"continuing with 3 ranks after .* s; former spares among the ranks: 1", served.stderr
    )


def test_killed_idle_rank_is_detected_before_the_next_probe(restarted):
    """Regression: only the probe step, every 5 s, detected the loss."""
    wait_for(lambda: health(restarted) == 200)
    own = rank_pids(restarted)[1]
    last_step_s = restarted.get("/status")["step_age_s"]
    # Right after a probe, so that the next one is seconds away.
    wait_for(lambda: restarted.get("/status")["step_age_s"] < last_step_s)
    os.kill(own, signal.SIGKILL)
    wait_for(lambda: health(restarted) == 503, limit_s=2.5)
    wait_for(lambda: health(restarted) == 200)


def test_a_rank_that_hangs_is_replaced(unstuck):
    alone = texts(unstuck, 2)
    own = rank_pids(unstuck)[1]
    with ThreadPoolExecutor(1) as pool:
        os.kill(own, signal.SIGSTOP)
        asked = pool.submit(texts, unstuck, 2)
        wait_for(lambda: health(unstuck) == 503)
        assert asked.result(LIMIT_S) == alone
    assert not psutil.pid_exists(own)


def test_hung_idle_engine_turns_unhealthy_and_recovers(unstuck):
    os.kill(rank_pids(unstuck)[0], signal.SIGSTOP)
    wait_for(lambda: health(unstuck) == 503)
    wait_for(lambda: health(unstuck) == 200)


def test_server_exits_with_the_reason_after_too_many_restarts(folder):
    with Served("--model", str(folder), "--restarts=1") as served:
        for _ in range(2):
            wait_for(lambda: health(served) == 200)
            os.kill(rank_pids(served)[0], signal.SIGKILL)
            wait_for(lambda: health(served) != 200)
        assert served.process.wait(LIMIT_S) == 1
    assert "was killed by SIGKILL" in served.stderr


def test_damaged_checkpoint_ends_the_server_without_traceback(folder, tmp_path):
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in folder.iterdir():
        data = path.read_bytes()
        (damaged / path.name).write_bytes(data[:-64] if path.suffix == ".safetensors" else data)
    done = run_command("serve", "--port=0", "--model", str(damaged))
    assert done.returncode in (1, 2) and "safetensors" in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_lets_requests_finish_and_takes_no_new_ones(tiny):
    alone = texts(tiny, 4)
    begun = threading.Barrier(5)
    with ThreadPoolExecutor(1) as pool:
        with endless(tiny):
            asked = pool.submit(texts, tiny, 4, begun)
            begun.wait(LIMIT_S)
            tiny.process.send_signal(signal.SIGTERM)
            wait_for(lambda: health(tiny) == 503)
            assert tiny.send("POST", "/v1/completions", LONG)[0] == 503
            assert asked.result(LIMIT_S) == alone
            assert tiny.process.poll() is None
        assert tiny.process.wait(LIMIT_S) == 0


def test_requests_that_outlast_the_drain_get_503_or_an_error_event(folder):
    """Regression: they got status 500 as plain text, or a stream that broke off."""
    with Served("--model", str(folder), "--drain=0") as served:
        with ThreadPoolExecutor(1) as pool:
            events = served.events("/v1/completions", **ENDLESS)
            assert next(events)["choices"]
            asked = pool.submit(served.send, "POST", "/v1/completions", ENDLESS)
            wait_for(lambda: n_running(served) == 2)
            served.process.send_signal(signal.SIGTERM)
            last = {}
            with pytest.raises(AssertionError, match="has no"):
                for event in events:
                    last = event
            status, headers, body = asked.result(LIMIT_S)
        assert status == 503 and headers["retry-after"] == "1"
        for error in (last["error"], json.loads(body)["error"]):
            assert error["type"] == "service_unavailable_error"
            assert error["message"] == "the server is shutting down"
        assert served.process.wait(LIMIT_S) == 0
    assert "Traceback" not in served.stderr


@pytest.mark.parametrize("stage", ["read", "tokenised"])
async def test_requests_that_are_not_in_the_engine_when_the_drain_ends_get_503(
    stage, monkeypatch, caplog
):
    """Regression: they got status 500, and the log a traceback."""
    monkeypatch.setattr(server, "_CLOSING_S", 0.1)
    ended, begun, goes_on = asyncio.Event(), threading.Event(), threading.Event()

    def encode(*_: object, **__: object) -> list[int]:
        begun.set()
        goes_on.wait(LIMIT_S)
        return []

    async def app(scope, receive, send) -> None:
        if stage == "read":
            begun.set()
        await access(scope, receive, send)

    inputs = SimpleNamespace(tokenizer=SimpleNamespace(encode=encode), max_seq_len=9)
    engine = SimpleNamespace(
        run=ended.wait, n_choices=0, adapters=[], drain=lambda: None, fail_unfinished=lambda: None,
        preparing=lambda *_, **__: nullcontext(),
    )  # fmt: skip
    access = Access(make_app(Service(["m"], inputs, engine)), [], "127.0.0.1")
    listener, body = server.bound_socket("127.0.0.1", 0), b'{"prompt": "Once"}'
    port = listener.getsockname()[1]
    serving = asyncio.create_task(server.serve(app, engine, listener, 0))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode())
    writer.write(body[:-1] if stage == "read" else body)
    try:
        while not begun.is_set():
            await asyncio.sleep(0.01)
        ended.set()
        await serving
        reply = await reader.read()
    finally:
        goes_on.set()
        writer.close()
    assert reply.startswith(b"HTTP/1.1 503 ") and b"the server is shutting down" in reply
    assert b"retry-after: 1\r\n" in reply.lower() and "Traceback" not in caplog.text


def test_sigterm_under_torchrun_lets_requests_finish(folder):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    with Served("--model", str(folder), "--drain=1000", launcher=launcher) as served:
        alone = texts(served, 2)
        begun = threading.Barrier(3)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(texts, served, 2, begun)
            begun.wait(LIMIT_S)
            served.process.send_signal(signal.SIGTERM)
            assert asked.result(LIMIT_S) == alone
        served.process.wait(LIMIT_S)  # torchrun's exit code reports the signal
    assert "[rank" not in served.stderr


def test_late_second_sigterm_under_a_launcher_does_not_end_the_drain(folder):
    """Regression: rank 0 forwards a signal after a step, and a long step made it a second one."""
    with Served("--model", str(folder), "--drain=1000", env=ONLY_RANK) as served:
        with endless(served):
            for _ in range(2):
                served.process.send_signal(signal.SIGTERM)
                wait_for(lambda: health(served) == 503)
                time.sleep(0.6)
            with pytest.raises(subprocess.TimeoutExpired):
                served.process.wait(2)
            assert health(served) == 503
        assert served.process.wait(LIMIT_S) == 0


def test_killed_http_server_under_a_launcher_is_reported(folder):
    """Regression: rank 0 exited with 0 and without a message."""
    with Served("--model", str(folder), "--restarts=2", env=ONLY_RANK) as served:
        assert "--restarts 2 has no effect: this process was started as a rank" in served.stderr
        children = psutil.Process(served.process.pid).children()
        (frontend,) = (
            child
            for child in children
            if any(each.status == psutil.CONN_LISTEN for each in child.net_connections())
        )
        frontend.kill()
        assert served.process.wait(LIMIT_S) == 1
    assert "the HTTP server was killed by SIGKILL" in served.stderr


def test_second_sigterm_exits_without_draining(tiny):
    with endless(tiny, n=16):
        children = rank_pids(tiny)
        tiny.process.send_signal(signal.SIGTERM)
        wait_for(lambda: health(tiny) == 503)
        time.sleep(0.6)  # two signals at once count as one
        tiny.process.send_signal(signal.SIGTERM)
        assert tiny.process.wait(LIMIT_S) in (0, 128 + signal.SIGTERM)
    wait_for(lambda: not any(map(psutil.pid_exists, children)))


def test_killed_server_leaves_no_rank_processes(tiny):
    children = rank_pids(tiny)
    tiny.process.kill()
    wait_for(lambda: not any(map(psutil.pid_exists, children)))


def test_full_server_answers_429_with_retry_after(folder):
    with Served("--model", str(folder), "--max-requests=4") as served:
        with endless(served, n=4):
            status, headers, body = served.send("POST", "/v1/completions", LONG)
            assert status == 429 and headers["retry-after"] == "1"
            assert json.loads(body)["error"]["type"] == "rate_limit_error"
            assert n_running(served) == 4  # the refusal did not wait
        wait_for(lambda: n_running(served) == 0)
        assert served.send("POST", "/v1/completions", LONG)[0] == 200
        status, _, body = served.send("POST", "/v1/completions", {**LONG, "n": 5})
        assert status == 400 and b"limit of 4" in body
