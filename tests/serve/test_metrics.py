"""The metrics for Prometheus, and the dashboard that reads them."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import Served

ROOT = Path(__file__).parents[2]

# Series that dashboards, autoscalers and gateways made for vLLM read.
OF_VLLM = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total",
    "generation_tokens_total", "request_success_total", "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket", "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket", "request_decode_time_seconds_bucket",
    "request_inference_time_seconds_bucket", "iteration_tokens_total_bucket",
    "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
    "request_prompt_tokens_bucket", "request_generation_tokens_bucket", "cache_config_info",
)  # fmt: skip


def samples(served: Served) -> dict[tuple[str, str], float]:
    _, _, body = served.send("GET", "/metrics")
    return {
        (sample.name, json.dumps(sample.labels, sort_keys=True)): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def shown(smollm2: Served) -> dict[tuple[str, str], float]:
    """All samples; counters are differences over one answer of 5 tokens."""
    before = samples(smollm2)
    smollm2.post("/v1/completions", prompt="The sky is", max_tokens=5, ignore_eos=True)
    counted = ("_total", "_count", "_sum", "_bucket")
    return {
        key: number - before.get(key, 0.0) if key[0].endswith(counted) else number
        for key, number in samples(smollm2).items()
    }


def value(shown: dict[tuple[str, str], float], name: str, **labels: str) -> float:
    labels = {"model_name": "smollm2", **labels}
    return shown[name, json.dumps(labels, sort_keys=True)]


@pytest.mark.parametrize("prefix", ["parallel_llama", "vllm"])
def test_answer_is_counted_under_both_metric_prefixes(shown, prefix):
    assert value(shown, f"{prefix}:generation_tokens_total") == 5
    assert value(shown, f"{prefix}:prompt_tokens_total") == 3
    assert value(shown, f"{prefix}:request_success_total", finished_reason="length") == 1
    assert value(shown, f"{prefix}:time_to_first_token_seconds_count") == 1
    assert 0 < value(shown, f"{prefix}:request_queue_time_seconds_sum") < 10
    whole = value(shown, f"{prefix}:e2e_request_latency_seconds_sum")
    parts = ("queue", "prefill", "decode")
    sums = (value(shown, f"{prefix}:request_{part}_time_seconds_sum") for part in parts)
    assert sum(sums) == pytest.approx(whole, abs=0.01)


def test_series_that_vllm_dashboards_read_are_exported(shown):
    names = {name for name, _ in shown}
    assert not {f"vllm:{name}" for name in OF_VLLM} - names


def test_every_rank_is_reported_as_up(shown):
    assert [value(shown, "parallel_llama:rank_up", rank=rank) for rank in "01"] == [1, 1]
    assert value(shown, "parallel_llama:up") == 1
    assert 0 <= value(shown, "parallel_llama:step_age_seconds") < 30


def test_grafana_dashboard_reads_only_exported_series(shown):
    board = json.loads((ROOT / "launch" / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    read = {name for query in queries for name in re.findall(r"parallel_llama:\w+", query)}
    absent = read - {name for name, _ in shown} - {"parallel_llama:rejected_requests_total"}
    assert len(read) > 15 and not absent
