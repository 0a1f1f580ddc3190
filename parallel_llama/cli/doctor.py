"""`doctor`: checks this host and the ranks on it, and names a remedy for each fault."""

import json
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from parallel_llama.cli import model
from parallel_llama.cli.arguments import JSON, Flag, Flags, Job, Verb, terminal_width
from parallel_llama.cli.host_checks import host_of, needs_of
from parallel_llama.cli.serve import PORT
from parallel_llama.cli.session import leads
from parallel_llama.cli.terminal import BOLD, DIM, GREEN, RED, YELLOW, Activity, painted
from parallel_llama.doctor.check import CHECKS, Check, in_order, is_ok, report
from parallel_llama.doctor.local_ranks import examine_here
from parallel_llama.doctor.machine import Host, machine_checks
from parallel_llama.errors import escaped
from parallel_llama.parallel.cgroups import cpu_cores
from parallel_llama.parallel.rank_env import is_started_as_rank
from parallel_llama.parallel.timeouts import Timeouts
from parallel_llama.plan import make_plan

MODEL: Flag[str | None] = replace(
    model.MODEL,
    help="also check this model: its memory, its files and some of its layers",
    default=None,
    default_text="only a built-in model",
)
NPROC: Flag[int | None] = replace(model.NPROC, default_text="2, or 1 on a single core")

_COLORS = {"pass": GREEN, "warn": YELLOW, "fail": RED, "skip": DIM}


def prepare(flags: Flags) -> Job:
    """Checks the model and the plan, and returns the job, which starts its ranks itself."""
    n_ranks = model.rank_count(flags[NPROC])
    if flags[NPROC] is None and not is_started_as_rank():
        n_ranks = 2 if cpu_cores() >= 2 else 1
    name, needs, has_weights = flags[MODEL], None, False
    if name is not None:
        files = model.found_model(flags, name)
        args = model.args_of(files)
        make_plan(args, n_ranks)
        has_weights = bool(files.weights)
        needs = needs_of(flags, name, files, args, n_ranks)
    host = host_of(n_ranks, needs, PORT.initial)
    return Job(lambda: _examine(flags, host, n_ranks, name if has_weights else None))


def _examine(flags: Flags, host: Host, n_ranks: int, weights: str | None) -> int:
    """Runs all checks and prints them; `weights` is the model if it has any."""
    checks: list[Check] = []
    timeouts = Timeouts(flags[model.TIMEOUT], flags[model.START_TIMEOUT])
    with Activity("checking this host", sys.stderr) as activity:

        def show(name: str) -> None:
            activity.what = f"checking the ranks: {CHECKS[name]}"

        if is_started_as_rank():
            host_results = tuple(machine_checks(host))
            from parallel_llama.doctor.rank import Examination  # imports torch

            Examination(weights, timeouts, checks.append, show, host_results).run()
        else:
            checks += machine_checks(host)
            show("start")
            examine_here(n_ranks, host.threads, weights, timeouts, checks.append, show)
    if not leads():
        return 0
    if flags[JSON]:
        print(json.dumps(report(checks)), flush=True)
    else:
        print("\n".join(_lines(in_order(checks))), flush=True)
    return 0 if is_ok(checks) else 1


def _lines(checks: Sequence[Check]) -> list[str]:
    """The table, and the verdict as its last line."""
    width = max(len(check.id) for check in checks)
    indent = " " * (width + 8)
    columns = max(terminal_width() - len(indent), 30)
    lines = []
    for check in checks:
        status = painted(check.status.upper(), _COLORS[check.status], sys.stdout)
        first, *rest = textwrap.wrap(escaped(check.seen), columns, break_on_hyphens=False) or [""]
        lines.append(f"{status}  {check.id.ljust(width)}  {first}")
        lines += [indent + line for line in rest]
        if check.remedy and check.status in ("warn", "fail"):
            # Not wrapped, to be copied.
            lines.append(f"{indent}{painted('remedy: ' + escaped(check.remedy), BOLD, sys.stdout)}")
    return [*lines, "", _verdict(checks)]


def _verdict(checks: Sequence[Check]) -> str:
    counts = Counter(check.status for check in checks)
    failed = [check.id for check in checks if check.status == "fail"]
    rest = f"{counts['pass']} passed, {counts['warn']} warned, {counts['skip']} skipped"
    if failed:
        names = ", ".join(dict.fromkeys(failed))
        return painted(f"{len(failed)} failed ({names}), {rest}", RED, sys.stdout)
    color = YELLOW if counts["warn"] else GREEN
    return painted(f"nothing failed: {rest}", color, sys.stdout)


VERB = Verb(
    "doctor",
    "Checks this machine and the ranks on it, and names a remedy for each fault.",
    "[--nproc N] [--model PATH_OR_NAME] [--json]",
    (NPROC, MODEL, model.DOWNLOAD, model.TIMEOUT, model.START_TIMEOUT, model.SECRET_FILE, JSON),
    "parallel-llama doctor --nproc 2",
    prepare,
)
