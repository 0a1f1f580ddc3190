"""From timed runs to rates, their spread, and their ratios."""

import statistics
from collections.abc import Sequence
from typing import Any

from launch.bench.engines import Run
from launch.bench.tasks import Task

Spread = dict[str, float]


def rates(task: Task, run: Run) -> dict[str, float]:
    """What one run comes to; a decode rate only where there is a token after the first."""
    if task.kind == "ragged":
        n_tokens = len(task.lengths) * task.n_new
        return {"new_tokens_per_s": n_tokens / run.total_s, "total_s": run.total_s}
    figures = {"prefill_tokens_per_s": sum(task.lengths) / run.first_token_s}
    if task.n_new > 1:
        decode_s = run.total_s - run.first_token_s
        figures["decode_tokens_per_s"] = (task.n_new - 1) / decode_s
    return figures


def spread(values: Sequence[float]) -> Spread:
    """Median, least and most, to four significant digits."""
    chosen = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: float(f"{value:.4g}") for name, value in chosen.items()}


def spreads(task: Task, runs: Sequence[Run]) -> dict[str, Spread]:
    per_run = [rates(task, run) for run in runs]
    return {key: spread([figures[key] for figures in per_run]) for key in per_run[0]}


def ratios(task: Task, ours: Sequence[Run], peer: Sequence[Run]) -> dict[str, Spread]:
    """How many times as fast `ours` is, turn by turn: what slows a turn down slows both."""
    pairs = [(rates(task, a), rates(task, b)) for a, b in zip(ours, peer, strict=True)]
    return {
        key: spread([a[key] / b[key] for a, b in pairs])
        for key in pairs[0][0]
        if key.endswith("_per_s")
    }


def all_ratios(task: Task, runs: dict[str, list[Run]]) -> dict[str, dict[str, Any]]:
    """The ratios of every engine called ours to every other engine."""
    return {
        name: {
            peer: ratios(task, own, other)
            for peer, other in runs.items()
            if not peer.startswith("ours")
        }
        for name, own in runs.items()
        if name.startswith("ours")
    }
