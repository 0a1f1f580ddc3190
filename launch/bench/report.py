"""The result of a comparison as text."""

from collections.abc import Sequence
from typing import Any

_LABELS = {
    "prefill_tokens_per_s": "prefill, tokens/s",
    "decode_tokens_per_s": "decode, tokens/s",
    "new_tokens_per_s": "new tokens/s",
    "total_s": "seconds",
    "read_bandwidth_share": "of memory's rate",
}


def report(result: dict[str, Any]) -> str:
    """Tables of speeds, ratios, agreement and versions, and who is not in them."""
    blocks = [_heading(result)]
    if engines := result["engines"]:
        blocks.append(_table("", engines))
        for name, peers in result["ratios"].items():
            if peers:
                rows = {f"... x {peer}": own for peer, own in peers.items()}
                blocks.append(_table(f"{name} is", rows))
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
        f"{result['model']}, {result['dtype']}; {prompts}; {result['new_tokens']} new for each\n"
        f"{result['processor']}, {len(result['cores'])} cores, which read memory at "
        f"{result['read_bytes_per_s'] / 1e9:.1f} GB/s\n"
        f"turns: {result['turns']}; median (least to most)"
    )


def _table(corner: str, rows: dict[str, dict[str, Any]]) -> str:
    keys = [key for key in _LABELS if key in next(iter(rows.values()))]
    cells = [[name, *(_cell(own[key]) for key in keys)] for name, own in rows.items()]
    return _columns([[corner, *(_LABELS[key] for key in keys)], *cells])


def _agreement(engines: dict[str, Any]) -> str:
    (reference, _), *others = engines.items()
    rows = [[reference, "gives the tokens that the others are compared with"]]
    for name, own in others:
        agreement = own["agreement"]
        text = (
            f"{agreement['tokens']} of {agreement['of_tokens']} tokens the same, all of them for "
            f"{agreement['prompts']} of {agreement['of_prompts']} prompts"
        )
        if first := agreement["first_difference"]:
            text += (
                f"; {agreement['near_ties']} near ties, {agreement['wrong']} wrong; the first: "
                f"turn {first['turn']}, prompt {first['prompt']}, token {first['token']}, "
                f"{first['gap_nats']:g} nats apart"
            )
        rows.append([name, text])
    return _columns(rows)


def _versions(engines: dict[str, Any]) -> str:
    rows = []
    for name, own in engines.items():
        versions = ", ".join(f"{package} {version}" for package, version in own["versions"].items())
        threads = f"ranks: {own['ranks']}, threads of each: {own['threads']}"
        rows.append([name, threads, f"started in {own['start_s']:.0f} s", versions])
    return _columns(rows)


def _cell(values: dict[str, float] | float) -> str:
    if isinstance(values, float):
        return f"{values:.0%}"
    return f"{values['median']:g} ({values['min']:g} to {values['max']:g})"


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
