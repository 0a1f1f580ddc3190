"""Limits, exit and restart of the process that runs untrusted templates and tokenizers.

Most tests use the template job, because a template can make the process do nearly anything.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from parallel_llama.errors import CheckpointError
from parallel_llama.tokenizer import bounded_process, sandbox_main, sandbox_templates
from parallel_llama.tokenizer.bounded_process import BoundedProcess, JobRequest, Stopped

pytestmark = pytest.mark.slow

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def process() -> Iterator[BoundedProcess]:
    process = BoundedProcess("sandbox_templates", 128 << 20)
    yield process
    process.close()


def request(template: str, cpu_s: float = 0.3, cpu_s_per_byte: float = 0.0) -> JobRequest:
    return JobRequest(cpu_s, cpu_s_per_byte, {"template": template, "context": {}})


def worker_of(process: BoundedProcess) -> psutil.Process:
    return psutil.Process(process._child._process.pid)


def test_request_over_its_cpu_limit_is_stopped_and_the_next_runs(process):
    assert process.ask(request("ready")) == {"text": "ready"}
    with pytest.raises(Stopped, match=r"more than 0\.3 s of CPU time"):
        process.ask(request(ENDLESS))
    assert process.ask(request("next")) == {"text": "next"}


def test_cpu_limit_grows_with_request_size(process):
    """The limit grows by 1 s per kB: the long request may run the loop that stops the short one."""
    slow = "{% for a in range(60) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(Stopped, match="CPU time"):
        process.ask(request(slow, 0.05))
    assert process.ask(request(slow + "x" * 30_000, 0.05, 0.001)) == {"text": "x" * 30_000}


def test_time_of_earlier_requests_is_not_counted(process):
    slow = "{% for a in range(4) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    process.ask(request("ready"))
    pid = worker_of(process).pid
    while worker_of(process).cpu_times().user < 0.5:
        process.ask(request(slow))
    assert worker_of(process).pid == pid


def test_waiting_for_a_busy_machine_does_not_count_as_cpu_time(process):
    """Regression: the limit counted wall time, so requests on a busy machine were stopped."""
    process.ask(request("ready"))
    child = worker_of(process)
    child.suspend()
    timer = threading.Timer(1.0, child.resume)
    timer.start()
    assert process.ask(request("late", cpu_s=0.3)) == {"text": "late"}
    timer.join()


def test_suspended_process_is_replaced_after_the_wall_time_limit(process, monkeypatch):
    process.ask(request("ready"))
    worker_of(process).suspend()
    with monkeypatch.context() as impatient:
        impatient.setattr(bounded_process, "WALL_BASE_S", 0.2)
        impatient.setattr(bounded_process, "WALL_PER_CPU_S", 1.0)
        with pytest.raises(Stopped, match=r"does not end within 0\.5 s"):
            process.ask(request("x"))
    assert process.ask(request("next")) == {"text": "next"}


def test_a_killed_process_is_started_again(process):
    process.ask(request("ready"))
    killed = worker_of(process)
    killed.kill()
    killed.wait(60)
    assert process.ask(request("next")) == {"text": "next"}
    assert worker_of(process).pid != killed.pid


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, EOFError, OverflowError])
def test_reply_to_an_interrupted_request_is_not_read_by_the_next(process, error):
    """Regression: after Ctrl-C, the late reply was read as the reply to the next request.

    A TimeoutError of the handler was reported as the limit of the process.
    """

    def interrupt(*_: object) -> None:
        raise error

    process.ask(request("ready"))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(error):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            process.ask(request(ENDLESS, cpu_s=20))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert process.ask(request("second")) == {"text": "second"}


def test_a_reply_is_bounded(process, monkeypatch):
    monkeypatch.setattr(bounded_process, "MAX_REPLY_BYTES", 1000)
    assert process.ask(request("{{ 'a' * 1000 }}")) == {"text": "a" * 1000}
    with pytest.raises(Stopped, match="its result is too long"):
        process.ask(request("{{ 'a' * 900000 }}"))


def test_opening_request_is_repeated_in_every_new_process(monkeypatch):
    """Also after an interrupt before it was sent."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    process = BoundedProcess("sandbox_tokenizers", 128 << 20)
    ids = {"a": 0, "b": 1}
    model = {"type": "BPE", "vocab": ids, "merges": []}
    file = json.dumps({"version": "1.0", "model": model, "added_tokens": []}).encode()
    assert process.open(JobRequest(1.0, 0.0, data=file))["ids"] == ids
    for _ in range(2):
        encode = JobRequest(1.0, 0.0, {"special": True}, b"ba")
        assert process.ask(encode) == {"ids": [1, 0]}
        process.close()
        with monkeypatch.context() as patch:
            patch.setattr(process, "_exchange", interrupt)
            with pytest.raises(KeyboardInterrupt):
                process.ask(encode)


def test_a_process_has_the_priority_of_the_thread_that_starts_it(process):
    """Regression: autogroups gave the process as much CPU time as the whole engine."""
    if not Path("/proc/self/autogroup").exists():
        pytest.skip("this kernel does not schedule sessions as groups")

    def ask() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 7)
        process.ask(request("x"))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert worker_of(process).nice() == 7
    session = Path(f"/proc/{worker_of(process).pid}/autogroup").read_text()
    assert session.split()[-2:] == ["nice", "7"]


def test_close_leaves_no_process_behind(process):
    process.ask(request("ready"))
    pid = worker_of(process).pid
    process.close()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("program", ["/bin/false", "/bin/nothing"])
def test_error_names_the_command_that_cannot_start(monkeypatch, program):
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(CheckpointError, match=rf"did not start: {program} .*sandbox_main\.py"):
        BoundedProcess("sandbox_templates", 128 << 20).ask(request("x"))


def test_a_process_opens_no_socket_and_no_file_for_writing(process):
    process.ask(request("ready"))
    child = worker_of(process)
    assert child.net_connections() == []
    assert child.open_files() == []
    limits = Path(f"/proc/{child.pid}/limits").read_text().splitlines()
    assert any(line.startswith("Max file size") and line.split()[3] == "0" for line in limits)


PARENT = f"""
import sys
from parallel_llama.tokenizer.bounded_process import BoundedProcess, JobRequest
process = BoundedProcess("sandbox_templates", 128 << 20)
def ask(template):
    return process.ask(JobRequest(1.0, 0.0, {{"template": template, "context": {{}}}}))
ask("ready")
print(process._child._process.pid, flush=True)
if sys.argv[1] == "working":
    ask("{ENDLESS}")
sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["idle", "working"])
def test_process_ends_when_its_parent_is_killed(state):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdin is not None and parent.stdout is not None
    with parent.stdin, parent.stdout:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
        assert psutil.wait_procs([child], timeout=200)[1] == []


def test_job_over_its_cpu_limit_is_killed_by_its_own_timer():
    child = subprocess.Popen(
        [sys.executable, sandbox_main.__file__, sandbox_templates.__file__, str(128 << 20)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None and child.stdout is not None
    with child.stdin, child.stdout:
        assert json.loads(child.stdout.readline()) == {"ready": True}
        for line in ({"n_bytes": 0, "cpu_s": 0.2}, {"template": ENDLESS, "context": {}}):
            child.stdin.write(json.dumps(line).encode() + b"\n")
        child.stdin.flush()
        started = time.monotonic()
        assert child.wait(timeout=200) == -signal.SIGPROF
        assert time.monotonic() - started > 0.1
