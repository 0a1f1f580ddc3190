"""A plan as lines of text for a terminal, with a table of its ranks. No torch."""

import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parallel_llama.cli import model
from parallel_llama.cli.arguments import Flags
from parallel_llama.cli.estimate import Comparison, Estimate, RankEstimate, estimate
from parallel_llama.cli.format_table import FormatTable, format_lines
from parallel_llama.cli.largest import Largest
from parallel_llama.cli.parsers import GB
from parallel_llama.cli.plan_request import PlanRequest
from parallel_llama.cli.prediction import Prediction, RankSteps, predict, rank_steps
from parallel_llama.cli.remedies import Remedy
from parallel_llama.cli.terminal import DIM, GREEN, RED, bar, bar_fills, painted, size, table
from parallel_llama.errors import counted
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.weights import Axis
from parallel_llama.memory import CUDA_ALLOWANCE, process_bytes
from parallel_llama.plan import ShardPlan

_WIDTH = 80
_LABEL_WIDTH = 11
_CUTS = {"kv_heads": "KV heads", "heads": "query heads"}
_PLACEMENTS = {
    "tensor": "tensor parallel",
    "expert": "expert parallel",
    "mixed": "tensor and expert parallel",
}
_BAR_WIDTH = 18
_SPEED = "predicted for each sequence, at the full context"
_BOUND = "most that the memory bandwidth allows for each sequence, at the full context"


@dataclass(frozen=True)
class FewerHosts:
    """A plan without some of the hosts.

    Args:
        left_out: the names of these hosts.
    """

    planned: Estimate
    left_out: list[str]


def title_lines(flags: Flags, request: PlanRequest) -> list[str]:
    args = request.args
    shape = (
        f"{args.n_layers} layers of width {args.dim}, {args.n_heads} heads of {args.head_dim}, "
        f"{args.n_kv_heads} KV heads, {_channels(args)}, vocabulary of {args.vocab_size}, "
        f"{model.in_dtypes(request.precision.dtype, request.precision.quant, request.kv.dtype)}"
    )
    where = "for CUDA GPUs" if request.device == "cuda" else "for the CPU"
    if isinstance(request.memory, tuple):
        where += f": {_sizes(request.memory)}"
    elif request.memory:
        where += f", {size(request.memory)} each"
    if request.device == "cpu" and request.memory and flags[model.DEVICE] == "auto":
        where += " (--gpus plans for GPUs)"
    lines = textwrap.wrap(shape, _WIDTH, break_long_words=False)
    return [
        f"{flags[model.MODEL]}, {where}",
        *(painted(line, DIM, sys.stdout) for line in lines),
        "",
    ]


def _sizes(memory: Sequence[int]) -> str:
    return ", ".join(f"{n} x {size(n_bytes)}" for n_bytes, n in Counter(memory).items())


def _channels(args: ModelArgs) -> str:
    if not args.n_experts:
        return f"{args.ffn_dim} channels"
    channels = f"{args.n_active_experts} of {args.n_experts} experts of {args.ffn_dim} channels"
    if args.shared_ffn_dim:
        channels += f", a shared expert of {args.shared_ffn_dim}"
    if args.dense_layers:
        n_dense = len(args.dense_layers)
        channels += f", {args.dense_ffn_dim} in {counted(n_dense, 'layer')} without experts"
    return channels


def plan_lines(planned: Estimate, price: float | None) -> list[str]:
    """One plan as text: what each rank holds and needs, and a summary."""
    plan, request = planned.plan, planned.request
    sequences = f"{request.max_seq_len:,} tokens" + (
        f" x {request.batch}" if request.batch > 1 else ""
    )
    held = ["rank", *(["layers"] if request.pp > 1 else []), "heads", "KV heads"]
    held += ["experts"] if plan.placement else []
    held += ["channels", *more_channels(request.args), "vocabulary", "KV/token"]
    needs = ["rank", "weights", "KV cache", "rest", "needs"]
    needs += [] if planned.fits is None else ["has"]
    fills, _ = bar_fills(sys.stdout)
    needs += [f"{fills[0]}weights {fills[1]}KV {fills[2]}rest"]
    scale = max(max(rank.memory or 0, rank.needed) for rank in planned.ranks)
    kv_per_token = sum(rank.kv_per_token for rank in planned.ranks)
    steps, model_bytes = rank_steps(planned), planned.one_rank_weights
    return [
        *table(held, [_held_row(rank, request.args) for rank in planned.ranks], sys.stdout),
        "",
        *table(needs, [_needs_row(rank, scale) for rank in planned.ranks], sys.stdout),
        "",
        *_steps_table(planned, steps),
        *_line(
            "balance",
            f"{plan.balance:.3f} (maximum work of a rank / its fair share), cut between "
            f"{_CUTS[plan.cut]}",
        ),
        *_line(
            "weights",
            f"{size(planned.weights)} on all ranks, {planned.weights / model_bytes:.3f} x the "
            f"model's {size(model_bytes)}",
        ),
        *_adapters(planned),
        *_draft(planned),
        *_line(
            "KV cache",
            f"for {sequences}, {size(kv_per_token)} per token on all ranks, {_copies(planned)}",
        ),
        *_line("rest", _rest(planned)),
        *_stages(plan),
        *_window(planned),
        *_experts(plan),
        *_decode(planned),
        *_links(planned),
        *_slowest(steps),
        *_speed(planned),
        *_cost(planned, price),
        *_verdict(planned),
        *_cache_flag(planned),
    ]


def _adapters(planned: Estimate) -> list[str]:
    """The weights of adapters; empty without --adapter."""
    if not (adapters := planned.request.adapters):
        return []
    ranks = {pair.rank for adapter in adapters for pair in adapter.pairs.values()}
    return _line(
        "adapters",
        f"{size(sum(rank.adapters for rank in planned.ranks))} on all ranks, "
        f"{counted(len(adapters), 'adapter')} of rank {', '.join(map(str, sorted(ranks)))}; "
        "speeds are without adapters",
    )


def _draft(planned: Estimate) -> list[str]:
    """The weights of the draft model; empty without --draft-model."""
    if (draft := planned.request.draft) is None:
        return []
    return _line(
        "draft",
        f"{size(sum(rank.draft_weights for rank in planned.ranks))} of weights on all ranks, in "
        f"{model.in_dtype(draft.precision.dtype, draft.precision.quant)}; its KV cache counts "
        "as KV cache; speeds are without drafts",
    )


def more_channels(args: ModelArgs) -> dict[str, Axis]:
    """The columns for channels other than those of experts or of all layers, and their axes."""
    columns: dict[str, Axis] = {}
    if args.shared_ffn_dim:
        columns["shared"] = "shared_ffn"
    if args.dense_layers:
        columns["dense"] = "dense_ffn"
    return columns


def _held_row(rank: RankEstimate, args: ModelArgs) -> list[str]:
    shard = rank.shard
    experts = [_span(shard.experts)] if shard.experts else []
    spans = [_span(shard.heads), _span(shard.kv_heads), *experts, _span(shard.ffn)]
    spans += [_span(shard.extent(axis)) for axis in more_channels(args).values()]
    layers = [_span(shard.layers)] if len(shard.stages) > 1 else []
    return [str(shard.rank), *layers, *spans, _span(shard.vocab), size(rank.kv_per_token)]


def _needs_row(rank: RankEstimate, scale: int) -> list[str]:
    parts = rank.all_weights, rank.kv.needed, rank.working
    limit = 1 if rank.memory is None else rank.memory / scale
    drawn = bar([part / scale for part in parts], _BAR_WIDTH, sys.stdout, limit)
    cells = [str(rank.shard.rank), *map(size, parts), size(rank.needed)]
    if rank.memory is None:
        return [*cells, drawn]
    color = GREEN if rank.needed <= rank.memory else RED
    return [*cells, size(rank.memory), painted(drawn, color, sys.stdout)]


def _steps_table(planned: Estimate, steps: RankSteps | None) -> list[str]:
    """What each rank reads in a decode step, and for how long; empty for equally fast ranks.

    The times exclude exchanges, in which all ranks wait for each other.
    """
    if steps is None or not steps.is_unlike:
        return []
    header = ["rank", "reads in a step", "at", "takes"]
    rows = [
        [
            str(rank.shard.rank),
            size(rank.read_weights + rank.read_kv),
            f"{rate / GB:,.1f} GB/s",
            f"{seconds * 1e3:,.2f} ms",
        ]
        for rank, rate, seconds in zip(planned.ranks, steps.rates, steps.seconds, strict=True)
    ]
    return [*table(header, rows, sys.stdout), ""]


def _slowest(steps: RankSteps | None) -> list[str]:
    """The rank that limits the step, and the loss; empty for equally fast ranks."""
    if steps is None or not steps.is_unlike:
        return []
    return _line(
        "slowest",
        f"rank {steps.slowest} limits a step: {max(steps.seconds) * 1e3:,.2f} ms without "
        f"exchanges, {steps.loss:.1%} more than {steps.balanced_s * 1e3:,.2f} ms, which the ranks "
        "would take if each read exactly in proportion to its speed",
    )


def _links(planned: Estimate) -> list[str]:
    """The hosts, and the time of the exchanges between them; empty without --hosts."""
    if (hosts := planned.request.hosts) is None:
        return []
    text = ", ".join(
        f"{hosts.name(number)}: {'rank' if len(own) == 1 else 'ranks'} {_span(own)}"
        for number, own in enumerate(hosts.ranks)
    )
    if hosts.links and (predicted := predict(planned)) is not None:
        text += f"; exchanges take {predicted.full.link_s * 1e3:,.2f} ms of a step"
    return _line("hosts", text)


def _experts(plan: ShardPlan) -> list[str]:
    if plan.placement is None:
        return []
    return _line("experts", f"{_PLACEMENTS[plan.placement.kind]}: {plan.placement.reason}")


def _stages(plan: ShardPlan) -> list[str]:
    """The stages of the pipeline, and the exchanges of all ranks; empty without a pipeline."""
    if len(plan.stages) == 1:
        return []
    text = "; ".join(
        f"{_numbered('rank', stage.ranks)}: {_numbered('layer', stage.layers)}"
        for stage in plan.stages
    )
    n_exchanges = len(plan.stages) + 3  # + embedding, output layer, new tokens
    return _line("stages", f"{text}; {n_exchanges} exchanges of all ranks in a decode step")


def _numbered(what: str, numbers: range) -> str:
    return f"{what}{'s' * (len(numbers) > 1)} {_span(numbers)}"


def _decode(planned: Estimate) -> list[str]:
    """Why decode steps run operator by operator; empty if they do not."""
    reason = planned.unrecorded
    return [] if reason is None else _line("decode", reason)


def _speed(planned: Estimate) -> list[str]:
    """The predicted speed, else the most that memory allows; empty if no rate is known."""
    request, slowest = planned.request, planned.slowest
    each = f" for each of {request.batch} sequences" if request.batch > 1 else ""
    if (predicted := predict(planned)) is not None:
        return _predicted_speed(planned, predicted, each)
    full, empty = planned.tokens_per_s(is_full=True), planned.tokens_per_s(is_full=False)
    if full is None or empty is None or slowest.bandwidth is None:
        return []
    in_turn = "the stages run one after another, and " if request.pp > 1 else ""
    return _line(
        "speed",
        f"memory bandwidth limits decoding to {_rate(empty)} tokens/s{each}, and to {_rate(full)} "
        f"after {request.max_seq_len:,} tokens: {in_turn}a step of rank {slowest.shard.rank} then "
        f"reads {size(slowest.read_weights)} of weights and {size(slowest.read_kv)} of KV cache, "
        f"at {slowest.bandwidth / GB:,.0f} GB/s",
    )


def _predicted_speed(planned: Estimate, predicted: Prediction, each: str) -> list[str]:
    """The predicted speed, what limits it, and where its figures are from."""
    full, empty = predicted.full, predicted.empty
    limits = f", limited by {full.limit}"
    if empty.limit != full.limit:
        limits = f"; {empty.limit} limits the former, {full.limit} the latter"
    text = (
        f"about {_rate(1 / empty.total_s)} new tokens/s{each}, and {_rate(1 / full.total_s)} after "
        f"{planned.request.max_seq_len:,} tokens{limits}"
    )
    if predicted.prefill is not None and predicted.prefill_tokens_per_s is not None:
        text += (
            f"; prompts at about {_rate(predicted.prefill_tokens_per_s)} tokens/s, limited by "
            f"{predicted.prefill.limit}"
        )
    return _line("speed", f"{text} (an estimate {_basis(planned)})")


def _basis(planned: Estimate) -> str:
    if planned.request.device == "cpu":
        return "from the calibration"
    slowest = planned.slowest
    at = "" if slowest.bandwidth is None else f", at {slowest.bandwidth / GB:,.0f} GB/s"
    return f"from data sheets and one measured H100{at}"


def _cost(planned: Estimate, price: float | None) -> list[str]:
    """The price of a million new tokens; empty without --price."""
    predicted = predict(planned)
    if price is None or predicted is None:
        return []
    request, n_ranks = planned.request, planned.plan.tp_size
    cost = predicted.cost(price * n_ranks)
    return _line(
        "cost",
        f"{cost:,.3g} for a million new tokens of {request.batch} sequences at "
        f"{request.max_seq_len:,} tokens: {n_ranks} x {price:g} per hour at "
        f"{_rate(predicted.tokens_per_s)} tokens/s",
    )


def _copies(planned: Estimate) -> str:
    """How often KV heads are replicated, and what --kv-split sequence would save."""
    own, n_ranks = planned.request.args.n_kv_heads, planned.plan.tp_size
    if planned.plan.kv_parts > 1:
        return f"each KV head stored once, its tokens sharded over {n_ranks} ranks"
    if planned.n_kv_heads == own:
        return "each KV head stored once"
    copies = f"{planned.n_kv_heads} KV heads stored instead of {own} ({planned.kv_overhead:+.0%})"
    if planned.request.pp > 1 or planned.request.draft is not None:
        return copies
    sharded = estimate(replace(planned.request, kv_split="sequence"))
    if planned.room_for_tokens is not None and sharded.room_for_tokens is not None:
        if sharded.room_for_tokens <= planned.room_for_tokens:
            return copies
        return f"{copies}; --kv-split sequence makes room for {sharded.room_for_tokens:,} tokens"
    before, after = planned.tightest.needed, sharded.tightest.needed
    if after >= before:
        return copies
    return f"{copies}; with --kv-split sequence a rank needs at most {size(after)}"


def _rest(planned: Estimate) -> str:
    """What a rank needs in addition to weights and KV cache."""
    n_tokens = planned.request.step_tokens
    if planned.request.device == "cuda":
        is_quantised = planned.request.precision.quant_group_size > 1
        converted = "quantised matrices that long steps convert, " if is_quantised else ""
        return (
            f"rotary tables, activations and scores of a step of {n_tokens} tokens, {converted}and "
            f"{size(CUDA_ALLOWANCE)} for CUDA's libraries and graphs"
        )
    request = planned.request
    process = process_bytes(request.args, planned.plan.shards[0], from_gguf=request.from_gguf)
    return (
        f"a process (about {process >> 20} MiB on rank 0: torch, LLVM, the tokenizer), activations "
        f"and scores of a step of {n_tokens} tokens"
    )


def _window(planned: Estimate) -> list[str]:
    """The KV cache of a model with a sliding window; empty for other models."""
    args = planned.request.args
    if args.sliding_window is None:
        return []
    n_layers = args.n_layers - len(args.full_layers)
    most = size(sum(rank.kv.per_sequence for rank in planned.ranks))
    return _line(
        "window",
        f"of {args.sliding_window:,} tokens in {n_layers} of {args.n_layers} layers: "
        f"{most} on all ranks for a sequence of {planned.request.max_seq_len:,} tokens",
    )


def format_table_lines(formats: FormatTable) -> list[str]:
    """A row for each pair of formats, what its columns mean, and the first that fits."""
    request = formats.request
    model_context = formats.rows[0].largest.model_context
    chosen = next((row for row in formats.rows if row.planned.fits), None)
    if chosen is None:
        most = "; the maximum number of ranks is not enough" if formats.finds_fewest else ""
        verdict = f"no format fits{most}"
    else:
        verdict = f"{chosen.flags} is the most precise that fits"
    if chosen is not None and formats.finds_fewest:
        verdict = "each row has the fewest ranks that are enough for its formats"
    sequences = f"{counted(request.batch, 'sequence')} of {request.max_seq_len:,} tokens"
    return [
        *format_lines(formats),
        "",
        *_line("needs", f"memory that the fullest rank needs for {sequences}"),
        *_line(
            "context",
            f"the longest at batch {request.batch}; the model's own is {model_context:,} tokens",
        ),
        *_line("batch", f"the largest at a context of {request.max_seq_len:,} tokens"),
        *(
            line
            for name, reason in formats.refused.items()
            for line in _line("no plan", f"in {name}: {reason}")
        ),
        *_line("formats", verdict),
    ]


def largest_lines(request: PlanRequest, largest: Largest | None) -> list[str]:
    """The largest context and batch; empty if memory is not known, or no sequence fits."""
    if largest is None or not largest.context:
        return []
    whole = " (the model's own)" if largest.context == largest.model_context else ""
    return _line(
        "largest",
        f"context of {largest.context:,} tokens{whole} at batch {request.batch}; batch of "
        f"{largest.batch:,} at {request.max_seq_len:,} tokens",
    )


def _verdict(planned: Estimate) -> list[str]:
    if planned.fits is None:
        return []
    if not planned.fits:
        return _fits(False, _shortfall(planned))
    room = f"room for {planned.room_for_tokens:,} tokens of KV cache"
    if planned.request.args.sliding_window is not None:
        n_sequences = (planned.room_for_tokens or 0) // planned.tokens_each
        room += f", {n_sequences:,} sequences of {planned.request.max_seq_len:,} tokens"
    return _fits(True, room)


def _cache_flag(planned: Estimate) -> list[str]:
    """The --kv-cache-bytes that the plan needs; empty if the default is enough."""
    if planned.fits is False or not planned.needs_cache_flag:
        return []
    n_mib = -(-planned.cache_bytes >> 20)
    default = min(planned.default_rooms or [0])
    return _line(
        "start", f"with --kv-cache-bytes {n_mib}M; the default for a rank is {size(default)}"
    )


def _fits(fits: bool, text: str) -> list[str]:
    word, color = ("yes", GREEN) if fits else ("no", RED)
    first, *others = _line("fits", f"{word}: {text}")
    return [first.replace(word, painted(word, color, sys.stdout), 1), *others]


def _shortfall(planned: Estimate) -> str:
    """Which rank has too little memory, and how much is left for the KV cache."""
    rank = planned.tightest
    room = planned.room_for_tokens or 0
    left = "the weights leave no room for KV cache"
    if room:
        n_tokens = planned.request.batch * planned.tokens_each
        left = f"room for {room:,} of {n_tokens:,} tokens of KV cache"
    has = size(rank.memory or 0)
    return f"rank {rank.shard.rank} needs {size(rank.needed)} and has {has}; {left}"


def advice_lines(fits: bool | None, remedies: Sequence[Remedy]) -> list[str]:
    """The changes that would make the plan fit, and what the tightest rank would need."""
    if fits is not False:
        return []
    if not remedies:
        text = "give each rank more memory: no other format, rank count or token count fits"
        return _line("remedy", text)
    width = max(len(remedy.words) for remedy in remedies)
    rows = [(remedy.words, _numbers(remedy.planned)) for remedy in remedies]
    lines = [f"  {words:<{width}}  {numbers}" for words, numbers in rows]
    if max(map(len, lines)) > _WIDTH:
        lines = [line for words, numbers in rows for line in (f"  {words}", f"      {numbers}")]
    return ["", "each of these changes makes it fit, the least lossy first:", *lines]


def _numbers(planned: Estimate) -> str:
    tightest = planned.tightest
    return (
        f"needs {size(tightest.needed)} of {size(tightest.memory or 0)}, "
        f"room for {planned.room_for_tokens:,} tokens"
    )


def fewest_lines(planned: Estimate, fewer: Estimate | None) -> list[str]:
    """The fewest ranks that are enough, and why one rank fewer is not enough."""
    precision = planned.request.precision
    tp_size, dtype = planned.plan.tp_size, model.in_dtype(precision.dtype, precision.quant)
    if not planned.fits:
        text = f"no number of ranks is enough; the maximum is {tp_size}"
    elif fewer is None:  # one rank, or one rank for each stage of a pipeline
        text = f"{counted(tp_size, 'rank')} {'is' if tp_size == 1 else 'are'} enough in {dtype}"
    else:
        fullest = fewer.tightest
        text = (
            f"{tp_size} ranks are enough in {dtype}; with {fewer.plan.tp_size}, "
            f"rank {fullest.shard.rank} would need {size(fullest.needed)}"
        )
    return _line("fewest", text)


def other_stages_lines(other: Estimate | None) -> list[str]:
    """The predicted speed of the plan with other stages; empty if it is not predicted."""
    if other is None or (predicted := predict(other)) is None:
        return []
    pp = other.request.pp
    with_pp = f"with --pp {pp}" if pp > 1 else "without --pp"
    return _line("otherwise", f"{with_pp}, {_speed_of(other, predicted)}")


def fewer_hosts_lines(fewer: FewerHosts | None) -> list[str]:
    """The hosts without which decoding is faster; empty if all hosts are useful."""
    if fewer is None or (predicted := predict(fewer.planned)) is None:
        return []
    names = " and ".join(fewer.left_out)
    return _line(
        "leave out", f"{names}: the other hosts reach {_speed_of(fewer.planned, predicted)}"
    )


def _speed_of(planned: Estimate, predicted: Prediction) -> str:
    text = f"about {_rate(1 / predicted.full.total_s)} new tokens/s after "
    text += f"{planned.request.max_seq_len:,} tokens"
    if predicted.prefill_tokens_per_s is not None:
        text += f", and prompts at about {_rate(predicted.prefill_tokens_per_s)} tokens/s"
    return text


def range_lines(comparison: Comparison, price: float | None) -> list[str]:
    """A range of numbers of ranks as text: one row each, and a summary."""
    is_predicted = all(predict(planned) is not None for planned in comparison.allowed)
    has_speed = is_predicted or comparison.request.bandwidth is not None
    header = ["ranks", "balance", "tokens/s" if has_speed else "cut between"]
    header += ["weights", "KV/token", "extra KV" if price is None else "cost/1M"]
    header += ["works"] if comparison.memory is None else ["KV tokens", "fits"]
    rows = [
        _size_row(planned, price, is_predicted=is_predicted, has_speed=has_speed)
        for planned in comparison.allowed
    ]
    refused = []
    if comparison.refused:
        (first, reason), *others = comparison.refused.items()
        sizes = _span(range(first, first + 1 + len(others)))
        rows.append([sizes, *["-"] * (len(header) - 2), _yes_or_no(False)])
        refused = _line("no plan", f"for {sizes} ranks: {reason}")
    return [
        *table(header, rows, sys.stdout),
        "",
        "balance    maximum work of a rank / its fair share",
        *(_line("tokens/s", _SPEED if is_predicted else _BOUND) if has_speed else []),
        "weights    maximum of any rank; likewise KV/token",
        "extra KV   additional copies of KV heads"
        if price is None
        else f"cost/1M    of a million new tokens, at {price:g} per rank and hour",
        *refused,
        *_conclusion(comparison),
    ]


def _size_row(
    planned: Estimate, price: float | None, *, is_predicted: bool, has_speed: bool
) -> list[str]:
    predicted = predict(planned) if is_predicted else None
    tokens_per_s = planned.tokens_per_s(is_full=True)
    if predicted is not None:
        tokens_per_s = 1 / predicted.full.total_s
    speed = "-" if tokens_per_s is None else _rate(tokens_per_s)
    extra = f"{planned.kv_overhead:.0%}"
    if price is not None and predicted is not None:
        extra = f"{predicted.cost(price * planned.plan.tp_size):,.3g}"
    cells = [
        str(planned.plan.tp_size),
        f"{planned.plan.balance:.3f}",
        speed if has_speed else _CUTS[planned.plan.cut],
        size(max(rank.all_weights for rank in planned.ranks)),
        size(max(rank.kv_per_token for rank in planned.ranks)),
        extra,
    ]
    if planned.fits is None:
        return [*cells, "yes"]
    return [*cells, f"{planned.room_for_tokens:,}", _yes_or_no(planned.fits)]


def _conclusion(comparison: Comparison) -> list[str]:
    """The fewest ranks that fit, or why no number does; empty if the memory is not known."""
    if comparison.memory is None:
        return []
    fewest = comparison.smallest_that_fits
    if fewest is not None:
        answer = f"of these, {fewest} {'rank is' if fewest == 1 else 'ranks are'} enough"
    else:
        answer = "none of these is enough"
        if comparison.allowed:
            largest = comparison.allowed[-1]
            answer += f"; with {largest.plan.tp_size}, {_shortfall(largest)}"
    room = f"room with {size(comparison.memory)} per rank"
    needed = f"{comparison.request.n_tokens:,} are needed"
    return [*_line("KV tokens", f"{room}; {needed}"), *_line("fewest", answer)]


def _yes_or_no(fits: bool) -> str:
    return painted("yes", GREEN, sys.stdout) if fits else painted("no", RED, sys.stdout)


def _line(label: str, text: str) -> list[str]:
    """A label, and wrapped text to its right."""
    wrapped = textwrap.wrap(text, _WIDTH - _LABEL_WIDTH, break_long_words=False)
    return [f"{label:<{_LABEL_WIDTH}}{wrapped[0]}", *(" " * _LABEL_WIDTH + w for w in wrapped[1:])]


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 10 else f"{tokens_per_s:.1f}"


def _span(r: range) -> str:
    """A range as text, with both ends included."""
    if not r:
        return "none"
    return f"{r.start}-{r.stop - 1}" if len(r) > 1 else str(r.start)
