"""`plan` for choosing hardware: which format fits, and how fast a model runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from plan_output import Capture, page, plan
from tiny_models import TINY_MODELS, write_hf

from parallel_llama.cli import main as command_line

LARGE = ["--model", "llama-3.1-70b", "--max-seq-len", "32k", "--batch", "16"]


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
def test_rows_of_fit_equal_the_plans_with_their_flags(capsys, argv):
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


def test_most_precise_formats_are_listed_first(capsys):
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
        (["--memory", "2,2", "--bandwidth", "20,12.5"], "drop --bandwidth 20,12.5"),
        (["--memory", "2", "--nproc", "1-3"], "drop --nproc 1-3"),
        (["--memory", "2", "--nproc", "10"], "use 1 to 9 ranks"),
    ],
)
def test_flags_that_contradict_fit_are_refused(capsys, argv, said):
    assert said in error(capsys, "--fit", *argv)


def test_unsupported_formats_are_named_with_the_reason(capsys):
    shown = " ".join(page(capsys, "--memory", "2", "--dtype", "float64", "--fit").split())
    assert "no plan in int8: int8 weights: quantised matrices are computed in float32" in shown


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


# How fast it is


# Llama 3.1 70B: 80 layers of width 8192, 64 heads of 128, 8 KV heads, 28672 channels.
LAYER = 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672)
HEAD = 128256 * 8192


def test_decode_step_takes_memory_link_and_launch_time(capsys):
    found = plan(capsys, *LARGE, "--gpus", "4xH100")["predicted"]
    norms = 8192 * (2 * 80 + 1)
    head = 251 * 128 * 8192  # of 1002 blocks of the vocabulary
    weights_s = (80 * LAYER // 4 + head + norms) * 2 / (0.94 * 3350e9)
    kv_s = 16 * 32768 * 80 * 2 * 2 * 128 * 2 / (0.73 * 3350e9)  # 2 KV heads on each rank
    reduced = 161 * 16 * 8192 * 2  # bytes of 161 all-reduces of 16 rows
    link_s = 162 * 20e-6 + 2 * 3 / 4 * reduced / 450e9
    launch_s = 50e-6 + 80 * 31e-6
    step = found["steps"]["decode"]
    assert step["memory_s"] == pytest.approx(weights_s + kv_s, rel=1e-9)
    assert step["link_s"] == pytest.approx(link_s, rel=1e-9)
    assert step["launch_s"] == pytest.approx(launch_s, rel=1e-9)
    assert (step["arithmetic_s"], step["limit"]) == (0, "memory bandwidth")
    assert step["total_s"] == pytest.approx(weights_s + kv_s + link_s + launch_s, rel=1e-9)
    assert found["decode_tokens_per_s"] == pytest.approx(16 / step["total_s"], rel=1e-9)
    assert found["steps"]["decode_empty"]["memory_s"] == pytest.approx(weights_s, rel=1e-9)


def test_a_given_bandwidth_replaces_that_of_the_gpu(capsys):
    def memory_s(*flags: str) -> float:
        found = plan(capsys, "--model", "llama-3.1-8b", "--batch", "2", *flags)["predicted"]
        return float(found["steps"]["decode"]["memory_s"])

    whole = memory_s("--gpus", "2xH100")
    assert memory_s("--gpus", "2xH100", "--bandwidth", "1675") == pytest.approx(2 * whole)
    slow_second = memory_s("--gpus", "2xH100", "--bandwidth", "3350,1675")
    assert slow_second == pytest.approx(2 * whole, rel=1e-3)
    assert "--bandwidth lists 3 ranks" in error(capsys, "--gpus", "2xH100", "--bandwidth", "1,2,3")


def test_prefill_step_is_limited_by_arithmetic(capsys):
    found = plan(capsys, *LARGE, "--gpus", "4xH100")["predicted"]
    values = 80 * LAYER / 4 + 8192 * 2 * 80
    step = found["steps"]["prefill"]
    assert step["arithmetic_s"] == pytest.approx(2 * values * 4096 / (0.47 * 989e12), rel=1e-3)
    assert (step["memory_s"], step["limit"]) == (0, "arithmetic")
    assert found["prefill_tokens_per_s"] == pytest.approx(4096 / step["total_s"], rel=1e-9)


def test_decode_is_limited_by_arithmetic_or_by_slow_links(capsys):
    asked = ["--model", "llama-3.1-8b", "--gpus"]
    many = plan(capsys, *asked, "1xH100", "--max-seq-len", "64", "--batch", "512")["predicted"]
    step = many["steps"]["decode"]
    values = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + HEAD // 2
    operations = 2 * values * 512
    assert step["limit"] == "arithmetic"
    assert step["arithmetic_s"] == pytest.approx(operations / (0.47 * 989e12), rel=1e-3)
    small = ["--model", "llama-3.2-1b", "--max-seq-len", "512", "--gpus"]
    assert plan(capsys, *small, "8xRTX4090")["predicted"]["steps"]["decode"]["limit"] == "link"
    assert "limited by link" in " ".join(page(capsys, *small, "8xRTX4090").split())


@pytest.mark.parametrize(
    ("model", "flags", "measured_ms"),
    [
        ("llama-3-8b", ["--batch", "1", "--max-seq-len", "512"], 5.81),
        ("llama-3-8b", ["--batch", "64", "--max-seq-len", "512"], 8.98),
        ("llama-3-8b", ["--batch", "64", "--max-seq-len", "2048"], 12.3),
        ("llama-3-8b", ["--batch", "1", "--max-seq-len", "512", "--quant", "int8"], 3.58),
        ("llama-3-8b", ["--batch", "1", "--max-seq-len", "512", "--quant", "int4"], 2.64),
        ("llama-3.2-1b", ["--batch", "1", "--max-seq-len", "512"], 1.36),
    ],
)
def test_h100_predictions_are_close_to_measured_times(capsys, model, flags, measured_ms):
    """The measured times are those of docs/speed.md; 64 short sequences differ the most."""
    found = plan(capsys, "--model", model, "--gpus", "1xH100", *flags)["predicted"]
    assert 0.83 < found["steps"]["decode"]["total_s"] * 1e3 / measured_ms < 1.12


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--nproc", "2"], "bench --calibrate"),
        (["--nproc", "2", "--bandwidth", "20"], "bench --calibrate"),
        (["--gpus", "3x24"], "name the GPUs"),
        (["--gpus", "2xT4"], "name the GPUs"),
        (["--gpus", "1xH100", "--quant", "fp8"], "fp8"),
        (["--gpus", "1xH100", "--quant", "int8", "--batch", "8"], "row by row"),
        (["--gpus", "1xH100", "--dtype", "float32"], "only 16-bit"),
        (["--gpus", "4xH100", "--kv-split", "sequence"], "operator by operator"),
    ],
)
def test_unmeasured_configuration_has_a_reason_but_no_prediction(capsys, argv, reason):
    found = plan(capsys, *argv)
    assert found["predicted"] is None and reason in found["unpredicted"]
    assert "estimate" not in page(capsys, *argv)
    assert reason in error(capsys, *argv, "--price", "2")


def test_cost_is_the_price_of_all_gpus_for_a_million_tokens(capsys):
    found = plan(capsys, *LARGE, "--gpus", "4xH100", "--price", "2.5")["predicted"]
    hours = 1e6 / found["decode_tokens_per_s"] / 3600
    assert found["price_per_million_tokens"] == pytest.approx(4 * 2.5 * hours, rel=1e-9)
    shown = page(capsys, *LARGE, "--gpus", "4xH100", "--price", "2.5")
    assert f"cost       {found['price_per_million_tokens']:.3g} for a million" in shown
    asked = [*LARGE, "--gpus", "H100", "--nproc", "4-5", "--price", "2.5"]
    assert f"{found['price_per_million_tokens']:.3g}" in page(capsys, *asked)
    assert "not a number from 0" in error(capsys, "--gpus", "1xH100", "--price", "-1")


# What a machine reaches


RATES = {"read_bytes_per_s": 4e9, "operations_per_s": 3e10}
WAITS = {"exchange_s": 1e-5, "link_bytes_per_s": 2e9}
SMOLLM2 = {"version": 1, "dtype": "float32", "quant": "none"}


def written(folder: Path, content: object) -> list[str]:
    """The flag of a plan for a calibration file with this content."""
    path = folder / "rates.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return ["--device", "cpu", "--calibration", str(path)]


def test_calibration_gives_memory_link_and_launch_times(capsys, tmp_path):
    fast = RATES | WAITS | {"read_bytes_per_s": 8e9}
    argv = written(tmp_path, SMOLLM2 | {"ranks": [fast, RATES | WAITS]})
    found = plan(capsys, *argv, "--nproc", "2", "--max-seq-len", "512")
    read = [rank["step_read_bytes"] for rank in found["ranks"]]
    # 30 layers: inputs and outputs of wo and w2; then the embedding and the head. Half of the
    # values come from the other rank.
    n_bytes = (30 * (576 + 576 + 1536 + 576) + 2 * 576) * 4 / 2
    link_s = (30 * 4 + 2) * 1e-5 + n_bytes / 2e9
    step = found["predicted"]["steps"]["decode"]
    assert step["memory_s"] == pytest.approx(max(read[0] / 8e9, read[1] / 4e9), rel=1e-9)
    assert step["link_s"] == pytest.approx(link_s, rel=1e-9) and step["launch_s"] == 0
    slow = written(tmp_path, SMOLLM2 | {"ranks": [fast, RATES | WAITS], "layer_s": 2e-5})
    found = plan(capsys, *slow, "--nproc", "2")["predicted"]
    assert found["steps"]["decode"]["launch_s"] == pytest.approx(30 * 2e-5, rel=1e-9)
    argv = written(tmp_path, SMOLLM2 | {"ranks": [fast, RATES | WAITS]})
    one = plan(capsys, *argv, "--nproc", "1", "--max-seq-len", "512")
    step = one["predicted"]["steps"]["decode"]
    assert step["total_s"] == pytest.approx(one["ranks"][0]["step_read_bytes"] / 12e9, rel=1e-9)
    prefill = one["predicted"]["steps"]["prefill"]
    layer = 576 * (2 * 576 + 2 * 192 + 3 * 1536)
    assert prefill["total_s"] == pytest.approx(2 * 30 * layer * 512 / 6e10, rel=1e-3)
    shown = " ".join(page(capsys, *argv, "--nproc", "2").split())
    assert "(an estimate from the calibration)" in shown


def rates_of(folder: Path, name: str, *rates: float, dtype: str = "float32") -> str:
    """A calibration file of a host with these read rates."""
    ranks = [RATES | {"read_bytes_per_s": rate} for rate in rates]
    path = folder / name
    path.write_text(json.dumps(SMOLLM2 | {"dtype": dtype, "ranks": ranks}))
    return str(path)


def test_shards_are_proportional_to_read_rates_of_several_files(capsys, tmp_path):
    two, one = rates_of(tmp_path, "a.json", 4e9, 4e9), rates_of(tmp_path, "b.json", 1e9)
    asked = ["--device", "cpu", "--max-seq-len", "512"]
    found = plan(capsys, *asked, "--calibration", f"{two},{one}")
    assert [rank["heads"] for rank in found["ranks"]] == [[0, 4], [4, 8], [8, 9]]
    assert [rank["ffn"] for rank in found["ranks"]] == [[0, 704], [704, 1376], [1376, 1536]]
    assert "exchanges between the hosts" in found["unpredicted"]
    other_order = plan(capsys, *asked, "--calibration", f"{one},{two}")
    assert [rank["heads"] for rank in other_order["ranks"]] == [[0, 1], [1, 5], [5, 9]]
    memory = [*asked, "--memory", "600MiB,600MiB,2"]  # the process takes 390 MiB of each
    within = plan(capsys, *memory, "--calibration", f"{two},{one}")
    assert within["fits"] is True
    assert found["ranks"][0]["needed_bytes"] > 600 << 20
    assert within["ranks"][2]["weight_bytes"] > found["ranks"][2]["weight_bytes"]


def test_slowest_rank_and_its_loss_are_shown(capsys, tmp_path):
    """Regression: the page did not show for which rank the other ranks wait."""
    files = rates_of(tmp_path, "a.json", 5e9), rates_of(tmp_path, "b.json", 2e9)
    argv = ["--device", "cpu", "--max-seq-len", "512", "--calibration", ",".join(files)]
    found = plan(capsys, *argv)
    read = [rank["step_read_bytes"] for rank in found["ranks"]]
    assert [rank["step_s"] for rank in found["ranks"]] == pytest.approx(
        [read[0] / 5e9, read[1] / 2e9], rel=1e-12
    )
    slowest = found["slowest_rank"]
    assert slowest == int(read[1] / 2e9 > read[0] / 5e9)
    assert found["balanced_step_s"] == pytest.approx(sum(read) / 7e9, rel=1e-12)
    longest = max(read[0] / 5e9, read[1] / 2e9)
    assert found["loss"] == pytest.approx(longest / (sum(read) / 7e9) - 1, rel=1e-9)
    shown = " ".join(page(capsys, *argv).split())
    assert f"rank {slowest} limits a step: {longest * 1e3:,.2f} ms" in shown
    assert f"{found['loss']:.1%} more than" in shown and "at 5.0 GB/s" not in shown
    tight = plan(capsys, *argv, "--memory", "600MiB,2")
    assert tight["loss"] > 2 * found["loss"] and tight["slowest_rank"] == 1
    one = plan(capsys, *argv[:-1], files[0], "--nproc", "2")
    assert one["loss"] < 0.2 and "slowest" not in page(capsys, *argv[:-1], files[0], "--nproc", "2")


def test_rates_that_differ_by_noise_give_equal_shards(capsys, tmp_path):
    alike = rates_of(tmp_path, "a.json", 4e9, 4.1e9, 3.95e9)
    asked = ["--device", "cpu", "--nproc", "3"]
    equal = [rank | {"step_s": None} for rank in plan(capsys, *asked)["ranks"]]
    found = plan(capsys, *asked, "--calibration", alike)["ranks"]
    assert [rank | {"step_s": None} for rank in found] == equal


def test_calibration_files_of_other_ranks_or_formats_are_refused(capsys, tmp_path):
    two, one = rates_of(tmp_path, "a.json", 4e9, 4e9), rates_of(tmp_path, "b.json", 1e9)
    narrow = rates_of(tmp_path, "c.json", 1e9, dtype="bfloat16")
    both = ["--device", "cpu", "--calibration", f"{two},{one}"]
    assert "has 3 ranks; omit --nproc, or give --nproc 3" in error(capsys, *both, "--nproc", "2")
    assert "memory has 2 sizes for 3 ranks" in error(capsys, *both, "--memory", "1,1")
    mixed = f"{two},{narrow}"
    assert "calibrate all hosts with the same flags" in error(capsys, "--calibration", mixed)
    generate = ["generate", "--prompt", "a", "--device", "cpu", "--calibration"]
    assert command_line.main([*generate, f"{two},{one}", "--nproc", "2"]) == 2
    assert "has 3 ranks, but the command runs on 2; use 3 ranks" in capsys.readouterr().err
    assert command_line.main([*generate, f"{two},{one}", "--elastic"]) == 2
    assert "--elastic and --calibration" in capsys.readouterr().err
    assert command_line.main([*generate, f"{two},{tmp_path / 'd.json'}"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_calibration_without_exchange_predicts_only_one_rank(capsys, tmp_path):
    argv = written(tmp_path, SMOLLM2 | {"ranks": [RATES]})
    assert plan(capsys, *argv)["predicted"] is not None
    found = plan(capsys, *argv, "--nproc", "2")
    assert found["predicted"] is None and "--nproc 2" in found["unpredicted"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ([], "not an object"),
        (SMOLLM2, "ranks is not a list"),
        (SMOLLM2 | {"ranks": []}, "ranks is not a list"),
        (SMOLLM2 | {"ranks": [1]}, "not an object"),
        (SMOLLM2 | {"ranks": [RATES], "speed": 1}, "unknown key 'speed'"),
        (SMOLLM2 | {"ranks": [RATES | {"exchanges": 1}]}, "unknown key 'exchanges'"),
        (SMOLLM2 | {"ranks": [RATES | {"read_bytes_per_s": -1}]}, "read_bytes_per_s=-1"),
        (SMOLLM2 | {"ranks": [{"read_bytes_per_s": 1}]}, "operations_per_s is missing"),
        (SMOLLM2 | {"ranks": [RATES], "version": 2}, "version=2"),
        (SMOLLM2 | {"ranks": [RATES], "layer_s": -1}, "layer_s=-1"),
    ],
    ids=str,
)
def test_a_file_that_is_not_a_calibration_is_refused(capsys, tmp_path, content, said):
    argv = written(tmp_path, content)
    shown = error(capsys, *argv)
    assert said in shown and "bench --calibrate FILE" in shown and argv[-1] in shown


def test_calibration_of_other_quant_or_device_is_refused(capsys, tmp_path):
    argv = written(tmp_path, SMOLLM2 | {"ranks": [RATES]})
    assert "--quant int8" in error(capsys, *argv, "--quant", "int8")
    assert "rates of CPU ranks" in error(capsys, *argv[2:], "--gpus", "1xH100")
    assert "no such file" in error(capsys, "--calibration", str(tmp_path / "missing.json"))


def test_plan_reads_the_calibration_that_bench_writes(capsys, tmp_path):
    model = ["--model", str(tmp_path / "model"), "--dtype", "float32", "--device", "cpu"]
    (tmp_path / "model").mkdir()
    write_hf(next(iter(TINY_MODELS.values())), tmp_path / "model")
    path = tmp_path / "rates.json"
    sizes = ["--prompt-tokens", "9", "--max-tokens", "3", "--repeat", "1", "--nproc", "2"]
    run_command("bench", *model, *sizes, "--calibrate", str(path), check=True)
    content = json.loads(path.read_text())
    expected = {*RATES, *WAITS, "piece_operations_per_s"}
    assert [set(each) for each in content["ranks"]] == [expected] * 2
    found = plan(capsys, *model, "--nproc", "2", "--calibration", str(path))["predicted"]
    assert 0 < found["steps"]["decode"]["total_s"] < 1
    assert found["prefill_tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--slice", "0/8"], "--calibrate and --slice cannot be combined"),
        (["--device", "cuda"], "measures CPU ranks"),
        (["--calibrate", "/missing/rates.json"], "there is no folder"),
    ],
)
def test_calibrate_is_refused_with_slice_cuda_or_missing_folder(capsys, tmp_path, flags, said):
    path = [] if flags[0] == "--calibrate" else ["--calibrate", str(tmp_path / "rates.json")]
    assert command_line.main(["bench", *flags, *path]) == 2
    assert said in capsys.readouterr().err
