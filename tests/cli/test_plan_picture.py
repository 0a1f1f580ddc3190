"""`plan --svg`: the picture of a plan."""

import errno
import json
import os
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import save_file

from parallel_llama.cli import main as command_line

_SVG = "{http://www.w3.org/2000/svg}"
_IN_DOCS = Path(__file__).parents[2] / "launch/screenshots/plan.svg"


def _drawn(tmp_path: Path, *argv: str) -> dict[str, ElementTree.Element]:
    """The rectangles with a tooltip, by its text."""
    path = tmp_path / "plan.svg"
    assert command_line.main(["plan", *argv, "--svg", str(path)]) in (0, 1)
    found = {}
    for rect in ElementTree.parse(path).getroot().iter(f"{_SVG}rect"):
        if (tooltip := rect.find(f"{_SVG}title")) is not None and tooltip.text:
            found[tooltip.text] = rect
    return found


def _span(rect: ElementTree.Element) -> tuple[float, float]:
    left = float(rect.attrib["x"])
    return left, left + float(rect.attrib["width"])


def test_rows_show_what_each_rank_holds(tmp_path):
    """Nine heads on two ranks."""
    drawn = _drawn(tmp_path, "--model", "smollm2", "--nproc", "2", "--no-exact")
    first, second = (_span(drawn[f"rank {held}"]) for held in ("0: heads 0-4", "1: heads 5-8"))
    assert first[1] == second[0]
    assert (first[1] - first[0]) / (second[1] - second[0]) == pytest.approx(5 / 4, abs=0.01)
    assert {tooltip.partition(":")[0] for tooltip in drawn} == {"rank 0", "rank 1"}
    assert not any("outputs" in tooltip for tooltip in drawn)


def test_replicated_kv_heads_are_drawn_for_each_rank(tmp_path):
    drawn = _drawn(tmp_path, "--model", "smollm2", "--nproc", "9")
    same = [_span(drawn[f"rank {rank}: KV heads 1"]) for rank in (3, 4, 5)]
    assert same[0] == same[1] == same[2]
    assert "rank 8: outputs 512-575" in drawn


@pytest.mark.parametrize(("memory", "n_beyond"), [("3x80", 0), ("2x80,1x40", 0), ("3x40", 3)])
def test_need_beyond_the_memory_of_a_rank_is_drawn(tmp_path, memory, n_beyond):
    argv = "--model", "llama-3.1-70b", "--gpus", memory, "--max-seq-len", "32k"
    drawn = _drawn(tmp_path, *argv)
    assert sum(rect.attrib.get("class") == "beyond" for rect in drawn.values()) == n_beyond
    assert sum(rect.attrib.get("class") == "weights" for rect in drawn.values()) == 3


def test_model_name_is_escaped_in_the_svg(tmp_path, monkeypatch):
    folder = tmp_path / "a<b>&c"
    folder.mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    save_file({"unused": torch.zeros(1)}, folder / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert _drawn(tmp_path, "--model", folder.name, "--max-seq-len", "1k")
    assert "a&lt;b&gt;&amp;c" in (tmp_path / "plan.svg").read_text()


def test_a_picture_that_cannot_be_drawn_is_refused(tmp_path, capsys):
    for argv, reason in (
        (["--nproc", "1-3", "--svg", str(tmp_path / "a.svg")], "--svg draws one plan"),
        (["--svg", str(tmp_path)], "a folder; give the name of a file in it"),
        (["--svg", str(tmp_path / "no" / "a.svg")], "create it first"),
        (["--svg", str(tmp_path / ("a" * 251))], "the name is too long; give a shorter one"),
    ):
        assert command_line.main(["plan", *argv]) == 2
        assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_full_disk_is_reported_and_keeps_the_old_picture(tmp_path, capsys, monkeypatch):
    path = tmp_path / "plan.svg"
    path.write_text("before")

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    assert command_line.main(["plan", "--svg", str(path)]) == 1
    assert f"--svg {path}: No space left on device" in capsys.readouterr().err
    assert path.read_text() == "before"


def test_picture_in_the_docs_equals_the_output_of_plan(tmp_path):
    argv = "--model", "llama-3.1-70b", "--gpus", "2x80,1x40", "--max-seq-len", "32k", "--batch", "3"
    _drawn(tmp_path, *argv)
    assert (tmp_path / "plan.svg").read_bytes() == _IN_DOCS.read_bytes()
