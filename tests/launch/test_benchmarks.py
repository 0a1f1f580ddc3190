"""Benchmarks of windows and overheads, and the charts of all benchmarks."""

from xml.etree import ElementTree

import pytest
import torch

from launch.bench.engine_overheads import guess_line, prefix_line, step_line
from launch.bench.plot import Chart, svg
from launch.bench.windows import HEAD_DIM, N_HEADS, WAYS
from parallel_llama.engine.statistics import StepTimes


@pytest.mark.parametrize(("n_tokens", "window"), [(50, 16), (700, 96), (30, 64)])
def test_all_ways_give_the_same(n_tokens, window):
    q, k, v = torch.randn(3, N_HEADS, n_tokens, HEAD_DIM, dtype=torch.float64)
    with torch.inference_mode():
        first, *others = (way(n_tokens, window, torch.float64)(q, k, v) for way in WAYS.values())
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=1e-12)


def test_a_chart_has_a_line_for_each_way():
    chart = Chart("a < b", "tokens", {"one": [(1, 2), (10, 20)], "two": [(1, 3)]})
    root = ElementTree.fromstring(svg([chart, chart]))
    lines = [node for node in root.iter() if node.tag.endswith("polyline")]
    assert len(lines) == 4
    dots = [node for node in root.iter() if node.tag.endswith("circle")]
    assert len(dots) == 2  # of the line that is one point, which nobody would see
    assert any(node.text == "a < b" for node in root.iter())


def test_an_axis_of_less_than_two_decades_has_more_than_the_powers_of_ten():
    def numbers(*values: float) -> set[str | None]:
        chart = Chart("", "", {"a": [(1, value) for value in values]})
        return {node.text for node in ElementTree.fromstring(svg([chart])).iter() if node.text}

    assert {"20", "50", "100", "200"} <= numbers(15, 300)
    assert not numbers(1, 1000) & {"2", "5", "20", "50", "200", "500"}


def test_a_step_is_split_into_all_its_parts():
    """The report asked for a part that was called something else by then, after all the work."""
    times = StepTimes(10, messages_s=0.1, schedule_s=0.2, forward_s=0.5, sample_s=0.1, decide_s=0.1)
    line = step_line(times, 16)
    assert all(part in line for part in ("100.0 ms", "50.0%", "messages 10.00", "decide 10.00"))


def test_medians_are_taken_over_rounds_and_texts():
    line = prefix_line([(1.0, 0.1), (2.0, 0.4), (4.0, 0.2)])
    assert line.endswith("0.200 s, cold 2.000 s, 0.100x")
    line = guess_line("free", [(1.0, 8, 8), (3.0, 7, 8)])
    assert "2.00x; each 1.00x (8 of 8" in line and "3.00x (7 of 8" in line
