"""The metrics as Prometheus scrapes them.

Every series has the prefix parallel_llama; those that vLLM has are repeated under its prefix, so
that dashboards for vLLM work.

Source: Prometheus's text format.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from parallel_llama.serve.engine_client import EngineClient
from parallel_llama.serve.metrics import Metrics
from parallel_llama.serve.wire import Stepped

OWN, VLLM = "parallel_llama", "vllm"

# Series that vLLM does not have.
OURS = frozenset((
    "up", "rank_up", "step_age_seconds", "step_seconds", "step_phase_seconds", "engine_restarts",
    "failed_steps", "rank_token_mismatches", "rejected_requests",
))  # fmt: skip


def make_registry(metrics: Metrics, engine: EngineClient) -> CollectorRegistry:
    """The registry of one engine's metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_EngineCollector(metrics, engine))
    return registry


class _EngineCollector(Collector):
    def __init__(self, metrics: Metrics, engine: EngineClient) -> None:
        self._metrics, self._engine = metrics, engine
        self._labels = metrics.labels

    def collect(self) -> Iterator[Metric]:
        families = [*self._metrics.collect(), *self._of_engine(self._engine)]
        for family in families:
            yield _renamed(OWN, family)
        for family in families:
            if family.name not in OURS:
                yield _renamed(VLLM, family)

    def _of_engine(self, engine: EngineClient) -> Iterator[Metric]:
        yield self._gauge("up", "1 if the engine accepts requests.", float(engine.is_ready))
        yield self._total("engine_restarts", "Number of engine restarts.", engine.n_restarts)
        failed = "Number of steps that failed with a numerical error."
        yield self._total("failed_steps", failed, engine.n_failed_steps)
        if engine.step_age_s is not None:
            age = "Time since the engine's last heartbeat, in seconds."
            yield self._gauge("step_age_seconds", age, engine.step_age_s)
        if engine.loaded is not None:
            ranks = GaugeMetricFamily(
                "rank_up", "1 if the rank is running.", labels=[*self._labels, "rank"]
            )
            for rank in engine.loaded.ranks:
                is_up = engine.step_age_s is not None
                ranks.add_metric([*self._labels.values(), str(rank.rank)], float(is_up))
            yield ranks
            config = GaugeMetricFamily(
                "cache_config_info",
                "Information of the KV cache configuration.",
                labels=[*self._labels, "block_size"],
            )
            config.add_metric([*self._labels.values(), str(engine.loaded.block_size)], 1)
            yield config
        if engine.last_step is not None:
            yield from self._of_statistics(engine.last_step)

    def _of_statistics(self, step: Stepped) -> Iterator[Metric]:
        state, times = step.statistics, step.statistics.times
        n_blocks = state.n_blocks_used + state.n_blocks_cached + state.n_blocks_free
        used = state.n_blocks_used / max(1, n_blocks)
        for name, help, value in (
            ("num_requests_running", "Number of choices in execution batches.", state.n_running),
            ("num_requests_waiting", "Number of choices waiting.", state.n_waiting),
            ("kv_cache_usage_perc", "KV cache usage. 1 means 100 percent usage.", used),
        ):
            yield self._gauge(name, help, value)
        for name, help, count in (
            ("num_preemptions", "Cumulative number of preemptions.", state.n_preempted),
            ("prefix_cache_queries", "Prefix cache queries, in tokens.", state.n_prompt_tokens),
            ("prefix_cache_hits", "Prefix cache hits, in tokens.", state.n_prefix_tokens),
        ):
            yield self._total(name, help, count)
        phases = CounterMetricFamily(
            "step_phase_seconds",
            "Time spent in each step phase, in seconds; forward and sample include collectives.",
            labels=[*self._labels, "phase"],
        )
        for name in ("messages", "schedule", "forward", "sample", "decide"):
            phases.add_metric([*self._labels.values(), name], getattr(times, f"{name}_s"))
        yield phases

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _total(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


def _renamed(prefix: str, family: Metric) -> Metric:
    renamed = Metric(f"{prefix}:{family.name}", family.documentation, family.type)
    renamed.samples = [sample._replace(name=f"{prefix}:{sample.name}") for sample in family.samples]
    return renamed
