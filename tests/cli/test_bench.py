"""What `bench` prints: the keys that scripts read, and consistent figures."""

import json
from pathlib import Path

import pytest
from commands import run_command
from tiny_models import TINY_MODELS, write_hf

from parallel_llama import LLM
from parallel_llama.cli import bench
from parallel_llama.cli.main import main
from parallel_llama.engine.machine import Interruptions

KEYS = {
    "prefill_tokens_per_s", "decode_tokens_per_s", "decode_ms_per_step", "time_to_first_token_s",
    "start_s", "weight_bytes_per_step", "read_bandwidth_share", "tp_size", "dtype", "quant",
    "peak_rss_bytes", "peak_cuda_bytes",
}  # fmt: skip
SIZES = ("--prompt-tokens=9", "--max-tokens=6", "--batch=3", "--repeat=2", "--dtype=float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    write_hf(next(iter(TINY_MODELS.values())), path)
    return path


@pytest.mark.parametrize("nproc", [1, 2])
def test_figures_are_complete_and_consistent(folder, nproc):
    asked = ("bench", f"--model={folder}", *SIZES, "--json", f"--nproc={nproc}")
    done = run_command(*asked, check=True)
    figures = json.loads(done.stdout)
    assert figures.keys() >= KEYS
    assert (figures["tp_size"], figures["dtype"], figures["quant"]) == (nproc, "float32", "none")
    for key in ("prefill_tokens_per_s", "decode_tokens_per_s", "read_bandwidth_share"):
        assert 0 < figures[f"{key}_min"] <= figures[key] <= figures[f"{key}_max"]
    # The fastest run has the shortest step; the batch has 3 sequences.
    for fast, slow in (("_max", "_min"), ("_min", "_max")):
        step_s = figures[f"decode_ms_per_step{slow}"] / 1e3
        assert figures[f"decode_tokens_per_s{fast}"] == pytest.approx(3 / step_s, rel=1e-3)
    assert 0 < figures["read_bandwidth_share"] < 1


def test_table_has_decode_rate_and_fraction_of_bandwidth(folder, capsys):
    assert main(["bench", f"--model={folder}", *SIZES]) == 0
    out = capsys.readouterr().out
    assert "decode, tokens/s" in out and "fraction of read bandwidth" in out


def test_busy_cores_are_reported_once_per_process(folder, capsys, monkeypatch):
    """Regression: launch.bench.gpu runs bench once per model, and each run repeated the warning."""
    monkeypatch.setattr(Interruptions, "have_shared_cores", lambda _: True)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    for _ in range(2):
        assert main(["bench", f"--model={folder}", *SIZES, "--json"]) == 0
    assert capsys.readouterr().err.count("the cores are busy") == 1


def test_single_new_token_has_no_decode_rate(folder, capsys):
    assert main(["bench", f"--model={folder}", "--max-tokens=1", "--repeat=1", "--json",
                 "--prompt-tokens=4"]) == 0  # fmt: skip
    figures = json.loads(capsys.readouterr().out)
    assert figures["decode_tokens_per_s"] is None and figures["prefill_tokens_per_s"] > 0


def test_bench_runs_without_draft_tokens_or_prefix_cache_hits(folder, monkeypatch):
    """Repetitive prompts would give draft tokens, and equal prompts would hit the prefix cache."""
    n_prefix_tokens = []
    lengths = set()
    original = LLM.run

    def run(llm, requests):
        for progress in original(llm, requests):
            lengths.add(len(progress.tokens))
            yield progress
        n_prefix_tokens.append(llm.engine.scheduler.n_prefix_tokens)

    monkeypatch.setattr(LLM, "run", run)
    monkeypatch.setattr(bench.random.Random, "randrange", lambda *_: 7)
    assert main(["bench", f"--model={folder}", "--prompt-tokens=40", "--max-tokens=20",
                 "--repeat=3"]) == 0  # fmt: skip
    assert lengths == {1} and n_prefix_tokens == [0] * 4


def test_prompt_beyond_the_context_is_refused(folder, capsys):
    assert main(["bench", f"--model={folder}", "--prompt-tokens=100000"]) == 2
    assert "100000" in capsys.readouterr().err


@pytest.mark.parametrize("nproc", [1, 2])
def test_batch_beyond_the_kv_cache_is_refused_before_it_is_measured(folder, nproc):
    """Regression: some prompts waited for others, and the figures were those of a smaller batch."""
    asked = ("bench", f"--model={folder}", *SIZES, "--json", f"--nproc={nproc}")
    for size, code in (("100K", 0), ("10K", 2)):
        done = run_command(*asked, f"--kv-cache-bytes={size}")
        assert done.returncode == code, done.stderr
        assert bool(done.stdout) == (code == 0)
    assert "--batch 3: the KV cache has room for " in done.stderr
    assert "of 3 sequences of 14 tokens; lower --batch" in done.stderr


def test_plan_reads_calibration_of_quantised_bfloat16_model(tmp_path, capsys):
    """Regression: plan refused the file, because it compared bfloat16 with the dtype of sums."""
    own = ["--model=smollm2", "--dtype=bfloat16", "--quant=int4", "--max-seq-len=64"]
    rates = str(tmp_path / "rates.json")
    sizes = "--prompt-tokens=4", "--max-tokens=2", "--repeat=1"
    assert main(["bench", *own, *sizes, "--calibrate", rates, "--json"]) == 0
    capsys.readouterr()
    assert main(["plan", *own, "--calibration", rates, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted"] is not None
