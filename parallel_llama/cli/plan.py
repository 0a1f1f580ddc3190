"""`plan`: who holds what and how many ranks it takes, before a byte is loaded. Imports no torch."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from parallel_llama.cli.arguments import JSON, Flag, Flags, Verb
from parallel_llama.cli.estimate import (
    Comparison,
    Estimate,
    RankEstimate,
    Workload,
    compare,
    estimate,
    fewest_that_fit,
)
from parallel_llama.cli.model import (
    DEVICE,
    DTYPE,
    KV_CACHE_DTYPE,
    KV_SPLIT,
    MAX_SEQ_LEN,
    MODEL,
    NPROC_ALIASES,
    QUANT,
    args_of,
    in_dtype,
    in_dtypes,
)
from parallel_llama.cli.parsers import count_or_range, memory_sizes, whole
from parallel_llama.cli.ranks import Job
from parallel_llama.cli.terminal import DIM, GREEN, RED, bar, painted, size, table
from parallel_llama.config import ModelArgs, context_length, default_quant, stored_formats
from parallel_llama.dtypes import ITEM_BYTES
from parallel_llama.errors import UsageError
from parallel_llama.files.model_files import find_model
from parallel_llama.parallel.device_choice import DeviceKind, choose_device, count_cards
from parallel_llama.plan import (
    CUDA_ALLOWANCE,
    PROCESS_BYTES,
    ShardPlan,
    default_dtype,
    kv_format,
    make_precision,
)

CUTS = {"kv_heads": "KV heads", "heads": "query heads"}
PLACEMENTS = {
    "tensor": "tensor parallel",
    "expert": "expert parallel",
    "mixed": "tensor and expert parallel",
}
BAR_WIDTH = 24

NPROC: Flag[list[int] | None] = Flag(
    "nproc",
    "ranks to plan for, or a range to compare",
    count_or_range,
    "N|A-B",
    default_text="1; with --memory as many as it names, or the fewest that fit",
    aliases=NPROC_ALIASES,
)
MEMORY: Flag[int | list[int] | None] = Flag(
    "memory",
    "memory of every rank in GiB (80; or 24G, 24GB, 24576MiB), or of each (80,80,40; 80x4,40x2), "
    "which then work in proportion",
    memory_sizes,
    "SIZES",
)
BATCH: Flag[int] = Flag("batch", "sequences at once", whole(1, 1_000_000), "B", 1)


def prepare(flags: Flags) -> Job:
    """Check the request and return the job that prints a plan, or the table of a range.

    The plan is that of --nproc ranks, else of those that --memory names, else of the fewest with
    that memory that fit.
    """
    nproc, memory = flags[NPROC], flags[MEMORY]
    files = find_model(flags[MODEL])
    args = args_of(files)
    first, *last = nproc or [len(memory) if isinstance(memory, list) else 1]
    device = _device_kind(flags[DEVICE], first)
    dtype = flags[DTYPE] or default_dtype(args, device)
    quant = flags[QUANT] or default_quant(files, args)
    work = Workload(
        args,
        make_precision(args, dtype, device, quant, stored_formats(files, args)),
        kv_format(flags[KV_CACHE_DTYPE], dtype),
        context_length(args, flags[MAX_SEQ_LEN]),
        flags[BATCH],
        flags[KV_SPLIT],
        device,
    )
    if nproc is None and isinstance(memory, int):
        found, fewer = fewest_that_fit(work, memory)
        page = [*_page(found), _answer(found, fewer)]
        return Job(lambda: _show(flags, work, _fewest_object(found, fewer), page))
    if not last:
        one = estimate(work, first, memory)
        return Job(lambda: _show(flags, work, _object(one), _page(one)))
    if isinstance(memory, list):
        raise UsageError(
            f"--memory names {len(memory)} ranks and --nproc a range of numbers; "
            "give --nproc N, not a range, or one size for all ranks"
        )
    comparison = compare(work, range(first, last[0] + 1), memory)
    return Job(lambda: _show(flags, work, _range_object(comparison), _overview(comparison)))


def _device_kind(asked: str, n_ranks: int) -> DeviceKind:
    """What ranks would run on; the device that was asked for may be another machine's."""
    return choose_device(asked, n_ranks, count_cards() if asked == "auto" else n_ranks)


def _show(flags: Flags, work: Workload, answer: dict[str, Any], page: Sequence[str]) -> int:
    if flags[JSON]:
        print(json.dumps({"model": flags[MODEL], **answer}))
    else:
        print("\n".join([*_title(flags[MODEL], work), *page]))
    return 1 if answer["fits"] is False else 0


def _fewest_object(found: Estimate, fewer: Estimate | None) -> dict[str, Any]:
    return {
        **_object(found),
        "smallest_that_fits": found.plan.tp_size if found.fits else None,
        "next_smaller": fewer and _object(fewer),
    }


def _range_object(comparison: Comparison) -> dict[str, Any]:
    errors = [{"tp_size": n, "error": reason} for n, reason in comparison.refused.items()]
    return {
        "plans": [*map(_object, comparison.allowed), *errors],
        "fits": comparison.fits,
        "smallest_that_fits": comparison.smallest_that_fits,
    }


def _object(found: Estimate) -> dict[str, Any]:
    """The JSON form of a plan; ranges are half-open [start, stop]."""
    return {
        "tp_size": found.plan.tp_size,
        "ranks": [
            {
                "rank": rank.share.rank,
                "heads": _pair(rank.share.heads),
                "kv_heads": _pair(rank.share.kv_heads),
                "ffn": _pair(rank.share.ffn),
                "experts": _pair(rank.share.experts),
                "vocab": _pair(rank.share.vocab),
                "weight_bytes": rank.weights,
                "kv_bytes_per_token": rank.kv_per_token,
                "working_bytes": rank.working,
            }
            for rank in found.ranks
        ],
        "imbalance": found.plan.balance,
        "fits": found.fits,
        "cut": found.plan.cut,
        "placement": found.plan.placement and found.plan.placement.kind,
        "dtype": found.work.precision.dtype,
        "quant": found.work.precision.quant,
        "kv_cache_dtype": found.work.kv.dtype,
        "kv_tokens": found.work.n_tokens,
        "room_for_kv_tokens": found.room_for_tokens,
        "weight_bytes": found.weights,
        "one_rank_weight_bytes": found.work.weights,
        "batch": found.work.batch,
        "sliding_window": found.work.args.sliding_window,
        "kv_bytes_per_sequence": sum(rank.kv.per_sequence for rank in found.ranks),
    }


def _title(model: str, work: Workload) -> list[str]:
    args = work.args
    shape = (
        f"{args.n_layers} layers of width {args.dim}, {args.n_heads} heads of {args.head_dim}, "
        f"{args.n_kv_heads} KV heads, {_channels(args)}, vocabulary of {args.vocab_size}, "
        f"{in_dtypes(work.precision.dtype, work.precision.quant, work.kv.dtype)}"
    )
    return [f"{model}  {painted(shape, DIM, sys.stdout)}", ""]


def _channels(args: ModelArgs) -> str:
    if not args.n_experts:
        return f"{args.ffn_dim} channels"
    return f"{args.n_active_experts} of {args.n_experts} experts of {args.ffn_dim} channels"


def _page(found: Estimate) -> list[str]:
    """One plan for a person: a row per rank, and what to make of it."""
    plan, work = found.plan, found.work
    sequences = f"{work.max_seq_len:,} tokens" + (f" x {work.batch}" if work.batch > 1 else "")
    header = ["rank", "heads", "KV heads", *(["experts"] if plan.placement else [])]
    header += ["channels", "vocabulary", "weights", "KV/token", "needs"]
    header += [] if found.fits is None else ["has"]
    header += [f"weights and KV cache of {sequences}"]
    scale = max(rank.memory or rank.needed for rank in found.ranks)
    kv_per_token = sum(rank.kv_per_token for rank in found.ranks)
    return [
        *table(header, [_rank_row(rank, scale) for rank in found.ranks], sys.stdout),
        "",
        f"balance    {plan.balance:.3f} (most work of a rank / its fair share), "
        f"cut between {CUTS[plan.cut]}",
        f"weights    {size(found.weights)} on all ranks, "
        f"{found.weights / work.weights:.3f} x the model's own {size(work.weights)}",
        f"KV cache   {size(kv_per_token)} a token on all ranks, {_copies(found)}",
        *_working(found),
        *_window(found),
        *_experts(plan),
        *_verdict(found),
    ]


def _rank_row(rank: RankEstimate, scale: int) -> list[str]:
    share = rank.share
    drawn = bar([rank.weights / scale, (rank.needed - rank.weights) / scale], BAR_WIDTH, sys.stdout)
    cells = [
        str(share.rank),
        _span(share.heads),
        _span(share.kv_heads),
        *([_span(share.experts)] if share.experts else []),
        _span(share.ffn),
        _span(share.vocab),
        size(rank.weights),
        size(rank.kv_per_token),
        size(rank.needed),
    ]
    if rank.memory is None:
        return [*cells, drawn]
    color = GREEN if rank.needed <= rank.memory else RED
    return [*cells, size(rank.memory), painted(drawn, color, sys.stdout)]


def _experts(plan: ShardPlan) -> list[str]:
    if plan.placement is None:
        return []
    return [f"experts    {PLACEMENTS[plan.placement.kind]}: {plan.placement.reason}"]


def _copies(found: Estimate) -> str:
    own, n_ranks = found.work.args.n_kv_heads, found.plan.tp_size
    if found.plan.kv_parts > 1:
        return f"each KV head held once, its tokens spread over {n_ranks} ranks"
    if found.n_kv_heads == own:
        return "each KV head held once"
    copies = f"{found.n_kv_heads} copies of {own} KV heads ({found.kv_overhead:+.0%})"
    return f"{copies}; --kv-split sequence holds each once"


def _working(found: Estimate) -> list[str]:
    """What there must be beside weights and cache."""
    most, n_tokens = max(rank.working for rank in found.ranks), found.work.step_tokens
    if not most:
        about = f"about {PROCESS_BYTES >> 20} MiB"
        return [
            f"process    {about} more on each rank: torch, LLVM, the tokenizer, a step's tensors"
        ]
    return [
        f"to work    {size(most)} more on a card, for a step of {n_tokens} tokens, scores, and "
        f"CUDA's libraries and graphs ({size(CUDA_ALLOWANCE)})"
    ]


def _window(found: Estimate) -> list[str]:
    """What a sliding window saves; nothing where all layers see all keys."""
    args = found.work.args
    if args.sliding_window is None:
        return []
    n_layers = args.n_layers - len(args.full_layers)
    most = size(sum(rank.kv.per_sequence for rank in found.ranks))
    return [
        f"window     of {args.sliding_window:,} tokens in {n_layers} of {args.n_layers} layers: "
        f"{most} on all ranks for a sequence of {found.work.max_seq_len:,} tokens"
    ]


def _verdict(found: Estimate) -> list[str]:
    if found.fits is None:
        return []
    room = f"there is room for {found.room_for_tokens:,} tokens of KV cache"
    if found.work.args.sliding_window is not None:
        n_sequences = (found.room_for_tokens or 0) // found.work.tokens_each[0]
        room += f", {n_sequences:,} sequences of {found.work.max_seq_len:,} tokens"
    return [f"fits       {_yes_or_no(found.fits)}: {room if found.fits else _shortfall(found)}"]


def _shortfall(found: Estimate) -> str:
    """Why a plan does not fit, and what would help."""
    room, work = found.room_for_tokens or 0, found.work
    reason = "the weights leave no room for KV cache"
    if room:
        reason = f"there is room for {room:,} of {work.n_tokens:,} tokens of KV cache"
    remedies = ["more ranks" if found.plan.tp_size < work.args.n_heads else "more memory"]
    if work.precision.quant == "none" and ITEM_BYTES[work.precision.dtype] > 2:
        remedies.append("--dtype bfloat16")
    if n_sequences := room // work.tokens_each[0]:
        remedies.append(f"--batch {n_sequences}")
    if found.longest_that_fits:
        remedies.append(f"--max-seq-len {found.longest_that_fits}")
    return f"{reason}; try {' or '.join(remedies)}"


def _answer(found: Estimate, fewer: Estimate | None) -> str:
    """How few ranks are enough, and how one fewer fails."""
    precision = found.work.precision
    tp_size, dtype = found.plan.tp_size, in_dtype(precision.dtype, precision.quant)
    if not found.fits:
        return f"fewest     no number of ranks is enough, and {tp_size} are the most there can be"
    if fewer is None:
        return f"fewest     1 rank is enough in {dtype}"
    fullest = max(fewer.ranks, key=lambda rank: rank.needed)
    return (
        f"fewest     {tp_size} ranks are enough in {dtype}; "
        f"with {fewer.plan.tp_size}, rank {fullest.share.rank} would need {size(fullest.needed)}"
    )


def _overview(comparison: Comparison) -> list[str]:
    """A range of sizes for a person: one row per size, and what to make of them."""
    header = ["ranks", "balance", "cut between", "weights", "KV/token", "extra KV"]
    header += ["works"] if comparison.memory is None else ["KV tokens", "fits"]
    rows = [_size_row(found) for found in comparison.allowed]
    if comparison.refused:
        (first, reason), *others = comparison.refused.items()
        sizes = _span(range(first, first + 1 + len(others)))
        rows.append([sizes, *["-"] * (len(header) - 2), f"no: {reason}"])
    return [
        *table(header, rows, sys.stdout),
        "",
        "balance    most work of a rank / its fair share",
        "weights    and KV/token of the rank that holds most",
        "extra KV   copies of KV heads beyond one of each",
        *_conclusion(comparison),
    ]


def _size_row(found: Estimate) -> list[str]:
    cells = [
        str(found.plan.tp_size),
        f"{found.plan.balance:.3f}",
        CUTS[found.plan.cut],
        size(max(rank.weights for rank in found.ranks)),
        size(max(rank.kv_per_token for rank in found.ranks)),
        f"{found.kv_overhead:.0%}",
    ]
    if found.fits is None:
        return [*cells, "yes"]
    return [*cells, f"{found.room_for_tokens:,}", _yes_or_no(found.fits)]


def _conclusion(comparison: Comparison) -> list[str]:
    """Which of the sizes is the smallest that fits, or why none does; nothing without memory."""
    if comparison.memory is None:
        return []
    work, fewest = comparison.work, comparison.smallest_that_fits
    if fewest is not None:
        answer = f"of these, {fewest} {'rank is' if fewest == 1 else 'ranks are'} enough"
    else:
        answer = "none of these is enough"
        if comparison.allowed:
            largest = comparison.allowed[-1]
            answer += f"; with {largest.plan.tp_size}, {_shortfall(largest)}"
    return [
        f"KV tokens  room with {size(comparison.memory)} a rank; {work.n_tokens:,} are wanted",
        f"fewest     {answer}",
    ]


def _yes_or_no(fits: bool) -> str:
    return painted("yes", GREEN, sys.stdout) if fits else painted("no", RED, sys.stdout)


def _pair(r: range) -> list[int]:
    return [r.start, r.stop]


def _span(r: range) -> str:
    """The members of a range for a person, who reads both ends as included."""
    if not r:
        return "none"
    return f"{r.start}-{r.stop - 1}" if len(r) > 1 else str(r.start)


VERB = Verb(
    "plan",
    "Shows which rank would hold what, whether it fits, and how few ranks are enough.",
    "[MODEL] [--nproc N | --nproc A-B] [--memory SIZES] [flags]",
    (
        MODEL,
        NPROC,
        MEMORY,
        MAX_SEQ_LEN,
        BATCH,
        DTYPE,
        QUANT,
        KV_CACHE_DTYPE,
        KV_SPLIT,
        DEVICE,
        JSON,
    ),
    "parallel-llama plan --model llama-3.1-70b --memory 80",
    prepare,
    placed=MODEL,
)
