"""Counters and histograms of requests and steps; `status.EngineCollector` exports them.

A request for several choices counts once in the times of requests, from its first token of any
choice to the end of its last choice. The time between two tokens is that of one choice.

Source: the metrics page of vLLM's documentation, for the names.
"""

import time
from collections import deque
from collections.abc import Iterator

from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from parallel_llama.serve.answer import Answer
from parallel_llama.serve.wire import Output, Stepped

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000, 100_000)

_PHASE = "Histogram of time spent in {} phase for request, in seconds."
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", _SECONDS),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", _STEP_SECONDS),
    "request_time_per_output_token_seconds": (
        "Histogram of time per output token in seconds per request.", _STEP_SECONDS
    ),
    "e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", _SECONDS),
    "request_queue_time_seconds": (_PHASE.format("WAITING"), _SECONDS),
    "request_prefill_time_seconds": (_PHASE.format("PREFILL"), _SECONDS),
    "request_decode_time_seconds": (_PHASE.format("DECODE"), _SECONDS),
    "request_inference_time_seconds": (_PHASE.format("RUNNING"), _SECONDS),
    "iteration_tokens_total": ("Histogram of number of tokens generated per engine step.", _TOKENS),
    "request_prompt_tokens": ("Number of prefill tokens processed per request.", _TOKENS),
    "request_generation_tokens": ("Number of generation tokens per choice.", _TOKENS),
    "step_seconds": ("Histogram of engine step duration in seconds.", _STEP_SECONDS),
}  # fmt: skip
# The second item is a label, in addition to the model's name.
_COUNTERS = {
    "prompt_tokens": ("Number of prefill tokens processed.",),
    "generation_tokens": ("Number of generation tokens processed.",),
    "request_success": ("Count of successfully processed choices.", "finished_reason"),
    "rejected_requests": ("Count of requests that were not admitted.", "reason"),
    "rank_token_mismatches": ("Engine failures because ranks sampled different tokens.",),
}

SHORT_WINDOW_S = 5.0
LONG_WINDOW_S = 60.0
RATE_RESOLUTION_S = 0.05


class Rate:
    """Mean events per second over a window of at most LONG_WINDOW_S."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._counts: deque[tuple[float, int]] = deque()

    def add(self, n: int) -> None:
        now_s = time.monotonic()
        # Counts within RATE_RESOLUTION_S share an entry, which bounds the length of the deque.
        if self._counts and now_s - self._counts[-1][0] < RATE_RESOLUTION_S:
            entry_s, n_before = self._counts.pop()
            self._counts.append((entry_s, n_before + n))
        else:
            self._counts.append((now_s, n))
        while now_s - self._counts[0][0] > LONG_WINDOW_S:
            self._counts.popleft()

    def per_s(self, window_s: float = SHORT_WINDOW_S) -> float:
        """Mean rate over the last `window_s` seconds, or since the start if that is more recent.

        The time since the start counts as at least SHORT_WINDOW_S.
        """
        now_s = time.monotonic()
        total = 0
        for entry_s, n in reversed(self._counts):
            if now_s - entry_s > window_s:
                break
            total += n
        return total / min(window_s, max(now_s - self._started_s, SHORT_WINDOW_S))


class Metrics:
    """Counts of one model's requests and steps."""

    def __init__(self, model: str) -> None:
        self.labels = {"model_name": model}
        self.token_rate = Rate()
        histograms = {
            name: Histogram(name, help, list(self.labels), registry=None, buckets=buckets)
            for name, (help, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(name, help, [*self.labels, *label], registry=None)
            for name, (help, *label) in _COUNTERS.items()
        }
        self._families: list[MetricWrapperBase] = [*histograms.values(), *self._counters.values()]
        self._histograms = {name: histogram.labels(model) for name, histogram in histograms.items()}
        for name, (_, *label) in _COUNTERS.items():
            if not label:
                self._count(name, 0)  # exported from the start

    # Events

    def submitted(self, answer: Answer) -> None:
        self._count("prompt_tokens", len(answer.request.prompt))
        self._observe("request_prompt_tokens", len(answer.request.prompt))

    def rejected(self, reason: str) -> None:
        """Counts a request that was not admitted; `reason` is busy or not_ready."""
        self._count("rejected_requests", 1, reason)

    def stepped(self, message: Stepped, probe_key: int | None) -> None:
        """Counts a step, and its tokens except those of the probe, a request of the server."""
        self._observe("step_seconds", message.step_s)
        n_drawn = sum(len(each.tokens) for each in message.outputs if each.key != probe_key)
        if n_drawn:
            self._observe("iteration_tokens_total", n_drawn)
            self._count("generation_tokens", n_drawn)
            self.token_rate.add(n_drawn)

    def emitted(
        self, answer: Answer, output: Output, previous_token_s: float | None, *, is_first: bool
    ) -> None:
        """Counts an answer's output.

        Args:
            previous_token_s: the time of the last tokens of the same choice before this output.
            is_first: whether no choice had tokens before this output.
        """
        token_s = answer.last_token_s[output.choice]
        if output.tokens and token_s is not None:
            if is_first:
                self._observe("time_to_first_token_seconds", token_s - answer.submitted_s)
            if previous_token_s is not None:
                self._observe("inter_token_latency_seconds", token_s - previous_token_s)
        if output.completion is not None:
            self._count("request_success", 1, output.completion.finish_reason)
            self._observe("request_generation_tokens", len(output.completion.tokens))

    def ended(self, answer: Answer) -> None:
        """Counts an answer whose choices have all ended."""
        now = time.monotonic()
        self._observe("e2e_request_latency_seconds", now - answer.submitted_s)
        started_s, first_s = answer.started_s, answer.first_token_s
        if started_s is not None:
            self._observe("request_queue_time_seconds", started_s - answer.submitted_s)
            self._observe("request_inference_time_seconds", now - started_s)
        if started_s is not None and first_s is not None:
            self._observe("request_prefill_time_seconds", first_s - started_s)
        if first_s is not None:
            self._observe("request_decode_time_seconds", now - first_s)
            n_first = sum(token_s is not None for token_s in answer.last_token_s)
            if n_after := answer.n_tokens - n_first:
                per_token_s = answer.decode_s / n_after
                self._observe("request_time_per_output_token_seconds", per_token_s)

    def mismatched(self) -> None:
        """Counts an engine failure because ranks sampled different tokens."""
        self._count("rank_token_mismatches", 1)

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            yield from family.collect()

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _count(self, name: str, n: int, *labels: str) -> None:
        self._counters[name].labels(*self.labels.values(), *labels).inc(n)
