"""Lets one rank of a run hang or die at any moment, and checks the end and the report of the run.

    python -m launch.soak.hangs [--runs 60] [--seed 1]

A run is `generate --timeout 2` with a tiny model on 2 to 4 ranks. After its first answer one rank
receives a signal, which is the fault or starts it (`faulty_rank`). The run must end with exit code
1 within the timeout and one second, name the rank and the fault in its report, show the rank's
stack if the rank can write it, name a folder of stacks that exists, and leave no process behind.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from launch.soak.faulty_rank import FAULTS
from launch.soak.tally import Tally

ROOT = Path(__file__).parents[2]
TIMEOUT_S, MORE_S = 2.0, 1.0
START_S = 200.0  # for what takes seconds on an idle machine
GONE_S = 1.0  # for the kernel to remove processes that were killed
LATE = "rank {rank} of {size} is late: .* it is "
DIFFER = ".*: the ranks called different collectives"
# What the report says of the rank, and a function in its stack; a stopped rank writes none.
SAYS = {
    "SIGKILL": (r"\[rank {rank}\] was killed by SIGKILL", None),
    "SIGSTOP": (LATE + "stopped by a signal", None),
    "SIGSEGV": (r"\[rank {rank}\] was killed by SIGSEGV", ""),
    "crash in C": (r"\[rank {rank}\] was killed by SIGSEGV", "crash_in_c"),
    "loop in Python": (LATE + "alive", "loop_in_python"),
    "loop in C": (LATE + "alive", "loop_in_c"),
    "sleep in C": (LATE + "alive", "sleep_in_c"),
    "skipped collective": ("rank {rank} (is )?in " + DIFFER, ""),
    "collective of another size": ("rank {rank} (is )?in all_reduce " + DIFFER, ""),
    "another collective": ("rank {rank} (is )?in barrier" + DIFFER, "barrier"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the faults; returns 1 if a run broke a promise, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args(argv)
    tally, chance, most_s = Tally("faults"), random.Random(flags.seed), 0.0

    with tempfile.TemporaryDirectory(prefix="hangs-") as name:
        folder = Path(name)
        model = write_inputs(folder)
        kinds: list[str] = []
        for _ in range(flags.runs):
            if not kinds:  # every kind once before any kind again
                kinds = chance.sample(list(SAYS), len(SAYS))
            kind, size = kinds.pop(), chance.choice([2, 3, 4])
            rank, wait_s = chance.randrange(size), chance.uniform(0, 0.5)
            seconds, wrong = run(folder, model, kind, size, rank, wait_s)
            most_s = max(most_s, seconds)
            tally.add(not wrong, f"{kind} in rank {rank} of {size}: {seconds:.2f} s{wrong}")
    return tally.close(f"at most {most_s:.2f} s")


def write_inputs(folder: Path) -> Path:
    """Writes a model, one prompt with a long answer, and prompts with short answers.

    Steps of prefill and of decoding alternate. Returns: the folder of the model.
    """
    from tiny_folder import write_endless_folder

    prompts = [{"prompt": "Once", "max_tokens": 4000}]
    prompts += [{"prompt": f"{i} is" * (i % 9 + 1), "max_tokens": 2 + i % 5} for i in range(2000)]
    lines = [json.dumps(prompt) + "\n" for prompt in prompts]
    (folder / "prompts.jsonl").write_text("".join(lines))
    return write_endless_folder(folder / "model")


def run(
    folder: Path, model: Path, kind: str, size: int, rank: int, wait_s: float
) -> tuple[float, str]:
    """One fault, `wait_s` after the first answer.

    Returns: the seconds from the fault to the end of the run, and what is wrong, or "".
    """
    logs, output = folder / "logs", folder / "answers.jsonl"
    logs.mkdir()
    command = [
        "generate", f"--model={model}", f"--prompts={folder / 'prompts.jsonl'}",
        f"--output={output}", f"--timeout={TIMEOUT_S}", f"--start-timeout={START_S}",
        f"--log-dir={logs}", "--kv-cache-bytes=32MiB", "--max-seq-len=4k",
    ]  # fmt: skip
    if kind in FAULTS:
        module = ["launch.soak.faulty_rank", kind, str(size), str(logs), *command]
    else:
        module = ["parallel_llama", *command, f"--nproc={size}"]
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", *module],
            stdout=said, stderr=said, stdin=subprocess.DEVNULL, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        try:
            await_answer(process, output)
            time.sleep(wait_s)
            number = signal.SIGUSR1 if kind in FAULTS else signal.Signals[kind]
            os.kill(pid_of(rank, process), number)
            began_s = time.monotonic()
            ended = wait(process, 10 * TIMEOUT_S)
            seconds = time.monotonic() - began_s
            left = f"{len(processes_left(process.pid))} processes are left"
        finally:
            for left_over in processes_left(process.pid, 0):
                left_over.kill()
            process.wait()
        said.seek(0)
        report = said.read()
    wrong = [] if ended else ["it did not end"]
    wrong += [] if left.startswith("0 ") else [left]
    wrong += [] if process.returncode == 1 else [f"exit code {process.returncode}"]
    if seconds > TIMEOUT_S + MORE_S:
        wrong.append(f"too late, with load {os.getloadavg()[0]:.0f}")
    wrong += faults_of_report(report, kind, size, rank, logs)
    for path in (logs, output, Path(f"{output}.run")):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return seconds, "".join(f"\n    {what}" for what in [*wrong, *[report] * bool(wrong)])


def await_answer(process: "subprocess.Popen[bytes]", output: Path) -> None:
    deadline = time.monotonic() + START_S
    while not (output.exists() and output.stat().st_size):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the run ended or hung before its first answer")
        time.sleep(0.01)


def wait(process: "subprocess.Popen[bytes]", limit_s: float) -> bool:
    """Returns: whether the process ended in time."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def pid_of(rank: int, launcher: "subprocess.Popen[bytes]") -> int:
    ranks = psutil.Process(launcher.pid).children()
    return next(own.pid for own in ranks if own.environ().get("RANK") == str(rank))


def processes_left(session: int, limit_s: float = GONE_S) -> list[psutil.Process]:
    """The processes of a session that still run after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while True:
        left = [own for own in psutil.process_iter() if is_in_session(own, session)]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.02)


def is_in_session(process: psutil.Process, session: int) -> bool:
    try:
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return os.getsid(process.pid) == session and not is_zombie
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False


def faults_of_report(report: str, kind: str, size: int, rank: int, logs: Path) -> list[str]:
    """What the report of a run lacks."""
    says, function = SAYS[kind]
    wrong = []
    if not re.search(says.format(rank=rank, size=size), report):
        wrong.append(f"the report does not say {says.format(rank=rank, size=size)!r}")
    stack = report.partition(f"rank {rank}, most recent call first:\n")[2]
    if function is not None and not re.match(rf'( +File ".*\n)*? +File ".* in {function}', stack):
        wrong.append(f"the stack of rank {rank} is not shown")
    folder = re.search(r"the stacks of all threads of ranks? [\d, ]+ are in (\S+) on ", report)
    if not folder or not (logs / Path(folder[1]).name / f"rank-{rank}.txt").exists():
        wrong.append("the folder of stacks is not named or does not exist")
    return wrong


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a run ends with it
    sys.exit(main())
