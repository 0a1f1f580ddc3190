"""An engine in a process of its own: the process, and the `Worker` that starts and calls it.

    python -m launch.bench.worker ENGINE_MODULE SETUP
    python -m launch.bench.worker ENGINE_MODULE SOURCE TARGET FORM

The first form keeps the engine loaded between rounds, because a start may take minutes. Its first
line of output holds the engine's versions. After that each input line holds a method of `Loaded`
and its arguments, and each output line holds the result. The process ends when its input ends.
The second form writes weights in the format that the engine loads.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from launch.bench.engines import Measurement, Setup

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 900.0
ANSWER_LIMIT_S = 1800.0
END_LIMIT_S = 5.0

# No look-ups or reports over the network.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


class RuntimeFailed(Exception):
    """An engine did not start, ended, or gave a wrong number of tokens."""


class Worker:
    """A running engine; the constructor starts `command` and waits for its first line.

    Raises: RuntimeFailed with the last line of stderr, if the engine does not start.
    """

    def __init__(self, command: Sequence[str], n_threads: int) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 -- closed in close()
        started = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | _ENVIRONMENT | {"OMP_NUM_THREADS": str(n_threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        try:
            self.versions: dict[str, str] = self._read_line(START_LIMIT_S)["versions"]
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - started

    def answer(self, prompts: list[list[int]], n_new: int) -> Measurement:
        """The measured answers to `prompts` in one round.

        Raises: RuntimeFailed if the engine fails or returns a wrong number of tokens.
        """
        run = Measurement(**self._ask("answer", prompts=prompts, n_new=n_new))
        lengths = [len(tokens) for tokens in run.tokens]
        if lengths != [n_new] * len(prompts):
            raise RuntimeFailed(f"was asked for {n_new} tokens per prompt and returned {lengths}")
        return run

    def nll(self, tokens: list[int]) -> float:
        """As `Loaded.nll`.

        Raises: RuntimeFailed if the engine fails.
        """
        nll: float = self._ask("nll", tokens=tokens)
        return nll

    def peak_bytes(self) -> int:
        """The sum of the peak memory of the engine's processes; shared memory counts for each."""
        return sum(map(_peak_bytes, _family(self._process.pid)))

    def close(self) -> None:
        """Ends the engine by closing its input, and by signals if it does not end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_LIMIT_S)
        self._signal(signal.SIGKILL)  # for child processes that the engine has left behind
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _ask(self, method: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([method, arguments]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("ended") from None
        return self._read_line(ANSWER_LIMIT_S)

    def _read_line(self, limit_s: float) -> Any:
        """The next line, decoded; if a line has begun, waits for its end."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                raise self._failure(f"gave no output for {limit_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failure("ended")
        return json.loads(line)

    def _failure(self, what: str) -> RuntimeFailed:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        last = [line.strip() for line in lines if line.strip()][-1:]
        return RuntimeFailed(": ".join([what, *last])[:2000])

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _family(pid: int) -> Iterator[int]:
    """A process and all its running descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from _family(int(child))


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    peak = status.partition("VmHWM:")[2].split()[:1]  # empty for a process that has ended
    return int(peak[0]) << 10 if peak else 0


def main() -> None:
    """Serves an engine until the input ends, or converts weights."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print to stdout, even on import, now print to stderr
    name, *arguments = sys.argv[1:]
    engine = import_module(f"launch.bench.engines.{name}")
    match arguments:
        case [setup]:
            _serve(engine, Setup(**json.loads(setup)), channel)
        case [source, target, form]:
            engine.convert(Path(source), Path(target), form)


def _serve(engine: Any, setup: Setup, channel: TextIO) -> None:
    def send(message: Any) -> None:
        print(json.dumps(message), file=channel, flush=True)

    loaded = engine.load(setup)
    send({"versions": engine.VERSIONS})
    for line in sys.stdin:
        method, arguments = json.loads(line)
        result = getattr(loaded, method)(**arguments)
        send(asdict(result) if isinstance(result, Measurement) else result)


if __name__ == "__main__":
    main()
