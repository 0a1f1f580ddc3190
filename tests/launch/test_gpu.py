"""The GPU benchmark runs without a GPU, survives failures of steps, and shows no wrong figures."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from launch.bench import gpu
from launch.bench.gpu import STEPS, Step, main
from launch.bench.gpu_report import charts, markdown
from launch.bench.gpu_steps import Row, Setting, attempt, shapes
from launch.bench.gpu_steps.models import shape
from parallel_llama.errors import UsageError


def report(folder: Path) -> Any:
    return json.loads((folder / "report.json").read_text())["steps"]


@pytest.mark.slow
def test_every_step_runs_without_a_card(tmp_path):
    """In tiny shapes, kernels in the interpreter; the report has none of its figures."""
    pytest.importorskip("triton", reason="kernels for CUDA devices need triton")
    code = main(["--out", str(tmp_path), "--dry-run"])
    rows = [row for step in report(tmp_path).values() for row in step]
    assert not [row for row in rows if row["wrong"]] and code == 0
    assert list(report(tmp_path)) == [step.title for step in STEPS]
    assert all(report(tmp_path).values())
    table = (tmp_path / "report.md").read_text()
    assert table.startswith("# A rehearsal on the CPU: no figure is a GPU's")
    figures = {line.split("|")[2].strip() for line in table.splitlines() if line.startswith("| ")}
    assert figures == {"figure", "ran", ""}
    names = {"report.md", "report.json", "log.txt", "decode.svg", "products.svg"}
    assert {file.name for file in tmp_path.iterdir()} == names
    for plot in tmp_path.glob("*.svg"):
        assert "a rehearsal on the CPU" in plot.read_text()
        ElementTree.parse(plot)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("has_triton", "says"), [(True, "no CUDA device"), (False, "pip install")])
def test_what_is_missing_is_said_before_work_starts(
    tmp_path, monkeypatch, capsys, has_triton, says
):
    monkeypatch.setattr(gpu, "find_spec", lambda _: object() if has_triton else None)
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path / "new")])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_step_that_fails_or_takes_too_long_costs_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "find_spec", lambda _: object())
    steps = Step("nothing", "none", 60), Step("parity", "long", 1.25), Step("card", "card", 60)
    monkeypatch.setattr(gpu, "STEPS", steps)
    assert main(["--out", str(tmp_path), "--dry-run"]) == 1
    found = report(tmp_path)
    assert "No module named" in found["none"][-1]["wrong"]
    assert "out of time after 5 s" in found["long"][-1]["wrong"]
    assert found["card"] and not [row for row in found["card"] if row["wrong"]]


def test_a_part_that_fails_keeps_what_it_has_given():
    def part():
        yield Row("a", 1.0)
        raise ValueError("no")

    first, second = attempt("b", part)
    assert first == Row("a", 1.0) and second == Row("b", wrong="ValueError: no")


def test_what_is_wrong_has_no_figure_and_no_point():
    right = Row("8b: batch 4, context 512", 2.0, "ms", 0.5, "at least 0.7")
    wrong = Row("8b: batch 8, context 512", wrong="off by | 3\nof 4")
    table = markdown({"a step": [right, wrong]}, is_rehearsal=False, took_s=7)
    lines = [line for line in table.splitlines() if line.startswith("| 8b")]
    assert lines == [
        "| 8b: batch 4, context 512 | 2 ms | 0.50 | at least 0.7 |  |",
        "| 8b: batch 8, context 512 | none |  |  | WRONG: off by / 3 of 4 |",
    ]
    drawn = charts({"a step": [right, wrong]}, is_rehearsal=False)
    assert drawn["decode"].lines == {"8b, 512 tokens": [(4, 2000.0)]} and len(drawn) == 1


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3-8b"])
def test_a_shape_is_measured_within_its_context(monkeypatch, name):
    """8,256 tokens were asked of a context of 8,192, and every row of 8B was refused."""
    asked: list[int] = []

    def load(path: str, *, max_seq_len: int, **_: object) -> None:
        asked.append(max_seq_len)
        raise UsageError(path)

    monkeypatch.setattr(shapes, "require_right", lambda *_args, **_options: None)
    monkeypatch.setattr(shapes, "LLM", load)
    setting = Setting(torch.device("cuda", 0), is_rehearsal=False)
    row, *_ = shapes.rows(setting, name)
    assert row.wrong and asked
    assert asked[0] <= shape(name, setting).max_seq_len
