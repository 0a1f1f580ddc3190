"""The server's status: GET /status, which the web page shows, and GET /metrics for Prometheus.

Every metric has the prefix parallel_llama. Metrics that vLLM has are repeated under vLLM's prefix,
so that dashboards for vLLM work.

Source: Prometheus's text format.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from resource import getpagesize
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import parallel_llama
from parallel_llama.serve.engine_client import EngineClient
from parallel_llama.serve.metrics import LONG_WINDOW_S
from parallel_llama.serve.service import Service
from parallel_llama.serve.wire import Stepped


def status_of(service: Service) -> dict[str, Any]:
    """The model, and the engine's load and memory; None for values that are not known yet.

    Units are in the suffixes of the keys. `memory_bytes` is a rank's resident memory now;
    `weight_bytes`, `cuda_bytes` and `bytes_per_rank` are allocated sizes.
    """
    engine, loaded, step = service.engine, service.engine.loaded, service.engine.last_step
    ranks = [] if loaded is None else loaded.ranks
    statistics = step and step.statistics
    return {
        "model": service.names[0],
        "version": parallel_llama.__version__,
        "state": engine.state,
        "tp_size": len(ranks) or None,
        "dtype": loaded and loaded.dtype,
        "quant": loaded and loaded.quant,
        "max_model_len": service.inputs.max_seq_len,
        "step_age_s": engine.step_age_s,
        "step_ms": step and round(step.step_s * 1e3, 2),
        "tokens_per_s": round(engine.metrics.token_rate.per_s(), 1),
        "tokens_per_s_minute": round(engine.metrics.token_rate.per_s(LONG_WINDOW_S), 1),
        "n_running": statistics and statistics.n_running,
        "n_waiting": statistics and statistics.n_waiting,
        "n_restarts": engine.n_restarts,
        "n_losses": engine.n_losses,
        "n_returns": engine.n_returns,
        "kv": loaded and _kv(service),
        "ranks": [
            {
                "rank": rank.rank,
                "up": engine.state in ("ready", "draining"),
                "memory_bytes": _resident_bytes(rank.pid),
                "cuda_bytes": rank.cuda_bytes,
                "weight_bytes": rank.weight_bytes,
            }
            for rank in ranks
        ],
        "defaults": _defaults(service),
    }


def _defaults(service: Service) -> dict[str, float]:
    """The sampling parameters of a request that sets none."""
    params = service.inputs.sampling_params()
    return {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p")}


def _kv(service: Service) -> dict[str, int] | None:
    loaded, step = service.engine.loaded, service.engine.last_step
    if loaded is None:
        return None
    used = cached = 0
    if step is not None:
        state = step.statistics
        n_blocks = max(1, state.n_blocks_used + state.n_blocks_cached + state.n_blocks_free)
        used = loaded.kv_tokens * state.n_blocks_used // n_blocks
        cached = loaded.kv_tokens * state.n_blocks_cached // n_blocks
    return {
        "tokens_used": used,
        "tokens_cached": cached,
        "tokens_total": loaded.kv_tokens,
        "bytes_per_rank": loaded.kv_bytes,
    }


def _resident_bytes(pid: int | None) -> int | None:
    """Resident memory of a process on this host; None if it cannot be read."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * getpagesize()
    return None


OWN_PREFIX, VLLM_PREFIX = "parallel_llama", "vllm"
Value = float | Mapping[str, float]  # one value, or values by a further label

# Metrics that vLLM does not have.
OWN_METRICS = frozenset((
    "up", "rank_up", "tp_size", "step_age_seconds", "step_seconds", "step_phase_seconds",
    "engine_restarts", "rank_losses", "rank_returns", "failed_steps", "rank_token_mismatches",
    "rejected_requests",
))  # fmt: skip


class EngineCollector(Collector):
    """The metrics of one engine, and of the requests that it has run."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine, self._labels = engine, engine.metrics.labels

    def collect(self) -> Iterator[Metric]:
        families = [*self._engine.metrics.collect(), *self._engine_metrics(self._engine)]
        for family in families:
            yield _renamed(OWN_PREFIX, family)
        for family in families:
            if family.name not in OWN_METRICS:
                yield _renamed(VLLM_PREFIX, family)

    def _engine_metrics(self, engine: EngineClient) -> Iterator[Metric]:
        yield self._gauge("up", "1 if the engine accepts requests.", engine.is_ready)
        yield self._total("engine_restarts", "Number of engine restarts.", engine.n_restarts)
        survived = (
            "Number of times that ranks were lost and the remaining ranks continued all requests."
        )
        yield self._total("rank_losses", survived, engine.n_losses)
        returned = "Number of processes that have replaced lost ranks."
        yield self._total("rank_returns", returned, engine.n_returns)
        failed = "Number of steps that failed with a numerical error."
        yield self._total("failed_steps", failed, engine.n_failed_steps)
        if engine.step_age_s is not None:
            age = "Time since the engine's last message, in seconds."
            yield self._gauge("step_age_seconds", age, engine.step_age_s)
        if engine.loaded is not None:
            up = {str(rank.rank): engine.step_age_s is not None for rank in engine.loaded.ranks}
            yield self._gauge("rank_up", "1 if the rank is running.", up, "rank")
            yield self._gauge("tp_size", "Number of ranks.", len(up))
            config = "Information about the KV cache configuration."
            block_size = {str(engine.loaded.block_size): 1}
            yield self._gauge("cache_config_info", config, block_size, "block_size")
        if engine.last_step is not None:
            yield from self._step_metrics(engine.last_step)

    def _step_metrics(self, step: Stepped) -> Iterator[Metric]:
        state, times = step.statistics, step.statistics.times
        n_blocks = state.n_blocks_used + state.n_blocks_cached + state.n_blocks_free
        running = "Number of choices in model execution batches."
        yield self._gauge("num_requests_running", running, state.n_running)
        waiting = "Number of choices waiting to be processed."
        yield self._gauge("num_requests_waiting", waiting, state.n_waiting)
        usage, used = "KV cache usage. 1 means 100 percent usage.", state.n_blocks_used
        yield self._gauge("kv_cache_usage_perc", usage, used / max(1, n_blocks))
        preempted = "Cumulative number of preemptions of choices."
        yield self._total("num_preemptions", preempted, state.n_preempted)
        queries = "Prefix cache queries, in terms of number of queried tokens."
        yield self._total("prefix_cache_queries", queries, state.n_prompt_tokens)
        hits = "Prefix cache hits, in terms of number of cached tokens."
        yield self._total("prefix_cache_hits", hits, state.n_prefix_tokens)
        drafts = "Number of draft tokens."
        yield self._total("spec_decode_num_draft_tokens", drafts, state.n_draft_tokens)
        accepted = "Number of accepted tokens."
        yield self._total("spec_decode_num_accepted_tokens", accepted, state.n_accepted_tokens)
        phases = ("messages", "schedule", "forward", "sample", "decide")
        phase_s = {name: getattr(times, f"{name}_s") for name in phases}
        spent = "Time spent in each step phase, in seconds; forward and sample include collectives."
        yield self._total("step_phase_seconds", spent, phase_s, "phase")

    def _gauge(self, name: str, help: str, value: Value, *label: str) -> Metric:
        return self._with_value(
            GaugeMetricFamily(name, help, labels=[*self._labels, *label]), value
        )

    def _total(self, name: str, help: str, value: Value, *label: str) -> Metric:
        return self._with_value(
            CounterMetricFamily(name, help, labels=[*self._labels, *label]), value
        )

    def _with_value(self, family: GaugeMetricFamily | CounterMetricFamily, value: Value) -> Metric:
        labels = list(self._labels.values())
        if isinstance(value, Mapping):
            for label, labelled_value in value.items():
                family.add_metric([*labels, label], float(labelled_value))
        else:
            family.add_metric(labels, float(value))
        return family


def _renamed(prefix: str, family: Metric) -> Metric:
    renamed = Metric(f"{prefix}:{family.name}", family.documentation, family.type)
    renamed.samples = [sample._replace(name=f"{prefix}:{sample.name}") for sample in family.samples]
    return renamed
