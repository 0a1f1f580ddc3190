"""Benchmarks of windows and overheads, and the charts of all benchmarks."""

from xml.etree import ElementTree

import pytest
import torch

from launch.bench.engine_overheads import step_line, step_times
from launch.bench.plot import Chart, svg
from launch.bench.windows import HEAD_DIM, N_HEADS, WAYS
from parallel_llama.engine.statistics import StepTimes
from parallel_llama.llm import LLM


@pytest.mark.parametrize(("n_tokens", "window"), [(50, 16), (700, 96), (30, 64)])
def test_all_ways_to_compute_a_window_give_equal_results(n_tokens, window):
    q, k, v = torch.randn(3, N_HEADS, n_tokens, HEAD_DIM, dtype=torch.float64)
    with torch.inference_mode():
        first, *others = (way(n_tokens, window, torch.float64)(q, k, v) for way in WAYS.values())
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=1e-12)


def test_chart_has_a_line_for_each_series():
    chart = Chart("a < b", "tokens", {"one": [(1, 2), (10, 20)], "two": [(1, 3)]})
    root = ElementTree.fromstring(svg([chart, chart]))
    lines = [node for node in root.iter() if node.tag.endswith("polyline")]
    assert len(lines) == 4
    dots = [node for node in root.iter() if node.tag.endswith("circle")]
    assert len(dots) == 2  # one in each chart, as a line of one point is invisible
    assert any(node.text == "a < b" for node in root.iter())


def test_a_step_is_split_into_all_its_parts():
    """Regression: after all the work, the report asked for a part by its old name."""
    times = StepTimes(10, messages_s=0.1, schedule_s=0.2, forward_s=0.5, sample_s=0.1, decide_s=0.1)
    line = step_line(times, 16)
    assert all(part in line for part in ("100.0 ms", "50.0%", "messages 10.00", "decide 10.00"))


def test_step_times_are_those_of_steps_after_the_prefill(model):
    """Regression: the times were all 0, and the report divided by the number of steps."""
    with LLM(str(model)) as llm:
        times = step_times(llm, 2, 8)
        assert 0 < times.n_steps < llm.engine.times.n_steps / 2
        assert 0 < times.forward_s < llm.engine.times.forward_s
