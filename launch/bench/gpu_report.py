"""The rows of `gpu` as tables and plots."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from launch.bench.gpu_steps import Row
from launch.bench.plot import Chart

_DECODE = re.compile(r"(.+): batch (\d+), context (\d+)")
_PRODUCT = re.compile(r"product (\d+) to (\d+), (\d+) rows, (.+)")
_REHEARSED = "a rehearsal on the CPU: "


def markdown(found: Mapping[str, Sequence[Row]], is_rehearsal: bool, took_s: float) -> str:
    """One table for each step; the table of a rehearsal has no figures."""
    title = "A rehearsal on the CPU: no figure is a GPU's" if is_rehearsal else "On a GPU"
    blocks = [f"# {title}\n\nIn {took_s:.0f} s."]
    for step, rows in found.items():
        lines = [f"## {step}", "", "| | figure | share | target | |", "|---|---|---|---|---|"]
        lines += [f"| {' | '.join(map(_cell, _cells(row, is_rehearsal)))} |" for row in rows]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _cells(row: Row, is_rehearsal: bool) -> tuple[str, ...]:
    if row.wrong:
        return row.name, "none", "", row.target, f"WRONG: {row.wrong}"
    if row.value is None:
        return row.name, "", "", row.target, row.note
    if is_rehearsal:
        return row.name, "ran", "", row.target, ""
    share = "" if row.share is None else f"{row.share:.2f}"
    return row.name, f"{row.value:.4g} {row.unit}", share, row.target, row.note


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
