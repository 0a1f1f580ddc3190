"""What Prometheus is shown: the counts, and the engine's own numbers of now.

Every series has our prefix, and those that vLLM has are there under its prefix as well, so that
dashboards made for it go on.

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
    """What is scraped of one engine."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Exposition(metrics, engine))
    return registry


class _Exposition(Collector):
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
        """What the engine itself knows, now."""
        yield self._gauge("up", "Whether the engine takes requests.", float(engine.is_ready))
        yield self._total("engine_restarts", "Starts after the first.", engine.n_restarts)
        yield self._total("failed_steps", "Steps that gave no numbers.", engine.n_failed_steps)
        if engine.step_age_s is not None:
            age = "Since the engine last showed that it steps. Units: seconds."
            yield self._gauge("step_age_seconds", age, engine.step_age_s)
        if engine.loaded is not None:
            ranks = GaugeMetricFamily(
                "rank_up", "Whether a rank is there.", labels=[*self._labels, "rank"]
            )
            for rank in engine.loaded.ranks:
                is_up = engine.step_age_s is not None
                ranks.add_metric([*self._labels.values(), str(rank.rank)], float(is_up))
            yield ranks
            config = GaugeMetricFamily(
                "cache_config_info", "The KV cache.", labels=[*self._labels, "block_size"]
            )
            config.add_metric([*self._labels.values(), str(engine.loaded.block_size)], 1)
            yield config
        if engine.last_step is not None:
            yield from self._of_statistics(engine.last_step)

    def _of_statistics(self, step: Stepped) -> Iterator[Metric]:
        state, times = step.statistics, step.statistics.times
        n_blocks = state.n_blocks_used + state.n_blocks_cached + state.n_blocks_free
        used = state.n_blocks_used / max(1, n_blocks)
        yield self._gauge("num_requests_running", "Choices that run.", state.n_running)
        yield self._gauge("num_requests_waiting", "Choices that wait.", state.n_waiting)
        yield self._gauge("kv_cache_usage_perc", "Blocks in use, 1 for all of them.", used)
        yield self._total("num_preemptions", "Choices that gave way.", state.n_preempted)
        yield self._total("prefix_cache_queries", "Tokens looked for.", state.n_prompt_tokens)
        yield self._total("prefix_cache_hits", "Tokens found.", state.n_prefix_tokens)
        phases = CounterMetricFamily(
            "step_phase_seconds",
            "Where the time of steps went; forward and sample hold the collectives. "
            "Units: seconds.",
            labels=[*self._labels, "phase"],
        )
        for name in ("messages", "schedule", "forward", "sample", "decide"):
            phases.add_metric([*self._labels.values(), name], getattr(times, f"{name}_s"))
        yield phases

    def _gauge(self, name: str, says: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, says, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _total(self, name: str, says: str, value: float) -> Metric:
        family = CounterMetricFamily(name, says, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


def _renamed(prefix: str, family: Metric) -> Metric:
    renamed = Metric(f"{prefix}:{family.name}", family.documentation, family.type)
    renamed.samples = [sample._replace(name=f"{prefix}:{sample.name}") for sample in family.samples]
    return renamed
