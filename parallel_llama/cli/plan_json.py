"""A plan as a JSON object: the answer of `plan --json`. No torch."""

from typing import Any

from parallel_llama.cli.estimate import Estimate
from parallel_llama.cli.hosts import Hosts
from parallel_llama.cli.largest import Largest
from parallel_llama.cli.prediction import StepTime, predict, rank_steps, why_unpredicted
from parallel_llama.cli.remedies import Remedy


def plan_object(planned: Estimate, price: float | None) -> dict[str, Any]:
    """A plan as a JSON object; ranges are half-open [start, stop]."""
    steps = rank_steps(planned)
    seconds = [None] * len(planned.ranks) if steps is None else steps.seconds
    return {
        "tp_size": planned.plan.tp_size,
        "pp": len(planned.plan.stages),
        "ranks": [
            {
                "rank": rank.shard.rank,
                "stage": planned.plan.stages.index(rank.shard.stage),
                "layers": _pair(rank.shard.layers),
                "heads": _pair(rank.shard.heads),
                "kv_heads": _pair(rank.shard.kv_heads),
                "ffn": _pair(rank.shard.ffn),
                "shared_ffn": _pair(rank.shard.shared_ffn),
                "dense_ffn": _pair(rank.shard.dense_ffn),
                "experts": _pair(rank.shard.experts),
                "vocab": _pair(rank.shard.vocab),
                "outputs": _pair(rank.shard.outputs),
                "weight_bytes": rank.weights,
                "adapter_bytes": rank.adapters,
                "draft_weight_bytes": rank.draft_weights,
                "kv_bytes_per_token": rank.kv_per_token,
                "working_bytes": rank.working,
                "needed_bytes": rank.needed,
                "memory_bytes": rank.memory,
                "step_read_bytes": rank.read_weights + rank.read_kv,
                "bandwidth_bytes_per_s": rank.bandwidth,
                "step_s": own_s,
            }
            for rank, own_s in zip(planned.ranks, seconds, strict=True)
        ],
        "hosts": planned.request.hosts and _host_objects(planned.request.hosts),
        "slowest_rank": steps and steps.slowest,
        "balanced_step_s": steps and steps.balanced_s,
        "loss": steps and steps.loss,
        "exact": planned.request.is_exact,
        "imbalance": planned.plan.balance,
        "fits": planned.fits,
        "cut": planned.plan.cut,
        "placement": planned.plan.placement and planned.plan.placement.kind,
        "device": planned.request.device,
        "dtype": planned.request.precision.dtype,
        "quant": planned.request.precision.quant,
        "kv_cache_dtype": planned.request.kv.dtype,
        "kv_cache_bytes": planned.cache_bytes,
        "kv_tokens": planned.request.n_tokens,
        "room_for_kv_tokens": planned.room_for_tokens,
        "weight_bytes": planned.weights,
        "one_rank_weight_bytes": planned.one_rank_weights,
        "batch": planned.request.batch,
        "decode_limit_tokens_per_s": planned.tokens_per_s(is_full=True),
        "decode_limit_tokens_per_s_empty": planned.tokens_per_s(is_full=False),
        **prediction_object(planned, price),
        "sliding_window": planned.request.args.sliding_window,
        "unrecorded_decode": planned.unrecorded,
        "kv_bytes_per_sequence": sum(rank.kv.per_sequence for rank in planned.ranks),
    }


def _host_objects(hosts: Hosts) -> list[dict[str, Any]]:
    return [
        {"name": hosts.name(number), "ranks": _pair(own)} for number, own in enumerate(hosts.ranks)
    ]


def prediction_object(planned: Estimate, price: float | None) -> dict[str, Any]:
    """The predicted speed as JSON keys; `price` is that of a rank per hour."""
    predicted = predict(planned)
    if predicted is None:
        return {"predicted": None, "unpredicted": why_unpredicted(planned)}
    steps = {"decode": predicted.full, "decode_empty": predicted.empty}
    if predicted.prefill is not None:
        steps["prefill"] = predicted.prefill
    answer: dict[str, Any] = {
        "decode_tokens_per_s": predicted.tokens_per_s,
        "prefill_tokens_per_s": predicted.prefill_tokens_per_s,
        "steps": {name: _step_object(step) for name, step in steps.items()},
    }
    if price is not None:
        answer["price_per_million_tokens"] = predicted.cost(price * planned.plan.tp_size)
    return {"predicted": answer, "unpredicted": None}


def _step_object(step: StepTime) -> dict[str, Any]:
    return {
        "total_s": step.total_s,
        "memory_s": step.memory_s,
        "arithmetic_s": step.arithmetic_s,
        "link_s": step.link_s,
        "launch_s": step.launch_s,
        "limit": step.limit,
    }


def limits_object(largest: Largest | None) -> dict[str, int | None]:
    """The largest context and batch as JSON keys."""
    return {
        "largest_context": None if largest is None else largest.context,
        "largest_batch": None if largest is None else largest.batch,
    }


def remedy_object(remedy: Remedy) -> dict[str, Any]:
    """A change that makes the plan fit, and what the tightest rank then needs."""
    return {
        "change": remedy.words,
        **{name: value for name, value in remedy.change.items() if name != "memory"},
        "tp_size": remedy.planned.plan.tp_size,
        "needed_bytes": remedy.planned.tightest.needed,
        "room_for_kv_tokens": remedy.planned.room_for_tokens,
        "kv_tokens": remedy.planned.request.n_tokens,
    }


def _pair(r: range) -> list[int]:
    return [r.start, r.stop]
