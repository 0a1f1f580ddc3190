"""A comparison as charts: every engine's speed over the bytes of its weights."""

from typing import Any

from launch.bench.plot import Chart

_SPEEDS = {
    "decode_tokens_per_s": "decode, tokens/s",
    "prefill_tokens_per_s": "prefill, tokens/s",
    "new_tokens_per_s": "new tokens/s",
}


def charts(result: dict[str, Any]) -> list[Chart]:
    """One for each kind of speed; an engine is one line through all that its weights are kept in.

    Above decode lies what the memory can feed at the most.
    """
    engines, n_prompts = result["engines"], len(result["prompt_tokens"])
    found = []
    for key, label in _SPEEDS.items():
        lines: dict[str, list[tuple[float, float]]] = {}
        for name, own in engines.items():
            if key in own:
                point = _megabytes(own["weight_bytes_per_step"]), own[key]["median"]
                lines.setdefault(name.partition("@")[0], []).append(point)
        if key == "decode_tokens_per_s":
            for n_bytes in sorted({own["weight_bytes_per_step"] for own in engines.values()}):
                limit = n_prompts * result["read_bytes_per_s"]["max"] / n_bytes
                lines.setdefault("memory's rate", []).append((_megabytes(n_bytes), limit))
        if any(key in own for own in engines.values()):
            lines = {name: sorted(points) for name, points in lines.items()}
            found.append(Chart(f"{label}, {result['model']}", "MB of weights a step", lines))
    return found


def _megabytes(n_bytes: int) -> float:
    return float(f"{n_bytes / 1e6:.3g}")
