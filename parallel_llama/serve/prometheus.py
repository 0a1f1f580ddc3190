"""The metrics as Prometheus scrapes them.

Every series has the prefix parallel_llama; those that vLLM has are repeated under its prefix, so
that dashboards for vLLM work.

Source: Prometheus's text format.
"""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from parallel_llama.serve.engine_client import EngineClient
from parallel_llama.serve.wire import Stepped

OWN, VLLM = "parallel_llama", "vllm"
Value = float | Mapping[str, float]  # of a metric, or by a further label

# Series that vLLM does not have.
OURS = frozenset((
    "up", "rank_up", "step_age_seconds", "step_seconds", "step_phase_seconds", "engine_restarts",
    "failed_steps", "rank_token_mismatches", "rejected_requests",
))  # fmt: skip


class EngineCollector(Collector):
    """The metrics of one engine, and of the requests that it has run."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine, self._labels = engine, engine.metrics.labels

    def collect(self) -> Iterator[Metric]:
        families = [*self._engine.metrics.collect(), *self._of_engine(self._engine)]
        for family in families:
            yield _renamed(OWN, family)
        for family in families:
            if family.name not in OURS:
                yield _renamed(VLLM, family)

    def _of_engine(self, engine: EngineClient) -> Iterator[Metric]:
        yield self._gauge("up", "1 if the engine accepts requests.", engine.is_ready)
        yield self._total("engine_restarts", "Number of engine restarts.", engine.n_restarts)
        failed = "Number of steps that failed with a numerical error."
        yield self._total("failed_steps", failed, engine.n_failed_steps)
        if engine.step_age_s is not None:
            age = "Time since the engine's last heartbeat, in seconds."
            yield self._gauge("step_age_seconds", age, engine.step_age_s)
        if engine.loaded is not None:
            up = {str(rank.rank): engine.step_age_s is not None for rank in engine.loaded.ranks}
            yield self._gauge("rank_up", "1 if the rank is running.", up, "rank")
            config = "Information of the KV cache configuration."
            block_size = {str(engine.loaded.block_size): 1}
            yield self._gauge("cache_config_info", config, block_size, "block_size")
        if engine.last_step is not None:
            yield from self._of_statistics(engine.last_step)

    def _of_statistics(self, step: Stepped) -> Iterator[Metric]:
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
        phases = ("messages", "schedule", "forward", "sample", "decide")
        phase_s = {name: getattr(times, f"{name}_s") for name in phases}
        spent = "Time spent in each step phase, in seconds; forward and sample include collectives."
        yield self._total("step_phase_seconds", spent, phase_s, "phase")

    def _gauge(self, name: str, help: str, value: Value, *label: str) -> Metric:
        return self._filled(GaugeMetricFamily(name, help, labels=[*self._labels, *label]), value)

    def _total(self, name: str, help: str, value: Value, *label: str) -> Metric:
        return self._filled(CounterMetricFamily(name, help, labels=[*self._labels, *label]), value)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, value: Value) -> Metric:
        own = list(self._labels.values())
        if isinstance(value, Mapping):
            for label, each in value.items():
                family.add_metric([*own, label], float(each))
        else:
            family.add_metric(own, float(value))
        return family


def _renamed(prefix: str, family: Metric) -> Metric:
    renamed = Metric(f"{prefix}:{family.name}", family.documentation, family.type)
    renamed.samples = [sample._replace(name=f"{prefix}:{sample.name}") for sample in family.samples]
    return renamed
