"""Line charts as SVG with logarithmic axes, without a plotting package."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 460, 340
_LEFT, _RIGHT, _BOTTOM = 64, 16, 48
_COLORS = (
    "#0969da", "#cf222e", "#8250df", "#9a6700", "#1a7f37", "#bf3989", "#57606a", "#bc4c00",
)  # fmt: skip
_TICK_WIDTH = 40


@dataclass(frozen=True)
class Chart:
    """Lines through points (x, y) above 0; a line with a single point is drawn as a dot."""

    title: str
    x_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


def svg(charts: Sequence[Chart]) -> str:
    """An SVG image of the charts side by side."""
    body = "".join(
        f'<g transform="translate({number * WIDTH} 0)">{"".join(_drawn(chart))}</g>\n'
        for number, chart in enumerate(charts)
    )
    size = f'width="{len(charts) * WIDTH}" height="{HEIGHT}"'
    style = 'font-family="sans-serif" font-size="12" fill="#1f2328"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n'
        f'<rect {size} fill="#ffffff"/>\n{body}</svg>\n'
    )


def _drawn(chart: Chart) -> Iterator[str]:
    points = [point for line in chart.lines.values() for point in line]
    (x_low, x_high), (y_low, y_high) = (_decades(values) for values in zip(*points, strict=True))
    top = 26 + (len(chart.lines) + 1) // 2 * 15  # below the names, which are in two columns

    def place(x: float, y: float) -> tuple[float, float]:
        right = (math.log10(x) - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT)
        up = (math.log10(y) - y_low) / (y_high - y_low) * (HEIGHT - top - _BOTTOM)
        return round(_LEFT + right, 1), round(HEIGHT - _BOTTOM - up, 1)

    yield _text(_LEFT, 18, chart.title, weight="bold")
    yield _text(WIDTH - _RIGHT, HEIGHT - 10, chart.x_label, anchor="end")
    for value in _marks(y_low, y_high):
        x, y = place(10**x_low, value)
        yield f'<path d="M{x} {y}H{WIDTH - _RIGHT}" stroke="#d1d9e0"/>'
        yield _text(x - 6, y + 4, f"{value:g}", anchor="end")
    free = 0.0  # the position from which there is space for the next tick label
    for at in sorted({x for x, _ in points}):
        x, y = place(at, 10**y_low)
        yield f'<path d="M{x} {y}v4" stroke="#1f2328"/>'
        if x >= free:
            yield _text(x, y + 18, f"{at:g}", "middle")
            free = x + _TICK_WIDTH
    for number, (name, line) in enumerate(chart.lines.items()):
        color = _COLORS[number % len(_COLORS)]
        path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in line))
        yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'
        if len(line) == 1:
            x, y = place(*line[0])
            yield f'<circle cx="{x}" cy="{y}" r="4" fill="{color}"/>'
        yield _text(_LEFT + number % 2 * 190, 34 + number // 2 * 15, name, color=color)


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """The logarithms of the ends of an axis, with some space around the values."""
    low, high = math.log10(min(values)), math.log10(max(values))
    return low - 0.1, max(high, low + 0.1) + 0.1


def _marks(low: float, high: float) -> list[float]:
    """Round values between two logarithms: powers of 10, and more if those are few."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    steps = (1, 2, 5) if high - low < 2 else (1,)
    values = [step * 10.0**decade for decade in decades for step in steps]
    return [value for value in values if low <= math.log10(value) <= high]


def _text(
    x: float, y: float, text: str, anchor: str = "start", color: str = "", weight: str = ""
) -> str:
    extra = (f' fill="{color}"' if color else "") + (f' font-weight="{weight}"' if weight else "")
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{extra}>{escape(text)}</text>\n'
