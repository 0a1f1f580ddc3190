"""Counters and histograms of requests and steps; `prometheus` exports them.

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

NOW_S = 5.0
MINUTE_S = 60.0
RATE_RESOLUTION_S = 0.05


class Rate:
    """Mean rate of events per second over the last seconds, at most MINUTE_S."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._counts: deque[tuple[float, int]] = deque()

    def add(self, n: int) -> None:
        now_s = time.monotonic()
        # Counts within RATE_RESOLUTION_S share an entry, which bounds the length of the deque.
        if self._counts and now_s - self._counts[-1][0] < RATE_RESOLUTION_S:
            begun_s, n_before = self._counts.pop()
            self._counts.append((begun_s, n_before + n))
        else:
            self._counts.append((now_s, n))
        while now_s - self._counts[0][0] > MINUTE_S:
            self._counts.popleft()

    def per_s(self, window_s: float = NOW_S) -> float:
        """Mean rate over the last `window_s` seconds, or since the start if that is more recent."""
        now_s = time.monotonic()
        total = 0
        for begun_s, n in reversed(self._counts):
            if now_s - begun_s > window_s:
                break
            total += n
        return total / min(window_s, max(now_s - self._started_s, NOW_S))


class Metrics:
    """Counts of one model's requests and steps."""

    def __init__(self, model: str) -> None:
        self.labels = {"model_name": model}
        self._kept: list[MetricWrapperBase] = []
        self.token_rate = Rate()
        self._first_token_s = self._histogram(
            "time_to_first_token_seconds", "Histogram of time to first token in seconds.", _SECONDS
        )
        self._between_s = self._histogram(
            "inter_token_latency_seconds",
            "Histogram of inter-token latency in seconds.",
            _STEP_SECONDS,
        )
        self._per_token_s = self._histogram(
            "request_time_per_output_token_seconds",
            "Histogram of time per output token in seconds per request.",
            _STEP_SECONDS,
        )
        self._whole_s = self._histogram(
            "e2e_request_latency_seconds",
            "Histogram of e2e request latency in seconds.",
            _SECONDS,
        )
        phase = "Histogram of time spent in {} phase for request, in seconds."
        self._queue_s = self._histogram(
            "request_queue_time_seconds", phase.format("WAITING"), _SECONDS
        )
        self._prefill_s = self._histogram(
            "request_prefill_time_seconds", phase.format("PREFILL"), _SECONDS
        )
        self._decode_s = self._histogram(
            "request_decode_time_seconds", phase.format("DECODE"), _SECONDS
        )
        self._inference_s = self._histogram(
            "request_inference_time_seconds", phase.format("RUNNING"), _SECONDS
        )
        self._step_tokens = self._histogram(
            "iteration_tokens_total",
            "Histogram of number of tokens generated per engine step.",
            _TOKENS,
        )
        self._prompt_sizes = self._histogram(
            "request_prompt_tokens", "Number of prefill tokens processed per request.", _TOKENS
        )
        self._drawn_sizes = self._histogram(
            "request_generation_tokens", "Number of generation tokens per choice.", _TOKENS
        )
        self._step_s = self._histogram(
            "step_seconds", "Histogram of engine step duration in seconds.", _STEP_SECONDS
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Number of prefill tokens processed.")
        self._drawn_tokens = self._counter(
            "generation_tokens", "Number of generation tokens processed."
        )
        self._ended = self._counter(
            "request_success", "Count of successfully processed choices.", "finished_reason"
        )
        self._rejected = self._counter(
            "rejected_requests", "Count of requests that were not admitted.", "reason"
        )
        self._mismatches = self._counter(
            "rank_token_mismatches",
            "Number of engine failures because ranks sampled different tokens.",
        )

    # Events

    def submitted(self, answer: Answer) -> None:
        self._prompt_tokens.inc(len(answer.request.prompt))
        self._prompt_sizes.observe(len(answer.request.prompt))

    def rejected(self, reason: str) -> None:
        """Counts a request that was not admitted; `reason` is busy or not_ready."""
        self._rejected.labels(*self.labels.values(), reason).inc()

    def stepped(self, message: Stepped) -> None:
        self._step_s.observe(message.step_s)
        n_drawn = sum(len(output.tokens) for output in message.outputs)
        if n_drawn:
            self._step_tokens.observe(n_drawn)
            self._drawn_tokens.inc(n_drawn)
            self.token_rate.add(n_drawn)

    def emitted(self, answer: Answer, output: Output, before_s: float | None) -> None:
        """Counts an answer's output; `before_s` is the time of the tokens before it."""
        if output.tokens and answer.last_token_s is not None:
            if before_s is None:
                self._first_token_s.observe(answer.last_token_s - answer.submitted_s)
            else:
                self._between_s.observe(answer.last_token_s - before_s)
        if output.completion is not None:
            reason = output.completion.finish_reason
            self._ended.labels(*self.labels.values(), reason).inc()
            self._drawn_sizes.observe(len(output.completion.tokens))

    def ended(self, answer: Answer) -> None:
        """Counts an answer whose choices have all ended."""
        now = time.monotonic()
        self._whole_s.observe(now - answer.submitted_s)
        begun_s, first_s = answer.begun_s, answer.first_token_s
        if begun_s is not None:
            self._queue_s.observe(begun_s - answer.submitted_s)
            self._inference_s.observe(now - begun_s)
        if begun_s is not None and first_s is not None:
            self._prefill_s.observe(first_s - begun_s)
        if first_s is not None:
            self._decode_s.observe(now - first_s)
            if (n_after := answer.n_tokens - answer.request.params.n) > 0:
                self._per_token_s.observe((now - first_s) / n_after)

    def mismatched(self) -> None:
        """Counts an engine failure because ranks sampled different tokens."""
        self._mismatches.inc(1)

    def collect(self) -> Iterator[Metric]:
        for each in self._kept:
            yield from each.collect()

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, help, list(self.labels), registry=None, buckets=buckets)
        self._kept.append(made)
        return made.labels(*self.labels.values())

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        made = Counter(name, help, [*self.labels, *labels], registry=None)
        self._kept.append(made)
        return made if labels else made.labels(*self.labels.values())
