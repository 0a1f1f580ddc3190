"""Benchmarks the GPU backend on one GPU in less than 8 minutes.

    python -m launch.bench.gpu --out FOLDER [--dry-run]

It needs torch for CUDA, which includes Triton, this package with its requirements, and transformers
for the comparisons. It needs no network and no checkpoint. If the machine with the GPU has no
package index, download the missing wheels on another machine and copy them:

    pip download --only-binary=:all: --no-deps -d WHEELS blake3 msgspec gguf llguidance ...
    pip wheel --no-deps -w WHEELS fairscale
    pip install --no-index --no-deps --target SITE WHEELS/*.whl
    PYTHONPATH=SITE python -m launch.bench.gpu --out FOLDER

Each step runs in its own process with a time limit, so that a failure does not affect other steps.
After a crash, the remaining parts of the step run in a new process. FOLDER gets report.md,
report.json, two plots, a log, and the compiled kernels, which a second run uses again.
A configuration with wrong results gets no figure, and the exit code is 1.

With --dry-run every step runs on the CPU in tiny shapes, with kernels in Triton's interpreter. This
checks the command without a GPU; the report has no figures.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from launch.bench.gpu_report import charts, markdown
from launch.bench.gpu_steps import DEVICE_LOST, Row
from launch.bench.gpu_steps.gpu import COPY, MATRIX, READ
from launch.bench.plot import svg

ROOT = Path(__file__).parents[2]
LIMIT_S = 460.0
_LOG_BYTES = 8 << 20
# A rehearsal gets more time, because the interpreter is slow.
_SLOWER = 4


@dataclass(frozen=True)
class Step:
    """A part of the benchmark, with a process and a time limit of its own.

    Args:
        module: a module of `gpu_steps`, and its arguments after colons.
        title: of the table with its rows, which steps may share.
        is_rehearsed: False if a rehearsal of another step runs the same code.
    """

    module: str
    title: str
    limit_s: float
    is_rehearsed: bool = True


_1B, _8B = "Llama 3.2 1B's shape", "Llama 3 8B's shape"
_PEERS = "transformers for comparison"
_SLICES = "One rank of 8: measured work, modelled collectives"

# What is most worth knowing comes first. Each model has a process of its own, so that its memory is
# returned before the next model.
STEPS = (
    Step("gpu", "The GPU", 40),
    Step("parity", "Whole models", 70),
    Step("shapes:llama-3.2-1b:none", _1B, 60),
    Step("shapes:llama-3-8b:none", _8B, 60),
    Step("shapes:llama-3-8b:int8", _8B, 80),
    Step("shapes:llama-3-8b:int4", _8B, 80, is_rehearsed=False),
    Step("peers:eager", _PEERS, 40),
    Step("kernels", "Kernels against float64", 75),
    Step("slices:llama-3-8b", _SLICES, 50),
    Step("slices:llama-3-70b", _SLICES, 60, is_rehearsed=False),
    Step("growing", "One growing sequence: torch's operators and ours", 45),
    Step("shapes:llama-3.2-1b:none:rest", _1B, 60),
    Step("shapes:llama-3-8b:none:rest", _8B, 60, is_rehearsed=False),
    Step("peers:compiled", _PEERS, 180, is_rehearsed=False),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs every step and writes the report; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m launch.bench.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on the CPU: no figure, but every step"
    )
    given = parser.parse_args(arguments)
    if missing := _missing(given.dry_run):
        parser.error(missing)
    given.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Row]] = {}
    started = time.monotonic()
    slower = _SLOWER if given.dry_run else 1
    log_file = given.out / "log.txt"
    with log_file.open("w") as log:
        for step in (step for step in STEPS if step.is_rehearsed or not given.dry_run):
            left_s = slower * LIMIT_S - (time.monotonic() - started)
            limit_s = min(slower * step.limit_s, left_s)
            own = replace(step, limit_s=limit_s)
            rows = _run(own, given.dry_run, found, log, given.out)
            found.setdefault(step.title, []).extend(rows)
            took_s = time.monotonic() - started
            _write(given.out, found, given.dry_run, took_s)
            print(f"{took_s:5.0f} s  {step.module}", file=sys.stderr, flush=True)
    if log_file.stat().st_size > _LOG_BYTES:
        os.truncate(log_file, _LOG_BYTES)
    print((given.out / "report.md").read_text())
    return int(any(row.wrong for rows in found.values() for row in rows))


def _missing(is_rehearsal: bool) -> str:
    """What the machine lacks, and the remedy; empty if nothing is missing."""
    if find_spec("triton") is None:
        return "the kernels need triton, which is not installed; run: pip install triton"
    if not is_rehearsal and not torch.cuda.is_available():
        return (
            "torch sees no CUDA device here; use a machine with one, or --dry-run for a rehearsal"
        )
    return ""


def _run(
    step: Step, is_rehearsal: bool, before: Mapping[str, list[Row]], log: Any, out: Path
) -> Iterator[Row]:
    """Yields the rows of a step, and one more for each part that crashed or reached the limit."""
    if step.limit_s < 5:
        yield Row(step.module, wrong="not run: the steps before it used all the time")
        return
    rates = {row.name: row.value for rows in before.values() for row in rows if row.value}
    has_rates = {READ, COPY, MATRIX} <= rates.keys()
    flags = ["--dry-run"] * is_rehearsal
    if has_rates:
        flags.append(f"--read-bytes-per-s={rates[READ] * 1e9}")
        flags.append(f"--copy-bytes-per-s={rates[COPY] * 1e9}")
        flags.append(f"--matrix-flops={rates[MATRIX] * 1e12}")
    deadline = time.monotonic() + step.limit_s
    last: str | None = None  # the part that ran when the process ended
    while True:
        after = [] if last is None else [f"--after={last}"]
        part, code = None, 0
        for found in _process(step.module, [*flags, *after], is_rehearsal, deadline, log, out):
            if isinstance(found, int):
                code = found
            elif "part" in found:
                part = found["part"]
            else:
                row = Row(**found)
                yield row if has_rates else replace(row, share=None, copy_share=None)
        if not code:
            return
        if code == -signal.SIGKILL and time.monotonic() >= deadline:
            yield Row(
                step.module, wrong=f"out of time after {step.limit_s:.0f} s; the rest is missing"
            )
            return
        if code != DEVICE_LOST:  # then the row of the part has the error
            yield Row(part or step.module, wrong=f"ended with exit code {code}; see log.txt")
        if part is None or part == last:  # the process ended before its first part
            return
        last = part


def _process(
    module: str, flags: Sequence[str], is_rehearsal: bool, deadline: float, log: Any, out: Path
) -> Iterator[dict[str, Any] | int]:
    """Yields the lines of a process that runs a step, and at last its exit code."""
    left_s = max(deadline - time.monotonic(), 0.0)
    paths = [str(ROOT), str(ROOT / "tests/support"), os.environ.get("PYTHONPATH", "")]
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    env |= {"TRITON_CACHE_DIR": str((out / "kernels").absolute())}
    env |= {"TRITON_INTERPRET": "1"} if is_rehearsal else {}
    command = [sys.executable, "-m", "launch.bench.gpu_steps", module, f"--limit-s={left_s}"]
    with subprocess.Popen(
        [*command, *flags], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=log, text=True
    ) as child:
        clock = threading.Timer(left_s, child.kill)
        clock.start()
        assert child.stdout is not None
        try:
            for line in child.stdout:
                if line.startswith(('{"name"', '{"part"')):
                    yield json.loads(line)
        finally:
            clock.cancel()
    yield child.returncode


def _write(out: Path, found: Mapping[str, list[Row]], is_rehearsal: bool, took_s: float) -> None:
    (out / "report.md").write_text(markdown(found, is_rehearsal, took_s))
    steps = {title: [asdict(row) for row in rows] for title, rows in found.items()}
    whole = {"is_rehearsal": is_rehearsal, "seconds": round(took_s, 1), "steps": steps}
    (out / "report.json").write_text(json.dumps(whole, indent=1))
    for name, chart in charts(found, is_rehearsal).items():
        (out / f"{name}.svg").write_text(svg([chart]))


if __name__ == "__main__":
    sys.exit(main())
