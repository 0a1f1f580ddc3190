"""`plan` for somebody who chooses hardware: what fits in which format, and how fast it runs."""

import json
from typing import Any

import pytest

from parallel_llama.cli import main as command_line

Capture = pytest.CaptureFixture[str]
LARGE = ["--model", "llama-3.1-70b", "--max-seq-len", "32k", "--batch", "16"]


def plan(capsys: Capture, *argv: str) -> dict[str, Any]:
    command_line.main(["plan", "--json", *argv])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def page(capsys: Capture, *argv: str) -> str:
    command_line.main(["plan", *argv])
    return capsys.readouterr().out


def error(capsys: Capture, *argv: str) -> str:
    assert command_line.main(["plan", *argv]) == 2
    return capsys.readouterr().err


# What fits


def format_flags(row: dict[str, Any]) -> list[str]:
    """The flags that plan for the formats of a row of --fit."""
    weights = row["weights"]
    name = "--dtype" if weights in ("float32", "bfloat16") else "--quant"
    cache = row["kv_cache_dtype"]
    kept = [] if cache == "float32" else ["--kv-cache-dtype", cache]
    return [name, weights, *kept]


@pytest.mark.parametrize(
    "argv",
    [
        [*LARGE, "--gpus", "4x80"],
        [*LARGE, "--gpus", "H100"],
        ["--model", "mistral-7b-v0.1", "--gpus", "2x80,1x16", "--batch", "40"],
        ["--device", "cpu", "--memory", "1100MiB,1100MiB", "--batch", "4"],
    ],
    ids=" ".join,
)
def test_each_row_of_formats_is_the_plan_with_its_flags(capsys, argv):
    found = plan(capsys, *argv, "--fit")
    shown = page(capsys, *argv, "--fit")
    assert found["fits"] is any(row["fits"] for row in found["formats"])
    for row in found["formats"][::2]:
        planned = plan(capsys, *argv, *format_flags(row))
        needs = [rank["needed_bytes"] for rank in planned["ranks"]]
        assert row["needed_bytes"] in needs
        for key in ("fits", "tp_size", "weight_bytes", "largest_context", "largest_batch"):
            assert row[key] == planned[key], (row, key)
        assert f"{row['largest_context']:,}" in shown and f"{row['largest_batch']:,}" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_most_precise_formats_come_first(capsys):
    rows = plan(capsys, *LARGE, "--gpus", "H100", "--fit")["formats"]
    sizes = [(row["weights"], row["kv_cache_dtype"]) for row in rows]
    assert sizes[0] == ("bfloat16", "bfloat16") and sizes[-1] == ("int4", "fp8")
    assert len({*sizes}) == len(sizes) == 12
    on_cpu = plan(capsys, "--device", "cpu", "--memory", "2,2", "--fit")["formats"]
    assert [row["weights"] for row in on_cpu[::4]][:3] == ["float32", "stored", "bfloat16"]
    shown = page(capsys, *LARGE, "--gpus", "3x80", "--fit")
    assert "--dtype bfloat16 --kv-cache-dtype int8 is the most precise that fits" in shown
    assert "no format fits" in page(capsys, *LARGE, "--gpus", "2x24", "--fit")
    assert command_line.main(["plan", *LARGE, "--gpus", "2x24", "--fit"]) == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--fit needs the memory of the ranks"),
        (["--memory", "2", "--quant", "int8"], "drop --quant int8"),
        (["--memory", "2", "--kv-cache-dtype", "fp8"], "drop --kv-cache-dtype fp8"),
        (["--memory", "2", "--nproc", "1-3"], "drop --nproc 1-3"),
        (["--memory", "2", "--nproc", "10"], "use 1 to 9 ranks"),
    ],
)
def test_flags_that_contradict_a_comparison_of_formats_are_refused(capsys, argv, said):
    assert said in error(capsys, "--fit", *argv)


def test_formats_that_a_model_cannot_have_are_named_with_the_reason(capsys):
    shown = " ".join(page(capsys, "--memory", "2", "--dtype", "float64", "--fit").split())
    assert "no plan in int8: quant='int8': dtype='float64'" in shown


@pytest.mark.parametrize(
    "argv",
    [
        [*LARGE, "--gpus", "4xH100"],
        ["--model", "mistral-7b-v0.1", "--gpus", "1x80", "--max-seq-len", "16k", "--batch", "3"],
        ["--device", "cpu", "--memory", "1", "--nproc", "3"],
    ],
    ids=" ".join,
)
def test_one_token_or_sequence_more_than_the_largest_does_not_fit(capsys, argv):
    found = plan(capsys, *argv)
    for flag, key in (("--max-seq-len", "largest_context"), ("--batch", "largest_batch")):
        given = [*argv]
        if flag in given:
            at = given.index(flag)
            del given[at : at + 2]
        most = found[key]
        assert plan(capsys, *given, flag, str(most))["fits"] is True
        further = ["plan", "--json", *given, flag, str(most + 1)]
        assert command_line.main(further) in (1, 2)  # 2 beyond the model's own context
        capsys.readouterr()
    shown = " ".join(page(capsys, *argv).split())
    assert f"largest context of {found['largest_context']:,} tokens" in shown
    assert f"batch of {found['largest_batch']:,} at" in shown


def test_a_plan_without_memory_has_no_largest_context(capsys):
    found = plan(capsys, "--nproc", "2")
    assert found["largest_context"] is found["largest_batch"] is None
