"""The rows of `gpu` as tables and plots."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from launch.bench.gpu_steps import Row
from launch.bench.plot import Chart

_DECODE = re.compile(r"(.+): batch (\d+), context (\d+)")
_PRODUCT = re.compile(r"product (\d+) to (\d+), (\d+) rows, (.+)")
_REHEARSED = "a rehearsal on the CPU: "
_HEAD = "| | figure | least to largest | share | of copies | target | |"
_LEGEND = (
    "A figure is the median of several measurements. A share is a fraction of the read bandwidth "
    "or, for prefill and prompts, of the rate of matrix products; the next column has the fraction "
    "of the copy bandwidth."
)


def markdown(found: Mapping[str, Sequence[Row]], is_rehearsal: bool, took_s: float) -> str:
    """One table for each step; the table of a rehearsal has no figures."""
    title = "A rehearsal on the CPU: no figure is a GPU's" if is_rehearsal else "On a GPU"
    blocks = [f"# {title}\n\nIn {took_s:.0f} s. {_LEGEND}"]
    for step, rows in with_ratios(found).items():
        lines = [f"## {step}", "", _HEAD, "|---|---|---|---|---|---|---|"]
        lines += [f"| {' | '.join(map(_cell, _cells(row, is_rehearsal)))} |" for row in rows]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def with_ratios(found: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """The rows, with notes that compare the time of a row with that of the row in `than`."""
    values = {row.name: row.value for rows in found.values() for row in rows}

    def noted(row: Row) -> Row:
        other = values.get(row.than)
        if not row.value or not other:
            return row
        ratio, how = row.value / other, "slow"
        if ratio < 1:
            ratio, how = 1 / ratio, "fast"
        compared = f"{ratio:.3g} times as {how} as {row.than}"
        return replace(row, note="; ".join(filter(None, (compared, row.note))))

    return {step: list(map(noted, rows)) for step, rows in found.items()}


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


def charts(found: Mapping[str, Sequence[Row]], is_rehearsal: bool) -> dict[str, Chart]:
    """By name: tokens/s over the batch size, and bytes/s over the size of a matrix."""
    decode: dict[str, list[tuple[float, float]]] = defaultdict(list)
    products: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in (row for rows in found.values() for row in rows if row.value):
        assert row.value is not None
        if match := _DECODE.fullmatch(row.name):
            batch = int(match[2])
            decode[f"{match[1]}, {match[3]} tokens"].append((batch, batch / row.value * 1e3))
        elif (match := _PRODUCT.fullmatch(row.name)) and match[3] == "1":
            n_values = int(match[1]) * int(match[2])
            products[match[4]].append((n_values / 1e6, row.value))
    title = _REHEARSED if is_rehearsal else ""
    drawn = {
        "decode": Chart(f"{title}decoded tokens a second", "sequences at once", decode),
        "products": Chart(f"{title}GB/s of products of one row", "values, millions", products),
    }
    return {
        name: Chart(chart.title, chart.x_label, {k: sorted(v) for k, v in chart.lines.items()})
        for name, chart in drawn.items()
        if chart.lines
    }
