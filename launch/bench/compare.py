"""Compares speed with other runtimes: equal weights, token ids and cores, alternating in one run.

    python -m launch.bench.compare [--task stream|ragged] [--streams 1] [--model smollm2]
                                   [--engines ours:1,transformers,llama-models,..]
                                   [--vllm-python PATH] [--peers-python PATH]
                                   [--repeat 5] [--starts 1] [--plot FILE.svg] [--json]

The task `stream` is --streams prompts of 512 tokens at once, with 64 new tokens each. The task
`ragged` is one batch of 16 prompts of 16 to 512 tokens, with 64 new tokens each. The name of an
engine may be followed by a number of ranks, which divide the cores, and by the format of the
weights (default float32): `ours:2`, `llama.cpp@Q8_0`. An engine that is not installed or fails is
left out, and the report says why. Greedy tokens of float32 engines are compared with those of the
first such engine; the exit code is 1 if they differ by more than a near tie or if an engine failed.
For other formats, the perplexity on the beginning of README.md shows the loss of accuracy.
"""

import argparse
import json
import math
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.bench.agreement import agreements
from launch.bench.engines import Measurement, Runtime, engines
from launch.bench.machine import Rates, prefill_flops
from launch.bench.plot import svg
from launch.bench.report import charts, report
from launch.bench.rounds import Rounds, measure
from launch.bench.task import Kind, Spread, Task, make_task, spread
from launch.bench.weights import Weights
from launch.bench.worker import ROOT
from parallel_llama.checkpoint.meta_folder import meta_vocab_size
from parallel_llama.config.layouts import load_model_args
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.model_files import ModelFiles, find_model
from parallel_llama.tokenizer import load_tokenizer

TEXT = ROOT / "README.md"
# Parts of the text, each as long as a prompt and its completion. One part is too short to show the
# effect of 8 bits on perplexity, a few thousandths.
N_TEXTS = 4


def compare(
    model: str,
    kind: Kind,
    prompt_tokens: int,
    n_new: int,
    chosen: Sequence[Runtime],
    n_rounds: int,
    n_streams: int = 1,
    n_starts: int = 1,
) -> dict[str, Any]:
    """Runs the whole comparison; returns the report for JSON.

    Raises: UsageError or CheckpointError if the model cannot be used for this task.
    """
    files = find_model(model)
    files.require_weights()
    args = load_model_args(files, meta_vocab_size)
    task = make_task(kind, prompt_tokens, n_new, args.vocab_size, n_streams)
    if task.max_seq_len > args.max_seq_len:
        raise UsageError(
            f"prompt and new tokens are up to {task.max_seq_len} and the context of {model} is "
            f"{args.max_seq_len}; lower --prompt-tokens or --new-tokens"
        )
    texts = texts_of(files, task.max_seq_len)
    cores = tuple(sorted(os.sched_getaffinity(0)))  # `taskset` narrows them
    with tempfile.TemporaryDirectory() as folder:
        weights = Weights(files, args, Path(folder))
        rounds = measure(weights, task, chosen, n_rounds, n_starts, texts, cores)
    figures = {
        each.name: engine_figures(each, task, rounds, len(cores))
        | shares(args, task, runs, rounds.rates[each.name], rounds.step_bytes[each.name])
        for each in chosen
        if (runs := rounds.runs.get(each.name))
    }
    exact = [each.name for each in chosen if each.is_exact]
    for name, agreement in agreements(model, rounds.runs, task.prompts, exact).items():
        figures[name]["agreement"] = agreement
    return {
        "model": model,
        "task": kind,
        "prompt_tokens": task.lengths,
        "new_tokens": n_new,
        "turns": n_rounds,
        "text_tokens": sum(map(len, texts)),
        "processor": processor(),
        "cores": cores,
        **machine_rates(rounds),
        "system": platform.platform(),
        "python": platform.python_version(),
        "engines": figures,
        "ratios": all_ratios(task, rounds),
        "absent": rounds.absent,
        "failed": rounds.failed,
    }


def texts_of(files: ModelFiles, length: int) -> list[list[int]]:
    """The texts for the perplexity, of this length; empty if the model has no tokenizer."""
    try:
        tokens = load_tokenizer(files.path).encode(TEXT.read_text())
    except UsageError:
        return []
    stop = min(N_TEXTS * length, len(tokens) - 1)  # one token alone has no log-probability
    return [tokens[start : start + length] for start in range(0, stop, length)]


def engine_figures(engine: Runtime, task: Task, rounds: Rounds, n_cores: int) -> dict[str, Any]:
    name = engine.name
    return {
        "form": engine.form,
        "ranks": engine.n_ranks,
        "threads": engine.n_threads(n_cores),
        "versions": rounds.workers[name].versions,
        **task.spreads(rounds.runs[name]),
        "start_to_first_token_s": spread(rounds.first_token_s[name]),
        "weight_bytes_per_step": rounds.step_bytes[name],
        "peak_rss_bytes": rounds.peak_bytes[name],
    } | ({"perplexity": float(f"{math.exp(rounds.nll[name]):.5g}")} if rounds.nll else {})


def machine_rates(rounds: Rounds) -> dict[str, Spread]:
    """The rates of the machine during the runs, which other programs may lower."""
    looks = [look for own in rounds.rates.values() for look in own]
    names = ("read_bytes_per_s", "product_flops_per_s") if looks else ()
    return {name: spread([getattr(look, name) for look in looks]) for name in names}


def shares(
    args: ModelArgs,
    task: Task,
    runs: Sequence[Measurement],
    rates: Sequence[Rates],
    step_bytes: int,
) -> dict[str, Spread]:
    """Fractions of the machine's rates that an engine reaches, measured around its runs.

    For decode, of the rate of reading weights; for prefill, of the rate of float32 products.
    """
    found: dict[str, list[float]] = {}
    for speeds, rate in zip(map(task.rates, runs), rates, strict=True):
        if decode := speeds.get("decode_tokens_per_s"):
            share = decode / len(task.lengths) * step_bytes / rate.read_bytes_per_s
            found.setdefault("read_bandwidth_share", []).append(share)
        if prefill := speeds.get("prefill_tokens_per_s"):
            n_flops = prefill_flops(args, task.lengths)
            share = prefill / sum(task.lengths) * n_flops / rate.product_flops_per_s
            found.setdefault("product_rate_share", []).append(share)
    return {key: spread(values) for key, values in found.items()}


def all_ratios(task: Task, rounds: Rounds) -> dict[str, dict[str, Any]]:
    """The speed of every engine called ours divided by that of every other engine."""
    ours = {name: runs for name, runs in rounds.runs.items() if name.startswith("ours")}
    peers = {name: runs for name, runs in rounds.runs.items() if name not in ours}
    return {
        name: {peer: task.ratios(own, runs) for peer, runs in peers.items()}
        for name, own in ours.items()
    }


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, compares and prints; returns the exit code."""
    parser = _parser()
    flags = parser.parse_args(arguments)
    chosen = [_located(each, flags) for each in flags.engines]
    sizes = flags.task, flags.prompt_tokens, flags.new_tokens
    counts = flags.repeat, flags.streams, flags.starts
    try:
        result = compare(flags.model, *sizes, chosen, *counts)
    except (UsageError, CheckpointError) as error:
        parser.error(str(error))
    print(json.dumps(result) if flags.json else report(result))
    if flags.plot is not None:
        flags.plot.write_text(svg(charts(result)))
    wrong = any(own["agreement"].get("wrong") for own in result["engines"].values())
    return int(wrong or bool(result["failed"]))


def _located(engine: Runtime, flags: argparse.Namespace) -> Runtime:
    """The engine with the path of its Python, if it is known."""
    shares = engine.shares and _located(engine.shares, flags)
    python = getattr(flags, engine.python_flag) if engine.python_flag else engine.python
    return replace(engine, python=python, shares=shares)


def _parser() -> argparse.ArgumentParser:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("python -m launch.bench.compare", description=about)
    parser.add_argument("--task", choices=("stream", "ragged"), default="stream")
    parser.add_argument("--model", default="smollm2", help="a model with weights")
    parser.add_argument(
        "--engines",
        type=engines,
        default="ours:1,transformers,llama-models,vllm,llama.cpp,ctranslate2",
        help="NAME[:RANKS][@FORM], such as ours:2 or llama.cpp@Q8_0; the first float32 engine "
        "is the reference for tokens",
    )
    parser.add_argument("--streams", type=_whole, default=1, help="prompts at once of a stream")
    length = "length of the prompt, or of the longest prompt"
    parser.add_argument("--prompt-tokens", type=_whole, default=512, help=length)
    parser.add_argument("--new-tokens", type=_whole, default=64, help="for each prompt")
    parser.add_argument("--repeat", type=_whole, default=5, help="rounds after a warm-up round")
    parser.add_argument("--starts", type=_whole, default=1, help="fresh processes of each engine")
    parser.add_argument("--vllm-python", metavar="PATH", help="the Python of vLLM's environment")
    parser.add_argument(
        "--peers-python", metavar="PATH", help="the Python that has llama.cpp and CTranslate2"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="plot speed against weights")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _whole(text: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text) < 10**6:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to 999999")


if __name__ == "__main__":
    # SIGTERM ends all engines, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
