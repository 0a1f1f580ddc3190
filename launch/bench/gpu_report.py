"""The report of `gpu` as JSON, tables and plots."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from launch.bench.gpu_state import GPUState
from launch.bench.gpu_steps import Row
from launch.bench.plot import Chart

_DECODE = re.compile(r"(.+): batch (\d+), context (\d+)")
_PRODUCT = re.compile(r"product (\d+) to (\d+), (\d+) rows, (.+)")
_REHEARSED = "a rehearsal on the CPU: "
_HEAD = "| | figure | least to largest | share | of copies | target | |"
_LEGEND = (
    "A measured time or rate is the median of several measurements. A share is a fraction of the "
    "read bandwidth or, for prefill and prompts, of the rate of matrix products; the next column "
    "has the fraction of the copy bandwidth."
)


@dataclass(frozen=True)
class StepReport:
    """The results of a step.

    Args:
        is_whole: False if the run ended during the step.
        before, after: the state of the GPU; None if it is not known.
    """

    module: str
    title: str
    seconds: float
    rows: Sequence[Row]
    is_whole: bool = True
    before: GPUState | None = None
    after: GPUState | None = None

    @property
    def is_right(self) -> bool:
        """Whether nothing is missing or wrong."""
        return self.is_whole and not any(row.wrong for row in self.rows)


@dataclass(frozen=True)
class Report:
    """A run, and the steps of earlier runs that it continues.

    Args:
        seconds: of this run.
        not_run: the names of steps for which there was no time.
    """

    is_rehearsal: bool
    seconds: float
    steps: Sequence[StepReport]
    not_run: Sequence[str] = ()

    def tables(self) -> dict[str, list[Row]]:
        """The rows by title, with notes that compare the time of a row with the row in `than`."""
        values = {row.name: row.value for step in self.steps for row in step.rows}
        found: dict[str, list[Row]] = defaultdict(list)
        for step in self.steps:
            found[step.title] += (_compared(row, values.get(row.than)) for row in step.rows)
        return found


def written(report: Report) -> Any:
    """The report as JSON."""
    return {**asdict(report), "seconds": round(report.seconds, 1)}


def read(found: Any) -> Report:
    """The report in the JSON of `written`.

    Raises: TypeError, KeyError, ValueError if it is not a report.
    """
    steps = [
        StepReport(
            **{
                **step,
                "rows": [Row(**row) for row in step["rows"]],
                **{each: step[each] and GPUState(**step[each]) for each in ("before", "after")},
            }
        )
        for step in found["steps"]
    ]
    return Report(found["is_rehearsal"], found["seconds"], steps, found["not_run"])


def markdown(report: Report) -> str:
    """One table for each title; the tables of a rehearsal have no figures."""
    title = "A rehearsal on the CPU: no figure is a GPU's" if report.is_rehearsal else "On a GPU"
    blocks = [f"# {title}\n\nIn {report.seconds:.0f} s. {_LEGEND}"]
    wrong = [row.name for step in report.steps for row in step.rows if row.wrong]
    if wrong:
        names = "".join(f"\n* {_cell(name)}" for name in wrong)
        blocks.append(f"{len(wrong)} rows are WRONG:\n{names}")
    for step, rows in report.tables().items():
        lines = [f"## {step}", "", _HEAD, "|---|---|---|---|---|---|---|"]
        lines += [f"| {' | '.join(map(_cell, _cells(row, report.is_rehearsal)))} |" for row in rows]
        blocks.append("\n".join(lines))
    if report.not_run:
        names = "".join(f"\n* {name}" for name in report.not_run)
        blocks.append(f"## Not run\n\nThere was no time left; --resume runs these steps:\n{names}")
    if any(step.before or step.after for step in report.steps):
        blocks.append(_states(report.steps))
    return "\n\n".join(blocks) + "\n"


def _compared(row: Row, other: float | None) -> Row:
    """The row with a note that compares its time with another."""
    if not row.value or not other:
        return row
    ratio, how = row.value / other, "slow"
    if ratio < 1:
        ratio, how = 1 / ratio, "fast"
    compared = f"{ratio:.3g} times as {how} as {row.than}"
    return replace(row, note="; ".join(filter(None, (compared, row.note))))


def _states(steps: Sequence[StepReport]) -> str:
    """The state of the GPU before and after each step."""
    first = next(state for step in steps for state in (step.before, step.after) if state)
    lines = [
        "## State of the GPU before and after each step",
        "",
        f"{first.name}, driver {first.driver}; at most {_number(first.most_sm_mhz)} MHz and "
        f"{_number(first.power_limit_w)} W.",
        "",
        "| step | seconds | SM, MHz | memory, MHz | power, W | temperature, C |",
        "|---|---|---|---|---|---|",
    ]
    for step in steps:
        states = step.before, step.after
        pairs = (
            " to ".join(_number(state and getattr(state, name)) for state in states)
            for name in ("sm_mhz", "memory_mhz", "power_w", "temperature_c")
        )
        lines.append(f"| {step.module} | {step.seconds:.0f} | {' | '.join(pairs)} |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}"


def _cells(row: Row, is_rehearsal: bool) -> tuple[str, ...]:
    if row.wrong:
        return row.name, "none", "", "", "", row.target, f"WRONG: {row.wrong}"
    if row.value is None:
        return row.name, "", "", "", "", row.target, row.note
    if is_rehearsal:
        return row.name, "ran", "", "", "", row.target, ""
    spread = "" if row.low is None else f"{row.low:.4g} to {row.high:.4g}"
    shares = ("" if each is None else f"{each:.2f}" for each in (row.share, row.copy_share))
    return row.name, f"{row.value:.4g} {row.unit}", spread, *shares, row.target, row.note


def _cell(text: str) -> str:
    """The text without line breaks and bars, which would end the cell."""
    return " ".join(text.split()).replace("|", "/")


def charts(report: Report) -> dict[str, Chart]:
    """By name: tokens/s over the batch size, and bytes/s over the size of a matrix."""
    decode: dict[str, list[tuple[float, float]]] = defaultdict(list)
    products: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in (row for step in report.steps for row in step.rows if row.value):
        assert row.value is not None
        if match := _DECODE.fullmatch(row.name):
            batch = int(match[2])
            decode[f"{match[1]}, {match[3]} tokens"].append((batch, batch / row.value * 1e3))
        elif (match := _PRODUCT.fullmatch(row.name)) and match[3] == "1":
            n_values = int(match[1]) * int(match[2])
            products[match[4]].append((n_values / 1e6, row.value))
    title = _REHEARSED if report.is_rehearsal else ""
    drawn = {
        "decode": Chart(f"{title}decoded tokens a second", "sequences at once", decode),
        "products": Chart(f"{title}GB/s of products of one row", "values, millions", products),
    }
    return {
        name: Chart(chart.title, chart.x_label, {k: sorted(v) for k, v in chart.lines.items()})
        for name, chart in drawn.items()
        if chart.lines
    }
