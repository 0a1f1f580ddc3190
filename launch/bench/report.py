"""The result of a comparison as text and as charts of speed over the bytes of the weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch.bench.plot import Chart

# By key of an engine's result: the heading of the column, and its formatter.
Columns = Mapping[str, tuple[str, Callable[[Any], str]]]


def _spread(values: Mapping[str, float]) -> str:
    return f"{values['median']:g} ({values['min']:g} to {values['max']:g})"


def _share(values: Mapping[str, float]) -> str:
    return f"{values['median']:.0%} ({values['min']:.0%} to {values['max']:.0%})"


_SPEEDS: Columns = {
    "prefill_tokens_per_s": ("prefill, tokens/s", _spread),
    "product_rate_share": ("of float32 rate", _share),
    "decode_tokens_per_s": ("decode, tokens/s", _spread),
    "read_bandwidth_share": ("of memory bandwidth", _share),
    "new_tokens_per_s": ("new tokens/s", _spread),
    "total_s": ("seconds", _spread),
}
_COSTS: Columns = {
    "weight_bytes_per_step": ("weights of a step, MB", lambda n: f"{n / 1e6:.1f}"),
    "start_to_first_token_s": ("start to first token, s", _spread),
    "peak_rss_bytes": ("peak memory, MB", lambda n: f"{n / 1e6:.0f}"),
    "perplexity": ("perplexity", "{:.4g}".format),
}
_CHARTS = {
    "decode_tokens_per_s": "decode, tokens/s",
    "prefill_tokens_per_s": "prefill, tokens/s",
    "new_tokens_per_s": "new tokens/s",
}


def report(result: dict[str, Any]) -> str:
    """Tables of speeds, costs, ratios, agreement and versions, and the engines left out."""
    blocks = [_heading(result)]
    if engines := result["engines"]:
        blocks += [_table("", engines, _SPEEDS), _table("", engines, _COSTS)]
        for name, peers in result["ratios"].items():
            if peers:
                rows = {f"... x {peer}": own for peer, own in peers.items()}
                blocks.append(_table(f"{name} is", rows, _SPEEDS))
        blocks += [_agreement(engines), _versions(engines)]
    blocks += [f"{name} was left out: {why}" for name, why in result["absent"].items()]
    blocks += [f"{name} FAILED: {why}" for name, why in result["failed"].items()]
    return "\n\n".join(blocks)


def _heading(result: dict[str, Any]) -> str:
    lengths = result["prompt_tokens"]
    prompts = f"one prompt of {lengths[0]} tokens"
    if len(lengths) > 1:
        total = sum(lengths)
        each = f"{lengths[0]}" if lengths[0] == lengths[-1] else f"{lengths[0]} to {lengths[-1]}"
        prompts = f"{len(lengths)} prompts of {each} tokens, {total} in all"
    return (
        f"{result['model']}; {prompts}; {result['new_tokens']} new for each\n"
        f"{result['processor']}, {len(result['cores'])} cores{_rates(result)}\n"
        f"rounds: {result['turns']}; median (min to max); "
        f"perplexity of {result['text_tokens']} tokens"
    )


def _rates(result: dict[str, Any]) -> str:
    """The rates of the machine during the runs; empty if no engine ran."""
    if "read_bytes_per_s" not in result:
        return ""
    read, multiply = (
        _spread({name: float(f"{value / 1e9:.3g}") for name, value in result[key].items()})
        for key in ("read_bytes_per_s", "product_flops_per_s")
    )
    return f", which read memory at {read} GB/s and multiply float32 matrices at {multiply} GFLOP/s"


def _table(corner: str, rows: dict[str, dict[str, Any]], columns: Columns) -> str:
    shown = {key: how for key, how in columns.items() if any(key in own for own in rows.values())}
    cells = [
        [name, *(show(own[key]) if key in own else "-" for key, (_, show) in shown.items())]
        for name, own in rows.items()
    ]
    return _columns([[corner, *(heading for heading, _ in shown.values())], *cells])


def _agreement(engines: dict[str, Any]) -> str:
    rows = []
    for name, own in engines.items():
        agreement = own["agreement"]
        if agreement["with"] == name:
            rows.append([name, "reference for the tokens of the others"])
            continue
        text = (
            f"{agreement['tokens']} of {agreement['of_tokens']} tokens the same, all tokens for "
            f"{agreement['prompts']} of {agreement['of_prompts']} prompts"
        )
        if first := agreement.get("first_difference"):
            text += (
                f"; {agreement['near_ties']} near ties, {agreement['wrong']} wrong; the first: "
                f"round {first['turn']}, prompt {first['prompt']}, token {first['token']}, "
                f"{first['gap_nats']:g} nats apart"
            )
        rows.append([name, text])
    return _columns(rows)


def _versions(engines: dict[str, Any]) -> str:
    rows = []
    for name, own in engines.items():
        versions = ", ".join(f"{package} {version}" for package, version in own["versions"].items())
        threads = f"ranks: {own['ranks']}, threads of each: {own['threads']}"
        rows.append([name, own["form"], threads, versions])
    return _columns(rows)


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def charts(result: dict[str, Any]) -> list[Chart]:
    """One chart for each kind of speed, with a line for each engine through all its formats.

    The chart of decode also has a line for the memory bandwidth.
    """
    engines, n_prompts = result["engines"], len(result["prompt_tokens"])
    found = []
    for key, label in _CHARTS.items():
        lines: dict[str, list[tuple[float, float]]] = {}
        for name, own in engines.items():
            if key in own:
                point = _megabytes(own["weight_bytes_per_step"]), own[key]["median"]
                lines.setdefault(name.partition("@")[0], []).append(point)
        if key == "decode_tokens_per_s":
            for n_bytes in sorted({own["weight_bytes_per_step"] for own in engines.values()}):
                limit = n_prompts * result["read_bytes_per_s"]["max"] / n_bytes
                lines.setdefault("memory bandwidth", []).append((_megabytes(n_bytes), limit))
        if any(key in own for own in engines.values()):
            lines = {name: sorted(points) for name, points in lines.items()}
            found.append(Chart(f"{label}, {result['model']}", "MB of weights a step", lines))
    return found


def _megabytes(n_bytes: int) -> float:
    return float(f"{n_bytes / 1e6:.3g}")
