"""`plan`: who holds what, before a byte is loaded. Imports no torch."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_llama.cli.arguments import (
    DEVICE,
    DTYPE,
    JSON,
    MAX_SEQ_LEN,
    MODEL,
    Flag,
    Verb,
    count_or_range,
    numbers,
    whole,
)
from parallel_llama.cli.model import find_args
from parallel_llama.cli.ranks import Job
from parallel_llama.cli.terminal import DIM, GREEN, RED, bar, painted, size, table
from parallel_llama.config import ModelArgs, context_length
from parallel_llama.errors import UsageError
from parallel_llama.plan import (
    ShardPlan,
    Share,
    default_dtype,
    kv_bytes_per_token,
    make_plan,
    weight_bytes,
)

BYTES_PER_VALUE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
CUTS = {"kv_heads": "KV heads", "heads": "query heads"}
BAR_WIDTH = 24
GIB = 1 << 30


@dataclass(frozen=True)
class Estimate:
    """A plan and what its ranks need for `n_tokens` tokens in the KV cache.

    Units: bytes; `memory` in bytes too.
    """

    args: ModelArgs
    plan: ShardPlan
    dtype: str
    n_tokens: int
    memory: tuple[float, ...] | None = None

    def weights(self, share: Share) -> int:
        return weight_bytes(self.args, share, BYTES_PER_VALUE[self.dtype])

    def kv_per_token(self, share: Share) -> int:
        return kv_bytes_per_token(self.args, share, BYTES_PER_VALUE[self.dtype])

    def needed(self, share: Share) -> int:
        return self.weights(share) + self.kv_per_token(share) * self.n_tokens

    @property
    def total_weights(self) -> int:
        return sum(map(self.weights, self.plan.shares))

    @property
    def one_rank_weights(self) -> int:
        return self.weights(make_plan(self.args, 1).shares[0])

    @property
    def kv_overhead(self) -> float:
        """KV heads held beyond one copy of each, as a share of that copy."""
        held = sum(share.n_local_kv_heads for share in self.plan.shares)
        return held / self.args.n_kv_heads - 1

    @property
    def room_for_tokens(self) -> int | None:
        """Tokens of KV cache that the tightest rank has room for; None if memory is unknown."""
        if self.memory is None:
            return None
        rooms = [
            int((gib - self.weights(share)) // self.kv_per_token(share))
            for share, gib in zip(self.plan.shares, self.memory, strict=True)
        ]
        return max(0, min(rooms))

    @property
    def fits(self) -> bool | None:
        if self.memory is None:
            return None
        ranks = zip(self.plan.shares, self.memory, strict=True)
        return all(self.needed(share) <= limit for share, limit in ranks)


def prepare(
    model: str,
    nproc: list[int] | None,
    memory: list[float] | None,
    max_seq_len: int | None,
    batch: int,
    dtype: str | None,
    device: str,
    json: bool,
) -> Job:
    """Check the request and return the job that prints the plan, or the table of a range."""
    args = find_args(model)
    dtype = dtype or default_dtype(args, _kind(device))
    n_tokens = context_length(args, max_seq_len) * batch
    counts = nproc or [len(memory) if memory else 1]
    if len(counts) == 2:
        if memory is not None:
            raise UsageError("--memory needs one number of ranks; give --nproc N, not a range")
        estimates = _estimates(args, range(counts[0], counts[1] + 1), dtype, n_tokens)
        return Job(lambda: _show_range(model, estimates, json))
    plan = make_plan(args, counts[0], memory)
    limits = tuple(gib * GIB for gib in memory) if memory else None
    estimate = Estimate(args, plan, dtype, n_tokens, limits)
    return Job(lambda: _show_one(model, estimate, batch, json))


def _kind(device: str) -> str:
    """'cpu' or 'cuda'; where it is open, whether the NVIDIA driver is there, without torch."""
    if device == "auto":
        return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    return device


def _estimates(
    args: ModelArgs, sizes: range, dtype: str, n_tokens: int
) -> dict[int, Estimate | str]:
    """The estimate of each size, or why it is refused."""
    found: dict[int, Estimate | str] = {}
    for tp_size in sizes:
        try:
            found[tp_size] = Estimate(args, make_plan(args, tp_size), dtype, n_tokens)
        except UsageError as error:
            found[tp_size] = str(error)
    return found


def _show_one(model: str, estimate: Estimate, batch: int, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"model": model, **_object(estimate), "batch": batch}))
    else:
        print("\n".join(_page(model, estimate, batch)))
    return 0


def _show_range(model: str, estimates: dict[int, Estimate | str], as_json: bool) -> int:
    if as_json:
        plans = [
            {"tp_size": tp_size, "error": found} if isinstance(found, str) else _object(found)
            for tp_size, found in estimates.items()
        ]
        print(json.dumps({"model": model, "plans": plans}))
    else:
        print("\n".join(_overview(model, estimates)))
    return 0


def _object(estimate: Estimate) -> dict[str, Any]:
    """The JSON form of a plan; ranges are half-open [start, stop]."""
    ranks = [
        {
            "rank": share.rank,
            "heads": _pair(share.heads),
            "kv_heads": _pair(share.kv_heads),
            "ffn": _pair(share.ffn),
            "vocab": _pair(share.vocab),
            "weight_bytes": estimate.weights(share),
            "kv_bytes_per_token": estimate.kv_per_token(share),
        }
        for share in estimate.plan.shares
    ]
    return {
        "tp_size": estimate.plan.tp_size,
        "ranks": ranks,
        "imbalance": estimate.plan.balance,
        "fits": estimate.fits,
        "cut": estimate.plan.cut,
        "dtype": estimate.dtype,
        "kv_tokens": estimate.n_tokens,
        "room_for_kv_tokens": estimate.room_for_tokens,
        "weight_bytes": estimate.total_weights,
        "one_rank_weight_bytes": estimate.one_rank_weights,
    }


def _page(model: str, estimate: Estimate, batch: int) -> list[str]:
    """One plan for a person: the model, a row per rank, and what to make of it."""
    args, plan, out = estimate.args, estimate.plan, sys.stdout
    scale = max(estimate.memory or map(estimate.needed, plan.shares))
    rows = [
        [
            str(share.rank),
            _span(share.heads),
            _span(share.kv_heads),
            _span(share.ffn),
            _span(share.vocab),
            size(estimate.weights(share)),
            size(estimate.kv_per_token(share)),
            _memory(estimate, share, scale),
        ]
        for share in plan.shares
    ]
    header = ["rank", "heads", "KV heads", "channels", "vocabulary", "weights", "KV/token"]
    sequences = f"{estimate.n_tokens // batch:,} tokens" + (f" x {batch}" if batch > 1 else "")
    return [
        _title(model, args, estimate.dtype),
        "",
        *table([*header, f"weights and KV cache of {sequences}"], rows, out),
        "",
        f"balance    {plan.balance:.3f} (most work of a rank / its fair share), "
        f"cut between {CUTS[plan.cut]}",
        f"weights    {size(estimate.total_weights)} on all ranks, "
        f"{estimate.total_weights / estimate.one_rank_weights:.3f} x the model's own "
        f"{size(estimate.one_rank_weights)}",
        f"KV cache   {_overhead(estimate)}",
        *_verdict(estimate),
    ]


def _overview(model: str, estimates: dict[int, Estimate | str]) -> list[str]:
    """A range of sizes for a person: one row per size, and the reason of each refusal."""
    args = next((found.args for found in estimates.values() if isinstance(found, Estimate)), None)
    dtype = next((found.dtype for found in estimates.values() if isinstance(found, Estimate)), "")
    rows = []
    for tp_size, found in estimates.items():
        if isinstance(found, str):
            rows.append([str(tp_size), "-", "-", "-", "-", "-", f"no: {found}"])
            continue
        shares = found.plan.shares
        rows.append(
            [
                str(tp_size),
                f"{found.plan.balance:.3f}",
                CUTS[found.plan.cut],
                size(max(map(found.weights, shares))),
                size(max(map(found.kv_per_token, shares))),
                f"{found.kv_overhead:.0%}",
                "yes",
            ]
        )
    header = ["ranks", "balance", "cut", "most weights", "KV/token", "KV twice", "works"]
    title = [_title(model, args, dtype), ""] if args else []
    return [*title, *table(header, rows, sys.stdout)]


def _title(model: str, args: ModelArgs, dtype: str) -> str:
    shape = (
        f"{args.n_layers} layers of width {args.dim}, {args.n_heads} heads of {args.head_dim}, "
        f"{args.n_kv_heads} KV heads, {args.ffn_dim} channels, {args.vocab_size} words, {dtype}"
    )
    return f"{model}  {painted(shape, DIM, sys.stdout)}"


def _memory(estimate: Estimate, share: Share, scale: float) -> str:
    needed = estimate.needed(share)
    weights = estimate.weights(share)
    drawn = bar([weights / scale, (needed - weights) / scale], BAR_WIDTH, sys.stdout)
    if estimate.memory is None:
        return f"{drawn}  {size(needed)}"
    limit = estimate.memory[share.rank]
    color = GREEN if needed <= limit else RED
    return f"{painted(drawn, color, sys.stdout)}  {size(needed)} of {size(limit)}"


def _overhead(estimate: Estimate) -> str:
    held = sum(share.n_local_kv_heads for share in estimate.plan.shares)
    twice = held - estimate.args.n_kv_heads
    per_token = size(sum(map(estimate.kv_per_token, estimate.plan.shares)))
    if not twice:
        return f"{per_token} a token on all ranks, each KV head held once"
    return (
        f"{per_token} a token on all ranks, {twice} of {estimate.args.n_kv_heads} KV heads "
        f"held again ({estimate.kv_overhead:+.0%})"
    )


def _verdict(estimate: Estimate) -> list[str]:
    if estimate.fits is None:
        return []
    tokens = f"there is room for {estimate.room_for_tokens:,} tokens of KV cache"
    if estimate.fits:
        return [f"fits       {painted('yes', GREEN, sys.stdout)}: {tokens}"]
    remedy = (
        "lower --max-seq-len or --batch"
        if estimate.room_for_tokens
        else "the weights alone are too large: use more ranks or a smaller --dtype"
    )
    return [f"fits       {painted('no', RED, sys.stdout)}: {tokens}; {remedy}"]


def _pair(r: range) -> list[int]:
    return [r.start, r.stop]


def _span(r: range) -> str:
    """The members of a range for a person, who reads both ends as included."""
    if not r:
        return "none"
    return f"{r.start}-{r.stop - 1}" if len(r) > 1 else str(r.start)


VERB = Verb(
    "plan",
    "Shows which rank would hold what, and whether it fits.",
    "[--model PATH_OR_NAME] [--nproc N | --nproc A-B] [flags]",
    (
        MODEL,
        Flag(
            "nproc",
            "ranks to plan for, or a range to compare",
            count_or_range,
            "N|A-B",
            default_text="1, or as many as --memory names",
        ),
        Flag("memory", "GiB of each rank; ranks get work in proportion", numbers, "G,G,..."),
        MAX_SEQ_LEN,
        Flag("batch", "sequences at once", whole(1, 1_000_000), "B", 1),
        DTYPE,
        DEVICE,
        JSON,
    ),
    "parallel-llama plan --model smollm2 --nproc 4",
    prepare,
)
