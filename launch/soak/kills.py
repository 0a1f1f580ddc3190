"""Kills ranks under load with `elastic`, and compares every bit with an undisturbed run.

    python -m launch.soak.kills [--runs 100] [--seed 1] [--model tiny|smollm2] [--quant int8]
    python -m launch.soak.kills --hosts [--runs 16]

In each run, new processes answer 16 requests, greedy and sampled, with log-probabilities. SIGKILL
ends random ranks other than rank 0, at random moments: during prefill, while decoding, or while the
others recover. Five ranks become two; with --hosts, three become one. No process replaces a lost
rank: rank 0 would start a new one after two seconds, and the program sets this delay so high that
the number of ranks only falls. The answers must be those of one rank, and the run must leave no
process, no file in /dev/shm and no temporary file. The printed times are those from each kill to
the first token, of any request, from a group without the killed rank.

With --hosts another program starts the ranks one by one, the last one in a second network and PID
namespace, so ranks exchange over TCP. This needs root, and the packages iproute2, util-linux and
gcc of Debian.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from launch.soak.killed_rank import N_STREAMS, Answer, Job, Report
from launch.soak.linked_hosts import ROOT, Link, LinkedHosts, NotPossible, environment, other_ranks
from launch.soak.tally import Tally

EXACT_AND_ELASTIC = {"exact": True, "elastic": True}
LIMIT_S = 240.0
END_LIMIT_S = 20.0  # for ranks on other hosts to end after rank 0
N_SETS = 3  # sets of requests; one reference for each
PROGRAM = sys.executable, "-m", "launch.soak.killed_rank"
# After a kill, the next one comes within this time, or at a number of tokens.
SOON_S = 0.4
MAX_TOKENS = {"tiny": 120, "smollm2": 60}
LONGEST = {"tiny": 200, "smollm2": 40}


class Program:
    """A running rank 0, and its number of tokens so far."""

    def __init__(self, command: Sequence[str], env: dict[str, str], stderr: Any) -> None:
        self.process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
        self._limit = threading.Timer(LIMIT_S, self.process.kill)
        self._limit.start()
        self._changed, self._ended, self.n_tokens, self._last = threading.Condition(), False, 0, ""
        line = self.process.stdout.readline()
        self.pids: list[int] = msgspec.json.decode(line) if line else []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._changed:
                self._last = line
                self.n_tokens = int(line) if line[0] != "{" else self.n_tokens
                self._changed.notify()
        with self._changed:
            self._ended = True
            self._changed.notify()

    def wait_for(self, n_tokens: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self.n_tokens >= n_tokens)

    def report(self) -> Report | None:
        """What it has reported; None if it has failed."""
        self._reader.join()
        self._limit.cancel()
        if self.process.wait():
            return None
        return msgspec.json.decode(self._last, type=Report)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns: 1 if a run failed, 2 if hosts cannot be made, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, help="default: 100, with smollm2 8, with --hosts 16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", choices=MAX_TOKENS, default="tiny")
    parser.add_argument("--quant", default="none", help="as in `generate`")
    parser.add_argument("--hosts", action="store_true")
    flags = parser.parse_args(argv)
    if flags.runs is None:
        flags.runs = 16 if flags.hosts else 8 if flags.model == "smollm2" else 100
    with ExitStack() as stack:
        model = flags.model
        if model == "tiny":
            from tiny_folder import write_endless_folder

            folder = stack.enter_context(tempfile.TemporaryDirectory())
            model = str(write_endless_folder(Path(folder, "tiny")))
        try:
            return soak(flags, model)
        except NotPossible as error:
            print(error, file=sys.stderr)
            return 2


def soak(flags: argparse.Namespace, model: str) -> int:
    """Runs and compares all runs. Returns: 1 if one failed, otherwise 0."""
    if flags.hosts:
        LinkedHosts(2, Link()).close()  # raises before the first reference is computed
    tally, times_s, phases = Tally("runs"), list[float](), Counter[str]()
    references: dict[int, list[Answer]] = {}
    settings = {"model": model, "quant": flags.quant, "dtype": "float32"}
    for number in range(flags.runs):
        set_number = flags.seed * 1000 + number % N_SETS
        job = Job(settings, set_number, MAX_TOKENS[flags.model], LONGEST[flags.model])
        if set_number not in references:
            references[set_number] = reference(job)
        run_seed = flags.seed * 1000 + number
        outcome = run(job, references[set_number], flags.hosts, random.Random(run_seed))
        times_s += outcome.times_s
        phases.update(outcome.phases)
        shown = ", ".join(f"{each:.2f}" for each in outcome.times_s)
        line = f"run seed {run_seed}: next token after {shown} s"
        tally.add(not outcome.faults, "; ".join([line, *outcome.faults]))
    figures = [f"{len(times_s)} kills ({', '.join(f'{n} {p}' for p, n in phases.items())})"]
    if times_s:
        median, most = statistics.median(times_s), max(times_s)
        figures.append(f"next token after {median:.2f} s (median), at most {most:.2f} s")
    return tally.close(*figures)


@dataclass(frozen=True)
class Outcome:
    """What was seen of one run.

    Args:
        faults: why it failed, if it did.
        times_s: from each kill to the next token.
        phases: what the ranks did at each kill.
    """

    faults: list[str]
    times_s: list[float]
    phases: list[str]


def run(job: Job, expected: Sequence[Answer], on_hosts: bool, rng: random.Random) -> Outcome:
    """Starts ranks, kills some, and compares the answers with the expected ones."""
    size, n_kills = (3, 2) if on_hosts else (5, 3)
    own = {} if on_hosts else {"tp_size": size}
    job = msgspec.structs.replace(job, settings={**job.settings, **EXACT_AND_ELASTIC, **own})
    shared = names_in("/dev/shm")
    with tempfile.TemporaryDirectory() as folder:
        start = start_on_hosts if on_hosts else start_locally
        with start(job, size, {"TMPDIR": folder}) as (program, victims):
            killed_s = kill(program, victims, n_kills, job, rng)
            report = program.report()
        faults = left_behind(folder, shared)
    if report is None:
        return Outcome([*faults, f"exit code {program.process.returncode}"], [], [])
    faults += faults_of(report, expected, size - n_kills)
    times_s = recovery_times(report, killed_s, size)
    if len(times_s) < n_kills:
        faults.append("a kill came after the last token")
    return Outcome(faults, times_s, phases_of(report, killed_s, size))


def reference(job: Job) -> list[Answer]:
    """The answers of one rank."""
    report = Program([*PROGRAM, encoded(job)], dict(os.environ), None).report()
    assert report is not None, "the undisturbed run failed"
    return report.answers


def encoded(job: Job) -> str:
    return msgspec.json.encode(job).decode()


@contextmanager
def start_locally(job: Job, _: int, env: dict[str, str]) -> Iterator[tuple]:
    """Starts rank 0, which starts the others. Yields its program, and the others as victims."""
    program = Program([*PROGRAM, encoded(job)], {**os.environ, **env}, subprocess.DEVNULL)
    yield program, [psutil.Process(pid) for pid in program.pids if pid != program.process.pid]


@contextmanager
def start_on_hosts(job: Job, size: int, env: dict[str, str]) -> Iterator[tuple]:
    """Starts all ranks, the last one on the second host. Yields as `start_locally`."""
    with LinkedHosts(2, Link()) as hosts:
        secret = f"PARALLEL_LLAMA_SECRET_FILE={hosts.secret}"
        own = "env", *(f"{name}={value}" for name, value in env.items()), secret
        first, *others = (
            hosts.command(int(rank == size - 1), *own, f"RANK={rank}", *PROGRAM, encoded(job))
            for rank in range(size)
        )
        with other_ranks(others, size) as processes:
            yield Program(first, dict(environment(size)), subprocess.DEVNULL), processes
            for process in processes:
                process.wait(END_LIMIT_S)


def kill(
    program: Program, victims: Sequence[Any], n_kills: int, job: Job, rng: random.Random
) -> list[float]:
    """Kills victims at random moments. Returns: when (monotonic)."""
    killed_s = []
    for number, victim in enumerate(rng.sample(list(victims), min(n_kills, len(victims)))):
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0.0, SOON_S))
        else:  # the last one before 60 % of all tokens
            share = (number + rng.random()) * 0.6 / n_kills
            program.wait_for(int(share * N_STREAMS * job.max_tokens))
            time.sleep(rng.uniform(0.0, 0.02))  # anywhere in a step
        victim.kill()
        killed_s.append(time.monotonic())
    return killed_s


def recovery_times(report: Report, killed_s: Sequence[float], size: int) -> list[float]:
    """From each kill to the first token of a group without the killed rank."""
    firsts = [
        [first_s for n_ranks, first_s in report.first_s.items() if n_ranks < size - number]
        for number in range(len(killed_s))
    ]
    return [min(each) - at_s for each, at_s in zip(firsts, killed_s, strict=True) if each]


def phases_of(report: Report, killed_s: Sequence[float], size: int) -> list[str]:
    """What the ranks were doing at each kill."""
    ready_s = [report.first_s.get(size - number) for number in range(len(killed_s))]
    begin = "during prefill", *["during a recovery"] * len(killed_s)
    return [
        "while decoding" if first_s is not None and at_s > first_s else phase
        for first_s, at_s, phase in zip(ready_s, killed_s, begin, strict=False)
    ]


def faults_of(report: Report, expected: Sequence[Answer], last_size: int) -> list[str]:
    faults = []
    for stream, (one, other) in enumerate(zip(expected, report.answers, strict=True)):
        if one != other:
            at = first_difference(one, other)
            faults.append(f"stream {stream} differs from the undisturbed run at token {at}")
    if min(report.first_s) != last_size or report.n_replaced:
        sizes = sorted(report.first_s, reverse=True)
        faults.append(f"groups of {sizes} ranks, {report.n_replaced} replaced")
    return faults


def first_difference(one: Answer, other: Answer) -> int:
    """The number of the first token that differs in its id or its log-probabilities."""
    pairs = enumerate(zip(one.logprobs, other.logprobs, strict=False))
    n_common = min(len(one.logprobs), len(other.logprobs))
    return next((at for at, (a, b) in pairs if a != b), n_common)


def left_behind(folder: str, shared: set[str]) -> list[str]:
    """The processes of a run, its temporary files, and files in /dev/shm that are not `shared`."""
    found = [f"process {pid} is left" for pid in processes_of(folder)]
    found += [f"temporary file {name} is left" for name in names_in(folder)]
    return found + [f"/dev/shm/{name} is left" for name in names_in("/dev/shm") - shared]


def names_in(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def processes_of(folder: str) -> list[int]:
    """The processes with TMPDIR set to `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == folder:
                found.append(process.pid)
        except psutil.Error:  # it has ended, or belongs to another user
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
