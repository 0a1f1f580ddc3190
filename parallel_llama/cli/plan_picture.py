"""The picture of a plan: which rank holds what, and how full its memory is, as SVG. No torch.

Every row is a rank. The full width is a whole axis of the model, or the memory of the rank that has
or needs the most. Browsers draw the picture in light or dark colours, as the system asks.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from parallel_llama.cli.estimate import Estimate, RankEstimate
from parallel_llama.cli.terminal import size

_WIDTH, _LEFT, _RIGHT = 860, 120, 190
_TRACK = _WIDTH - _LEFT - _RIGHT
_LINE = 18  # of text
_LETTERED = 12  # the smallest height of a row with text in it
_FIRST_HUE, _GOLDEN_ANGLE = 210, 137.5  # of rank 0, and degrees to the hue of the next rank

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.rank { font-size: 10px; fill: #ffffff; text-anchor: middle }
.title { font-size: 16px; font-weight: 600 }
.dim { fill: #59636e }
.page { fill: #ffffff }
.track { fill: #eaeef2 }
.weights { fill: #0969da } .kv { fill: #54aeff } .rest { fill: #8c959f }
.beyond { fill: #cf222e }
.limit { stroke: #1f2328; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
text, .rank { fill: #f0f6fc } .dim { fill: #9198a1 }
.page { fill: #0d1117 } .track { fill: #212830 }
.weights { fill: #4493f8 } .kv { fill: #1f4f8f } .rest { fill: #656c76 }
.beyond { fill: #f85149 } .limit { stroke: #f0f6fc }
}
""".strip()


def picture(planned: Estimate, title: Sequence[str], axes: Mapping[str, Sequence[range]]) -> bytes:
    """A plan as an SVG file.

    Args:
        planned: the plan and the memory that it needs.
        title: lines of text above the tables.
        axes: by name, what each rank holds of an axis; ranges may overlap.
    """
    lane = 14 if len(planned.ranks) <= 16 else 6  # the height of a row
    parts: list[str] = []
    y = 12
    for number, line in enumerate(title):
        y += _LINE
        parts.append(_text(_LEFT - 100, y, line, "title" if number == 0 else "dim"))
    for name, ranges in axes.items():
        y += _LINE
        parts += _axis(name, ranges, y, lane)
        y += lane * len(ranges)
    y += 2 * _LINE
    parts += _legend(y, has_limit=planned.fits is not None)
    y += _LINE // 2
    parts += _memory(planned.ranks, y, lane)
    height = y + lane * len(planned.ranks) + _LINE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title[0])}">'
    )
    page = f'<rect class="page" width="{_WIDTH}" height="{height}"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", page, *parts, "</svg>\n"]).encode()


def _axis(name: str, ranges: Sequence[range], y: int, lane: int) -> Iterator[str]:
    """One row per rank: the part of an axis that the rank holds."""
    whole = max(held.stop for held in ranges)
    middle = y + lane * len(ranges) / 2 + 4
    yield _text(_LEFT - 100, middle, name)
    yield _text(_LEFT + _TRACK + 10, middle, f"{whole:,} in all", "dim")
    for rank, held in enumerate(ranges):
        top, scale = y + rank * lane, _TRACK / whole
        yield _rect(_LEFT, top, _TRACK, lane - 2, 'class="track"')
        if not held:
            continue
        span = f"{held.start}-{held.stop - 1}" if len(held) > 1 else f"{held.start}"
        hue = (_FIRST_HUE + rank * _GOLDEN_ANGLE) % 360
        tooltip = f"rank {rank}: {name} {span}"
        left, width = _LEFT + held.start * scale, len(held) * scale
        yield _rect(left, top, width, lane - 2, f'fill="hsl({hue:.0f} 45% 50%)"', tooltip)
        if lane >= _LETTERED and width >= _LINE:
            yield _text(left + width / 2, top + lane - 4, str(rank), "rank")


def _memory(ranks: Sequence[RankEstimate], y: int, lane: int) -> Iterator[str]:
    """One row per rank: weights, KV cache and rest, and the memory that the rank has."""
    scale = _TRACK / max(max(rank.memory or 0, rank.needed) for rank in ranks)
    for rank in ranks:
        number = rank.shard.rank
        top, left = y + number * lane, 0
        yield _rect(_LEFT, top, (rank.memory or rank.needed) * scale, lane - 2, 'class="track"')
        parts = {"weights": rank.all_weights, "kv": rank.kv.needed, "rest": rank.working}
        for name, n_bytes in parts.items():
            tooltip = f"rank {number}: {size(n_bytes)} of {'KV cache' if name == 'kv' else name}"
            box = _LEFT + left * scale, top, n_bytes * scale, lane - 2
            yield _rect(*box, f'class="{name}"', tooltip)
            left += n_bytes
        if rank.memory is not None:
            limit = _LEFT + rank.memory * scale
            if rank.needed > rank.memory:
                tooltip = f"rank {number} lacks {size(rank.needed - rank.memory)}"
                beyond = (rank.needed - rank.memory) * scale
                yield _rect(limit, top, beyond, lane - 2, 'class="beyond"', tooltip)
            yield f'<path class="limit" d="M{limit:.1f} {top - 1}v{lane}"/>'
        if lane >= _LETTERED:
            has = "" if rank.memory is None else f" of {size(rank.memory)}"
            yield _text(_LEFT - 100, top + lane - 4, f"rank {number}")
            yield _text(_LEFT + _TRACK + 10, top + lane - 4, f"{size(rank.needed)}{has}", "dim")


def _legend(y: int, *, has_limit: bool) -> Iterator[str]:
    names = {"weights": "weights", "kv": "KV cache", "rest": "rest"}
    if has_limit:
        names["beyond"] = "beyond the rank's memory"
    yield _text(_LEFT - 100, y, "Memory")
    for number, (name, label) in enumerate(names.items()):
        left = _LEFT + 95 * number
        yield _rect(left, y - 9, 10, 10, f'class="{name}"')
        yield _text(left + 15, y, label, "dim")


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    class_ = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{class_}>{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, style: str, tooltip: str = "") -> str:
    """A rectangle with a tooltip."""
    inner = f"<title>{escape(tooltip)}</title>" if tooltip else ""
    box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f"<rect {box} {style}>{inner}</rect>"
