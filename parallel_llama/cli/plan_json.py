"""A plan as a JSON object: the answer of `plan --json`. No torch."""

from typing import Any

from parallel_llama.cli.estimate import Estimate
from parallel_llama.cli.hosts import Hosts
from parallel_llama.cli.largest import Largest
from parallel_llama.cli.prediction import StepTime, predict, rank_steps, why_unpredicted
from parallel_llama.cli.remedies import Remedy


def plan_object(found: Estimate, price: float | None) -> dict[str, Any]:
    """A plan as a JSON object; ranges are half-open [start, stop]."""
    steps = rank_steps(found)
    seconds = [None] * len(found.ranks) if steps is None else steps.seconds
    return {
        "tp_size": found.plan.tp_size,
        "pp": len(found.plan.stages),
        "ranks": [
            {
                "rank": rank.shard.rank,
                "stage": found.plan.stages.index(rank.shard.stage),
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
            for rank, own_s in zip(found.ranks, seconds, strict=True)
        ],
        "hosts": found.asked.hosts and _host_objects(found.asked.hosts),
        "slowest_rank": steps and steps.slowest,
        "balanced_step_s": steps and steps.balanced_s,
        "loss": steps and steps.loss,
        "exact": found.asked.is_exact,
        "imbalance": found.plan.balance,
        "fits": found.fits,
        "cut": found.plan.cut,
        "placement": found.plan.placement and found.plan.placement.kind,
        "device": found.asked.device,
        "dtype": found.asked.precision.dtype,
        "quant": found.asked.precision.quant,
        "kv_cache_dtype": found.asked.kv.dtype,
        "kv_cache_bytes": found.cache_bytes,
        "kv_tokens": found.asked.n_tokens,
        "room_for_kv_tokens": found.room_for_tokens,
        "weight_bytes": found.weights,
        "one_rank_weight_bytes": found.one_rank_weights,
        "batch": found.asked.batch,
        "decode_limit_tokens_per_s": found.tokens_per_s(is_full=True),
        "decode_limit_tokens_per_s_empty": found.tokens_per_s(is_full=False),
        **prediction_object(found, price),
        "sliding_window": found.asked.args.sliding_window,
        "unrecorded_decode": found.unrecorded,
        "kv_bytes_per_sequence": sum(rank.kv.per_sequence for rank in found.ranks),
    }


def _host_objects(hosts: Hosts) -> list[dict[str, Any]]:
    return [
        {"name": hosts.name(number), "ranks": _pair(own)} for number, own in enumerate(hosts.ranks)
    ]


def prediction_object(found: Estimate, price: float | None) -> dict[str, Any]:
    """The predicted speed as JSON keys; `price` is that of a rank per hour."""
    predicted = predict(found)
    if predicted is None:
        return {"predicted": None, "unpredicted": why_unpredicted(found)}
    steps = {"decode": predicted.full, "decode_empty": predicted.empty}
    if predicted.prefill is not None:
        steps["prefill"] = predicted.prefill
    answer: dict[str, Any] = {
        "decode_tokens_per_s": predicted.tokens_per_s,
        "prefill_tokens_per_s": predicted.prefill_tokens_per_s,
        "steps": {name: _step_object(step) for name, step in steps.items()},
    }
    if price is not None:
        answer["price_per_million_tokens"] = predicted.cost(price * found.plan.tp_size)
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
        "tp_size": remedy.found.plan.tp_size,
        "needed_bytes": remedy.found.tightest.needed,
        "room_for_kv_tokens": remedy.found.room_for_tokens,
        "kv_tokens": remedy.found.asked.n_tokens,
    }


def _pair(r: range) -> list[int]:
    return [r.start, r.stop]
