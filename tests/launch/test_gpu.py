"""The GPU benchmark runs without a GPU, survives failures of steps, and shows no wrong figures."""

import importlib.util
import json
import logging
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from launch.bench import gpu
from launch.bench.gpu import ROOT, STEPS, Step, main
from launch.bench.gpu_report import Report, StepReport, charts, markdown, read, written
from launch.bench.gpu_state import GPUState, parsed
from launch.bench.gpu_steps import DEVICE_LOST, Row, Rows, Setting, Wrong, attempt, clock, shapes
from launch.bench.gpu_steps import __main__ as gpu_step
from launch.bench.gpu_steps.models import (
    Recorded,
    Texts,
    decode_logits,
    difference,
    record,
    shape,
    torchs,
)
from parallel_llama.errors import UsageError
from parallel_llama.families.model_args import ModelArgs


def report(folder: Path) -> dict[str, StepReport]:
    found = read(json.loads((folder / "report.json").read_text()))
    return {step.module: step for step in found.steps}


@pytest.mark.slow
def test_every_step_runs_without_a_gpu(tmp_path):
    """Shapes are tiny and kernels run in the interpreter; the report shows no figures."""
    pytest.importorskip("triton", reason="kernels for CUDA devices need triton")
    code = main(["--out", str(tmp_path), "--dry-run"])
    found = report(tmp_path)
    assert not [row for step in found.values() for row in step.rows if row.wrong] and code == 0
    assert [*found] == [step.module for step in STEPS if step.is_rehearsed]
    assert {step.title for step in found.values()} == {step.title for step in STEPS}
    assert all(step.rows and step.is_right for step in found.values())
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
def test_missing_requirement_is_reported_before_any_work(
    tmp_path, monkeypatch, capsys, has_triton, says
):
    monkeypatch.setattr(gpu, "find_spec", lambda _: object() if has_triton else None)
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path / "new")])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.slow
def test_failed_or_timed_out_step_does_not_stop_other_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "find_spec", lambda _: object())
    steps = Step("nothing", "none", 60), Step("parity", "long", 1.25), Step("gpu", "gpu", 60)
    monkeypatch.setattr(gpu, "STEPS", steps)
    assert main(["--out", str(tmp_path), "--dry-run"]) == 1
    found = report(tmp_path)
    assert "No module named" in found["nothing"].rows[-1].wrong
    assert "out of time after 5 s" in found["parity"].rows[-1].wrong
    assert found["gpu"].rows and found["gpu"].is_right
    log = (tmp_path / "log.txt").read_text()
    assert log.startswith("=== nothing\n--- nothing\nTraceback") and "ModuleNotFoundError" in log


def test_after_a_crash_the_remaining_parts_run_in_a_new_process(tmp_path, monkeypatch):
    """Regression: after an illegal address, all later checks of the step failed with that error."""
    row = asdict(Row("a row", 1.0))
    runs: list[list[Any]] = [
        [{"part": "a"}, row, {"part": "b"}, row, -signal.SIGSEGV],
        [{"part": "c"}, row, asdict(Row("c", wrong="CUDA error")), DEVICE_LOST],
        [{"part": "d"}, row, 0],
    ]
    flags: list[Sequence[str]] = []

    def process(_module: str, given: Sequence[str], *_: object) -> Iterator[Any]:
        flags.append(given)
        yield from runs[len(flags) - 1]

    monkeypatch.setattr(gpu, "_process", process)
    rows = list(gpu._run(Step("parity", "", 60), True, {}, None, tmp_path))
    assert [each.name for each in rows] == ["a row", "a row", "b", "a row", "c", "a row"]
    assert [each.wrong for each in rows if each.wrong] == [
        "ended with exit code -11; see log.txt",
        "CUDA error",
    ]
    assert flags == [["--dry-run"], ["--dry-run", "--after=b"], ["--dry-run", "--after=c"]]


@pytest.mark.parametrize("code", [1, -signal.SIGSEGV])
def test_a_process_that_ends_before_its_first_part_is_not_started_again(
    tmp_path, monkeypatch, code
):
    monkeypatch.setattr(gpu, "_process", lambda *_: iter([code]))
    (row,) = gpu._run(Step("parity", "", 60), True, {}, None, tmp_path)
    assert row == Row("parity", wrong=f"ended with exit code {code}; see log.txt")


LOST = "CUDA error: an illegal memory access was encountered"


def run_parts(monkeypatch, capsys, *flags: str, lost_as: str = LOST) -> tuple[int, list[Any]]:
    """The exit code and the lines of a step with three parts, whose second part loses the GPU."""

    def fails(_: Setting) -> Rows:
        yield from attempt("inner", lost)

    def lost() -> Rows:
        yield Row("b")
        raise RuntimeError(lost_as)

    def works(name: str) -> Rows:
        yield Row(name)

    parts = {"a": lambda _: works("a"), "b": fails, "c": lambda _: works("c")}
    monkeypatch.setitem(sys.modules, "launch.bench.gpu_steps.three", SimpleNamespace(PARTS=parts))
    monkeypatch.setattr(sys, "argv", ["gpu_steps", "three", "--dry-run", *flags])
    # A dry run changes _PROGRAMS, and this dry run shares the process of the tests.
    programs = gpu_step.decode_attention._PROGRAMS
    monkeypatch.setattr(gpu_step.decode_attention, "_PROGRAMS", programs)
    code = gpu_step.main()
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_process_reports_lost_gpu_and_exits(monkeypatch, capsys):
    code, lines = run_parts(monkeypatch, capsys)
    assert code == DEVICE_LOST
    assert [line.get("part") or line["name"] for line in lines] == ["a", "a", "b", "b", "inner"]
    assert "illegal memory access" in lines[-1]["wrong"]
    of_triton = LOST.replace("CUDA error", "Triton Error [CUDA]")
    assert run_parts(monkeypatch, capsys, lost_as=of_triton)[0] == DEVICE_LOST
    code, lines = run_parts(monkeypatch, capsys, "--after=b")
    assert code == 0
    assert [line.get("part") or line["name"] for line in lines] == ["c", "c"]


def test_gpu_tests_and_benchmark_steps_have_the_same_parts():
    """Regression: the names differed, so every test on a GPU would have failed."""
    pytest.importorskip("triton", reason="kernels for CUDA devices need triton")
    spec = importlib.util.spec_from_file_location("on_gpu", ROOT / "tests/gpu/test_on_gpu.py")
    assert spec is not None and spec.loader is not None
    on_gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(on_gpu)
    for step, parts in on_gpu.PARTS.items():
        assert tuple(gpu_step.parts_of(step)) == parts


def test_each_kernel_check_is_compiled_by_exactly_one_process(monkeypatch):
    """Regression: 216 checks compiled one after another for 120 to 170 s, in a step of 75 s."""
    pytest.importorskip("triton", reason="kernels for CUDA devices need triton")
    from triton.runtime.jit import JITFunction

    from launch.bench.gpu_steps import kernels

    setting, made = Setting(torch.device("cpu"), is_rehearsal=False), list[str]()
    monkeypatch.setattr(JITFunction, "run", JITFunction.run)

    def make(**of_sample: Any) -> None:
        made.append(str(of_sample))
        raise ValueError("no GPU")

    monkeypatch.setattr(kernels, "make_sample", make)
    for first in range(3):
        kernels.compile_samples(setting, first, 3)
    samples = [str(of_sample) for _, of_sample in kernels._samples(setting)]
    assert sorted(made) == sorted(samples) and len({*samples}) == 72
    values = [dict(of_sample) for _, of_sample in kernels._samples(setting)]
    for one, other in combinations(("dtype", "heads_per_kv", "head_dim", "cache_dtype"), 2):
        pairs = {(each[one], each[other]) for each in values}
        n_one, n_other = len({each[one] for each in values}), len({each[other] for each in values})
        assert len(pairs) == n_one * n_other


def test_failed_part_keeps_its_earlier_rows():
    def part():
        yield Row("a", 1.0)
        raise ValueError("no")

    first, second = attempt("b", part)
    assert first == Row("a", 1.0) and second == Row("b", wrong="ValueError: no")


def test_wrong_row_has_no_figure_and_no_chart_point():
    right = Row(
        "8b: batch 4, context 512",
        2.0,
        "ms",
        1.9,
        2.5,
        0.4,
        0.5,
        target="at least 0.7",
        note="fast",
    )
    wrong = Row("8b: batch 8, context 512", wrong="off by | 3\nof 4")
    found = Report(False, 7, [StepReport("step", "a step", 1, [right, wrong])])
    table = markdown(found)
    lines = [line for line in table.splitlines() if line.startswith("| 8b")]
    assert lines == [
        "| 8b: batch 4, context 512 | 2 ms | 1.9 to 2.5 | 0.40 | 0.50 | at least 0.7 | fast |",
        "| 8b: batch 8, context 512 | none |  |  |  |  | WRONG: off by / 3 of 4 |",
    ]
    drawn = charts(found)
    assert drawn["decode"].lines == {"8b, 512 tokens": [(4, 2000.0)]} and len(drawn) == 1


def test_the_time_of_a_row_is_compared_with_another_row():
    ours = [Row("ours", 2.0, "ms"), Row("int4", 0.5, "ms", than="ours", note="of 4 bits")]
    peers = [Row("peer", 5.0, "ms", than="ours"), Row("other", 1.0, "ms", than="not run")]
    found = Report(False, 7, [StepReport("a", "A", 1, ours), StepReport("b", "B", 1, peers)])
    noted = {row.name: row.note for rows in found.tables().values() for row in rows}
    assert noted == {
        "ours": "",
        "int4": "4 times as fast as ours; of 4 bits",
        "peer": "2.5 times as slow as ours",
        "other": "",
    }


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3-8b"])
def test_a_shape_is_measured_within_its_context(monkeypatch, name):
    """Regression: 8,256 tokens exceeded the context of 8,192, so every row of 8B was refused."""
    asked: list[int] = []

    def load(path: str, *, max_seq_len: int, **_: object) -> None:
        asked.append(max_seq_len)
        raise UsageError(path)

    monkeypatch.setattr(shapes, "require_right", lambda *_args, **_options: None)
    monkeypatch.setattr(shapes, "LLM", load)
    setting = Setting(torch.device("cuda", 0), is_rehearsal=False)
    with pytest.raises(UsageError):
        next(shapes.rows(setting, name, "none"))
    assert asked[0] <= shape(name, setting).max_seq_len


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("Gemma 2", {"full_layers": ()}),
        ("Gemma 2", {"sliding_window": 30}),
        ("Gemma 2", {"attention_soft_cap": None}),
        ("Gemma 2", {"logit_soft_cap": None}),
        ("Gemma 3", {"local_rope_theta": None}),
        ("Qwen 3 MoE", {"qk_norm": False}),
        ("Qwen 3 MoE", {"n_active_experts": 2}),
        ("Qwen 2 MoE, shared expert", {"shared_gate": False}),
        ("groups of experts", {"n_active_groups": 3}),
        ("Falcon, parallel block", {"parallel_block": False, "shared_norm": False}),
    ],
)
def test_feature_of_a_tiny_family_changes_its_logits(name, without):
    """With random weights, attention scores are near 0, and a soft cap would change nothing."""
    from launch.bench.gpu_steps import families

    setting = Setting(torch.device("cpu"), is_rehearsal=False)
    sample, texts = families.samples(setting)[name], Texts(2, 48)

    def logits(args: ModelArgs) -> torch.Tensor:
        own = replace(sample, args=args)
        runner = families.loaded(own, torchs(args), families.CPU, texts, setting)
        return decode_logits(runner, texts, (34, 2))

    expected, found = logits(sample.args), logits(replace(sample.args, **without))
    assert (found - expected).abs().max() > 10 * families.TOLERANCE * expected.abs().max()


def test_family_with_wrong_or_unrecorded_steps_is_marked_wrong(monkeypatch):
    from launch.bench.gpu_steps import families

    setting = Setting(torch.device("cpu"), is_rehearsal=False)
    gemma = {"Gemma 2": families.samples(setting)["Gemma 2"]}
    monkeypatch.setattr(families, "samples", lambda _: gemma)
    monkeypatch.setattr(families, "ours", torchs)
    monkeypatch.setattr(families, "record", lambda *_: Recorded({}, "no memory"))
    (row,) = families.rows(setting)
    assert row.wrong == "no memory"
    without = replace(gemma["Gemma 2"].args, attention_soft_cap=None)
    monkeypatch.setattr(families, "ours", lambda _: torchs(without))
    (row,) = families.rows(setting)
    assert "of the largest" in row.wrong


def test_rows_that_differ_are_counted():
    expected = torch.zeros(3, 2, 4)
    expected[0, 0, 0] = -2.0
    found = expected.clone()
    assert difference(found, expected) == ""
    found[1, 1, 3], found[2, 0, 0] = 0.5, 0.25
    says = "2 of 6 rows differ, first step 1 of text 1, by at most 0.25"
    assert difference(found, expected) == says
    found[2, 0, 1] = torch.nan
    assert "nan" in difference(found, expected)


def test_the_first_token_that_differs_is_named():
    pytest.importorskip("triton", reason="kernels for CUDA devices need triton")
    from launch.bench.gpu_steps import features

    features._require_same([(1, 2)], [(1, 2)])
    with pytest.raises(Wrong, match=r"text 1 .* at token 2"):
        features._require_same([(1,), (1, 2, 3)], [(1,), (1, 2, 4)])


def a_run(rows_of: Mapping[str, Sequence[Row]], **others: Any) -> Report:
    return Report(
        False, 7, [StepReport(name, name, 1, rows) for name, rows in rows_of.items()], **others
    )


def runs(monkeypatch, out: Path, before: Report | None, *flags: str) -> tuple[int, list[str]]:
    """The exit code, and which of the steps gpu, a, b:1 and b:2 run; each gives one row."""
    ran: list[str] = []

    def run(step: Step, *_: object) -> Iterator[Row]:
        ran.append(step.module)
        yield Row(f"new {step.module}", 1.0)

    monkeypatch.setattr(gpu, "_missing", lambda _: "")
    monkeypatch.setattr(gpu, "gpu_state", lambda: GPUState("H100", "1"))
    monkeypatch.setattr(gpu, "STEPS", [Step(name, name, 60) for name in ("gpu", "a", "b:1", "b:2")])
    monkeypatch.setattr(gpu, "_run", run)
    if before is not None:
        (out / "report.json").write_text(json.dumps(written(before)))
    return main(["--out", str(out), *flags]), ran


def test_resumed_run_keeps_correct_steps_and_runs_the_rest(tmp_path, monkeypatch):
    cut = StepReport("b:2", "b:2", 1, [Row("few")], is_whole=False)
    whole = a_run({"gpu": [Row("old", 1.0)], "a": [Row("x", wrong="no")], "b:1": [Row("old b")]})
    before = replace(whole, steps=[*whole.steps, cut])
    code, ran = runs(monkeypatch, tmp_path, before, "--resume")
    assert code == 0 and ran == ["a", "b:2"]
    names = [row.name for step in report(tmp_path).values() for row in step.rows]
    assert names == ["old", "new a", "old b", "new b:2"]
    _, ran = runs(monkeypatch, tmp_path, None, "--resume", "--steps", "b")
    assert ran == ["b:1", "b:2"]
    _, ran = runs(monkeypatch, tmp_path, None, "--steps", "b:2")
    assert ran == ["gpu", "b:2"] and [*report(tmp_path)] == ran


@pytest.mark.parametrize(
    ("before", "flags", "says"),
    [
        (None, ["--resume"], "no report.json"),
        (None, ["--steps", "a,c"], "no step 'c'; use gpu, a, b:1, b:2"),
        (Report(True, 7, []), ["--resume"], "a rehearsal"),
        (
            Report(False, 7, [StepReport("a", "a", 1, [], before=GPUState("H200", "1"))]),
            ["--resume"],
            "of another GPU than this one (H100)",
        ),
    ],
)
def test_invalid_resume_or_steps_flag_is_refused(
    tmp_path, monkeypatch, capsys, before, flags, says
):
    with pytest.raises(SystemExit) as ended:
        runs(monkeypatch, tmp_path, before, *flags)
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_a_report_of_another_version_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "report.json").write_text('{"is_rehearsal": false, "steps": {"The GPU": []}}')
    with pytest.raises(SystemExit):
        runs(monkeypatch, tmp_path, None, "--resume")
    assert "not a report of this version" in capsys.readouterr().err


def test_interrupted_run_keeps_rows_of_its_last_step(tmp_path, monkeypatch):
    def run(step: Step, *_: object) -> Iterator[Row]:
        yield Row(f"first of {step.module}", 1.0)
        if step.module == "a":
            raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "_WRITE_S", 0.0)
    monkeypatch.setattr(gpu, "_missing", lambda _: "")
    monkeypatch.setattr(gpu, "gpu_state", lambda: None)
    monkeypatch.setattr(gpu, "STEPS", [Step(name, name, 60) for name in ("gpu", "a", "b")])
    monkeypatch.setattr(gpu, "_run", run)
    with pytest.raises(KeyboardInterrupt):
        main(["--out", str(tmp_path)])
    found = report(tmp_path)
    assert [row.name for step in found.values() for row in step.rows] == [
        "first of gpu",
        "first of a",
    ]
    assert found["gpu"].is_whole and not found["a"].is_whole
    assert "* b\n" in (tmp_path / "report.md").read_text()


def test_first_flag_stops_in_time_and_lists_steps_not_run(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(gpu, "_missing", lambda _: "")
    monkeypatch.setattr(gpu, "gpu_state", lambda: None)
    steps = [Step("gpu", "GPU", 100), Step("a", "A", 300), Step("b", "B", 60)]
    monkeypatch.setattr(gpu, "STEPS", steps)

    def run(step: Step, *_: object) -> Iterator[Row]:
        yield Row("row", 1.0)
        now[0] += min(step.limit_s, 200)
        if step.limit_s < 200:
            yield Row(step.module, wrong="out of time after 90 s; the rest is missing")

    monkeypatch.setattr(gpu, "_run", run)
    assert main(["--out", str(tmp_path), "--first"]) == 1  # the GPU took longer than its own limit
    assert now[0] == gpu.FIRST_LIMIT_S
    found = report(tmp_path)
    assert not found["a"].is_whole and "cut short after 190 s" in found["a"].rows[-1].note
    table = (tmp_path / "report.md").read_text()
    assert "## Not run\n\nThere was no time left; --resume runs these steps:\n\n* b\n" in table


def test_the_state_of_the_gpu_is_in_the_report():
    line = "NVIDIA H100 80GB HBM3, 580.1, 1980, 2619, 1980, 310.22, [N/A], 41\n"
    state = parsed(line)
    assert state == GPUState("NVIDIA H100 80GB HBM3", "580.1", 1980, 2619, 1980, 310.22, None, 41)
    assert parsed("No devices were found\n") is None
    step = StepReport("gpu", "GPU", 12.4, [Row("a")], before=state, after=None)
    found = Report(False, 20, [step], [])
    assert read(json.loads(json.dumps(written(found)))) == found
    last = markdown(found).splitlines()[-1]
    assert last == "| gpu | 12 | 1980 to ? | 2619 to ? | 310 to ? | 41 to ? |"


def test_first_and_rest_measurements_cover_every_size_once():
    setting = Setting(torch.device("cuda", 0), is_rehearsal=False)
    first, rest = (set(shapes._sizes(which, setting)) for which in ("first", "rest"))
    assert not first & rest and {batch for batch, _ in first} == {1, 16, 64}
    assert first | rest == set(product((1, 16, 64, 256), (512, 2048, 4096)))


def test_replay_is_timed_behind_a_queued_one_and_eager_step_alone(monkeypatch):
    """A replay on an idle device would include the time of its launch."""
    events: list[str] = []
    seconds = iter([0.5, 3.0, 1.0] * 2)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            events.append("event")

        def synchronize(self) -> None:
            events.append("wait")

        def elapsed_time(self, _: object) -> float:
            return next(seconds) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    monkeypatch.setattr(clock, "_REPEAT_S", 0.0)
    setting = Setting(torch.device("cuda", 0), is_rehearsal=False)
    found = clock.queued_seconds(lambda: events.append("call"), setting)
    assert events == ["call", "wait", *["call", "event", "call", "event", "wait"] * 3]
    assert found == clock.Seconds(1.0, 0.5, 3.0)
    row = clock.measured(Row("a"), found, lambda s: 6 / s, "GB/s")
    assert row == Row("a", 6.0, "GB/s", 2.0, 12.0)
    events.clear()
    clock.eager_seconds(lambda: events.append("call"), setting)
    assert events == ["call", "wait", *["event", "call", "event", "wait"] * 3]


def test_unrecorded_step_is_labelled_with_its_reason():
    """Regression: only the log said that steps ran without a graph."""
    model = shapes._Model(None, "8b", "8b", "none", Recorded({1: int, 2: int}, "no memory"))
    assert model.how_run(1) == model.how_run(2) == ""
    assert "OPERATOR BY OPERATOR: no memory" in model.how_run(3)


def test_the_reason_for_a_step_without_a_graph_is_kept():
    runner = SimpleNamespace()

    def recorded(recorder: Any, on_graph: Any) -> None:
        on_graph(1)
        recorder(lambda: None)
        on_graph(2)
        logging.getLogger("parallel_llama.engine.recorded_steps").warning("from %d rows: no", 2)

    runner.record = recorded
    found = record(runner, Setting(torch.device("cpu"), is_rehearsal=True))
    assert [*found.replays] == [1] and found.why_not == "from 2 rows: no"
    assert found.replay(1) and found.replay(2) is None
