"""The ways of a sliding window that are compared compute the same, and their chart is an image."""

from xml.etree import ElementTree

import pytest
import torch

from launch.bench.plot import Chart, svg
from launch.bench.windows import HEAD_DIM, N_HEADS, WAYS


@pytest.mark.parametrize(("n_tokens", "window"), [(50, 16), (700, 96), (30, 64)])
def test_all_ways_give_the_same(n_tokens: int, window: int) -> None:
    q, k, v = torch.randn(3, N_HEADS, n_tokens, HEAD_DIM, dtype=torch.float64)
    with torch.inference_mode():
        first, *others = (way(n_tokens, window, torch.float64)(q, k, v) for way in WAYS.values())
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=1e-12)


def test_a_chart_has_a_line_for_each_way() -> None:
    chart = Chart("a < b", "tokens", {"one": [(1, 2), (10, 20)], "two": [(1, 3)]})
    root = ElementTree.fromstring(svg([chart, chart]))
    lines = [node for node in root.iter() if node.tag.endswith("polyline")]
    assert len(lines) == 4
    dots = [node for node in root.iter() if node.tag.endswith("circle")]
    assert len(dots) == 2  # of the line that is one point, which nobody would see
    assert any(node.text == "a < b" for node in root.iter())


def test_an_axis_of_less_than_two_decades_has_more_than_the_powers_of_ten() -> None:
    def numbers(*values: float) -> set[str | None]:
        chart = Chart("", "", {"a": [(1, value) for value in values]})
        return {node.text for node in ElementTree.fromstring(svg([chart])).iter() if node.text}

    assert {"20", "50", "100", "200"} <= numbers(15, 300)
    assert not numbers(1, 1000) & {"2", "5", "20", "50", "200", "500"}
