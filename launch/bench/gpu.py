"""Benchmarks the GPU backend on one GPU in less than 10 minutes.

    python -m launch.bench.gpu --out FOLDER [--first] [--steps NAMES] [--resume] [--dry-run]

It needs torch for CUDA (with Triton), this package with its requirements, and transformers for the
comparisons. It needs no network and no checkpoint. If the machine with the GPU has no package
index, download the missing wheels on another machine and copy them:

    pip download --only-binary=:all: --no-deps -d WHEELS blake3 msgspec gguf llguidance ...
    pip wheel --no-deps -w WHEELS fairscale
    pip install --no-index --no-deps --target SITE WHEELS/*.whl
    PYTHONPATH=SITE python -m launch.bench.gpu --out FOLDER

Each step runs in its own process with a time limit, so that a failure does not affect other steps.
After a crash, the remaining parts of the step run in a new process. FOLDER gets report.md,
report.json, two plots, a log, and the compiled kernels, which a second run uses again.
A configuration with wrong results gets no figure, and the exit code is 1.

The most important steps come first. --first ends after 5 minutes at most; the report lists the
steps that were not run. --resume continues an earlier run in the same FOLDER: it keeps the rows of
that run, and runs the steps that are missing, have failed or were cut short. --steps chooses steps;
together with --resume they run again, even if they have succeeded.

With --dry-run the steps run on the CPU in tiny shapes, with kernels in Triton's interpreter, except
steps that would repeat the code of others. This checks the command without a GPU; the report has no
figures.
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
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from launch.bench.gpu_report import Report, StepReport, charts, markdown, read, written
from launch.bench.gpu_state import GPUState, gpu_state
from launch.bench.gpu_steps import COPY, DEVICE_LOST, MATRIX, READ, Row
from launch.bench.plot import svg

ROOT = Path(__file__).parents[2]
LIMIT_S, FIRST_LIMIT_S = 560.0, 290.0
_LEAST_S = 15.0  # a step is not started if less time is left
_WRITE_S = 2.0  # between two reports of a step that runs
_LOG_BYTES = 8 << 20
_LATE = "out of time"
# A rehearsal gets more time, because the interpreter is slow.
_SLOWER = 4


@dataclass(frozen=True)
class Step:
    """A part of the benchmark, with a process and a time limit of its own.

    Args:
        module: a module of `gpu_steps`, and its arguments after colons.
        title: title of the table with its rows; several steps may share a table.
        is_rehearsed: False if a rehearsal of another step runs the same code.
    """

    module: str
    title: str
    limit_s: float
    is_rehearsed: bool = True


_1B, _8B = "Llama 3.2 1B's shape", "Llama 3 8B's shape"
_PEERS = "transformers for comparison"
_SLICES = "One rank of 8: measured work, modelled collectives"

# The most important steps come first. Each step has its own process, so that the memory of its
# models is freed before the next step.
STEPS = (
    Step("gpu", "The GPU", 40),
    Step("parity", "Whole models", 70),
    Step("shapes:llama-3.2-1b:none", _1B, 60),
    Step("shapes:llama-3-8b:none", _8B, 60, is_rehearsed=False),
    Step("quant_products", "Products with 8-bit and 4-bit weights", 40),
    Step("shapes:llama-3-8b:int8", _8B, 80),
    Step("shapes:llama-3-8b:int4", _8B, 80, is_rehearsed=False),
    Step("peers:eager", _PEERS, 40),
    Step("families", "Families and formats, compared with the CPU", 90),
    Step("features", "Features of the engine", 60),
    Step("kernels", "Kernels against float64", 75),
    Step("slices:llama-3-8b", _SLICES, 50),
    Step("slices:llama-3-70b", _SLICES, 60, is_rehearsed=False),
    Step("growing", "One growing sequence: torch's operators and ours", 45),
    Step("shapes:llama-3.2-1b:none:rest", _1B, 60, is_rehearsed=False),
    Step("shapes:llama-3-8b:none:rest", _8B, 60, is_rehearsed=False),
    Step("peers:compiled", _PEERS, 180, is_rehearsed=False),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps and writes the report after each step; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m launch.bench.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--first",
        action="store_true",
        help=f"end after {FIRST_LIMIT_S:.0f} s instead of {LIMIT_S:.0f} s",
    )
    names = ", ".join(step.module for step in STEPS)
    parser.add_argument(
        "--steps",
        metavar="NAMES",
        help=f"run these steps, separated by commas; the first part of a name is enough: {names}",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the report in FOLDER; run what is missing or has failed",
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU: no figures")
    given = parser.parse_args(arguments)
    if missing := _missing(given.dry_run):
        parser.error(missing)
    state = _state(given.dry_run)
    kept: dict[str, StepReport] = {}
    try:
        if given.resume:
            kept = _kept(given.out, given.dry_run, state)
        steps = _chosen(given.steps, kept, given.dry_run)
    except ValueError as error:
        parser.error(str(error))
    given.out.mkdir(parents=True, exist_ok=True)
    limit_s = FIRST_LIMIT_S if given.first else LIMIT_S
    reports = _run_all(steps, kept, state, given.dry_run, limit_s, given.out)
    print((given.out / "report.md").read_text())
    return int(any(row.wrong for report in reports for row in report.rows))


def _chosen(names: str | None, kept: Mapping[str, StepReport], is_rehearsal: bool) -> list[Step]:
    """The steps to run; always the first one if it has no result: all shares need its rates.

    Raises: ValueError for a name that no step's name begins with.
    """
    steps = [step for step in STEPS if step.is_rehearsed or not is_rehearsal]
    unfinished = [
        step for step in steps if step.module not in kept or not kept[step.module].is_right
    ]
    if names is None:
        return unfinished
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if not any(_is_named(step, name) for step in steps):
            raise ValueError(
                f"--steps: there is no step {name!r}; use "
                + ", ".join(step.module for step in steps)
            )
    return [
        step
        for step in steps
        if any(_is_named(step, name) for name in wanted)
        or (step.module == STEPS[0].module and step in unfinished)
    ]


def _is_named(step: Step, name: str) -> bool:
    return f"{step.module}:".startswith(f"{name}:")


def _kept(out: Path, is_rehearsal: bool, state: GPUState | None) -> dict[str, StepReport]:
    """The reports of the steps of an earlier run.

    Raises: ValueError if there is no report, or it is of another kind or GPU.
    """
    try:
        kept = read(json.loads((out / "report.json").read_text()))
    except FileNotFoundError:
        raise ValueError(f"--resume: {out} has no report.json; drop --resume") from None
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"--resume: {out / 'report.json'} is not a report of this version "
            f"({type(error).__name__}: {error}); drop --resume"
        ) from None
    if kept.is_rehearsal != is_rehearsal:
        raise ValueError(
            f"--resume: {out} has a {'rehearsal' if kept.is_rehearsal else 'run on a GPU'}; "
            "use another folder"
        )
    names = {each.before.name for each in kept.steps if each.before} | {state and state.name}
    if len(names - {None}) > 1:
        raise ValueError(
            f"--resume: {out} has figures of another GPU than this one ({state and state.name}); "
            "use another folder"
        )
    return {each.module: each for each in kept.steps}


def _run_all(
    steps: Sequence[Step],
    kept: Mapping[str, StepReport],
    state: GPUState | None,
    is_rehearsal: bool,
    limit_s: float,
    out: Path,
) -> list[StepReport]:
    """Runs steps until the time is used up; returns the reports of all steps, in their order."""
    done, started = dict(kept), time.monotonic()
    slower = _SLOWER if is_rehearsal else 1
    log_file = out / "log.txt"

    def reports() -> list[StepReport]:
        return [done[step.module] for step in STEPS if step.module in done]

    def write() -> None:
        not_run = [step.module for step in steps if step.module not in done]
        _write(out, Report(is_rehearsal, time.monotonic() - started, reports(), not_run))

    write()  # with the list of steps that are not run, in case the first step is killed
    with log_file.open("a" if kept else "w") as log:
        for step in steps:
            left_s = slower * limit_s - (time.monotonic() - started)
            if left_s < _LEAST_S:
                break
            print(f"=== {step.module}", file=log, flush=True)
            own = replace(step, limit_s=min(slower * step.limit_s, left_s))
            is_cut = own.limit_s < slower * step.limit_s
            before, written_s = reports(), time.monotonic()
            for found in _reports(own, is_cut, is_rehearsal, before, log, out):
                done[step.module] = replace(found, before=state)
                if time.monotonic() - written_s >= _WRITE_S:
                    write()
                    written_s = time.monotonic()
            after = _state(is_rehearsal)
            done[step.module] = replace(done[step.module], after=after)
            state = after
            write()
            took_s = time.monotonic() - started
            print(f"{took_s:5.0f} s  {step.module}", file=sys.stderr, flush=True)
    if log_file.stat().st_size > _LOG_BYTES:
        os.truncate(log_file, _LOG_BYTES)
    return reports()


def _reports(
    step: Step, is_cut: bool, is_rehearsal: bool, before: Sequence[StepReport], log: Any, out: Path
) -> Iterator[StepReport]:
    """Runs a step; yields its report after each row, and at the end.

    `is_cut`: whether the step has less than its own limit, because the time of the run is short.
    """
    rates = {row.name: row.value for each in before for row in each.rows if row.value}
    started, rows = time.monotonic(), list[Row]()
    for row in _run(step, is_rehearsal, rates, log, out):
        rows.append(row)
        yield StepReport(step.module, step.title, time.monotonic() - started, [*rows], False)
    took_s = time.monotonic() - started
    is_whole = not (is_cut and rows and rows[-1].wrong.startswith(_LATE))
    if not is_whole:
        rows[-1] = Row(step.module, note=f"cut short after {took_s:.0f} s; the rest is missing")
    yield StepReport(step.module, step.title, took_s, rows, is_whole)


def _state(is_rehearsal: bool) -> GPUState | None:
    return None if is_rehearsal else gpu_state()


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
    step: Step, is_rehearsal: bool, rates: Mapping[str, float], log: Any, out: Path
) -> Iterator[Row]:
    """Yields the rows of a step, and one more for each part that crashed or reached the limit.

    `rates` has the figures of earlier rows, by name.
    """
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
            yield Row(step.module, wrong=f"{_LATE} after {step.limit_s:.0f} s; the rest is missing")
            return
        if code != DEVICE_LOST:  # after DEVICE_LOST the part's row has the error
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
    if is_rehearsal:  # tiny operators take longer with several threads
        env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
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


def _write(out: Path, report: Report) -> None:
    (out / "report.md").write_text(markdown(report))
    (out / "report.json").write_text(json.dumps(written(report), indent=1))
    for name, chart in charts(report).items():
        (out / f"{name}.svg").write_text(svg([chart]))


if __name__ == "__main__":
    sys.exit(main())
